"""Read checkpoints without executing anything in them, and write results whole or not at all."""

import json
import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from tqdm import tqdm

from minimind_hf.convert.layout import ConversionError, clean_names

# What a saved model folder may hold; `--overwrite` replaces a folder of these and no other.
MODEL_FILES = (
    "config.json generation_config.json README.md configuration_minimind.py modeling_minimind.py "
    "model*.safetensors model.safetensors.index.json"
).split()
TOKENIZER_FILES = (
    "tokenizer.json tokenizer_config.json special_tokens_map.json added_tokens.json chat_template.jinja "
    "vocab.json merges.txt tokenizer.model"
).split()


def progress(items, description: str):
    """A progress bar on the terminal, nothing where the output goes elsewhere."""
    return tqdm(items, description, disable=None, leave=False)


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Read a checkpoint: a .pth file (plain, compiled, data-parallel or resume) or a folder with safetensors.

    The file is memory-mapped, and loaded with `weights_only`, so that nothing in it is executed.

    Returns:
        The tensors by their clean names (see `clean_names`), on the CPU, in the dtype of the file.

    Raises:
        ConversionError: the file is missing, truncated, hostile, or holds something else than finite tensors.
    """
    path = Path(path)
    if path.is_dir():
        tensors = read_folder(path)
    elif not path.exists():
        raise ConversionError(f"{path} does not exist")
    elif path.suffix == ".safetensors":
        tensors = read_safetensors(path)
    else:
        tensors = read_torch_file(path)
    return clean_names(check_values(tensors, path))


def read_torch_file(path: Path) -> dict[str, torch.Tensor]:
    """Return the state dict in a file that torch.save wrote: all of it, or the model part of a resume file."""
    with path.open("rb") as file:
        start = file.read(64)
    if start.startswith(b"version https://git-lfs"):
        raise ConversionError(f"{path} is a Git LFS pointer, not the checkpoint itself: run `git lfs pull`")
    is_zip = start.startswith(b"PK\x03\x04")  # older torch.save files are bare pickles, which cannot be mapped
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
    except Exception as error:  # whatever a damaged or hostile file makes the unpickler raise
        reason = str(error).strip().splitlines()
        raise ConversionError(
            f"{path} is not a checkpoint that can be read safely: it is truncated, or holds more than tensors. "
            f"Nothing in it was executed. torch says: {reason[0][:200] if reason else type(error).__name__}"
        ) from error
    if not isinstance(content, dict):
        raise ConversionError(f"{path} holds a {type(content).__name__}, expected a dict of tensors (a state dict)")
    if isinstance(content.get("model"), dict):
        content = content["model"]
    return content


def read_safetensors(path: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of one safetensors file, memory-mapped."""
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, not a dict
    except (SafetensorError, OSError) as error:
        raise ConversionError(f"{path} is not a whole safetensors file: {error}. Download or copy it again") from error


def read_folder(folder: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of a model folder, from one safetensors file or from the shards that its index lists."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        shards = read_json(index).get("weight_map")
        if not isinstance(shards, dict) or not all(isinstance(shard, str) for shard in shards.values()):
            raise ConversionError(f"{index} has no weight_map from tensor names to file names")
        names = sorted(set(shards.values()))
    else:
        names = ["model.safetensors"]
    missing = [name for name in names if Path(name).name != name or not (folder / name).is_file()]
    if missing:
        raise ConversionError(f"{folder} lacks {', '.join(missing)}: it is not a whole folder with safetensors")
    tensors = {}
    for name in names:
        tensors.update(read_safetensors(folder / name))
    if index.exists() and tensors.keys() != shards.keys():
        differing = sorted(tensors.keys() ^ shards.keys())
        raise ConversionError(f"{index} and the shards disagree about {', '.join(differing[:8])}")
    return tensors


def check_values(tensors: dict, path: Path) -> dict[str, torch.Tensor]:
    """Return the dict if it holds nothing but finite floating-point tensors under string names."""
    for name, tensor in progress(tensors.items(), "Reading"):
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise ConversionError(f"{path} is not a state dict: {name!r} is a {type(tensor).__name__}, not a tensor")
        if tensor.layout != torch.strided or not tensor.is_floating_point():
            raise ConversionError(f"{name} in {path} is {tensor.dtype}: expected float16, bfloat16 or float32")
        if not torch.isfinite(tensor).all():
            raise ConversionError(f"{name} in {path} holds NaN or infinity: the training that wrote it has diverged")
    return tensors


def read_json(path: Path) -> dict:
    """Return the object in a JSON file.

    Raises:
        ConversionError: there is no such file, or no JSON object in it.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConversionError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConversionError(f"{path} holds a JSON {type(content).__name__}, expected an object")
    return content


@contextmanager
def written_whole(destination: Path, overwrite: bool, is_folder: bool):
    """Give a path beside the destination to write to, and rename it once the block has ended without an error.

    Raises:
        ConversionError: the destination exists and `overwrite` is false, or it holds what is not a model's.
    """
    destination = Path(destination)
    check_destination(destination, overwrite, is_folder)
    destination.parent.mkdir(parents=True, exist_ok=True)
    workplace = Path(tempfile.mkdtemp(prefix=f".{destination.name}.", dir=destination.parent))
    try:
        draft = workplace / destination.name
        if is_folder:
            draft.mkdir()
        yield draft
        replaced = workplace / "replaced"
        if is_folder and destination.exists():
            destination.rename(replaced)
        try:
            draft.replace(destination)
        except BaseException:
            if replaced.exists():
                replaced.rename(destination)
            raise
    finally:
        shutil.rmtree(workplace, ignore_errors=True)


def check_destination(destination: Path, overwrite: bool, is_folder: bool):
    """Raise a ConversionError where writing to the destination would lose something of the user's."""
    if not destination.name or destination.is_symlink():
        raise ConversionError(f"{destination} cannot be replaced: name a new {'folder' if is_folder else 'file'}")
    if not destination.exists():
        return
    if destination.is_dir() != is_folder:
        raise ConversionError(f"{destination} is a {'file' if is_folder else 'folder'}: name another destination")
    if is_folder:
        strangers = [entry.name for entry in destination.iterdir() if not is_model_file(entry)]
        if strangers:
            raise ConversionError(
                f"{destination} exists and holds what is not a model's, which would be lost: "
                f"{', '.join(sorted(strangers)[:8])}. Name another folder"
            )
        if not any(destination.iterdir()):
            return
    if not overwrite:
        raise ConversionError(f"{destination} exists: pass --overwrite to replace it")


def is_model_file(path: Path) -> bool:
    return path.is_file() and any(path.match(pattern) for pattern in (*MODEL_FILES, *TOKENIZER_FILES))
