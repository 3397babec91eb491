"""What the documents name exists, and what they show is so."""

import ast
import re
import subprocess
import sys
from dataclasses import fields

from conftest import ROOT
from transformers import PreTrainedConfig
from typer.testing import CliRunner

from minimind_hf import MiniMindConfig
from minimind_hf.cli import app

INHERITED = {field.name for field in fields(PreTrainedConfig)} - MiniMindConfig.__annotations__.keys()
OWN_FIELDS = [field for field in fields(MiniMindConfig) if field.name not in INHERITED]
DOCUMENT = (ROOT / "docs" / "behaviours.md").read_text(encoding="utf-8")


def test_every_promise_names_its_tests():
    rows = re.findall(r"^\| (\d+) \| .+? \| (.+) \|$", DOCUMENT, re.MULTILINE)
    assert [int(number) for number, _ in rows] == list(range(1, 38))
    assert all("::test_" in tests for _, tests in rows)


def test_every_test_that_is_named_exists():
    named = re.findall(r"(\w+)::(test_\w+)", DOCUMENT.partition("\n| | holds")[2])
    assert len(named) > 37
    for file, test in named:
        (path,) = (ROOT / "tests").rglob(f"test_{file}.py")
        tree = ast.parse(path.read_text(encoding="utf-8"))
        functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        assert test in functions, f"{path} has no {test}"


def test_page_on_the_inside_of_the_model():
    text = (ROOT / "docs" / "inside.md").read_text(encoding="utf-8")
    script = "\n".join(re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    assert f"print(error)  # {run.stdout.strip()}\n" in text


def test_picture_is_what_the_command_draws(tmp_path):
    output = tmp_path / "trace.svg"
    assert CliRunner().invoke(app, ["trace", "--format", "svg", "--output", str(output)]).exit_code == 0
    assert output.read_text(encoding="utf-8") == (ROOT / "docs" / "trace.svg").read_text(encoding="utf-8")


def test_config_page_is_that_of_the_fields():
    page = (ROOT / "docs" / "config.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| `(\w+)`", page, re.MULTILINE) == [field.name for field in OWN_FIELDS]
    script = (
        "import sys; sys.path.insert(0, 'docs'); from make_config_page import make_page; print(make_page(), end='')"
    )
    run = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, encoding="utf-8", timeout=120)
    assert run.stdout == page, run.stderr
