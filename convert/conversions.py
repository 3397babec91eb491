"""Between MiniMind's checkpoints of every generation and MiniMind folders, each conversion verified."""

from pathlib import Path

import torch

from minimind_hf.configuration_minimind import MiniMindConfig
from minimind_hf.convert.checkpoint import (
    DTYPES,
    UNTOLD,
    UNTOLD_OF_EXPERTS,
    UNTOLD_OF_HEADS,
    Checkpoint,
    cast_tensors,
    find_config,
    load_checkpoint,
    reorder_rotary_rows,
)
from minimind_hf.convert.compare import Digest, compare_digests, digests
from minimind_hf.convert.files import (
    MINIMIND_FOLDER,
    TORCH_FILE,
    check_destination,
    read_json,
    read_torch_file,
    write_json,
    write_safetensors,
    written_whole,
)
from minimind_hf.convert.generations import GENERATIONS, Generation, names_for
from minimind_hf.convert.layout import ConversionError, pair_neighbours
from minimind_hf.convert.tokenizer import (
    copy_tokenizer,
    find_tokenizer,
    load_tokenizer,
    take_special_tokens,
    tokenizer_files,
)
from minimind_hf.modeling_minimind import MiniMindForCausalLM


def to_hf(
    source: Path,
    destination: Path,
    tokenizer: Path | None = None,
    config: Path | None = None,
    dtype: str | None = None,
    overwrite: bool = False,
    verify: bool = True,
    **flags,
) -> str:
    """Convert a MiniMind checkpoint of any generation to a Hugging Face folder.

    Args:
        source: the .pth file that MiniMind's training wrote (plain, compiled, data-parallel or resume), or a model
            folder of any MiniMind generation.
        destination: the folder to write; it appears whole, or not at all.
        tokenizer: a folder whose tokenizer files are copied along; by default the source, where it has a tokenizer.
        config: a config.json with what the tensors cannot tell (rope_theta, rms_norm_eps, experts per token, …), in
            the spelling of any generation; by default the one in the source folder.
        dtype: "float32", "float16" or "bfloat16"; by default that of the checkpoint.
        overwrite: replace an existing model folder.
        verify: read the result back and compare it with the source.
        **flags: config values, such as num_attention_heads, and `generation`, a key of GENERATIONS; each must agree
            with the tensors and with `config`.

    Returns:
        One line that says what was verified, and what was assumed.

    Raises:
        ConversionError: the checkpoint cannot be converted exactly; nothing was written.
    """
    source, destination = Path(source), Path(destination)
    tokenizer = find_tokenizer(source, tokenizer)
    inputs = [source, config, *tokenizer_files(tokenizer)]
    check_destination(destination, inputs, overwrite, MINIMIND_FOLDER)
    checkpoint = load_checkpoint(source, config, flags)
    if tokenizer is not None:
        config = find_config(source, config)
        take_special_tokens(checkpoint.config, tokenizer, given=read_json(config) if config else {})
    if checkpoint.generation.interleaved:  # the folder itself has the layout of MiniMind2
        checkpoint.config.source_layout = key_of(checkpoint.generation)
    cast = describe_cast(checkpoint.tensors, dtype)
    checkpoint.tensors = cast_tensors(checkpoint.tensors, dtype)
    with written_whole(destination, inputs, overwrite, MINIMIND_FOLDER) as draft:
        write_folder(checkpoint, draft)
        write_generation_config(checkpoint, draft)
        expected = digests(checkpoint.tensors) if verify else None
        checkpoint.tensors = {}  # gives the memory of the source back before the result is read
        if tokenizer is not None:
            copy_tokenizer(tokenizer, draft)
        verified = verify_folder(draft, checkpoint.config, expected) if verify else "not verified"
        return verified + cast + assumed(checkpoint)


def assumed(checkpoint: Checkpoint) -> str:
    """The part of the report that says which values nobody gave."""
    if not checkpoint.assumed:
        return ""
    return f"; assumed, since no tensor tells: {', '.join(checkpoint.assumed)}"


def describe_cast(tensors: dict[str, torch.Tensor], dtype: str | None) -> str:
    """The part of the report that says that values were rounded."""
    if dtype not in DTYPES:
        return ""
    rounded = [t.dtype for t in tensors.values() if torch.promote_types(t.dtype, DTYPES[dtype]) != DTYPES[dtype]]
    return f"; rounded from {str(rounded[0])[6:]} to {dtype}" if rounded else ""


def key_of(generation: Generation) -> str:
    return next(key for key, candidate in GENERATIONS.items() if candidate is generation)


def write_generation_config(checkpoint: Checkpoint, folder: Path):
    """Write the tokens that begin, end and pad, and whatever else the source says about generation."""
    path = checkpoint.source / "generation_config.json"
    given = read_json(path) if path.is_file() else {}
    given = {name: value for name, value in given.items() if value is not None and name != "transformers_version"}
    tokens = {name: getattr(checkpoint.config, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    write_json({**tokens, **given}, folder / "generation_config.json")


def to_torch(
    source: Path,
    destination: Path,
    layout: str | None = None,
    config: Path | None = None,
    overwrite: bool = False,
    verify: bool = True,
    **flags,
) -> str:
    """Convert a MiniMind folder to the state dict that MiniMind's own scripts load.

    Args:
        source: a MiniMind folder, or a .pth file of another generation.
        destination: the .pth file to write, in the dtype of the source; it appears whole, or not at all.
        layout: a key of GENERATIONS, whose names and order of rows are written; by default those that the folder was
            converted from, else MiniMind-3's, or MiniMind2's for a model without q/k norms.
        config: as in `to_hf`.
        overwrite: replace an existing file.
        verify: read the result back and compare it with the source.
        **flags: as in `to_hf`.

    Returns:
        One line that says what was verified, and what MiniMind's scripts must be told.

    Raises:
        ConversionError: the source is no MiniMind model, or the layout cannot express it; nothing was written.
    """
    source, destination = Path(source), Path(destination)
    check_destination(destination, [source, config], overwrite, TORCH_FILE)
    if layout not in (None, *GENERATIONS):
        raise ConversionError(f"--layout {layout}: expected one of {', '.join(GENERATIONS)}")
    checkpoint = load_checkpoint(source, config, flags)
    generation = GENERATIONS[layout] if layout else own_layout(checkpoint)
    tensors = to_state_dict(checkpoint, generation)
    hint = script_arguments(checkpoint.config, generation)
    with written_whole(destination, [source, config], overwrite, TORCH_FILE) as draft:
        torch.save(tensors, draft)
        if not verify:
            return "not verified" + hint
        expected = digests(tensors)
        del checkpoint, tensors  # gives the memory of the source back before the result is read
        counted = compare_digests(digests(read_torch_file(draft)), expected)
        return f"verified: {counted} read back bit for bit equal, as {generation.title} names them{hint}"


def own_layout(checkpoint: Checkpoint) -> Generation:
    """The generation that a checkpoint comes from, as far as it is known."""
    if checkpoint.generation.interleaved:
        return checkpoint.generation
    return GENERATIONS.get(getattr(checkpoint.config, "source_layout", None), checkpoint.generation)


def script_arguments(config: MiniMindConfig, generation: Generation) -> str:
    """The part of the report that lists what neither a .pth file says nor the scripts of its generation assume."""
    values = generation.complete({**generation.defaults, "num_attention_heads": generation.heads})
    usual = MiniMindConfig(**values)
    needed = []
    for name in [*UNTOLD, *UNTOLD_OF_HEADS, *(UNTOLD_OF_EXPERTS if config.use_moe else ())]:
        found, expected = (
            own.rope_parameters[name] if name == "rope_theta" else getattr(own, name) for own in (config, usual)
        )
        if found != expected:
            needed.append(f"{name} {found}")
    return f"; give MiniMind's scripts {', '.join(needed)}" if needed else ""


def to_state_dict(checkpoint: Checkpoint, generation: Generation) -> dict[str, torch.Tensor]:
    """Name, order and arrange the tensors as the code of a generation does.

    Raises:
        ConversionError: that code cannot express this model.
    """
    names = names_for(generation, checkpoint.config)
    tensors = dict(checkpoint.tensors)
    if checkpoint.config.tie_word_embeddings:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    if generation.interleaved:
        tensors = reorder_rotary_rows(tensors, checkpoint.config.head_dim, pair_neighbours)
    return {own: tensors[name] for own, name in names.items()}


def write_folder(checkpoint: Checkpoint, folder: Path):
    """Write a MiniMind folder: config, generation config, code, card, and the weights straight from their file."""
    dtype = next(iter(checkpoint.tensors.values())).dtype
    with torch.device("meta"):
        model = MiniMindForCausalLM(checkpoint.config).to(dtype)
    model.save_pretrained(folder, state_dict={})  # all but the weights, which this model does not hold
    write_safetensors(checkpoint.tensors, folder / "model.safetensors")


def verify_folder(folder: Path, config: MiniMindConfig, expected: dict[str, Digest]) -> str:
    """Open a written MiniMind folder and compare its config and every tensor with what it was made from."""
    written = load_checkpoint(folder)
    counted = compare_digests(digests(written.tensors), expected)
    if written.config.to_diff_dict() != config.to_diff_dict():
        raise ConversionError("verification failed: the config reads back differently")
    if (folder / "tokenizer_config.json").exists():
        load_tokenizer(folder)
    dtype = next(iter(expected.values())).dtype
    return f"verified: the folder opens, {counted} bit for bit equal to the source in {str(dtype)[6:]}"
