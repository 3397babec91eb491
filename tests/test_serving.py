"""MiniMind over HTTP: `minimind serve`, and llama.cpp's server, asked by the client of OpenAI."""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import openai
import pytest
from documents import blocks, commands
from memorised_chats import ANSWER, CALL, CALLED, REASONED, WEATHER, save_chat_model
from transformers.cli.serving import utils

from minimind_hf.serving import serve

# One worker of pytest runs them all: what is served takes a while to start.
pytestmark = pytest.mark.xdist_group("serving")
streamed_or_not = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    save_chat_model(folder)
    return folder


@contextmanager
def served(command, log, health):
    """A client of a server that runs meanwhile; `command` ends in the option for its port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    with log.open("w") as output:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        server = subprocess.Popen([*command, port], stdout=output, stderr=output, env=environment)
    try:
        wait_until_it_answers(f"http://127.0.0.1:{port}{health}", server, log)
        yield openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", timeout=60)
    finally:
        server.terminate()
        server.wait(60)


# Without limits, continuous batching takes most of the machine's memory for its cache.
BATCHING = ["--continuous-batching", "--cb-num-blocks", "64", "--cb-max-batch-tokens", "512"]


@pytest.fixture(scope="module", params=[[], BATCHING], ids=["plain", "continuous-batching"])
def client(request, folder, tmp_path_factory):
    command = [sys.executable, "-m", "minimind_hf", "serve", folder, "--dtype", "float32", *request.param, "--port"]
    with served(command, tmp_path_factory.mktemp("server") / "log", "/health") as client:
        yield client


def wait_until_it_answers(url, server, log, seconds=180):
    for _ in range(2 * seconds):
        assert server.poll() is None, log.read_text()[-3000:]
        try:
            urllib.request.urlopen(url, timeout=5)
            return
        except urllib.error.URLError:
            time.sleep(0.5)
    pytest.fail(f"the server does not answer after {seconds} seconds: {log.read_text()[-3000:]}")


PAGE = "docs/serving.md"
(ASKING,) = blocks(PAGE, None, "python")
WORDS = {"minimind": [sys.executable, "-m", "minimind_hf"], "python": [sys.executable]}


def run_block(client, script):
    """What a Python block of the page prints, after the first one, with this server in place of the page's."""
    address = str(client.base_url).removesuffix("/v1/")
    script = "\n".join([ASKING, script]).replace("http://127.0.0.1:8000", address)
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    return run.stdout.splitlines()


def ask(client, folder, conversation, **options):
    messages = [{"role": "user", "content": conversation[0]}]
    return client.chat.completions.create(model=str(folder), messages=messages, max_tokens=80, **options)


def message_of(reply, stream):
    """What the client sees: what the model was thinking, what it says, and which tools it calls."""
    parts = [chunk.choices[0].delta for chunk in reply] if stream else [reply.choices[0].message]
    calls = [call.function for part in parts for call in part.tool_calls or []]
    return {
        "reasoning_content": "".join(getattr(part, "reasoning_content", None) or "" for part in parts).strip(),
        "content": "".join(part.content or "" for part in parts).strip(),
        "calls": [{"name": call.name, "arguments": json.loads(call.arguments)} for call in calls],
    }


@streamed_or_not
def test_plain_answer(stream, client, folder):
    message = message_of(ask(client, folder, ANSWER, stream=stream), stream)
    assert message == {"reasoning_content": "", **ANSWER[1], "calls": []}


@pytest.mark.skipif(
    not hasattr(utils, "_REASONING_FIELDS"),
    reason="the server of this version of transformers has another name for reasoning",
)
@streamed_or_not
def test_reasoning_is_split_off(stream, client, folder):
    thinking = {"chat_template_kwargs": {"open_thinking": True}}
    message = message_of(ask(client, folder, REASONED, stream=stream, extra_body=thinking), stream)
    assert message == {**REASONED[1], "calls": []}


@streamed_or_not
def test_tool_calls_are_split_off(stream, client, folder):
    message = message_of(ask(client, folder, CALLED, stream=stream, tools=[WEATHER]), stream)
    assert message == {"reasoning_content": "", "content": "", "calls": [CALL["function"]]}


def test_requests_at_once_are_answered_as_one_at_a_time(client, folder):
    with ThreadPoolExecutor(8) as pool:
        replies = list(pool.map(lambda _: ask(client, folder, ANSWER), range(8)))
    assert {reply.choices[0].message.content for reply in replies} == {ANSWER[1]["content"]}


def test_a_client_that_hangs_up_does_no_harm(client, folder):
    for _ in range(3):
        with ask(client, folder, ANSWER, stream=True) as stream:
            next(iter(stream))
    assert ask(client, folder, ANSWER).choices[0].message.content == ANSWER[1]["content"]


def test_bad_requests_are_refused_and_the_server_lives_on(client, folder):
    with pytest.raises(openai.APIStatusError):
        client.chat.completions.create(model="another", messages=[{"role": "user", "content": "?"}])
    with pytest.raises(openai.APIStatusError):
        client.chat.completions.create(model=str(folder), messages="?")
    assert ask(client, folder, ANSWER).choices[0].message.content == ANSWER[1]["content"]


def test_page_on_minimind_serve(tmp_path, monkeypatch):
    save_chat_model(tmp_path / "my-minimind")
    monkeypatch.chdir(tmp_path)
    serving, chatting = (commands(block) for block in blocks(PAGE, "minimind serve", "sh"))
    assert serving == [["minimind", "serve", "my-minimind"]]
    command = [*WORDS["minimind"], *serving[0][1:], "--dtype", "float32", "--port"]
    (thinking,) = blocks(PAGE, "minimind serve", "python")
    with served(command, tmp_path / "log", "/health") as client:
        assert run_block(client, "") == [ANSWER[1]["content"]]
        if hasattr(utils, "_REASONING_FIELDS"):  # as above
            assert run_block(client, thinking) == [ANSWER[1]["content"], REASONED[1]["reasoning_content"]]
        (chat,) = chatting
        assert chat[:3] == ["transformers", "chat", "my-minimind"]
        address = str(client.base_url).removesuffix("/v1/")
        chat = [sys.executable, "-m", "transformers.cli.transformers", "chat", "my-minimind", address]
        online = {**os.environ, "HF_HUB_OFFLINE": "0"}  # else it asks no server, not even this one
        said = f"{ANSWER[0]}\n!exit\n"
        run = subprocess.run(chat, input=said, env=online, capture_output=True, text=True, timeout=120)
        assert ANSWER[1]["content"] in run.stdout, run.stderr


def test_page_on_llama_cpp(tmp_path, monkeypatch):
    save_chat_model(tmp_path / "my-minimind")
    monkeypatch.chdir(tmp_path)
    converting, serving = commands(blocks(PAGE, "llama.cpp", "sh")[0])
    subprocess.run([*WORDS[converting[0]], *converting[1:]], check=True)
    with served([*WORDS[serving[0]], *serving[1:], "--port"], tmp_path / "log", "/v1/models") as client:
        assert run_block(client, "") == [ANSWER[1]["content"]]
        reply = ask(client, "my.gguf", ANSWER, temperature=0, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in reply) == ANSWER[1]["content"]


def test_page_on_ollama(tmp_path, monkeypatch):
    save_chat_model(tmp_path / "my-minimind")
    monkeypatch.chdir(tmp_path)
    converting, *others = commands(blocks(PAGE, "Ollama", "sh")[0])
    subprocess.run([*WORDS[converting[0]], *converting[1:]], check=True)
    assert {path.name for path in (tmp_path / others[0][1]).iterdir()} == {"my.gguf", "Modelfile"}


@pytest.mark.parametrize(
    ("folder_name", "hidden", "message"),
    [
        ("nothing", "", "is not a model folder"),
        ("model", "uvicorn", r"needs uvicorn: pip install 'minimind-hf\[serve\]'"),
    ],
)
def test_what_cannot_be_served_is_one_line(folder_name, hidden, message, tmp_path, monkeypatch):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    monkeypatch.setattr("minimind_hf.serving.find_spec", lambda name: None if name == hidden else object())
    with pytest.raises(ValueError, match=message):
        serve(tmp_path / folder_name, [])
