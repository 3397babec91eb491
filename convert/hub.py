"""Push a converted folder to the Hugging Face Hub."""

from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from minimind_hf.convert.layout import ConversionError, first_line


def check_repository(name: str):
    """Raise a ConversionError unless this can be the name of a repository."""
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise ConversionError(f"--push-to-hub {name}: {first_line(error)}") from error


def push_folder(folder: Path, repository: str, private: bool = True) -> str:
    """Upload a model folder, its model card included; the card that a repository has already is kept.

    Args:
        folder: what to upload.
        repository: "NAME" or "USER/NAME"; made where there is none, private unless told otherwise.
        private: for a new repository. An existing one stays as it is.

    Returns:
        The address of the repository.

    Raises:
        ConversionError: the Hub refused, or cannot be reached.
    """
    api = HfApi()
    try:
        address = api.create_repo(repository, private=private, exist_ok=True)
        has_card = api.file_exists(address.repo_id, "README.md")
        api.upload_folder(
            repo_id=address.repo_id, folder_path=folder, ignore_patterns=["README.md"] if has_card else None
        )
    except Exception as error:  # the client's HTTP library has errors of its own
        raise ConversionError(
            f"{folder} is written, but pushing it to {repository} failed: {first_line(error)}. Check `hf auth whoami` "
            f"and the network, then `hf upload {repository} {folder}`"
        ) from error
    return str(address)
