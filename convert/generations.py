"""The generations of MiniMind as data: tensor names, spelling of the config, defaults, what each can express.

A table maps the name that a generation gives a tensor to the name of layout.py, in the order of that generation's own
state dict; the way back is its computed inverse.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from minimind_hf.configuration_minimind import (
    MINIMIND2_KEYS,
    YARN_PARAMETERS,
    MiniMindConfig,
    from_minimind2,
    is_early_config,
)
from minimind_hf.convert.layout import (
    ATTENTION,
    BLOCK_NORMS,
    EMBEDDING,
    EXPERT,
    FEED_FORWARD,
    FINAL_NORM,
    HEAD,
    QK_NORM,
    ROUTER,
    SHARED_EXPERT,
    ConversionError,
    count_indices,
    expected_shapes,
    fill_in,
    some_names,
)


def as_they_are(*tables) -> dict[str, str]:
    return {name: name for table in tables for name in table}


MINIMIND3_NAMES = as_they_are(
    EMBEDDING, ATTENTION, QK_NORM, BLOCK_NORMS, FEED_FORWARD, ROUTER, EXPERT, FINAL_NORM, HEAD
)
MINIMIND2_NAMES = as_they_are(
    EMBEDDING, ATTENTION, BLOCK_NORMS, FEED_FORWARD, EXPERT, ROUTER, SHARED_EXPERT, FINAL_NORM, HEAD
)
EARLY_NAMES = {
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "layers.{layer}.attention.wq.weight": "model.layers.{layer}.self_attn.q_proj.weight",
    "layers.{layer}.attention.wk.weight": "model.layers.{layer}.self_attn.k_proj.weight",
    "layers.{layer}.attention.wv.weight": "model.layers.{layer}.self_attn.v_proj.weight",
    "layers.{layer}.attention.wo.weight": "model.layers.{layer}.self_attn.o_proj.weight",
    "layers.{layer}.attention_norm.weight": "model.layers.{layer}.input_layernorm.weight",
    "layers.{layer}.ffn_norm.weight": "model.layers.{layer}.post_attention_layernorm.weight",
    "layers.{layer}.feed_forward.w1.weight": "model.layers.{layer}.mlp.gate_proj.weight",
    "layers.{layer}.feed_forward.w2.weight": "model.layers.{layer}.mlp.down_proj.weight",
    "layers.{layer}.feed_forward.w3.weight": "model.layers.{layer}.mlp.up_proj.weight",
    "layers.{layer}.feed_forward.experts.{expert}.w1.weight": (
        "model.layers.{layer}.mlp.experts.{expert}.gate_proj.weight"
    ),
    "layers.{layer}.feed_forward.experts.{expert}.w2.weight": (
        "model.layers.{layer}.mlp.experts.{expert}.down_proj.weight"
    ),
    "layers.{layer}.feed_forward.experts.{expert}.w3.weight": (
        "model.layers.{layer}.mlp.experts.{expert}.up_proj.weight"
    ),
    "layers.{layer}.feed_forward.gate.weight": "model.layers.{layer}.mlp.gate.weight",
    "layers.{layer}.feed_forward.shared_experts.w1.weight": (
        "model.layers.{layer}.mlp.shared_experts.0.gate_proj.weight"
    ),
    "layers.{layer}.feed_forward.shared_experts.w2.weight": (
        "model.layers.{layer}.mlp.shared_experts.0.down_proj.weight"
    ),
    "layers.{layer}.feed_forward.shared_experts.w3.weight": (
        "model.layers.{layer}.mlp.shared_experts.0.up_proj.weight"
    ),
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}

EARLY_CONFIG_KEYS = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "hidden_dim": "intermediate_size",
    "norm_eps": "rms_norm_eps",
    "max_seq_len": "max_position_embeddings",
    **MINIMIND2_KEYS,
}
# Only for widths that the tensors show; `n_shared_experts` is a switch there, which any value but null turns on.
EARLY_UNNEEDED_KEYS = ("multiple_of", "n_shared_experts")


@dataclass(frozen=True)
class Generation:
    """What distinguishes the checkpoints of one generation."""

    title: str
    names: dict[str, str]  # its own name of a tensor -> that of layout.py
    heads: int  # query heads of the published models
    key_value_heads: int
    defaults: dict  # config values that its tensors cannot tell, where they are not those of MiniMindConfig
    complete: Callable[[dict], dict] = from_minimind2  # add the defaults that depend on other values
    config_keys: dict[str, str] = field(default_factory=lambda: MINIMIND2_KEYS)  # its own spelling -> MiniMindConfig's
    unneeded_keys: tuple = ()  # keys of its configs that the tensors make superfluous
    published_widths: tuple = (512, 640, 768)  # hidden sizes of the published models
    interleaved: bool = False  # rotary pairs are neighbours (2i, 2i + 1), not halves (i, i + D / 2)
    fixed: dict = field(default_factory=dict)  # config values that its code cannot vary


GENERATIONS = {
    "minimind3": Generation(
        "MiniMind-3",
        MINIMIND3_NAMES,
        heads=8,
        key_value_heads=4,
        defaults={},
        complete=dict,
        config_keys={},
        fixed={"use_qk_norm": True},
    ),
    "minimind2": Generation(
        "MiniMind2",
        MINIMIND2_NAMES,
        heads=8,
        key_value_heads=2,
        defaults={},
        fixed={"use_qk_norm": False, "tie_word_embeddings": True},
    ),
    "minimind2-early": Generation(
        "MiniMind2 (early)",
        EARLY_NAMES,
        heads=8,
        key_value_heads=2,
        defaults={"rope_theta": 1e6, "max_position_embeddings": 8192, "aux_loss_alpha": 0.1},
        config_keys=EARLY_CONFIG_KEYS,
        unneeded_keys=EARLY_UNNEEDED_KEYS,
        interleaved=True,
        fixed={"use_qk_norm": False, "tie_word_embeddings": True, "hidden_act": "silu", "rope_type": "default"},
    ),
    "minimind1": Generation(
        "MiniMind v1",
        EARLY_NAMES,
        heads=16,
        key_value_heads=8,
        defaults={"rope_theta": 1e4, "max_position_embeddings": 512},
        config_keys=EARLY_CONFIG_KEYS,
        unneeded_keys=EARLY_UNNEEDED_KEYS,
        interleaved=True,
        fixed={
            "use_qk_norm": False,
            "tie_word_embeddings": True,
            "hidden_act": "silu",
            "rope_type": "default",
            "rope_theta": 1e4,
        },
    ),
}


def recognise_generation(tensors, given: dict, wanted: str | None = None) -> Generation:
    """Say which generation wrote these tensors.

    An early MiniMind2 and a MiniMind v1 have the same names: their config tells them apart, or the published shapes.

    Args:
        tensors: by their own names.
        given: the config that came with them, in its own spelling; may be empty.
        wanted: a key of GENERATIONS, to be confirmed.

    Raises:
        ConversionError: no generation has such names, it is not the wanted one, or it cannot be told.
    """
    candidates = [key for key, generation in GENERATIONS.items() if next(iter(generation.names)) in tensors]
    if not candidates:
        if any(".lora." in name for name in tensors):
            raise ConversionError("this is a LoRA of a MiniMind model, not the model itself: see `merge-lora`")
        telltales = dict.fromkeys(next(iter(generation.names)) for generation in GENERATIONS.values())
        raise ConversionError(
            f"these are not the tensors of a MiniMind model: expected one of {', '.join(telltales)}, "
            f"found {some_names(tensors) or 'no tensor at all'}"
        )
    if "minimind3" in candidates:
        candidates = ["minimind3" if "model.layers.0.self_attn.q_norm.weight" in tensors else "minimind2"]
    elif wanted in candidates:
        candidates = [wanted]
    elif "use_qk_norm" in given:  # a whole config of this package's own: little hangs on which of the two it is
        candidates = [given["source_layout"] if given.get("source_layout") in candidates else "minimind2-early"]
    elif is_early_config(given):
        candidates = ["minimind2-early" if "rope_theta" in given or is_early_minimind2(given) else "minimind1"]
    else:
        candidates = [key for key in candidates if has_published_heads(tensors, GENERATIONS[key])]
        if not candidates:
            raise ConversionError(
                "these are the names of an early MiniMind2 and of a MiniMind v1, and the shapes are of neither's "
                "published models: pass --config with its config.json, or --generation and --num-attention-heads"
            )
    if wanted not in (None, *candidates):
        raise ConversionError(f"--generation {wanted}, but these are tensors of {GENERATIONS[candidates[0]].title}")
    return GENERATIONS[candidates[0]]


def is_early_minimind2(given: dict) -> bool:
    return given.get("architectures") == ["MiniMindLM"]


def has_published_heads(tensors, generation: Generation) -> bool:
    """Whether the query and key projections, by either name, are as wide as in a generation's published models."""
    query, key = (
        tensors.get(f"model.layers.0.self_attn.{part}_proj.weight", tensors.get(f"layers.0.attention.w{part}.weight"))
        for part in "qk"
    )
    if query is None or key is None or query.dim() != 2 or key.dim() != 2:
        return False
    is_published = query.shape[1] in generation.published_widths and query.shape[0] == query.shape[1]
    return is_published and query.shape[0] * generation.key_value_heads == key.shape[0] * generation.heads


def own_names(generation: Generation, counts: dict[str, int]) -> dict[str, str]:
    """Map every tensor name that a generation can have to that of layout.py, in the order of its own state dict.

    Args:
        generation: whose names.
        counts: how many layers, experts and shared experts there are.
    """
    return fill_in(generation.names, counts)


def names_in(tensors, generation: Generation) -> dict[str, str]:
    """As `own_names`, for a checkpoint at hand: its names tell the counts."""
    counts = {}
    for placeholder in ("layer", "expert", "shared"):
        templates = [name for name in generation.names if f"{{{placeholder}}}" in name]
        counts[placeholder] = count_indices(tensors, templates, placeholder)
    return own_names(generation, counts)


def names_for(generation: Generation, config: MiniMindConfig) -> dict[str, str]:
    """Map the names that a generation gives the tensors of a config to those of layout.py, in its own order.

    Raises:
        ConversionError: the generation's code cannot express this model; says what would be lost.
    """
    check_expressible(generation, config)
    counts = {"layer": config.num_hidden_layers, "expert": config.num_experts, "shared": config.num_shared_experts}
    expected = expected_shapes(config)
    if config.tie_word_embeddings:  # the reference implementation stores the shared weight under both names
        expected = {**expected, "lm_head.weight": None}
    names = {own: name for own, name in own_names(generation, counts).items() if name in expected}
    lost = expected.keys() - set(names.values())
    if lost:
        raise ConversionError(f"{generation.title} has no place for {some_names(lost)}: they would be lost")
    return names


def check_expressible(generation: Generation, config: MiniMindConfig):
    """Raise unless the code of a generation computes what this config says."""
    refuse_unfixed(generation, config, generation.fixed, ": --layout names another generation")
    if not config.use_qk_norm and config.head_dim * config.num_attention_heads != config.hidden_size:
        raise ConversionError(
            f"{generation.title} has heads of hidden_size / num_attention_heads = "
            f"{config.hidden_size / config.num_attention_heads:g}, this model of head_dim={config.head_dim}"
        )
    rope = {name: value for name, value in config.rope_parameters.items() if name != "rope_theta"}
    if rope not in ({"rope_type": "default"}, YARN_PARAMETERS):
        raise ConversionError(
            f"{generation.title} has one yarn fixed in its code, this model other rope parameters: {rope}"
        )
    normalises_one = config.use_moe and config.num_experts_per_tok == 1 and config.norm_topk_prob
    if normalises_one and not config.use_qk_norm:
        raise ConversionError(f"{generation.title} does not normalise the weight of a single expert, this model does")


def refuse_unfixed(generation: Generation, config: MiniMindConfig, names, hint: str = ""):
    """Raise where one of these values is not the one that is fixed in the code of a generation."""
    for name in names:
        found = config.rope_parameters[name] if name.startswith("rope_") else getattr(config, name)
        if found != generation.fixed[name]:
            fixed = f"{name}={generation.fixed[name]} fixed in its code"
            raise ConversionError(f"{generation.title} has {fixed}, this model has {found}{hint}")
