"""Every cell of the table in docs/conversions.md: what it calls exact converts, what it calls refused does not."""

import os
import re
import shutil

import pytest
import torch
from conftest import FIXTURES, ROOT
from safetensors.torch import load_file
from test_generations import publish
from test_gguf import byte_level, enlarged, save_tokenizer
from transformers import AutoModelForCausalLM

from minimind_hf.convert import ConversionError, to_gguf, to_hf, to_llama, to_qwen3, to_torch

TABLE = re.findall(
    r"^\| (\w[\w-]*): ([\w, -]+?) \| (.+) \|$", (ROOT / "docs" / "conversions.md").read_text(encoding="utf-8"), re.M
)
DIRECTIONS = ["loads as published", "to-hf", "to-torch, own layout", "to-qwen3", "to-llama", "to-gguf"]


CELLS = [
    pytest.param(generation, name, direction, cell, id=f"{generation}-{name}-{direction}")
    for generation, names, row in TABLE
    for name in names.split(", ")
    for direction, cell in zip(DIRECTIONS, row.split(" | "), strict=True)
]


def test_table_covers_every_fixture_and_direction():
    rows = {(generation, name) for generation, names, _ in TABLE for name in names.split(", ")}
    generations = ("minimind3", "minimind2", "minimind2-early", "minimind1")
    assert rows == {(key, case.name) for key in generations for case in (FIXTURES / key).iterdir()}
    assert f"| cases | {' | '.join(DIRECTIONS)} |" in (ROOT / "docs" / "conversions.md").read_text(encoding="utf-8")


def attempt(direction, case, folder):
    """Convert one case; return the folder that transformers loads, or None where the result is no folder."""
    arguments = {"source": case / "weights.pth", "config": case / "hf_config.json"}
    if direction == "loads as published":
        return publish(case, folder / "published", "pytorch_model.bin")
    if direction == "to-torch, own layout":
        to_torch(destination=folder / "x.pth", layout=case.parent.name, **arguments)
        written, original = (torch.load(path, weights_only=True) for path in (folder / "x.pth", arguments["source"]))
        assert list(written) == list(original)
        assert all(torch.equal(written[name], original[name]) for name in original)
        return None
    if direction == "to-gguf":  # its logits through llama.cpp are in test_gguf.py
        tokenizer = save_tokenizer(byte_level(), folder / "tokenizer")
        to_gguf(destination=folder / "x.gguf", outtype="f32", tokenizer=tokenizer, **enlarged(case, folder))
        return None
    {"to-hf": to_hf, "to-qwen3": to_qwen3, "to-llama": to_llama}[direction](destination=folder / "out", **arguments)
    return folder / "out"


@pytest.mark.parametrize("generation, name, direction, cell", CELLS)
def test_cell(generation, name, direction, cell, tmp_path):
    case = FIXTURES / generation / name
    if cell.startswith("refused: "):
        expected = ValueError if direction == "loads as published" else ConversionError
        with pytest.raises(expected):
            folder = attempt(direction, case, tmp_path)
            AutoModelForCausalLM.from_pretrained(folder)
        assert not {"out", "x.pth", "x.gguf"} & set(os.listdir(tmp_path))
        return
    assert cell == "exact"
    folder = attempt(direction, case, tmp_path)
    if folder is None:
        return
    golden = load_file(case / "golden.safetensors")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(model(golden["input_ids"]).logits, golden["logits"], rtol=0, atol=1e-4)
    shutil.rmtree(folder)
