"""vLLM's own engine, on the CPU, against this package's model under transformers.

The engine finds MiniMind by the entry point alone: nothing here imports the package for it, nor trusts remote code.
"""

import json
import os
import re
import socket
import subprocess
import sys
import time
from textwrap import indent

os.environ |= {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}

import openai
import pytest
import torch
import torch.nn.functional as F
from conftest import DENSE, FACTS, FIXTURES, MINIMIND2, MOE, needs_facts, tiny_model
from documents import blocks, commands
from memorised_chats import ANSWER, CALL, CALLED, REASONED, WEATHER, save_chat_model
from safetensors.torch import load_file, save_file
from torch.testing import assert_close
from transformers import pipeline
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest

from minimind_hf import MiniMindForSequenceClassification, MiniMindForTokenClassification, MiniMindModel
from minimind_hf.cli import TINY_MODEL
from minimind_hf.convert import to_hf

PAGE = "docs/serving.md"
GREEDY = SamplingParams(temperature=0, max_tokens=64)
KINDS = {
    "dense": DENSE,
    "untied-yarn": {"tie_word_embeddings": False, "inference_rope_scaling": True, "max_position_embeddings": 4096},
    "moe-top1": {**MOE, "num_experts_per_tok": 1},
    "moe-unnormalized": {**MOE, "norm_topk_prob": False},
    "minimind2-moe": MINIMIND2,
}
every_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture
def load():
    """Makes engines; each has let go of its processes and memory before the next one starts."""
    engines = []

    def load(folder, **options):
        settings = {"dtype": "float32", "max_model_len": 512, "enforce_eager": True, "disable_log_stats": True}
        engines.append(LLM(str(folder), **{**settings, **options}))
        return engines[-1]

    yield load
    for engine in engines:
        engine.llm_engine.engine_core.shutdown()


def prompts_of(input_ids):
    return [{"prompt_token_ids": row.tolist()} for row in input_ids]


def logits_of(engine, input_ids, **options):
    """Logits [B, S, V] of the engine at every position of its prompts."""
    everything = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=-1, logprobs=-1, detokenize=False)
    rows = []
    for output in engine.generate(prompts_of(input_ids), everything, use_tqdm=False, **options):
        # The first token has no prediction; that of the last is the generated one.
        entries = output.prompt_logprobs[1:] + output.outputs[0].logprobs
        rows.append([[entry[token].logprob for token in range(len(entry))] for entry in entries])
    return torch.tensor(rows)


RAW = {"max_logprobs": -1, "logprobs_mode": "raw_logits", "skip_tokenizer_init": True}


@every_kind
def test_logits_are_those_of_the_model(kind, load, input_ids, tmp_path):
    model = tiny_model(head_dim=32, **KINDS[kind])  # the smallest heads of vLLM's attention on the CPU
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        expected = model(input_ids).logits
    assert_close(logits_of(load(tmp_path, max_model_len=256, **RAW), input_ids), expected, rtol=0, atol=1e-4)


def test_logits_are_those_of_the_reference(load, tmp_path):
    case = FIXTURES / "minimind3" / "wide-heads"
    to_hf(case / "weights.pth", tmp_path / "model", config=case / "hf_config.json")
    golden = load_file(case / "golden.safetensors")
    logits = logits_of(load(tmp_path / "model", max_model_len=256, **RAW), golden["input_ids"])
    assert_close(logits, golden["logits"], rtol=0, atol=1e-4)


REGISTER = """
import sys
from importlib.metadata import entry_points
(plugin,) = entry_points(group="vllm.general_plugins", name="minimind")
register = plugin.load()
assert "vllm" not in sys.modules  # so it loads where there is no vLLM, too
register()
register()
from vllm import ModelRegistry
assert "MiniMindForCausalLM" in ModelRegistry.get_supported_archs()
assert "vllm.model_executor.models.transformers" not in sys.modules  # layers and kernels wait for a model
"""


def test_registering_twice_is_fine_and_loads_no_layers():
    subprocess.run([sys.executable, "-c", REGISTER], check=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({**MOE, "hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type='dynamic'"),
        ({"head_dim": 24}, "head_dim=24"),
    ],
)
def test_what_vllm_would_compute_wrongly_is_refused(changes, message, load, tmp_path):
    tiny_model(**{"head_dim": 32, **changes}).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=message):
        load(tmp_path, max_model_len=256, **RAW)


REMOTE_CODE = """
import json, sys
from vllm import LLM, SamplingParams
if __name__ == "__main__":
    folder, input_ids = sys.argv[1], json.loads(sys.argv[2])
    engine = LLM(folder, trust_remote_code=True, dtype="float32", enforce_eager=True, skip_tokenizer_init=True)
    greedy = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, detokenize=False)
    outputs = engine.generate([{"prompt_token_ids": row} for row in input_ids], greedy, use_tqdm=False)
    assert "minimind_hf" not in sys.modules
    print("tokens", json.dumps([output.outputs[0].token_ids for output in outputs]))
"""


def test_trusted_folder_works_without_the_package(input_ids, tmp_path):
    model = tiny_model(head_dim=32, **MOE)
    model.save_pretrained(tmp_path / "model")
    expected = model.generate(input_ids, max_new_tokens=16, do_sample=False, eos_token_id=None)[
        :, input_ids.shape[1] :
    ]
    script = tmp_path / "script.py"
    script.write_text(REMOTE_CODE, encoding="utf-8")
    command = [sys.executable, script, tmp_path / "model", json.dumps(input_ids.tolist())]
    run = subprocess.run(command, env={**os.environ, "VLLM_PLUGINS": ""}, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
    (tokens,) = re.findall(r"^tokens (.+)$", run.stdout, re.MULTILINE)
    assert json.loads(tokens) == expected.tolist()


def add_random_lora(model, folder):
    """Write a LoRA of every linear layer as PEFT would, and add it to the weights of the model."""
    generator = torch.Generator().manual_seed(3)
    tensors, layers = {}, [name for name, layer in model.model.named_modules() if isinstance(layer, torch.nn.Linear)]
    for name in layers:
        weight = model.model.get_submodule(name).weight
        a = torch.randn(8, weight.shape[1], generator=generator) / 8
        b = torch.randn(weight.shape[0], 8, generator=generator) / 8
        prefix = f"base_model.model.model.{name}"
        tensors |= {f"{prefix}.lora_A.weight": a, f"{prefix}.lora_B.weight": b}
        weight.data += 2 * b @ a
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    targets = sorted({name.rpartition(".")[-1] for name in layers})
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": targets, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")


def test_lora_adapter_is_added_to_the_requests_that_name_it(load, input_ids, tmp_path):
    model = tiny_model(head_dim=32)
    model.save_pretrained(tmp_path / "model")
    with torch.no_grad():
        plain = model(input_ids).logits
        add_random_lora(model, tmp_path / "lora")
        adapted = model(input_ids).logits
    engine = load(tmp_path / "model", max_model_len=256, enable_lora=True, **RAW)
    adapter = LoRARequest("lora", 1, str(tmp_path / "lora"))
    assert_close(logits_of(engine, input_ids, lora_request=adapter), adapted, rtol=0, atol=1e-4)
    assert_close(logits_of(engine, input_ids), plain, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("head", "task", "expect"),
    [
        (MiniMindModel, "embed", lambda output: F.normalize(output.last_hidden_state[:, -1], dim=-1)),
        (MiniMindForSequenceClassification, "classify", lambda output: output.logits.softmax(-1)),
        (MiniMindForTokenClassification, "token_classify", lambda output: output.logits.softmax(-1)),
    ],
    ids=["embeddings", "sequences", "tokens"],
)
def test_heads_give_what_they_give_under_transformers(head, task, expect, load, input_ids, tmp_path):
    model = tiny_model(model_class=head, head_dim=32, num_labels=3, **MOE)
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        expected = expect(model(input_ids))
    engine = load(tmp_path, runner="pooling", max_model_len=256, tokenizer=str(FIXTURES / "tokenizer"))
    outputs = engine.encode(prompts_of(input_ids), pooling_task=task, use_tqdm=False)
    assert_close(torch.stack([output.outputs.data for output in outputs]), expected, rtol=0, atol=1e-5)


QUESTIONS = [f"What is {a} plus {b}?" for a, b in zip(range(11, 27), range(60, 28, -2), strict=True)]
QUESTIONS += [f"{a}加{b}等于多少？" for a, b in zip(range(31, 47), range(20, 52, 2), strict=True)]
CHATS = [[{"role": "user", "content": question}] for question in QUESTIONS]


@pytest.fixture(scope="module")
def expected():
    """What transformers' greedy search answers to each of 32 questions, one at a time."""
    generator = pipeline("text-generation", str(TINY_MODEL), dtype=torch.float32, trust_remote_code=False)
    replies = [generator(chat, max_new_tokens=64, do_sample=False) for chat in CHATS]
    return [reply[0]["generated_text"][-1]["content"] for reply in replies]


def answers(engine, chats):
    return [output.outputs[0].text for output in engine.chat(chats, GREEDY, use_tqdm=False)]


# A core for each of two processes. vLLM's pipelines on the CPU need the warm-up that only a compiled model gets.
TWO_PROCESSES = {
    "tensor": {"tensor_parallel_size": 2},
    "pipeline": {"pipeline_parallel_size": 2, "enforce_eager": False},
}


@pytest.fixture
def two_cores(monkeypatch):
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")


def test_32_prompts_at_once_are_answered_as_one_at_a_time(load, expected):
    engine = load(TINY_MODEL)
    assert answers(engine, CHATS) == expected
    assert [answers(engine, [chat])[0] for chat in CHATS[:4]] == expected[:4]


@pytest.mark.parametrize("parallel", TWO_PROCESSES)
def test_two_processes_answer_the_same(parallel, load, expected, two_cores):
    assert answers(load(TINY_MODEL, **TWO_PROCESSES[parallel]), CHATS) == expected


@pytest.mark.parametrize("kind", [MOE, MINIMIND2], ids=["moe-top2", "minimind2-moe"])
def test_two_processes_share_a_mixture_of_experts(kind, load, input_ids, tmp_path, two_cores):
    model = tiny_model(head_dim=32, **kind)
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        expected = model(input_ids).logits
    engine = load(tmp_path, max_model_len=256, tensor_parallel_size=2, **RAW)
    assert_close(logits_of(engine, input_ids), expected, rtol=0, atol=1e-4)


@needs_facts  # the dense one: vLLM's attention on the CPU has no heads of 24, which the mixture of experts has
def test_trained_checkpoint_answers_as_recorded(load, tmp_path):
    to_hf(FACTS / "dense" / "full_sft_256.pth", tmp_path / "dense", tokenizer=FACTS.parent / "tokenizer")
    recorded = json.loads((FACTS / "dense" / "answers.json").read_text(encoding="utf-8"))
    given = answers(load(tmp_path / "dense"), [[{"role": "user", "content": question}] for question in recorded])
    assert dict(zip(recorded, map(str.strip, given), strict=True)) == recorded


# The `vllm` command asks for the version of a package named vllm, and whether it is one for the CPU.
VLLM = """
from importlib import metadata
version = metadata.version
metadata.version = lambda name: version("vllm-cpu") + "+cpu" if name == "vllm" else version(name)
from vllm.entrypoints.cli.main import main
main()
"""


def wait_until_it_answers(client, server, log, seconds=300):
    for _ in range(seconds):
        assert server.poll() is None, log.read_text()[-3000:]
        try:
            client.models.list()
            return
        except openai.APIConnectionError:
            time.sleep(1)
    pytest.fail(f"the server does not answer after {seconds} seconds: {log.read_text()[-3000:]}")


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    """A client of `vllm serve`, started with the settings of docs/serving.md."""
    folder = tmp_path_factory.mktemp("model")
    save_chat_model(folder)
    (block,) = blocks(PAGE, "vLLM", "sh")
    ((_, _, _, *arguments),) = commands(block)  # vllm serve my-minimind
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    own = f"--served-model-name my-minimind --dtype float32 --enforce-eager --host 127.0.0.1 --port {port}"
    log = tmp_path_factory.mktemp("server") / "log"
    command = [sys.executable, "-c", VLLM, "serve", folder, *arguments, *own.split()]
    with log.open("w") as output:
        server = subprocess.Popen(command, stdout=output, stderr=output)
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
    try:
        wait_until_it_answers(client, server, log)
        yield client
    finally:
        server.terminate()
        server.wait(60)


def ask(client, conversation, **options):
    messages = [{"role": "user", "content": conversation[0]}]
    return client.chat.completions.create(model="my-minimind", messages=messages, temperature=0, **options)


def message_of(reply, stream):
    """The parts of a reply that a client sees: what it was thinking, what it says, which tools it calls."""
    parts = [chunk.choices[0].delta for chunk in reply] if stream else [reply.choices[0].message]
    calls = [call.function for part in parts for call in part.tool_calls or []]
    return {
        "reasoning_content": "".join(getattr(part, "reasoning", None) or "" for part in parts).strip(),
        "content": "".join(part.content or "" for part in parts).strip(),
        "tool_calls": ["".join(call.name or "" for call in calls), "".join(call.arguments or "" for call in calls)],
    }


streamed_or_not = pytest.mark.parametrize("stream", [False, True])
one_server = pytest.mark.xdist_group("server")


@one_server
@streamed_or_not
def test_chat_over_http(stream, client):
    message = message_of(ask(client, ANSWER, stream=stream), stream)
    assert message == {**ANSWER[1], "reasoning_content": "", "tool_calls": ["", ""]}


@one_server
@streamed_or_not
def test_reasoning_is_split_off(stream, client):
    thinking = {"chat_template_kwargs": {"open_thinking": True, "thinking": True}}
    message = message_of(ask(client, REASONED, stream=stream, extra_body=thinking), stream)
    assert message == {**REASONED[1], "tool_calls": ["", ""]}


@one_server
@streamed_or_not
def test_tool_calls_are_split_off(stream, client):
    message = message_of(ask(client, CALLED, stream=stream, tools=[WEATHER]), stream)
    name, arguments = message.pop("tool_calls")
    assert message == {"reasoning_content": "", "content": ""}
    assert {"name": name, "arguments": json.loads(arguments)} == CALL["function"]


@one_server
def test_responses_api_and_required_tool_call(client):
    reply = client.responses.create(model="my-minimind", input=ANSWER[0], temperature=0)
    assert reply.output_text == ANSWER[1]["content"]
    message = message_of(ask(client, CALLED, tools=[WEATHER], tool_choice="required"), stream=False)
    assert json.loads(message["tool_calls"][1]) == CALL["function"]["arguments"]


@one_server
def test_python_blocks_of_the_page(client, tmp_path):
    save_chat_model(tmp_path / "my-minimind")
    (asking,), (thinking, offline) = blocks(PAGE, None, "python"), blocks(PAGE, "vLLM", "python")
    address = str(client.base_url).removesuffix("/v1/")
    script = "\n".join([asking, thinking, offline])
    script = 'if __name__ == "__main__":\n' + indent(script, "    ")  # vLLM starts processes, which import it
    (tmp_path / "page.py").write_text(script.replace("http://127.0.0.1:8000", address), encoding="utf-8")
    environment = {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR"}
    command = [sys.executable, "page.py"]
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-3000:]
    printed = [line for line in run.stdout.splitlines() if line]
    assert printed == [ANSWER[1]["content"], REASONED[1]["reasoning_content"], ANSWER[1]["content"]]


@one_server
def test_bad_requests_are_refused_and_the_server_lives_on(client):
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.chat.completions.create(model="other", messages=[{"role": "user", "content": "?"}])
    with pytest.raises(openai.BadRequestError, match="512"):
        ask(client, ("a" * 6000, None))
    assert ask(client, ANSWER).choices[0].message.content == ANSWER[1]["content"]
