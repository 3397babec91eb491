"""The Hub over real HTTP: push, then load in fresh processes that know nothing but the address."""

import subprocess
import sys

import pytest
import torch
from conftest import DENSE, FIXTURES, MOE, tiny_model
from hub_standin import HubStandin
from transformers import AutoModelForCausalLM, AutoTokenizer

from minimind_hf.convert import to_hf, to_torch

PUSH = """
import sys
from transformers import AutoModelForCausalLM, AutoTokenizer
import minimind_hf
AutoModelForCausalLM.from_pretrained(sys.argv[1]).push_to_hub("user/name")
AutoTokenizer.from_pretrained(sys.argv[1]).push_to_hub("user/name")
"""

LOAD = """
import sys, torch
if sys.argv[1] == "remote code":
    sys.modules["minimind_hf"] = None  # as if it were not installed
    trust = {"trust_remote_code": True}
else:
    import minimind_hf
    trust = {}
from transformers import AutoModelForCausalLM, pipeline
model = AutoModelForCausalLM.from_pretrained("user/name", dtype=torch.float32, **trust)
torch.save(model(torch.arange(3, 15)[None]).logits, sys.argv[2])
generator = pipeline("text-generation", "user/name", **trust)
reply = generator([{"role": "user", "content": "hello"}], max_new_tokens=4)[0]["generated_text"][-1]
assert reply["role"] == "assistant", reply
"""

REPOSITORY = [
    "README.md",
    "chat_template.jinja",
    "config.json",
    "configuration_minimind.py",
    "generation_config.json",
    "model.safetensors",
    "modeling_minimind.py",
    "tokenizer.json",
    "tokenizer_config.json",
]


@pytest.fixture
def hub():
    with HubStandin() as hub:
        yield hub


@pytest.fixture
def python(hub, tmp_path):
    """Run a program in a fresh process whose Hub is the stand-in and whose cache is empty."""

    def run(program, *arguments, cache, succeeds=True, **variables):
        command = [sys.executable, "-c", program, *map(str, arguments)]
        environment = hub.environment(tmp_path / cache) | variables
        options = {"env": environment, "stdin": subprocess.DEVNULL, "timeout": 300}
        ended = subprocess.run(command, **options, cwd=tmp_path, capture_output=True, text=True)
        assert (ended.returncode == 0) == succeeds, ended.stderr
        return ended

    return run


@pytest.mark.parametrize("kind", [DENSE, MOE], ids=["dense", "moe"])
def test_converted_model_round_trips_through_the_hub(kind, hub, python, tmp_path):
    model = tiny_model(vocab_size=6400, hidden_size=32, head_dim=8, **kind)
    model.save_pretrained(tmp_path / "trained")
    to_torch(tmp_path / "trained", tmp_path / "trained.pth")
    to_hf(
        tmp_path / "trained.pth",
        tmp_path / "converted",
        tokenizer=FIXTURES / "tokenizer",
        config=tmp_path / "trained" / "config.json",
    )
    python(PUSH, tmp_path / "converted", cache="push")

    files = hub.repositories["user/name"]
    assert sorted(set(files) - {".gitattributes"}) == REPOSITORY
    card = files["README.md"].decode()
    assert "license: apache-2.0" in card
    assert "- minimind" in card
    assert f"{model.num_parameters():,} parameters" in card

    expected = model(torch.arange(3, 15)[None]).logits
    for way in ("package", "remote code"):
        python(LOAD, way, tmp_path / f"{way}.pt", cache=way)
        torch.testing.assert_close(torch.load(tmp_path / f"{way}.pt"), expected, rtol=0, atol=1e-6)


MINIMIND = "import minimind_hf.cli; minimind_hf.cli.main()"


@pytest.fixture
def checkpoint(tmp_path):
    """A .pth file of a small model with as many tokens as the tokenizer has."""
    tiny_model(vocab_size=6400, hidden_size=32, head_dim=8).save_pretrained(tmp_path / "trained")
    to_torch(tmp_path / "trained", tmp_path / "trained.pth")
    return tmp_path / "trained.pth"


def test_command_converts_and_pushes_to_a_private_repository(hub, python, checkpoint, tmp_path):
    options = ["--tokenizer", FIXTURES / "tokenizer", "--config", tmp_path / "trained" / "config.json"]
    push = python(
        MINIMIND, "convert", "to-hf", checkpoint, "model", *options, "--push-to-hub", "user/name", cache="push"
    )
    assert "verified: " in push.stdout and "/user/name" in push.stdout.splitlines()[-1]
    assert "user/name" in hub.private
    files = hub.repositories["user/name"]
    pushed = set(files) - {".gitattributes"}
    assert pushed == set(REPOSITORY) - {"chat_template.jinja"}  # this tokenizer keeps its template in its config
    for name in pushed:
        assert files[name] == (tmp_path / "model" / name).read_bytes()
    python(LOAD, "package", tmp_path / "logits.pt", cache="load")
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(tmp_path / "trained")(torch.arange(3, 15)[None]).logits
    torch.testing.assert_close(torch.load(tmp_path / "logits.pt"), expected, rtol=0, atol=1e-6)


def test_pushed_repository_is_public_on_request_and_keeps_its_card(hub, python, checkpoint):
    python(MINIMIND, "convert", "to-hf", checkpoint, "model", "--push-to-hub", "user/name", "--public", cache="push")
    assert "user/name" not in hub.private
    hub.repositories["user/name"]["README.md"] = b"My own words."
    python(MINIMIND, "convert", "to-hf", checkpoint, "again", "--push-to-hub", "user/name", cache="push")
    assert hub.repositories["user/name"]["README.md"] == b"My own words."
    assert "user/name" not in hub.private


def test_refused_push_keeps_the_folder_and_is_one_line(hub, python, checkpoint, tmp_path):
    arguments = ["convert", "to-hf", checkpoint, "model", "--push-to-hub", "nobody/../name"]
    refused = python(MINIMIND, *arguments, cache="push", succeeds=False)
    assert "--push-to-hub nobody/../name" in refused.stderr
    assert not (tmp_path / "model").exists()  # a name that cannot be is seen before anything is written
    offline = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "0"}
    failed = python(MINIMIND, *arguments[:-1], "user/name", cache="push", succeeds=False, **offline)
    assert "pushing it to user/name failed" in failed.stderr
    assert "Traceback" not in failed.stderr
    assert (tmp_path / "model" / "model.safetensors").exists()


def test_card_of_the_repository_is_kept(hub, python, tmp_path):
    tiny_model(vocab_size=6400, hidden_size=32, head_dim=8).save_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(FIXTURES / "tokenizer").save_pretrained(tmp_path / "model")
    python(PUSH, tmp_path / "model", cache="push")
    hub.repositories["user/name"]["README.md"] = b"---\nlicense: mit\n---\n\nMy own words.\n"
    python(PUSH, tmp_path / "model", cache="push again")
    card = hub.repositories["user/name"]["README.md"].decode()
    assert "My own words." in card
    assert "license: mit" in card


def test_card_survives_a_save_into_the_same_folder(tmp_path):
    model = tiny_model()
    model.save_pretrained(tmp_path)
    (tmp_path / "README.md").write_text("My own words.")
    model.save_pretrained(tmp_path)
    assert (tmp_path / "README.md").read_text() == "My own words."
    assert AutoModelForCausalLM.from_pretrained(tmp_path).config.hidden_size == 64
