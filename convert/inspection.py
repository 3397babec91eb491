"""Say what a checkpoint is, without converting it."""

from pathlib import Path

from minimind_hf.convert.checkpoint import build_config, is_tied
from minimind_hf.convert.files import read_tensors
from minimind_hf.convert.layout import recognise_generation


def describe(path: Path) -> dict[str, object]:
    """Describe a .pth file or a model folder: generation, parameters, dtype, tied or not, and the config.

    Raises:
        ConversionError: the path holds no MiniMind checkpoint.
    """
    path = Path(path)
    tensors = read_tensors(path)
    generation = recognise_generation(tensors)
    facts = {"generation": generation, "dtype": ", ".join(sorted({str(t.dtype)[6:] for t in tensors.values()}))}
    if generation != "MiniMind-3":
        return {**facts, "parameters": f"{sum(t.numel() for t in tensors.values()):,} (tied ones counted twice)"}

    tied = is_tied(tensors)
    head = tensors["lm_head.weight"].numel() if tied and "lm_head.weight" in tensors else 0
    config = build_config(tensors, path, path / "config.json" if path.is_dir() else None)
    names = "hidden_size num_hidden_layers num_attention_heads num_key_value_heads head_dim vocab_size".split()
    names += (
        ["num_experts", "num_experts_per_tok", "moe_intermediate_size"] if config.use_moe else ["intermediate_size"]
    )
    names += ["max_position_embeddings", "rope_parameters", "rms_norm_eps"]
    return {
        **facts,
        "parameters": f"{sum(t.numel() for t in tensors.values()) - head:,}",
        "embeddings": "tied" if config.tie_word_embeddings else "not tied",
        "feed-forward": "mixture of experts" if config.use_moe else "dense",
        **{name: getattr(config, name) for name in names},
    }
