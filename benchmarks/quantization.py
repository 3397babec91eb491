"""What quantizing the weights costs the tiny checkpoint: python benchmarks/quantization.py

Perplexity is that of the right answers to the held-out questions of `examples/train_tiny.py`, per token, given the
question; right, how many of the hundred held-out sums are answered to the letter; size, that of the saved folder's
weights. Needs torchao and bitsandbytes.
"""

import sys
import tempfile
from pathlib import Path

import torch
from torch.nn.utils.rnn import pad_sequence
from torchao.quantization import Int8DynamicActivationInt8WeightConfig, Int8WeightOnlyConfig, IntxWeightOnlyConfig
from torchao.quantization.granularity import PerGroup
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, TorchAoConfig
from transformers.utils import logging

from minimind_hf.cli import TINY_MODEL

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
import train_tiny

INT4 = IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(32))
METHODS = {
    "none, float32": None,
    "torchao int8, weights only": TorchAoConfig(Int8WeightOnlyConfig()),
    "torchao int8, weights and activations": TorchAoConfig(Int8DynamicActivationInt8WeightConfig()),
    "torchao int4, groups of 32": TorchAoConfig(INT4),
    "bitsandbytes 8 bits": BitsAndBytesConfig(load_in_8bit=True),
    "bitsandbytes fp4": BitsAndBytesConfig(load_in_4bit=True),
    "bitsandbytes nf4": BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4"),
}


def encode(tokenizer, conversation) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids [S] of a conversation, and its labels [S]: -100 where the assistant does not speak."""
    encoded = tokenizer.apply_chat_template(conversation, return_dict=True, return_assistant_tokens_mask=True)
    input_ids = torch.tensor(encoded["input_ids"])
    return input_ids, input_ids.masked_fill(torch.tensor(encoded["assistant_masks"]) == 0, -100)


@torch.no_grad()
def perplexity(model, conversations: list[tuple[torch.Tensor, torch.Tensor]], batch_size=100) -> float:
    """exp of the mean cross entropy over all labels; conversations as from `encode`."""
    total = count = 0
    for start in range(0, len(conversations), batch_size):
        input_ids, labels = zip(*conversations[start : start + batch_size], strict=True)
        # Padding on the right needs no mask: no token sees what follows it.
        input_ids, labels = pad_sequence(input_ids, True), pad_sequence(labels, True, padding_value=-100)
        number = (labels[:, 1:] != -100).sum()
        total += model(input_ids, labels=labels).loss.double() * number
        count += number
    return (total / count).exp().item()


def saved_size(model) -> int:
    """Bytes of the weights on disk. Call it before the first forward: bitsandbytes repacks its weights then."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return sum(file.stat().st_size for file in Path(folder).glob("*.safetensors"))


def main():
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(TINY_MODEL)
    questions = train_tiny.evaluation_questions()
    conversations = [encode(tokenizer, conversation) for kind in questions.values() for conversation in kind]
    sums = {"sums": questions["sums, held out"]}
    print(f"{'method':<38} {'size':>9} {'perplexity':>11} {'right':>6}")
    for name, config in METHODS.items():
        model = AutoModelForCausalLM.from_pretrained(TINY_MODEL, dtype=torch.float32, quantization_config=config)
        size = saved_size(model) / 2**20
        right = train_tiny.evaluate(model, tokenizer, sums)["sums"]
        print(f"{name:<38} {size:5.2f} MiB {perplexity(model, conversations):11.5f} {right:6.0%}")


if __name__ == "__main__":
    main()
