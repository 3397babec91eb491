"""Make models of checkpoints and of folders, completely or not at all."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from minimind_hf.convert.checkpoint import Checkpoint, load_checkpoint
from minimind_hf.convert.files import read_json
from minimind_hf.convert.layout import ConversionError, first_line
from minimind_hf.modeling_minimind import MiniMindForCausalLM


def build_model(checkpoint: Checkpoint, dtype: torch.dtype = torch.float32) -> MiniMindForCausalLM:
    """Make a model of a checkpoint, for evaluation on the CPU."""
    # Copies, so that changing the model cannot reach the file, nor another tensor that shares its memory.
    state = {name: tensor.to(dtype, copy=True) for name, tensor in checkpoint.tensors.items()}
    model, report = MiniMindForCausalLM.from_pretrained(
        None, config=checkpoint.config, state_dict=state, dtype=dtype, output_loading_info=True
    )
    refuse_incomplete(report)
    return model.eval()


def load_folder(folder: Path, dtype: str | torch.dtype = "auto"):
    """Load a causal language model of any architecture from a folder, running no code of it.

    Raises:
        ConversionError: the folder is no model, or its weights and its config do not fit each other.
    """
    config = read_json(folder / "config.json")
    if config.get("model_type") == "minimind":
        load_checkpoint(folder)
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, output_loading_info=True, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # every architecture and file format has errors of its own
        raise ConversionError(f"{folder} does not load as a causal language model: {first_line(error)}") from error
    refuse_incomplete(report)
    return model.eval()


def refuse_incomplete(report: dict):
    """Raise unless the loading report of `from_pretrained` is empty."""
    faults = {kind: entries for kind, entries in report.items() if entries}
    if faults:
        raise ConversionError(f"the model did not load completely: {faults}")
