"""The `minimind` command, run as a user runs it: what it prints, and how it refuses."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import FIXTURES
from transformers.utils import logging

from minimind_hf.cli import main

WEIGHTS = FIXTURES / "minimind3" / "dense" / "weights.pth"


@pytest.fixture
def minimind(tmp_path, monkeypatch, capsys):
    """Run the command inside this process, in tmp_path."""
    verbosity = logging.get_verbosity()
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["minimind", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            main()
        output, errors = capsys.readouterr()
        return subprocess.CompletedProcess(arguments, end.value.code, output, errors)

    yield run
    logging.set_verbosity(verbosity)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def test_convert_inspect_verify_and_back(minimind, tmp_path):
    convert = minimind("convert", "to-hf", WEIGHTS, "model")
    assert convert.returncode == 0, convert.stderr
    assert "verified: the folder opens, 24 tensors with 135,552 values bit for bit equal" in convert.stdout
    assert "--tokenizer" in convert.stderr

    inspect = minimind("inspect", "model")
    facts = dict(line.split(maxsplit=1) for line in inspect.stdout.splitlines())
    assert facts["generation"] == "MiniMind-3"
    assert facts["parameters"] == "135,552"
    assert facts["attention"] == f"{2 * 64 * (2 * 64 + 2 * 32):,}"  # 2 blocks, 4 heads and 2 key/value heads of 16
    assert facts["head_dim"] == "16"

    verify = minimind("verify", "model", WEIGHTS)
    assert verify.returncode == 0, verify.stderr
    assert "greedy agreement  100.00% of 256 positions" in verify.stdout

    back = minimind("convert", "to-torch", "model", "back.pth")
    assert back.returncode == 0, back.stderr
    assert (tmp_path / "back.pth").exists()


def test_verify_says_whose_config_counts(minimind, tmp_path):
    case = FIXTURES / "minimind2" / "dense"
    minimind("convert", "to-hf", case / "weights.pth", "model", "--config", case / "hf_config.json")
    borrowed = minimind("verify", "model", case / "weights.pth")
    assert f"config of {case / 'weights.pth'}: of {Path('model') / 'config.json'}" in borrowed.stdout
    given = minimind("verify", case / "weights.pth", case / "weights.pth", "--config", case / "hf_config.json")
    assert given.returncode == 0 and "max difference    0" in given.stdout
    assumed = minimind("verify", case / "weights.pth", case / "weights.pth", "--num-attention-heads", 4)
    assert "assumed rope_theta 1000000.0" in assumed.stdout


def test_inspect_takes_what_no_tensor_tells(minimind):
    weights = FIXTURES / "minimind1" / "dense" / "weights.pth"
    facts = minimind("inspect", weights, "--generation", "minimind1", "--num-attention-heads", 4).stdout
    assert "MiniMind v1" in facts and "head_dim                 16" in facts


def test_hang_up_does_not_stop_what_shall_survive_it(tmp_path):
    program = (
        "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"  # as nohup does
        "import minimind_hf.cli, sys\n"
        "minimind_hf.cli.app = lambda: signal.raise_signal(signal.SIGHUP)\n"
        "minimind_hf.cli.main()\nprint('survived')\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True)
    assert ended.stdout == "survived\n"


def test_verify_exits_with_1_where_models_differ(minimind):
    other = FIXTURES / "minimind3" / "untied" / "weights.pth"
    verify = minimind("verify", WEIGHTS, other)
    assert verify.returncode == 1
    assert "differ by more than" in verify.stderr


BAD_INPUT = {
    "missing file": (["convert", "to-hf", "no.pth", "model"], "no.pth"),
    "not a checkpoint": (["convert", "to-hf", __file__, "model"], "test_cli.py"),
    "contradicting flag": (
        ["convert", "to-hf", WEIGHTS, "model", "--num-attention-heads", "8"],
        "--num-attention-heads is 8 in the arguments, but the tensors",
    ),
    "missing config": (["convert", "to-hf", WEIGHTS, "model", "--config", "no.json"], "no.json"),
    "missing tokenizer": (["convert", "to-hf", WEIGHTS, "model", "--tokenizer", "nowhere"], "nowhere"),
    "missing folder": (["convert", "to-torch", "nowhere", "back.pth"], "nowhere"),
    "nothing to inspect": (["inspect", "nowhere"], "nowhere"),
    "nothing to verify": (["verify", WEIGHTS, "nowhere"], "nowhere"),
    "nothing to generate with": (["generate", "--model", "nowhere", "hello"], "nowhere"),
    "unknown command": (["frobnicate"], "frobnicate"),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_is_one_line_without_a_traceback(case, minimind, tmp_path):
    arguments, culprit = BAD_INPUT[case]
    result = minimind(*arguments)
    assert result.returncode != 0
    assert culprit in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""
    assert os.listdir(tmp_path) == []


EVIL = "open('EXECUTED', 'w').close()\n"


@pytest.mark.parametrize("command", ["generate", "verify", "convert"])
def test_code_in_a_folder_is_never_run_nor_offered_to_be_run(command, minimind, tmp_path, monkeypatch):
    folder = tmp_path / "evil"
    shutil.copytree(FIXTURES / "tokenizer", folder)
    (folder / "evil.py").write_text(EVIL)
    auto_map = {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M", "AutoTokenizer": ["evil.T", None]}
    (folder / "config.json").write_text(json.dumps({"model_type": "evil", "auto_map": auto_map}))
    tokenizer = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    tokenizer |= {"auto_map": auto_map, "tokenizer_class": "T"}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    arguments = {
        "generate": ["generate", "--model", folder, "hi"],
        "verify": ["verify", folder, folder],
        "convert": ["convert", "to-hf", WEIGHTS, tmp_path / "model", "--tokenizer", folder],
    }[command]
    result = minimind(*arguments)
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
    assert not list(tmp_path.rglob("EXECUTED"))


def test_unforeseen_errors_are_one_line_too(minimind, monkeypatch):
    monkeypatch.setattr("minimind_hf.convert.inspection.describe", lambda *_: 1 / 0)
    result = minimind("inspect", WEIGHTS)
    assert result.returncode == 1
    assert result.stderr.startswith("minimind: ZeroDivisionError: division by zero (MINIMIND_TRACEBACK=1")
    assert "Traceback" not in result.stderr


def test_terminated_conversion_leaves_nothing(tmp_path):
    program = (
        "import os, signal, minimind_hf.cli, minimind_hf.convert.conversions as conversions\n"
        "def wait(*_, **__): print('writing', flush=True); signal.pause()\n"
        "conversions.verify_folder = wait\n"
        f"import sys; sys.argv = ['minimind', 'convert', 'to-hf', {str(WEIGHTS)!r}, 'model']\n"
        "minimind_hf.cli.main()\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "writing\n"
    assert os.listdir(tmp_path) != []
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 143
    time.sleep(0.1)
    assert os.listdir(tmp_path) == []
