"""The tokenizer of a checkpoint: load it without running code, copy it as it is, take its special tokens."""

import shutil
from pathlib import Path

from transformers import AutoTokenizer

from minimind_hf.configuration_minimind import MiniMindConfig
from minimind_hf.convert.files import TOKENIZER_FILES
from minimind_hf.convert.layout import ConversionError, first_line


def load_tokenizer(folder: Path):
    """Load a tokenizer from a folder, running no code of it."""
    if not folder.is_dir():
        raise ConversionError(
            f"{folder} {'is a file' if folder.exists() else 'does not exist'}: name a tokenizer's folder"
        )
    if not (folder / "tokenizer_config.json").is_file():
        raise ConversionError(f"{folder} holds no tokenizer: tokenizer_config.json is missing")
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the tokenizers library raises bare Exception for a damaged file
        raise ConversionError(f"the tokenizer in {folder} does not load: {first_line(error)}") from error


def tokenizer_files(folder: Path | None) -> list[Path]:
    """What a tokenizer consists of in a folder; the last may be a folder of chat templates."""
    return [folder / name for name in TOKENIZER_FILES if (folder / name).exists()] if folder else []


def copy_tokenizer(source: Path, destination: Path):
    """Copy the tokenizer files as they are, so that every token and template stays what it was."""
    for path in tokenizer_files(source):
        copy = shutil.copytree if path.is_dir() else shutil.copyfile
        copy(path, destination / path.name)


def take_special_tokens(config: MiniMindConfig, folder: Path, given: dict):
    """Make the config's eos, bos and pad those of the tokenizer; where `given` sets one, they must agree."""
    tokenizer = load_tokenizer(folder)
    largest = max(tokenizer.get_vocab().values(), default=0)
    if largest >= config.vocab_size:
        raise ConversionError(
            f"the tokenizer in {folder} has ids up to {largest}, but the model only {config.vocab_size} embeddings"
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


def find_tokenizer(source: Path, tokenizer: Path | None) -> Path | None:
    """The folder whose tokenizer goes along: the given one, or else the source, where it is a folder that has one."""
    if tokenizer is not None:
        return Path(tokenizer)
    return source if (source / "tokenizer_config.json").is_file() else None
