"""What a MiniMind checkpoint looks like: tensor names and shapes as data, and pure functions over them.

Nothing here reads or writes a file. A checkpoint is a dict from tensor name to tensor.
"""

import re

import torch

from minimind_hf.configuration_minimind import MiniMindConfig


class ConversionError(ValueError):
    """A checkpoint, config or flag cannot be converted exactly. The message names the culprit and the remedy."""


# Every tensor of a MiniMind-3 checkpoint, in the order of the reference implementation's state dict, and its shape in
# terms of the config. `{layer}` and `{expert}` count from 0. "query" is num_attention_heads * head_dim, "key_value"
# is num_key_value_heads * head_dim. The names on disk of a saved Hugging Face folder are the same.
ATTENTION = {
    "model.layers.{layer}.self_attn.q_proj.weight": ("query", "hidden_size"),
    "model.layers.{layer}.self_attn.k_proj.weight": ("key_value", "hidden_size"),
    "model.layers.{layer}.self_attn.v_proj.weight": ("key_value", "hidden_size"),
    "model.layers.{layer}.self_attn.o_proj.weight": ("hidden_size", "query"),
    "model.layers.{layer}.self_attn.q_norm.weight": ("head_dim",),
    "model.layers.{layer}.self_attn.k_norm.weight": ("head_dim",),
    "model.layers.{layer}.input_layernorm.weight": ("hidden_size",),
    "model.layers.{layer}.post_attention_layernorm.weight": ("hidden_size",),
}
FEED_FORWARD = {
    "model.layers.{layer}.mlp.gate_proj.weight": ("intermediate_size", "hidden_size"),
    "model.layers.{layer}.mlp.down_proj.weight": ("hidden_size", "intermediate_size"),
    "model.layers.{layer}.mlp.up_proj.weight": ("intermediate_size", "hidden_size"),
}
ROUTER = {"model.layers.{layer}.mlp.gate.weight": ("num_experts", "hidden_size")}
EXPERT = {
    "model.layers.{layer}.mlp.experts.{expert}.gate_proj.weight": ("moe_intermediate_size", "hidden_size"),
    "model.layers.{layer}.mlp.experts.{expert}.down_proj.weight": ("hidden_size", "moe_intermediate_size"),
    "model.layers.{layer}.mlp.experts.{expert}.up_proj.weight": ("moe_intermediate_size", "hidden_size"),
}
EMBEDDING = {"model.embed_tokens.weight": ("vocab_size", "hidden_size")}
NORM = {"model.norm.weight": ("hidden_size",)}
HEAD = {"lm_head.weight": ("vocab_size", "hidden_size")}

# A tensor that only one generation has, newest first.
GENERATIONS = {
    "MiniMind-3": "model.layers.0.self_attn.q_norm.weight",
    "MiniMind2": "model.embed_tokens.weight",
    "an early MiniMind2 or a MiniMind v1": "tok_embeddings.weight",
}

WRAPPER_PREFIX = re.compile(r"^(?:(?:_orig_mod|module)\.)+")  # left by torch.compile and by data parallelism
BUFFERS = ("pos_cis", "freqs_cos", "freqs_sin", "mask")  # tables of old files that the model computes itself


def clean_names(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Strip the prefixes of wrappers and drop the old position tables; nothing else is dropped.

    Raises:
        ConversionError: two names become one.
    """
    cleaned = {}
    for name, tensor in tensors.items():
        clean = WRAPPER_PREFIX.sub("", name)
        if clean.split(".")[-1] in BUFFERS:
            continue
        if clean in cleaned:
            raise ConversionError(f"two tensors are named {clean} once the prefix is stripped, {name} is one of them")
        cleaned[clean] = tensor
    return cleaned


def recognise_generation(tensors: dict[str, torch.Tensor]) -> str:
    """Name the MiniMind generation whose tensor names these are.

    Raises:
        ConversionError: no generation has such names.
    """
    for generation, telltale in GENERATIONS.items():
        if telltale in tensors:
            return generation
    if any(".lora." in name for name in tensors):
        raise ConversionError(
            "this is a LoRA of a MiniMind model, not the model itself: convert the model it belongs to"
        )
    raise ConversionError(
        f"these are not the tensors of a MiniMind model: expected one of {', '.join(GENERATIONS.values())}, "
        f"found {some_names(tensors) or 'no tensor at all'}"
    )


def infer_sizes(tensors: dict[str, torch.Tensor]) -> dict[str, int | bool]:
    """Read from the shapes of MiniMind-3 tensors every config value that they determine.

    Raises:
        ConversionError: a tensor that tells a size is missing or has the wrong number of dimensions.
    """
    first = {key: key.format(layer=0, expert=0) for key in (*EMBEDDING, *ATTENTION, *FEED_FORWARD, *ROUTER, *EXPERT)}

    def rows(key, dimensions=2):
        tensor = tensors.get(first[key])
        if tensor is None or tensor.dim() != dimensions or 0 in tensor.shape:
            found = "missing" if tensor is None else f"of shape {list(tensor.shape)}"
            raise ConversionError(f"{first[key]} is {found}: the sizes of the model cannot be read")
        return tensor.shape[0]

    head_dim = rows("model.layers.{layer}.self_attn.q_norm.weight", dimensions=1)
    use_moe = first["model.layers.{layer}.mlp.gate.weight"] in tensors
    sizes = {
        "vocab_size": rows("model.embed_tokens.weight"),
        "hidden_size": tensors["model.embed_tokens.weight"].shape[1],
        "num_hidden_layers": count_indices(tensors, r"model\.layers\.(\d+)\."),
        "num_attention_heads": rows("model.layers.{layer}.self_attn.q_proj.weight") // head_dim,
        "num_key_value_heads": rows("model.layers.{layer}.self_attn.k_proj.weight") // head_dim,
        "head_dim": head_dim,
        "use_moe": use_moe,
    }
    if use_moe:
        sizes["num_experts"] = count_indices(tensors, r"model\.layers\.0\.mlp\.experts\.(\d+)\.")
        sizes["moe_intermediate_size"] = rows("model.layers.{layer}.mlp.experts.{expert}.gate_proj.weight")
    else:
        sizes["intermediate_size"] = rows("model.layers.{layer}.mlp.gate_proj.weight")
    return sizes


def count_indices(names, pattern: str) -> int:
    """Count the different numbers that the pattern's group finds in the names. Gaps show up as missing tensors."""
    return len({match[1] for match in (re.match(pattern, name) for name in names) if match})


def expected_shapes(config: MiniMindConfig, with_head: bool = True) -> dict[str, tuple[int, ...]]:
    """List the name and the shape of every tensor of a checkpoint with this config, in the reference's order."""
    derived = {
        "query": config.num_attention_heads * config.head_dim,
        "key_value": config.num_key_value_heads * config.head_dim,
    }
    layer_tables = [ATTENTION]
    layer_tables += [ROUTER, *[EXPERT] * config.num_experts] if config.use_moe else [FEED_FORWARD]

    names = list(EMBEDDING.items())
    for layer in range(config.num_hidden_layers):
        for position, table in enumerate(layer_tables):
            expert = position - 2  # after ATTENTION and ROUTER
            names += [(name.format(layer=layer, expert=expert), shape) for name, shape in table.items()]
    names += list(NORM.items()) + (list(HEAD.items()) if with_head else [])
    return {name: tuple(derived.get(size) or getattr(config, size) for size in shape) for name, shape in names}


def check_tensors(tensors: dict[str, torch.Tensor], config: MiniMindConfig):
    """Check that a checkpoint holds exactly the tensors of its config; a tied lm_head may be absent.

    Raises:
        ConversionError: names the tensors that are missing, unexpected, or of another shape.
    """
    with_head = "lm_head.weight" in tensors or not config.tie_word_embeddings
    expected = expected_shapes(config, with_head)
    missing, unexpected = expected.keys() - tensors.keys(), tensors.keys() - expected.keys()
    misshapen = [
        f"{name} is {list(tensors[name].shape)} instead of {list(shape)}"
        for name, shape in expected.items()
        if name in tensors and tuple(tensors[name].shape) != shape
    ]
    faults = []
    if missing:
        faults.append(f"missing: {some_names(missing)}")
    if unexpected:
        faults.append(f"unexpected: {some_names(unexpected)}")
    if misshapen:
        faults.append(f"of the wrong shape: {'; '.join(misshapen[:8])}")
    if faults:
        raise ConversionError(f"the tensors do not fit a MiniMind-3 model of these sizes. {'. '.join(faults)}")


def fuse_experts(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Name and stack the tensors as the model holds them in memory: gate_up_proj [E, 2I, H], down_proj [E, H, I]."""
    fused, experts = {}, {}
    for name, tensor in tensors.items():
        match = re.fullmatch(r"(.+\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.weight", name)
        if match:
            experts.setdefault(match[1], {})[int(match[2]), match[3]] = tensor
        else:
            fused[name] = tensor
    for prefix, parts in experts.items():
        indices = sorted({index for index, _ in parts})
        gate_up = [torch.cat([parts[index, "gate"], parts[index, "up"]]) for index in indices]
        fused[f"{prefix}.gate_up_proj"] = torch.stack(gate_up)
        fused[f"{prefix}.down_proj"] = torch.stack([parts[index, "down"] for index in indices])
    return fused


def some_names(names, most: int = 8) -> str:
    """Join the first names in sorted order, and say how many more there are."""
    names = sorted(names)
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
