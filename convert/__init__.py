"""Convert MiniMind checkpoints: `layout` knows names and shapes, `files` reads and writes, `conversions` does it."""

from minimind_hf.convert.conversions import to_hf, to_torch
from minimind_hf.convert.layout import ConversionError

__all__ = ["ConversionError", "to_hf", "to_torch"]
