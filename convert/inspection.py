"""Say what a checkpoint is, without converting it."""

import math
import re
from pathlib import Path

from minimind_hf.configuration_minimind import MiniMindConfig
from minimind_hf.convert.checkpoint import load_checkpoint
from minimind_hf.convert.conversions import own_layout
from minimind_hf.convert.layout import expected_shapes

# Where a parameter belongs, by what its name holds; the first that fits.
MODULES = {
    "embedding": "embed_tokens",
    "lm_head": "lm_head",
    "norms": "norm",
    "attention": "self_attn",
    "router": r"mlp\.gate\.",
    "shared experts": "shared_experts",
    "experts": r"\.experts\.",
    "feed-forward": "mlp",
}


def count_parameters(config: MiniMindConfig) -> dict[str, int]:
    """Count the parameters of a model by module, those of all blocks together."""
    counts = dict.fromkeys(MODULES, 0)
    for name, shape in expected_shapes(config).items():
        module = next(module for module, pattern in MODULES.items() if re.search(pattern, name))
        counts[module] += math.prod(shape)
    return {module: count for module, count in counts.items() if count}


def count_active(config: MiniMindConfig) -> int:
    """Count the parameters that one token passes through: of the experts of a block, only the chosen ones."""
    counts = count_parameters(config)
    share = config.num_experts_per_tok / config.num_experts if config.use_moe else 0
    return sum(counts.values()) - round(counts.get("experts", 0) * (1 - share))


def cache_bytes(config: MiniMindConfig, element_size: int) -> int:
    """Say how many bytes of keys and values a cache holds for each token, in all blocks."""
    return 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * element_size


def describe(path: Path, config: Path | None = None, flags: dict | None = None) -> dict[str, object]:
    """Describe a checkpoint or a model folder: generation, dtype, parameters, cache, tied or not, and the config.

    Args:
        path: what to describe.
        config: see `load_checkpoint`, as for the next one.
        flags: config values that no tensor tells.

    Raises:
        ConversionError: the path holds no MiniMind checkpoint.
    """
    checkpoint = load_checkpoint(Path(path), config, flags)
    config = checkpoint.config
    names = "hidden_size num_hidden_layers num_attention_heads num_key_value_heads head_dim vocab_size".split()
    names += (
        ["num_experts", "num_experts_per_tok", "moe_intermediate_size", "num_shared_experts"]
        if config.use_moe
        else ["intermediate_size"]
    )
    names += ["max_position_embeddings", "rope_parameters", "rms_norm_eps"]
    dtypes = {tensor.dtype for tensor in checkpoint.tensors.values()}
    per_token = cache_bytes(config, max(dtype.itemsize for dtype in dtypes))
    full = per_token * config.max_position_embeddings / 1e6
    return {
        "generation": own_layout(checkpoint).title,
        "dtype": ", ".join(sorted(str(dtype)[6:] for dtype in dtypes)),
        "parameters": f"{sum(tensor.numel() for tensor in checkpoint.tensors.values()):,}",
        **{f"  {module}": f"{count:,}" for module, count in count_parameters(config).items()},
        **({"  active for a token": f"{count_active(config):,}"} if config.use_moe else {}),
        "cache": f"{per_token:,} bytes for each token, {full:,.1f} MB when full",
        "embeddings": "tied" if config.tie_word_embeddings else "not tied",
        "feed-forward": "mixture of experts" if config.use_moe else "dense",
        **{name: getattr(config, name) for name in names},
        "assumed": ", ".join(checkpoint.assumed) or "nothing",
    }
