"""The README's Python blocks run as they stand, in one folder that holds what they name."""

import ast
import re
import shutil
import subprocess
import sys

import torch
from conftest import FIXTURES, ROOT
from transformers import AutoModelForCausalLM, AutoTokenizer

from minimind_hf import MiniMindConfig
from minimind_hf.convert import to_torch


def test_python_blocks_run(tmp_path):
    (tmp_path / "assets").symlink_to(ROOT / "assets")
    (tmp_path / "path" / "to" / "minimind").mkdir(parents=True)
    shutil.copytree(FIXTURES / "tokenizer", tmp_path / "path" / "to" / "minimind" / "model")
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(MiniMindConfig(hidden_size=64)).save_pretrained(tmp_path / "my-minimind")
    to_torch(tmp_path / "my-minimind", tmp_path / "full_sft_768.pth")
    AutoTokenizer.from_pretrained(FIXTURES / "tokenizer").save_pretrained(tmp_path / "my-minimind")

    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 5
    run = subprocess.run(
        [sys.executable, "-c", "\n".join(blocks)], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stderr
    lines = run.stdout.splitlines()
    assert lines[0] == "12 + 30 = 42"
    assert lines[1] == "7 × 8 = 56"
    message = {"role": "assistant", "reasoning_content": "7 × 8 = 7 × 7 + 7", "content": "56"}
    assert ast.literal_eval(lines[2]) == message
    assert lines[3].startswith("verified: ")


def test_commands_are_those_of_the_makefile():
    readme, makefile = (ROOT / "README.md").read_text(encoding="utf-8"), (ROOT / "Makefile").read_text()
    commands = re.findall(r"^make (\w+)", readme, re.MULTILINE)
    assert commands == ["demo", "test"]
    assert all(f"\n{command}:" in makefile for command in commands)
