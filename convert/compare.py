"""Compare two models by the logits they give for the same random tokens."""

import hashlib
import math
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from minimind_hf.convert.checkpoint import load_checkpoint
from minimind_hf.convert.files import progress, read_json
from minimind_hf.convert.layout import ConversionError, some_names
from minimind_hf.convert.loading import build_model, load_folder


@dataclass
class Comparison:
    """How far the logits of two models are apart, over `positions` positions of random text."""

    max_difference: float  # largest absolute difference of two logits
    greedy_agreement: float  # share of the positions where both models would pick the same token
    kl_divergence: float  # mean over the positions, in nats, of KL(first || second)
    positions: int


def load_for_comparison(path: Path, other: Path | None = None, config: Path | None = None, flags: dict | None = None):
    """Load a causal language model in float32 on the CPU, from a model folder or a checkpoint without config.

    Args:
        path: the model.
        other: the model that it is compared with: if that is a MiniMind folder, its config counts for both.
        config: a config.json for a checkpoint that has none, in place of that.
        flags: config values for a checkpoint that has none.

    Returns:
        The model, and where its config comes from.
    """
    path = Path(path)
    if path.is_dir():
        return load_folder(path, torch.float32), "its own"
    borrowed = Path(other) / "config.json" if other is not None and config is None else None
    if borrowed is not None and borrowed.is_file() and read_json(borrowed).get("model_type") == "minimind":
        config = borrowed
    checkpoint = load_checkpoint(path, config, flags)
    origin = f"of {config}" if config else "told by the tensors"
    return build_model(checkpoint), origin + (
        f", assumed {', '.join(checkpoint.assumed)}" if checkpoint.assumed else ""
    )


@torch.no_grad()
def compare_logits(first, second, batch_size: int = 4, length: int = 64, seed: int = 0) -> Comparison:
    """Compare the logits of two causal language models on random token ids [batch_size, length].

    Raises:
        ConversionError: the vocabularies differ in size, or the logits are not finite.
    """
    vocabularies = first.config.vocab_size, second.config.vocab_size
    if vocabularies[0] != vocabularies[1]:
        raise ConversionError(f"the vocabularies differ: {vocabularies[0]} and {vocabularies[1]} tokens")
    length = min(length, first.config.max_position_embeddings, second.config.max_position_embeddings)
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(vocabularies[0], (batch_size, length), generator=generator)
    logits = [model(ids).logits.float() for model in (first, second)]  # [B, S, V] each
    if not all(torch.isfinite(values).all() for values in logits):
        raise ConversionError("the logits hold NaN or infinity: one of the models is broken")
    log_probabilities = [F.log_softmax(values, dim=-1) for values in logits]
    return Comparison(
        max_difference=(logits[0] - logits[1]).abs().max().item(),
        greedy_agreement=(logits[0].argmax(-1) == logits[1].argmax(-1)).float().mean().item(),
        kl_divergence=F.kl_div(*reversed(log_probabilities), log_target=True, reduction="sum").item() / ids.numel(),
        positions=ids.numel(),
    )


def compare_tensors(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> str:
    """Check that two dicts hold the same names and bits, and say how much was compared."""
    return compare_digests(digests(found), digests(expected))


@dataclass(frozen=True)
class Digest:
    """What remains of a tensor when its memory is given back, enough to tell whether another one is bitwise equal."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    sha256: bytes


def digests(tensors: dict[str, torch.Tensor]) -> dict[str, Digest]:
    """Take the digest of every tensor."""
    taken = {}
    for name, tensor in progress(tensors.items(), "Hashing"):
        content = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
        taken[name] = Digest(tensor.dtype, tuple(tensor.shape), hashlib.sha256(content).digest())
    return taken


def compare_digests(found: dict[str, Digest], expected: dict[str, Digest]) -> str:
    """As `compare_tensors`."""
    if found.keys() != expected.keys():
        raise ConversionError(f"verification failed, names differ: {some_names(found.keys() ^ expected.keys())}")
    for name, digest in expected.items():
        if found[name] != digest:
            raise ConversionError(f"verification failed: {name} differs from the source")
    return f"{len(expected)} tensors with {sum(math.prod(digest.shape) for digest in expected.values()):,} values"
