"""Say what a checkpoint is, without converting it."""

from pathlib import Path

from minimind_hf.convert.checkpoint import load_checkpoint
from minimind_hf.convert.conversions import own_layout


def describe(path: Path, config: Path | None = None, flags: dict | None = None) -> dict[str, object]:
    """Describe a checkpoint or a model folder: generation, parameters, dtype, tied or not, and the config.

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
    return {
        "generation": own_layout(checkpoint).title,
        "dtype": ", ".join(sorted({str(tensor.dtype)[6:] for tensor in checkpoint.tensors.values()})),
        "parameters": f"{sum(tensor.numel() for tensor in checkpoint.tensors.values()):,}",
        "embeddings": "tied" if config.tie_word_embeddings else "not tied",
        "feed-forward": "mixture of experts" if config.use_moe else "dense",
        **{name: getattr(config, name) for name in names},
        "assumed": ", ".join(checkpoint.assumed) or "nothing",
    }
