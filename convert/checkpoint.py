"""Open a checkpoint of any kind as tensors under this package's names and a complete config."""

from dataclasses import dataclass, fields
from pathlib import Path

import torch
from huggingface_hub.errors import StrictDataclassError

from minimind_hf.configuration_minimind import MiniMindConfig, is_early_config
from minimind_hf.convert.files import read_json, read_tensors
from minimind_hf.convert.generations import (
    GENERATIONS,
    Generation,
    has_published_heads,
    names_in,
    recognise_generation,
    refuse_unfixed,
)
from minimind_hf.convert.layout import (
    ConversionError,
    check_tensors,
    expected_shapes,
    infer_sizes,
    pair_halves,
    some_names,
)

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


# What no tensor tells. Where neither a config nor a flag says it, the default of the generation is assumed.
UNTOLD = ["rope_theta", "inference_rope_scaling", "rms_norm_eps", "max_position_embeddings"]
UNTOLD_OF_EXPERTS = ["num_experts_per_tok", "norm_topk_prob"]
UNTOLD_OF_HEADS = ["num_attention_heads"]  # without q/k norms

# Of these, what the code of a generation can have fixed.
UNTOLD_BY_TENSORS = {"rope_theta", "rope_type", "hidden_act"}

# Keys of a converted folder that say where it comes from; no other config takes them away.
HISTORY = {"merged_adapters", "source_layout"}

ROTARY_PROJECTIONS = ("self_attn.q_proj.weight", "self_attn.k_proj.weight")


@dataclass
class Checkpoint:
    """A MiniMind model as data, whatever file it came from."""

    source: Path
    tensors: dict[str, torch.Tensor]  # by the names of layout.py, memory-mapped; a tied lm_head.weight is left out
    config: MiniMindConfig
    generation: Generation | None = None  # that of the file; None where it came from another architecture
    assumed: tuple[str, ...] = ()  # the values in force that nobody gave, such as "rope_theta 1000000"


def load_checkpoint(source: Path, config: Path | None = None, flags: dict | None = None) -> Checkpoint:
    """Open a checkpoint: a .pth file of MiniMind's training, a model folder, or a safetensors file.

    Args:
        source: the file or folder.
        config: a config.json, in the spelling of any generation, with what the tensors cannot tell; by default the
            one in the folder.
        flags: config values, such as num_attention_heads, and `generation`; each must agree with the tensors and with
            `config`. None stands for a flag that was not given.

    Raises:
        ConversionError: the file is damaged or hostile, or the tensors, the config and the flags do not fit.
    """
    source = Path(source)
    own_tensors = read_tensors(source)
    config = find_config(source, config)
    given = read_json(config) if config else {}
    check_config_file(given, config)
    flags = {name: value for name, value in (flags or {}).items() if value is not None}
    refuse_bad_flags(flags)
    wanted = flags.pop("generation", None)
    generation = recognise_generation(own_tensors, given, wanted)

    names = names_in(own_tensors, generation)
    tensors = {names.get(name, name): tensor for name, tensor in own_tensors.items()}
    told = translate_keys(given, generation, config)
    check_agreement(flags, told, f"{config} says", flags, config)
    told |= flags
    model_config = complete_config(tensors, generation, told, is_own_config(given), flags, config, source)

    if not is_own_config(given):
        refuse_unfixed(generation, model_config, UNTOLD_BY_TENSORS & generation.fixed.keys())
    own = source / "config.json"
    if source.is_dir() and config != own and own.is_file():  # what the folder says of its past stays true
        for key in HISTORY & read_json(own).keys():
            setattr(model_config, key, read_json(own)[key])

    shapes = expected_shapes(model_config)
    if "lm_head.weight" in tensors:
        shapes["lm_head.weight"] = shapes["model.embed_tokens.weight"]
    own_shapes = {own: shapes[name] for own, name in names.items() if name in shapes}
    check_tensors(own_tensors, own_shapes, generation.title)
    if generation.interleaved:
        tensors = reorder_rotary_rows(tensors, model_config.head_dim, pair_halves)
    if model_config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    tells_generation = "rope_theta" in given or "architectures" in given  # of the two early ones
    generation_is_told = not generation.interleaved or wanted or is_own_config(given) or tells_generation
    assumed = assumptions(model_config, told.keys(), generation, generation_is_told)
    return Checkpoint(source, tensors, model_config, generation, assumed)


def complete_config(tensors, generation: Generation, told: dict, is_own: bool, flags, path, source) -> MiniMindConfig:
    """Make a whole config of what the tensors tell, of what a config and flags tell, and of the generation's defaults.

    Args:
        tensors: by the names of layout.py.
        generation: whose defaults count.
        told: by a config and by flags, in MiniMindConfig's keys; must agree with the tensors.
        is_own: the config is whole and of this package's own, so that no default is wanted.
        flags: which keys of `told` are flags; this and the next two are for messages.
        path: of the config.
        source: of the tensors.
    """
    heads = told.get("num_attention_heads")
    if heads is None and "model.layers.0.self_attn.q_norm.weight" not in tensors:
        heads = assume_heads(tensors, generation)
    known = infer_sizes(tensors, heads) | {"tie_word_embeddings": is_tied(tensors)}
    if known["tie_word_embeddings"] and told.get("tie_word_embeddings") is False and "lm_head.weight" in tensors:
        known["tie_word_embeddings"] = False  # two weights that happen to be equal
    check_agreement(told, known, f"the tensors of {source} say", flags, path)
    if not known["use_moe"] and "num_experts_per_tok" in flags:
        raise ConversionError(f"--num-experts-per-tok is {flags['num_experts_per_tok']}, but {source} has no experts")
    try:
        values = told | known
        return MiniMindConfig(**(values if is_own else generation.complete(generation.defaults | values)))
    except (ValueError, TypeError, AttributeError, ArithmeticError, StrictDataclassError) as error:
        raise ConversionError(f"{path or source}: {error}") from error


def find_config(source: Path, config: Path | None) -> Path | None:
    """The config.json that goes with a checkpoint: the given one, or else that of a folder."""
    if config is not None or not source.is_dir():
        return config
    if not (source / "config.json").is_file():
        raise ConversionError(f"{source} is not a whole model folder: it lacks config.json. Pass one as --config")
    return source / "config.json"


def refuse_bad_flags(flags: dict):
    """Raise for a flag that is no number, or a generation that there is none of."""
    for name, value in flags.items():
        if value != value:
            raise ConversionError(f"--{name.replace('_', '-')} is {value}: expected a number")
    if flags.get("generation") not in (None, *GENERATIONS):
        raise ConversionError(f"--generation {flags['generation']}: expected one of {', '.join(GENERATIONS)}")


def check_config_file(given: dict, path):
    """Raise unless a config.json is that of a plain MiniMind model."""
    if not given:
        return
    if given.get("model_type", "minimind") != "minimind":
        raise ConversionError(f"{path} is the config of a {given['model_type']} model, expected minimind")
    if given.get("quantization_config"):
        raise ConversionError(f"{path} is the config of a quantized model: convert the one it was made from")
    if "/" in str(given.get("attn_implementation")):
        raise ConversionError(
            f"{path} names code as attn_implementation={given['attn_implementation']!r}: remove the key"
        )
    known = {field.name for field in fields(MiniMindConfig)} | {"model_type", "rope_theta", "rope_scaling"}
    for generation in GENERATIONS.values():
        known |= {*generation.config_keys, *generation.unneeded_keys}
    if not known & given.keys():
        raise ConversionError(f"{path} has no key of a MiniMind config; it holds {some_names(given)}")


def is_own_config(given: dict) -> bool:
    """Whether a config was written by MiniMindConfig of this package, which writes every key."""
    return {"use_qk_norm", "rms_norm_scale_in_float32"} <= given.keys()


def translate_keys(given: dict, generation: Generation, path) -> dict:
    """Bring a config from its generation's spelling to that of MiniMindConfig.

    Null stands for a missing key, except in a config of this package's own, which writes every key.

    Raises:
        ConversionError: it is the config of another generation, or two of its keys contradict each other.
    """
    is_minimind3 = generation is GENERATIONS["minimind3"]
    written_by_minimind3 = "moe_intermediate_size" in given and "use_qk_norm" not in given
    if (
        (is_early_config(given) and not generation.interleaved)
        or ("n_routed_experts" in given and is_minimind3)
        or (written_by_minimind3 and not is_minimind3)
    ):
        raise ConversionError(f"{path} is the config of another generation: the tensors are of {generation.title}")
    translated = {}
    for key, value in given.items():
        if (value is None and not is_own_config(given)) or key in generation.unneeded_keys:
            continue
        name = generation.config_keys.get(key, key)
        if translated.setdefault(name, value) != value:
            raise ConversionError(f"{path} holds {key}={value}, and {name}={translated[name]}, which is the same key")
    return translated


def check_agreement(given: dict, told: dict, told_by: str, flags: dict, path):
    """Raise a ConversionError where a config or a flag gives a value that is told otherwise."""
    for name in given.keys() & told.keys():
        if given[name] not in (None, told[name]):
            culprit = f"--{name.replace('_', '-')}" if name in flags else name
            origin = "the arguments" if name in flags else path
            raise ConversionError(f"{culprit} is {given[name]} in {origin}, but {told_by} {told[name]}")


def assume_heads(tensors, generation: Generation) -> int:
    """The number of heads of the published models of a generation, where the shapes are theirs."""
    if not has_published_heads(tensors, generation):
        raise ConversionError(
            f"the tensors of a {generation.title} do not tell the number of heads, and these have not the shapes of "
            "its published models: pass --config with its config.json, or --num-attention-heads"
        )
    return generation.heads


def assumptions(config: MiniMindConfig, told, generation: Generation, generation_is_told: bool) -> tuple[str, ...]:
    """List the values in force that neither the tensors nor `told` nor the code of a known generation settles."""
    untold = [*UNTOLD, *(UNTOLD_OF_EXPERTS if config.use_moe else ())]
    untold += [] if config.use_qk_norm else UNTOLD_OF_HEADS
    settled = {*told, *(generation.fixed if generation_is_told else ())}
    settled |= {"rope_theta", "inference_rope_scaling"} if "rope_parameters" in told else set()
    settled |= {"inference_rope_scaling"} if "rope_scaling" in told or "rope_type" in generation.fixed else set()
    theta = config.rope_parameters["rope_theta"]
    values = {name: theta if name == "rope_theta" else getattr(config, name) for name in untold if name not in settled}
    unclear = [] if generation_is_told else [f"generation {generation.title}"]
    return (*unclear, *(f"{name} {value}" for name, value in values.items()))


def reorder_rotary_rows(tensors, head_dim: int, reorder) -> dict[str, torch.Tensor]:
    """Apply `pair_halves` or its inverse to every query and key projection."""
    return {
        name: reorder(tensor, head_dim) if name.endswith(ROTARY_PROJECTIONS) else tensor
        for name, tensor in tensors.items()
    }


def is_tied(tensors) -> bool:
    """Whether the language-model head is the embedding table, or absent, which means the same."""
    head = tensors.get("lm_head.weight")
    return head is None or torch.equal(head, tensors["model.embed_tokens.weight"])


def cast_tensors(tensors: dict[str, torch.Tensor], dtype: str | None = None) -> dict[str, torch.Tensor]:
    """Cast to the named dtype, or to the narrowest one that holds every value of every tensor exactly.

    Raises:
        ConversionError: the dtype is unknown, or a value is beyond its range.
    """
    if dtype is not None and dtype not in DTYPES:
        raise ConversionError(f"--dtype {dtype}: expected one of {', '.join(DTYPES)}")
    target = DTYPES[dtype] if dtype else exact_dtype(tensors)
    limit = torch.finfo(target).max
    for name, tensor in tensors.items():
        if torch.finfo(tensor.dtype).max > limit and tensor.abs().max() > limit:
            raise ConversionError(f"{name} holds {tensor.abs().max():.6g}, beyond the {limit:.6g} of {target}")
    return {name: tensor.to(target) for name, tensor in tensors.items()}


def exact_dtype(tensors: dict[str, torch.Tensor]) -> torch.dtype:
    """The narrowest dtype that represents every value of every tensor."""
    exact, *others = {tensor.dtype for tensor in tensors.values()}
    for dtype in others:
        exact = torch.promote_types(exact, dtype)
    if exact not in DTYPES.values():
        raise ConversionError(f"the tensors are {exact}: pass --dtype with one of {', '.join(DTYPES)}")
    return exact
