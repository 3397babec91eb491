"""Read checkpoints without executing anything in them, and write results whole or not at all."""

import json
import re
import shutil
import tempfile
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from tqdm import tqdm

from minimind_hf.convert.layout import ConversionError, clean_names, some_names

READABLE_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# Parts of an earlier result that a new one may lack; datasets keeps what `map` computed beside its shards.
SHARD = re.compile(
    r"model-\d{5}-of-\d{5}\.safetensors|model\.safetensors\.index\.json|data-\d{5}-of-\d{5}\.arrow|cache-\w+\.arrow"
)
TOKENIZER_FILES = (
    "tokenizer.json tokenizer_config.json special_tokens_map.json added_tokens.json chat_template.jinja "
    "vocab.json merges.txt tokenizer.model additional_chat_templates"  # the last is a folder
).split()


def progress(items, description: str):
    """A progress bar on the terminal, nothing where the output goes elsewhere."""
    return tqdm(items, description, disable=None, leave=False)


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Read a checkpoint: a .pth file (plain, compiled, data-parallel or resume), a safetensors file or a model folder.

    The file is memory-mapped, and loaded with `weights_only`, so that nothing in it is executed.

    Returns:
        The tensors by their clean names (see `clean_names`), on the CPU, in the dtype of the file.

    Raises:
        ConversionError: the file is missing, truncated, hostile, or holds something else than finite tensors.
    """
    path = Path(path)
    if path.is_dir():
        tensors = read_folder(path)
    elif path.suffix == ".safetensors":
        tensors = read_safetensors(path)
    else:
        tensors = read_torch_file(path)
    return check_values(clean_names(tensors), path)


def check_regular(path: Path):
    """Raise a ConversionError unless this is a file; a pipe would be waited for."""
    if not path.is_file():
        raise ConversionError(f"{path} {'is not a regular file' if path.exists() else 'does not exist'}")


def read_torch_file(path: Path) -> dict[str, torch.Tensor]:
    """Return the state dict in a file that torch.save wrote: all of it, or the model part of a resume file."""
    check_regular(path)
    with path.open("rb") as file:
        start = file.read(64)
    if start.startswith(b"version https://git-lfs"):
        raise ConversionError(f"{path} is a Git LFS pointer, not the checkpoint itself: run `git lfs pull`")
    if start.startswith(b"GGUF"):
        raise ConversionError(f"{path} is a GGUF file, which only llama.cpp reads: use what it was made from")
    is_zip = start.startswith(b"PK\x03\x04")  # older torch.save files are bare pickles, which cannot be mapped
    if is_zip:
        check_archive(path)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch comments on what it is about to refuse
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
    except Exception as error:  # whatever a damaged or hostile file makes the unpickler raise
        foreign = re.search(r"(?i)unsupported (?:global|class)\W*(?:GLOBAL )?([a-z_]\w*\.[\w.]*\w)", str(error))
        found = f"it holds {foreign[1]}" if foreign else "it is truncated, damaged, or no checkpoint at all"
        raise ConversionError(
            f"{path} cannot be read safely: {found}, expected nothing but tensors. Nothing in it was executed"
        ) from error
    if not isinstance(content, dict):
        raise ConversionError(f"{path} holds a {type(content).__name__}, expected a dict of tensors (a state dict)")
    if isinstance(content.get("model"), dict):
        beside = [name for name, value in content.items() if isinstance(value, torch.Tensor)]
        if beside:
            raise ConversionError(f"{path} holds a model and, beside it, {some_names(beside)}: which of them counts?")
        content = content["model"]
    for name, tensor in content.items():
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise ConversionError(f"{path} is not a state dict: {name!r} is the name of a {type(tensor).__name__}")
    return content


def check_archive(path: Path):
    """Raise unless every record of a torch.save archive is whole: torch maps the file without looking."""
    try:
        with zipfile.ZipFile(path) as archive:
            packed = [record.filename for record in archive.infolist() if record.compress_type != zipfile.ZIP_STORED]
            damaged = archive.testzip() if not packed else None
    except (zipfile.BadZipFile, OSError, EOFError) as error:
        raise ConversionError(f"{path} is truncated or damaged ({error}): download or copy it again") from error
    if damaged:
        raise ConversionError(f"{path} is damaged: the checksum of {damaged} is wrong. Download or copy it again")
    if packed:
        raise ConversionError(f"{path} was compressed after torch.save wrote it ({packed[0]}): use the original file")


def read_safetensors(path: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of one safetensors file, memory-mapped."""
    check_regular(path)
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, not a dict
    except (SafetensorError, OSError) as error:
        raise ConversionError(f"{path} is not a whole safetensors file: {error}. Download or copy it again") from error


# The weights of a model folder by their file name, the preferred format first.
WEIGHT_FILES = {"model.safetensors": read_safetensors, "pytorch_model.bin": read_torch_file}


def read_folder(folder: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of a model folder, from one file or from the shards that an index lists."""
    found = [name for name in WEIGHT_FILES if (folder / name).exists() or (folder / f"{name}.index.json").exists()]
    if (folder / "adapter_config.json").exists():
        raise ConversionError(f"{folder} is a PEFT adapter, not a model: merge-lora puts it into its model")
    if not found:
        raise ConversionError(f"{folder} is not a whole model folder: it holds neither {' nor '.join(WEIGHT_FILES)}")
    read, index = WEIGHT_FILES[found[0]], folder / f"{found[0]}.index.json"
    if not index.exists():
        return read(folder / found[0])
    if (folder / found[0]).exists():
        raise ConversionError(f"{folder} holds {found[0]} and {index.name}: remove the one that is stale")
    shards = read_json(index).get("weight_map")
    if not isinstance(shards, dict) or not all(isinstance(shard, str) for shard in shards.values()):
        raise ConversionError(f"{index} has no weight_map from tensor names to file names")
    names = sorted(set(shards.values()))
    missing = [name for name in names if Path(name).name != name or not (folder / name).is_file()]
    if missing:
        raise ConversionError(f"{folder} is not a whole model folder: it lacks {', '.join(missing)}")
    tensors = {}
    for name in names:
        shard = read(folder / name)
        if tensors.keys() & shard.keys():
            raise ConversionError(f"{folder / name} repeats {min(tensors.keys() & shard.keys())} of another shard")
        tensors.update(shard)
    if tensors.keys() != shards.keys():
        differing = sorted(tensors.keys() ^ shards.keys())
        raise ConversionError(f"{index} and the shards disagree about {', '.join(differing[:8])}")
    return tensors


def write_safetensors(tensors: dict[str, torch.Tensor], path: Path):
    """Write one safetensors file, straight from the memory of the tensors."""
    written, own = {}, set()
    for name, tensor in tensors.items():
        memory = tensor.untyped_storage().data_ptr()
        # safetensors takes neither two tensors in one memory nor strides.
        shares = memory in own or tensor.numel() * tensor.element_size() < tensor.untyped_storage().nbytes()
        written[name] = tensor.clone(memory_format=torch.contiguous_format) if shares else tensor.contiguous()
        own.add(memory)
    save_file(written, path, metadata={"format": "pt"})


def check_values(tensors: dict, path: Path) -> dict[str, torch.Tensor]:
    """Return the dict if it holds nothing but finite floating-point tensors."""
    for name, tensor in progress(tensors.items(), "Reading"):
        if tensor.layout != torch.strided or tensor.dtype not in READABLE_DTYPES:
            kind = tensor.dtype if tensor.layout == torch.strided else tensor.layout
            raise ConversionError(f"{name} in {path} is {kind}: expected float16, bfloat16 or float32")
        if tensor.is_meta or tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
            raise ConversionError(
                f"{name} in {path} claims {list(tensor.shape)} values, but the file holds fewer: it is damaged, or "
                "was saved from a view, which .clone() makes whole"
            )
        if tensor.is_neg():
            raise ConversionError(f"{name} in {path} is a negated view: save it again with .resolve_neg()")
        if tensor.numel() and not torch.isfinite(torch.stack(tensor.aminmax())).all():  # NaN wins both
            raise ConversionError(f"{name} in {path} holds NaN or infinity: the training that wrote it has diverged")
    return tensors


def read_json(path: Path) -> dict:
    """Return the object in a JSON file.

    Raises:
        ConversionError: there is no such file, or no JSON object in it.
    """
    check_regular(Path(path))
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"), object_pairs_hook=unique_keys)
    except (OSError, ValueError, RecursionError) as error:
        raise ConversionError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConversionError(f"{path} holds a JSON {type(content).__name__}, expected an object")
    return content


def write_json(content: dict, path: Path):
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def unique_keys(pairs: list[tuple]) -> dict:
    content = dict(pairs)
    if len(content) < len(pairs):
        (repeated, _), *_ = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"the key {repeated!r} stands there twice")
    return content


def is_torch_file(path: Path) -> bool:
    return zipfile.is_zipfile(path) and any(name.endswith("/data.pkl") for name in zipfile.ZipFile(path).namelist())


def is_gguf_file(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == b"GGUF"


@dataclass(frozen=True)
class Output:
    """A kind of result, and what shows that an existing one came from a conversion, so that it may be replaced."""

    marker: str | None = None  # a file that every such folder holds; None: the result is one file, not a folder
    model_type: str | None = None  # what "model_type" in the marker must be
    recognise: Callable[[Path], bool] | None = None  # says whether a file is of this kind

    @property
    def noun(self) -> str:
        return "folder" if self.marker else "file"

    @property
    def title(self) -> str:
        if self.model_type:
            return f"a {self.model_type} model folder"
        return f"a folder with {self.marker}" if self.marker else "a file of the kind that is written"

    def may_replace(self, existing: Path) -> bool:
        if self.recognise:
            return self.recognise(existing)
        marker = existing / self.marker
        return marker.is_file() and read_json(marker).get("model_type") == self.model_type


TORCH_FILE = Output(recognise=is_torch_file)
GGUF_FILE = Output(recognise=is_gguf_file)
MINIMIND_FOLDER = Output("config.json", "minimind")


@contextmanager
def written_whole(destination: Path, sources: list[Path], overwrite: bool, output: Output):
    """Give a path beside the destination to write to, and rename it once the block has ended without an error.

    A model card in a folder that is replaced is kept.

    Raises:
        ConversionError: see `check_destination`; or a file of the folder that is replaced would be lost.
    """
    destination = Path(destination)
    check_destination(destination, sources, overwrite, output)
    missing = [folder for folder in destination.parents if not folder.exists()]  # the nearest first
    destination.parent.mkdir(parents=True, exist_ok=True)
    workplace = Path(tempfile.mkdtemp(prefix=f".{destination.name[:40]}.", dir=destination.parent))
    replaced = workplace / "replaced"
    try:
        draft = workplace / destination.name
        if output.marker:
            draft.mkdir()
            if (destination / "README.md").exists():
                shutil.copyfile(destination / "README.md", draft / "README.md")
        yield draft
        if output.marker:
            check_nothing_is_lost(destination, draft)
            for file in draft.iterdir():  # safetensors writes files that only their owner may read
                if file.is_file():
                    shutil.copymode(draft / output.marker, file)
        if output.marker and destination.exists():
            destination.rename(replaced)
        draft.replace(destination)
    finally:
        if replaced.exists() and not destination.exists():  # interrupted between the two renames
            replaced.rename(destination)
        shutil.rmtree(workplace, ignore_errors=True)
        if not destination.exists():
            for folder in missing:
                with suppress(OSError):  # somebody else put something there
                    folder.rmdir()


def check_destination(destination: Path, sources: list[Path], overwrite: bool, output: Output):
    """Raise a ConversionError where writing to the destination would lose something of the user's.

    Args:
        destination: where the result will be.
        sources: every file and folder that is read; None entries are passed over.
        overwrite: whether what a conversion wrote there may be replaced.
        output: the kind of the result.
    """
    destination = Path(destination)
    if destination.name in ("", "..") or destination.is_symlink():
        raise ConversionError(f"{destination} cannot be replaced: name a new {output.noun}")
    if not str(destination).isprintable():
        raise ConversionError(f"{str(destination)!r} has characters that no file of this kind can be named with")
    here = destination.resolve()
    for source in filter(None, sources):
        source = Path(source)
        parts = [source, *(source.iterdir() if source.is_dir() else ())]  # each may be a link to somewhere else
        for there in (part.resolve() for part in parts):
            if here == there or here in there.parents or source.resolve() in here.parents:
                raise ConversionError(
                    f"{destination} would replace a part of the source {source}: name another {output.noun}"
                )
    if output.marker and destination.suffix.lower() in (".gguf", ".pth", ".safetensors"):
        raise ConversionError(f"{destination} is the name of a file, but a folder is written: leave the ending out")
    is_folder = output.marker is not None
    if not destination.exists() or (is_folder and destination.is_dir() and not any(destination.iterdir())):
        return
    if not (destination.is_dir() if is_folder else destination.is_file()):
        raise ConversionError(f"{destination} exists and is not a {output.noun}: name another destination")
    if not overwrite:
        raise ConversionError(f"{destination} exists: pass --overwrite to replace it")
    if not output.may_replace(destination):
        raise ConversionError(f"{destination} is not {output.title}, so --overwrite leaves it alone")


def check_nothing_is_lost(destination: Path, draft: Path):
    """Raise a ConversionError if the existing folder holds files that the new one lacks, other than old shards."""
    existing = {entry.name for entry in destination.iterdir()} if destination.exists() else set()
    lost = sorted(name for name in existing - {entry.name for entry in draft.iterdir()} if not SHARD.fullmatch(name))
    if lost:
        hint = "pass --tokenizer to keep the tokenizer, or " if set(lost) & set(TOKENIZER_FILES) else ""
        raise ConversionError(
            f"{destination} holds {', '.join(lost[:8])}, which would be lost: {hint}name another folder"
        )
