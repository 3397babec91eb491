"""The conversions: between the reference implementation's .pth files and Hugging Face folders, each one verified."""

import shutil
from dataclasses import fields
from pathlib import Path

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoModelForCausalLM, AutoTokenizer

from minimind_hf.configuration_minimind import OLDER_GENERATIONS, MiniMindConfig
from minimind_hf.convert.files import (
    TOKENIZER_FILES,
    check_destination,
    progress,
    read_json,
    read_tensors,
    read_torch_file,
    written_whole,
)
from minimind_hf.convert.layout import (
    ConversionError,
    check_tensors,
    clean_names,
    expected_shapes,
    fuse_experts,
    infer_sizes,
    recognise_generation,
    some_names,
)
from minimind_hf.modeling_minimind import MiniMindForCausalLM

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def to_hf(
    source: Path,
    destination: Path,
    tokenizer: Path | None = None,
    config: Path | None = None,
    dtype: str | None = None,
    overwrite: bool = False,
    **flags,
) -> str:
    """Convert a MiniMind-3 checkpoint to a Hugging Face folder.

    Args:
        source: the .pth file that MiniMind's training wrote (plain, compiled, data-parallel or resume).
        destination: the folder to write; it appears whole, or not at all.
        tokenizer: a folder whose tokenizer files are copied along.
        config: a config.json with what the tensors cannot tell (rope_theta, rms_norm_eps, experts per token, …).
        dtype: "float32", "float16" or "bfloat16"; by default that of the checkpoint.
        overwrite: replace an existing model folder.
        **flags: config values, such as num_attention_heads; each must agree with the tensors and with `config`.

    Returns:
        One line that says what was verified.

    Raises:
        ConversionError: the checkpoint cannot be converted exactly; nothing was written.
    """
    source, destination = Path(source), Path(destination)
    check_destination(destination, source, overwrite, is_folder=True)
    if source.is_dir() or source.suffix == ".safetensors":
        raise ConversionError(f"{source} is in Hugging Face's format already: expected a .pth file")
    tensors = read_tensors(source)
    model_config = build_config(tensors, source, config, flags)
    if tokenizer is not None:
        take_special_tokens(model_config, Path(tokenizer), given=read_json(config) if config else {})
    model = build_model(tensors, model_config, dtype)
    with written_whole(destination, source, overwrite, is_folder=True) as draft:
        model.save_pretrained(draft)
        if tokenizer is not None:
            copy_tokenizer(Path(tokenizer), draft)
        return verify_folder(draft, tensors, model.dtype, with_tokenizer=tokenizer is not None)


def to_torch(source: Path, destination: Path, overwrite: bool = False) -> str:
    """Convert a Hugging Face folder to the state dict that MiniMind's own scripts load.

    Args:
        source: a MiniMind-3 model folder.
        destination: the .pth file to write, in the dtype of the folder; it appears whole, or not at all.
        overwrite: replace an existing file.

    Returns:
        One line that says what was verified.

    Raises:
        ConversionError: the folder does not hold a MiniMind-3 causal language model; nothing was written.
    """
    source, destination = Path(source), Path(destination)
    check_destination(destination, source, overwrite, is_folder=False)
    if source.exists() and not source.is_dir():
        raise ConversionError(f"{source} is a file: expected a Hugging Face folder")
    tensors = read_tensors(source)
    model_config = build_config(tensors, source, source / "config.json")
    if model_config.tie_word_embeddings:  # the reference implementation stores the shared weight under both names
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    tensors = {name: tensors[name] for name in expected_shapes(model_config)}
    with written_whole(destination, source, overwrite, is_folder=False) as draft:
        torch.save(tensors, draft)
        written = clean_names(read_torch_file(draft))
        return f"verified: {compare_tensors(written, tensors)} read back bit for bit equal"


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


def take_special_tokens(config: MiniMindConfig, folder: Path, given: dict):
    """Make the config's eos, bos and pad those of the tokenizer; where `given` sets one, they must agree."""
    tokenizer = load_tokenizer(folder)
    if len(tokenizer) > config.vocab_size:
        raise ConversionError(
            f"the tokenizer in {folder} has {len(tokenizer)} tokens, but the model only {config.vocab_size} embeddings"
        )
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        token = getattr(tokenizer, name)
        if token is None:
            continue
        accepted = given[name] if isinstance(given.get(name), list) else [given.get(name)]
        if accepted != [None] and token not in accepted:
            raise ConversionError(f"{name} is {given[name]} in the config, but {token} in the tokenizer of {folder}")
        if accepted == [None]:
            setattr(config, name, token)


def load_tokenizer(folder: Path):
    """Load a tokenizer from a folder, running no code of it."""
    if not (folder / "tokenizer_config.json").is_file():
        raise ConversionError(f"{folder} holds no tokenizer: tokenizer_config.json is missing")
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the tokenizers library raises bare Exception for a damaged file
        raise ConversionError(f"the tokenizer in {folder} does not load: {first_line(error)}") from error


def copy_tokenizer(source: Path, destination: Path):
    """Copy the tokenizer files as they are, so that every token and template stays what it was."""
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, destination / name)


def build_model(tensors, config: MiniMindConfig, dtype: str | None = None) -> MiniMindForCausalLM:
    """Make a model of these tensors, in the given dtype or in the narrowest one that holds all of them exactly."""
    if dtype is not None and dtype not in DTYPES:
        raise ConversionError(f"--dtype {dtype}: expected one of {', '.join(DTYPES)}")
    target = DTYPES[dtype] if dtype else exact_dtype(tensors)
    limit = torch.finfo(target).max
    for name, tensor in tensors.items():
        if tensor.abs().max() > limit:
            raise ConversionError(f"{name} holds {tensor.abs().max():.6g}, beyond the {limit:.6g} of {target}")
    # Clones, since tensors of a file may share memory, which safetensors refuses to write.
    state = {name: tensor.clone() for name, tensor in tensors.items() if is_kept(name, config)}
    model, report = MiniMindForCausalLM.from_pretrained(
        None, config=config, state_dict=state, dtype=target, output_loading_info=True
    )
    refuse_incomplete(report)
    return model.eval()


def load_folder(folder: Path, dtype: str | torch.dtype = "auto"):
    """Load a causal language model from a folder, running no code of it.

    Raises:
        ConversionError: the folder is no model, or its weights and its config do not fit each other.
    """
    config = read_json(folder / "config.json")
    if config.get("model_type") == "minimind":
        build_config(read_tensors(folder), folder, folder / "config.json")
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, output_loading_info=True, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # every architecture and file format has errors of its own
        raise ConversionError(f"{folder} does not load as a causal language model: {first_line(error)}") from error
    refuse_incomplete(report)
    return model.eval()


def first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def exact_dtype(tensors) -> torch.dtype:
    """The narrowest dtype that represents every value of every tensor."""
    dtypes = {tensor.dtype for tensor in tensors.values()}
    exact = dtypes.pop()
    for dtype in dtypes:
        exact = torch.promote_types(exact, dtype)
    if exact not in DTYPES.values():
        raise ConversionError(f"the tensors are {exact}: pass --dtype with one of {', '.join(DTYPES)}")
    return exact


def is_kept(name: str, config: MiniMindConfig) -> bool:
    """Whether a tensor is stored of its own: a tied lm_head is not."""
    return not (name == "lm_head.weight" and config.tie_word_embeddings)


def refuse_incomplete(report: dict):
    """Raise unless the loading report of `from_pretrained` is empty."""
    faults = {kind: entries for kind, entries in report.items() if entries}
    if faults:
        raise ConversionError(f"the model did not load completely: {faults}")


def verify_folder(folder: Path, tensors, dtype: torch.dtype, with_tokenizer: bool) -> str:
    """Load a written folder as a user will, and compare every parameter with the checkpoint it was made from."""
    model, report = MiniMindForCausalLM.from_pretrained(folder, output_loading_info=True)
    refuse_incomplete(report)
    kept = {name: tensor.to(dtype) for name, tensor in tensors.items() if is_kept(name, model.config)}
    parameters = dict(model.named_parameters())
    counted = compare_tensors(parameters, fuse_experts(kept))
    ids = torch.arange(min(16, model.config.vocab_size, model.config.max_position_embeddings))[None]
    with torch.no_grad():
        if not torch.isfinite(model(ids).logits).all():
            raise ConversionError(
                f"the converted model gives logits that are not finite in {dtype}: try --dtype float32"
            )
    if with_tokenizer:
        load_tokenizer(folder)
    return f"verified: the folder loads, {counted} bit for bit equal to the checkpoint in {str(dtype)[6:]}"


def compare_tensors(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> str:
    """Check that two dicts hold the same names and bits, and say how much was compared."""
    if found.keys() != expected.keys():
        raise ConversionError(f"verification failed, names differ: {some_names(found.keys() ^ expected.keys())}")
    for name, tensor in progress(expected.items(), "Verifying"):
        if found[name].dtype != tensor.dtype or not torch.equal(found[name], tensor):
            raise ConversionError(f"verification failed: {name} differs from the source")
    return f"{len(expected)} tensors with {sum(tensor.numel() for tensor in expected.values()):,} values"
