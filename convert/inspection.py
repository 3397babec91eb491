"""Say what a checkpoint is, without converting it."""

from pathlib import Path

from minimind_hf.convert.checkpoint import load_checkpoint


def describe(path: Path) -> dict[str, object]:
    """Describe a .pth file or a model folder: generation, parameters, dtype, tied or not, and the config.

    Raises:
        ConversionError: the path holds no MiniMind checkpoint.
    """
    checkpoint = load_checkpoint(Path(path))
    config = checkpoint.config
    names = "hidden_size num_hidden_layers num_attention_heads num_key_value_heads head_dim vocab_size".split()
    names += (
        ["num_experts", "num_experts_per_tok", "moe_intermediate_size", "num_shared_experts"]
        if config.use_moe
        else ["intermediate_size"]
    )
    names += ["max_position_embeddings", "rope_parameters", "rms_norm_eps"]
    return {
        "generation": checkpoint.generation.title,
        "dtype": ", ".join(sorted({str(tensor.dtype)[6:] for tensor in checkpoint.tensors.values()})),
        "parameters": f"{sum(tensor.numel() for tensor in checkpoint.tensors.values()):,}",
        "embeddings": "tied" if config.tie_word_embeddings else "not tied",
        "feed-forward": "mixture of experts" if config.use_moe else "dense",
        **{name: getattr(config, name) for name in names},
        "assumed": ", ".join(checkpoint.assumed) or "nothing",
    }
