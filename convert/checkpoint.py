"""Open a checkpoint of any kind as tensors under this package's names and a complete config."""

from dataclasses import dataclass, fields
from pathlib import Path

import torch
from huggingface_hub.errors import StrictDataclassError

from minimind_hf.configuration_minimind import OLDER_GENERATIONS, MiniMindConfig
from minimind_hf.convert.files import read_json, read_tensors
from minimind_hf.convert.layout import (
    ConversionError,
    check_tensors,
    infer_sizes,
    recognise_generation,
    some_names,
)

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass
class Checkpoint:
    """A MiniMind model as data, whatever file it came from."""

    source: Path
    tensors: dict[str, torch.Tensor]  # by the names of layout.py, memory-mapped; a tied lm_head.weight is left out
    config: MiniMindConfig


def load_checkpoint(source: Path, config: Path | None = None, flags: dict | None = None) -> Checkpoint:
    """Open a checkpoint: a .pth file of MiniMind's training, or a folder or file with safetensors.

    Args:
        source: the file or folder.
        config: a config.json with what the tensors cannot tell; by default the one in the folder.
        flags: config values, such as num_attention_heads; each must agree with the tensors and with `config`.

    Raises:
        ConversionError: the file is damaged or hostile, or the tensors, the config and the flags do not fit.
    """
    source = Path(source)
    tensors = read_tensors(source)
    if config is None and (source / "config.json").is_file():
        config = source / "config.json"
    model_config = build_config(tensors, source, config, flags)
    return Checkpoint(source, {k: v for k, v in tensors.items() if is_kept(k, model_config)}, model_config)


def build_config(tensors, source, config_path=None, flags=None) -> MiniMindConfig:
    """Make the config of a checkpoint from its tensors, a config.json and flags, and check the tensors against it.

    What the tensors tell must agree with the config and the flags. What they cannot tell comes from the flags, then
    from the config, then from MiniMind-3's defaults.
    """
    given = read_json(config_path) if config_path else {}
    check_config_file(given, config_path)
    generation = recognise_generation(tensors)
    if generation != "MiniMind-3":
        raise ConversionError(f"{source} holds {generation}: only MiniMind-3 can be converted so far")
    known = infer_sizes(tensors)
    known["tie_word_embeddings"] = is_tied(tensors)
    flags = {name: value for name, value in (flags or {}).items() if value is not None}

    for values, origin in ((given, config_path), (flags, "the arguments")):
        for name, value in known.items():
            untied_on_purpose = name == "tie_word_embeddings" and value and values.get(name) is False
            if untied_on_purpose and "lm_head.weight" in tensors:
                continue  # two weights that happen to be equal
            if values.get(name) not in (None, value):
                flag = f"--{name.replace('_', '-')}" if values is flags else name
                raise ConversionError(f"{flag} is {values[name]} in {origin}, but the tensors of {source} say {value}")
    try:
        config = MiniMindConfig(
            **{**known, **{key: value for key, value in given.items() if value is not None}, **flags}
        )
    except (ValueError, TypeError, AttributeError, ArithmeticError, StrictDataclassError) as error:
        raise ConversionError(f"{config_path or source}: {error}") from error
    check_tensors(tensors, config)
    return config


def check_config_file(given: dict, path):
    """Raise unless a config.json is that of a plain MiniMind model."""
    if not given:
        return
    if given.get("model_type", "minimind") != "minimind":
        raise ConversionError(f"{path} is the config of a {given['model_type']} model, expected minimind")
    if "quantization_config" in given:
        raise ConversionError(f"{path} is the config of a quantized model: convert the one it was made from")
    known = {field.name for field in fields(MiniMindConfig)} | {"model_type", *OLDER_GENERATIONS}
    if not known & given.keys():
        raise ConversionError(f"{path} has no key of a MiniMind config; it holds {some_names(given)}")


def is_tied(tensors) -> bool:
    """Whether the language-model head is the embedding table, or absent, which means the same."""
    head = tensors.get("lm_head.weight")
    return head is None or torch.equal(head, tensors["model.embed_tokens.weight"])


def is_kept(name: str, config: MiniMindConfig) -> bool:
    """Whether a tensor is stored of its own: a tied lm_head is not."""
    return not (name == "lm_head.weight" and config.tie_word_embeddings)


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
