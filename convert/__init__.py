"""Convert MiniMind checkpoints, LoRA files and datasets.

`generations` and `layout` know names and shapes as data, `files` reads and writes, `checkpoint` opens whatever there
is; `conversions`, `exports`, `gguf_export`, `lora` and `dataset` hold one function for each direction.
"""

from minimind_hf.convert.conversions import to_hf, to_torch
from minimind_hf.convert.dataset import convert_dataset
from minimind_hf.convert.exports import from_llama, from_qwen3, to_llama, to_qwen3
from minimind_hf.convert.gguf_export import to_gguf
from minimind_hf.convert.layout import ConversionError
from minimind_hf.convert.lora import lora_to_peft, merge_lora, peft_to_lora

__all__ = [
    "ConversionError",
    "convert_dataset",
    "from_llama",
    "from_qwen3",
    "lora_to_peft",
    "merge_lora",
    "peft_to_lora",
    "to_gguf",
    "to_hf",
    "to_llama",
    "to_qwen3",
    "to_torch",
]
