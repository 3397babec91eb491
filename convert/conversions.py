"""Between MiniMind's checkpoints of every generation and MiniMind folders, each conversion verified."""

from pathlib import Path

import torch

from minimind_hf.configuration_minimind import MiniMindConfig
from minimind_hf.convert.checkpoint import Checkpoint, cast_tensors, find_config, load_checkpoint, reorder_rotary_rows
from minimind_hf.convert.compare import Digest, compare_digests, digests
from minimind_hf.convert.files import (
    FILE,
    MINIMIND_FOLDER,
    check_destination,
    read_json,
    read_torch_file,
    write_safetensors,
    written_whole,
)
from minimind_hf.convert.generations import GENERATIONS, Generation, names_for
from minimind_hf.convert.layout import ConversionError, pair_neighbours
from minimind_hf.convert.tokenizer import copy_tokenizer, find_tokenizer, load_tokenizer, take_special_tokens
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
    check_destination(destination, [source], overwrite, MINIMIND_FOLDER)
    checkpoint = load_checkpoint(source, config, flags)
    tokenizer = find_tokenizer(source, tokenizer)
    if tokenizer is not None:
        config = find_config(source, config)
        take_special_tokens(checkpoint.config, tokenizer, given=read_json(config) if config else {})
    checkpoint.tensors = cast_tensors(checkpoint.tensors, dtype)
    with written_whole(destination, [source], overwrite, MINIMIND_FOLDER) as draft:
        write_folder(checkpoint, draft)
        expected = digests(checkpoint.tensors) if verify else None
        checkpoint.tensors = {}  # gives the memory of the source back before the result is read
        if tokenizer is not None:
            copy_tokenizer(tokenizer, draft)
        return (verify_folder(draft, checkpoint.config, expected) if verify else "not verified") + assumed(checkpoint)


def assumed(checkpoint: Checkpoint) -> str:
    """The part of the report that says which values nobody gave."""
    if not checkpoint.assumed:
        return ""
    return f"; assumed, since no tensor tells: {', '.join(checkpoint.assumed)}"


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
        layout: a key of GENERATIONS, whose names and order of rows are written; by default MiniMind-3's, or
            MiniMind2's for a model without q/k norms.
        config: as in `to_hf`.
        overwrite: replace an existing file.
        verify: read the result back and compare it with the source.
        **flags: as in `to_hf`.

    Returns:
        One line that says what was verified.

    Raises:
        ConversionError: the source is no MiniMind model, or the layout cannot express it; nothing was written.
    """
    source, destination = Path(source), Path(destination)
    check_destination(destination, [source], overwrite, FILE)
    if layout not in (None, *GENERATIONS):
        raise ConversionError(f"--layout {layout}: expected one of {', '.join(GENERATIONS)}")
    checkpoint = load_checkpoint(source, config, flags)
    generation = GENERATIONS[layout or ("minimind3" if checkpoint.config.use_qk_norm else "minimind2")]
    tensors = to_state_dict(checkpoint, generation)
    with written_whole(destination, [source], overwrite, FILE) as draft:
        torch.save(tensors, draft)
        if not verify:
            return "not verified"
        expected = digests(tensors)
        del checkpoint, tensors  # gives the memory of the source back before the result is read
        counted = compare_digests(digests(read_torch_file(draft)), expected)
        return f"verified: {counted} read back bit for bit equal, as {generation.title} names them"


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
