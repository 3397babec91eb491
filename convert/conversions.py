"""Between the reference implementation's .pth files and MiniMind folders, each conversion verified."""

from pathlib import Path

import torch

from minimind_hf.convert.checkpoint import Checkpoint, cast_tensors, load_checkpoint
from minimind_hf.convert.compare import compare_tensors
from minimind_hf.convert.files import (
    FILE,
    MINIMIND_FOLDER,
    check_destination,
    read_json,
    read_torch_file,
    write_safetensors,
    written_whole,
)
from minimind_hf.convert.layout import clean_names, expected_shapes
from minimind_hf.convert.tokenizer import copy_tokenizer, load_tokenizer, take_special_tokens
from minimind_hf.modeling_minimind import MiniMindForCausalLM


def to_hf(
    source: Path,
    destination: Path,
    tokenizer: Path | None = None,
    config: Path | None = None,
    dtype: str | None = None,
    overwrite: bool = False,
    **flags,
) -> str:
    """Convert a MiniMind checkpoint to a Hugging Face folder.

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
    check_destination(destination, [source], overwrite, MINIMIND_FOLDER)
    checkpoint = load_checkpoint(source, config, flags)
    if tokenizer is not None:
        take_special_tokens(checkpoint.config, Path(tokenizer), given=read_json(config) if config else {})
    checkpoint.tensors = cast_tensors(checkpoint.tensors, dtype)
    with written_whole(destination, [source], overwrite, MINIMIND_FOLDER) as draft:
        write_folder(checkpoint, draft)
        if tokenizer is not None:
            copy_tokenizer(Path(tokenizer), draft)
            load_tokenizer(draft)
        counted = compare_tensors(load_checkpoint(draft).tensors, checkpoint.tensors)
        return f"verified: {counted} read back bit for bit equal"


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
    check_destination(destination, [source], overwrite, FILE)
    checkpoint = load_checkpoint(source)
    tensors = dict(checkpoint.tensors)
    if checkpoint.config.tie_word_embeddings:  # the reference implementation stores the shared weight under both names
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    tensors = {name: tensors[name] for name in expected_shapes(checkpoint.config)}
    with written_whole(destination, [source], overwrite, FILE) as draft:
        torch.save(tensors, draft)
        written = clean_names(read_torch_file(draft))
        return f"verified: {compare_tensors(written, tensors)} read back bit for bit equal"


def write_folder(checkpoint: Checkpoint, folder: Path):
    """Write a MiniMind folder: config, generation config, code, card, and the weights straight from their file."""
    dtype = next(iter(checkpoint.tensors.values())).dtype
    with torch.device("meta"):
        model = MiniMindForCausalLM(checkpoint.config).to(dtype)
    model.save_pretrained(folder, state_dict={})  # all but the weights, which the model does not hold
    write_safetensors(checkpoint.tensors, folder / "model.safetensors")
