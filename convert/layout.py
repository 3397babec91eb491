"""What a MiniMind checkpoint looks like: tensor names and shapes as data, and pure functions over them.

Nothing here reads or writes a file. A checkpoint is a dict from tensor name to tensor.
"""

import re
from itertools import groupby

import torch

from minimind_hf.configuration_minimind import MiniMindConfig


class ConversionError(ValueError):
    """A checkpoint, config or flag cannot be converted exactly. The message names the culprit and the remedy."""


# Every tensor that a MiniMind folder can hold and its shape in terms of the config. `{layer}`, `{expert}` and
# `{shared}` count from 0; "query" is num_attention_heads * head_dim, "key_value" num_key_value_heads * head_dim.
# MiniMind-3 uses these names itself, in this order.
EMBEDDING = {"model.embed_tokens.weight": ("vocab_size", "hidden_size")}
ATTENTION = {
    "model.layers.{layer}.self_attn.q_proj.weight": ("query", "hidden_size"),
    "model.layers.{layer}.self_attn.k_proj.weight": ("key_value", "hidden_size"),
    "model.layers.{layer}.self_attn.v_proj.weight": ("key_value", "hidden_size"),
    "model.layers.{layer}.self_attn.o_proj.weight": ("hidden_size", "query"),
}
QK_NORM = {
    "model.layers.{layer}.self_attn.q_norm.weight": ("head_dim",),
    "model.layers.{layer}.self_attn.k_norm.weight": ("head_dim",),
}
BLOCK_NORMS = {
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
SHARED_EXPERT = {
    "model.layers.{layer}.mlp.shared_experts.{shared}.gate_proj.weight": ("moe_intermediate_size", "hidden_size"),
    "model.layers.{layer}.mlp.shared_experts.{shared}.down_proj.weight": ("hidden_size", "moe_intermediate_size"),
    "model.layers.{layer}.mlp.shared_experts.{shared}.up_proj.weight": ("moe_intermediate_size", "hidden_size"),
}
FINAL_NORM = {"model.norm.weight": ("hidden_size",)}
HEAD = {"lm_head.weight": ("vocab_size", "hidden_size")}

PLACEHOLDER = re.compile(r"\{(\w+)\}")
WRAPPER_PREFIX = re.compile(r"^(?:(?:_orig_mod|module)\.)+")  # left by torch.compile and by data parallelism
# Tables of old files that the model computes itself.
BUFFER = re.compile(r"(?:model\.)?(?:pos_cis|freqs_cos|freqs_sin|mask|layers\.\d+\.(?:attention|self_attn)\.mask)")


def clean_names(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Strip the prefixes of wrappers and drop the old position tables; nothing else is dropped.

    Raises:
        ConversionError: two names become one.
    """
    cleaned = {}
    for name, tensor in tensors.items():
        clean = WRAPPER_PREFIX.sub("", name)
        if BUFFER.fullmatch(clean):
            continue
        if clean in cleaned:
            raise ConversionError(f"two tensors are named {clean} once the prefix is stripped, {name} is one of them")
        cleaned[clean] = tensor
    return cleaned


def fill_in(table: dict, counts: dict[str, int]) -> dict:
    """Write out a table for every layer, expert and shared expert, in the order of a state dict.

    Args:
        table: from templates of names to names, which are filled in too, or to anything else.
        counts: how many layers, experts and shared experts there are.
    """
    filled = {}
    for placeholder, group in groupby(table.items(), lambda entry: first_placeholder(entry[0])):
        entries = dict(group)
        if placeholder is None:
            filled |= entries
            continue
        for index in range(counts[placeholder]):

            def numbered(text, written=(f"{{{placeholder}}}", str(index))):
                return text.replace(*written) if isinstance(text, str) else text

            filled |= fill_in({numbered(name): numbered(value) for name, value in entries.items()}, counts)
    return filled


def first_placeholder(name: str) -> str | None:
    match = PLACEHOLDER.search(name)
    return match and match[1]


def infer_sizes(tensors: dict[str, torch.Tensor], num_attention_heads: int | None) -> dict[str, int | bool]:
    """Read from the shapes of tensors every config value that they determine.

    Args:
        tensors: by the names of this file.
        num_attention_heads: which tensors without q/k norms do not tell.

    Raises:
        ConversionError: a tensor that tells a size is missing or has the wrong number of dimensions.
    """

    def rows(template, dimensions=2):
        name = template.format(layer=0, expert=0)
        tensor = tensors.get(name)
        if tensor is None or tensor.dim() != dimensions or 0 in tensor.shape:
            found = "missing" if tensor is None else f"of shape {list(tensor.shape)}"
            raise ConversionError(f"{name} is {found}: the sizes of the model cannot be read")
        return tensor.shape[0]

    query, key = (rows(f"model.layers.{{layer}}.self_attn.{part}_proj.weight") for part in "qk")
    use_qk_norm = "model.layers.0.self_attn.q_norm.weight" in tensors
    if use_qk_norm:
        head_dim = rows("model.layers.{layer}.self_attn.q_norm.weight", dimensions=1)
        num_attention_heads = query // head_dim
    elif not isinstance(num_attention_heads, int) or isinstance(num_attention_heads, bool):
        raise ConversionError(f"num_attention_heads is {num_attention_heads!r}: expected a whole number")
    elif num_attention_heads <= 0 or query % num_attention_heads or key % (query // num_attention_heads):
        raise ConversionError(
            f"--num-attention-heads {num_attention_heads}: the {query} rows of the query projection and the {key} of "
            "the key projection are no whole heads then"
        )
    else:
        head_dim = query // num_attention_heads
    use_moe = "model.layers.0.mlp.gate.weight" in tensors
    sizes = {
        "vocab_size": rows("model.embed_tokens.weight"),
        "hidden_size": tensors["model.embed_tokens.weight"].shape[1],
        "num_hidden_layers": count_indices(tensors, [*ATTENTION, *BLOCK_NORMS], "layer"),
        "num_attention_heads": num_attention_heads,
        "num_key_value_heads": key // head_dim,
        "head_dim": head_dim,
        "use_qk_norm": use_qk_norm,
        "use_moe": use_moe,
    }
    if use_moe:
        sizes["num_experts"] = count_indices(tensors, list(EXPERT), "expert")
        sizes["num_shared_experts"] = count_indices(tensors, list(SHARED_EXPERT), "shared")
        sizes["moe_intermediate_size"] = rows("model.layers.{layer}.mlp.experts.{expert}.gate_proj.weight")
    else:
        sizes["intermediate_size"] = rows("model.layers.{layer}.mlp.gate_proj.weight")
    return sizes


def count_indices(names, templates: list[str], placeholder: str) -> int:
    """Count the different numbers that stand in place of the placeholder. Gaps show up as missing tensors."""
    patterns = [
        PLACEHOLDER.sub(lambda match: r"(\d+)" if match[1] == placeholder else r"\d+", template.replace(".", r"\."))
        for template in templates
    ]
    matches = (re.fullmatch(pattern, name) for name in names for pattern in patterns)
    return len({match[1] for match in matches if match})


def expected_shapes(config: MiniMindConfig) -> dict[str, tuple[int, ...]]:
    """List the name and the shape of every tensor of a checkpoint with this config; a tied lm_head is none."""
    derived = {
        "query": config.num_attention_heads * config.head_dim,
        "key_value": config.num_key_value_heads * config.head_dim,
    }
    shapes = {**EMBEDDING, **ATTENTION, **(QK_NORM if config.use_qk_norm else {}), **BLOCK_NORMS}
    shapes |= {**ROUTER, **EXPERT, **SHARED_EXPERT} if config.use_moe else FEED_FORWARD
    shapes |= FINAL_NORM | ({} if config.tie_word_embeddings else HEAD)
    counts = {
        "layer": config.num_hidden_layers,
        "expert": config.num_experts,
        "shared": config.num_shared_experts,
    }
    return {
        name: tuple(derived.get(size) or getattr(config, size) for size in shape)
        for name, shape in fill_in(shapes, counts).items()
    }


def check_tensors(tensors: dict[str, torch.Tensor], expected: dict[str, tuple[int, ...]], title: str):
    """Check that a checkpoint holds exactly the expected tensors.

    Raises:
        ConversionError: names the tensors that are missing, unexpected, or of another shape.
    """
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
        raise ConversionError(f"the tensors do not fit a {title} model of these sizes. {'. '.join(faults)}")


def pair_halves(weight: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Reorder the rows of a query or key projection [heads * D, H]: neighbours (2i, 2i + 1) become (i, i + D / 2).

    Attention scores do not change, since queries and keys are reordered alike within each head.
    """
    heads = weight.view(-1, head_dim // 2, 2, weight.shape[1])  # [heads, pairs, 2, H]
    return heads.transpose(1, 2).reshape(weight.shape)


def pair_neighbours(weight: torch.Tensor, head_dim: int) -> torch.Tensor:
    """The inverse of `pair_halves`."""
    heads = weight.view(-1, 2, head_dim // 2, weight.shape[1])  # [heads, 2, pairs, H]
    return heads.transpose(1, 2).reshape(weight.shape)


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
