"""Training in two processes is training in one: equal losses, and checkpoints that any number of processes resumes."""

import json
import os
import subprocess
import sys

import pytest
import torch
import transformers
from conftest import MOE, ROOT, tiny_model
from packaging.version import Version
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.xdist_group("scaling")  # the fixtures below are long: make each of them once

WORKER = ROOT / "tests" / "train_worker.py"
LAUNCH = [sys.executable, "-m", "accelerate.commands.launch", "--config_file"]
KINDS = {"dense": {}, "moe": {**MOE, "router_aux_loss_coef": 0}}  # every process balances its own tokens
LAUNCHERS = {
    "one": [sys.executable],
    "ddp": [*LAUNCH, ROOT / "examples" / "accelerate" / "ddp.yaml"],
    "fsdp2": [*LAUNCH, ROOT / "examples" / "accelerate" / "fsdp2.yaml"],
    "zero2": [*LAUNCH, ROOT / "examples" / "accelerate" / "deepspeed_zero2.yaml"],
    "zero3": [*LAUNCH, ROOT / "examples" / "accelerate" / "deepspeed_zero3.yaml"],
}


def train(folder, launcher, output, *checkpoint):
    command = [*LAUNCHERS[launcher], WORKER, folder, output, "4", *checkpoint]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-3000:]
    report = json.loads((output / "losses.json").read_text())
    assert report["processes"] == (1 if launcher == "one" else 2)
    return torch.tensor(report["steps"])  # loss and norm of the gradient, by step


def save_task(kind, folder):
    """A model, and rows with 4 to 16 labels each."""
    tiny_model(**KINDS[kind]).save_pretrained(folder)
    rows = torch.randint(3, 192, (32, 16), generator=torch.Generator().manual_seed(0))
    ignored = torch.arange(16) < torch.arange(32)[:, None] % 13
    torch.save((rows, rows.masked_fill(ignored, -100)), folder / "rows.pt")


@pytest.fixture(scope="module", params=[("dense", "ddp"), ("moe", "fsdp2")], ids=["dense-ddp", "moe-fsdp2"])
def runs(request, tmp_path_factory):
    """A folder with a model that one process trained in `one`, and two processes in `two`; and the two curves."""
    kind, launcher = request.param
    folder = tmp_path_factory.mktemp(kind)
    save_task(kind, folder)
    return folder, launcher, train(folder, "one", folder / "one"), train(folder, launcher, folder / "two")


def assert_same_weights(folder, expected):
    model, expected = (AutoModelForCausalLM.from_pretrained(path / "model") for path in (folder, expected))
    for (name, parameter), (_, reference) in zip(model.named_parameters(), expected.named_parameters(), strict=True):
        assert_close(parameter, reference, rtol=0, atol=2e-4, msg=lambda text, name=name: f"{name}: {text}")


def test_two_processes_learn_what_one_learns(runs):
    folder, _, expected, losses = runs
    assert_close(losses, expected, rtol=0, atol=1e-4)
    assert_same_weights(folder / "two", folder / "one")


def test_one_process_resumes_what_two_began(runs):
    folder, _, expected, _ = runs
    losses = train(folder, "one", folder / "two-then-one", folder / "two" / "checkpoint-2")
    assert_close(losses, expected, rtol=0, atol=1e-4)
    assert_same_weights(folder / "two-then-one", folder / "one")


@pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.20"),
    reason="on CPUs, several processes of this version's Trainer cannot read an optimizer's state",
)
def test_two_processes_resume_what_one_began(runs):
    folder, launcher, expected, _ = runs
    losses = train(folder, launcher, folder / "one-then-two", folder / "one" / "checkpoint-2")
    assert_close(losses, expected, rtol=0, atol=1e-4)
    assert_same_weights(folder / "one-then-two", folder / "one")


@pytest.mark.parametrize(("kind", "launcher"), [("dense", "zero2"), ("moe", "zero3")])
def test_deepspeed_learns_what_one_process_learns_and_resumes_itself(kind, launcher, tmp_path):
    pytest.importorskip("deepspeed", reason="`make test-deepspeed` has an environment for it")
    save_task(kind, tmp_path)
    expected = train(tmp_path, "one", tmp_path / "one")
    for output, checkpoint in (("two", []), ("resumed", [tmp_path / "two" / "checkpoint-2"])):
        losses = train(tmp_path, launcher, tmp_path / output, *checkpoint)
        assert_close(losses, expected, rtol=0, atol=1e-4)
        assert_same_weights(tmp_path / output, tmp_path / "one")
