"""Ollama's Modelfile: its template, rendered by Go as Ollama does, makes the prompts that the chat template makes."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import FIXTURES, ROOT, tiny_model
from transformers import AutoTokenizer

pytest.importorskip("gguf", reason="the gguf package is not installed")

from minimind_hf.cli import TINY_MODEL
from minimind_hf.convert import ConversionError
from minimind_hf.convert.gguf_export import to_gguf

GO = shutil.which("go", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
needs_go = pytest.mark.skipif(GO is None, reason="no Go compiler")
TOKENIZER = FIXTURES / "tokenizer"
DEFAULT_SYSTEM = (  # as MiniMind2's chat template
    "{% if messages[0].role != 'system' %}<|im_start|>system\nYou help.<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant{{ '\n' }}"
)


@pytest.fixture(scope="module")
def ollama(tmp_path_factory):
    """Renders chats by a template as Ollama does; see ollama_templates.go."""
    folder = tmp_path_factory.mktemp("go")
    environment = {**os.environ, "GOCACHE": str(folder / "cache"), "GO111MODULE": "off", "GOTOOLCHAIN": "local"}
    build = [GO, "build", "-o", folder / "render", ROOT / "tests" / "ollama_templates.go"]
    subprocess.run(build, env=environment, check=True)

    def run(template, *chats):
        request = json.dumps({"template": template, "chats": chats}, ensure_ascii=False).encode()
        return json.loads(subprocess.run([folder / "render"], input=request, capture_output=True, check=True).stdout)

    return run


def folder_with(tmp_path, tokenizer, template=None, **generation):
    """A model folder with this tokenizer, or with its chat template replaced."""
    tokenizer = AutoTokenizer.from_pretrained(tokenizer)
    tokenizer.chat_template = template or tokenizer.chat_template
    model = tiny_model(vocab_size=len(tokenizer), hidden_size=32, eos_token_id=tokenizer.eos_token_id)
    model.generation_config.update(**generation)
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def modelfile_of(folder, destination):
    """The lines of the Modelfile before its template, and the template."""
    to_gguf(folder, destination, modelfile=True, verify=False)
    head, template = (destination.parent / "Modelfile").read_text(encoding="utf-8").split('TEMPLATE """')
    assert template.endswith('"""\n')
    return head.splitlines(), template.removesuffix('"""\n')


def as_ollama(conversation, tools=(), open_thinking=False, **_):
    messages = []
    for message in conversation:
        calls = [{"function": call.get("function", call)} for call in message.get("tool_calls", [])]
        messages.append({**message, "thinking": message.get("reasoning_content", ""), "tool_calls": calls})
    return {"messages": messages, "tools": list(tools), "think": open_thinking}


def compact(rendered, *values):
    """The text with JSON values as Ollama writes them: without spaces."""
    for value in values:
        assert json.dumps(value) in rendered
        rendered = rendered.replace(json.dumps(value), json.dumps(value, separators=(",", ":")))
    return rendered


@needs_go
def test_prompts_are_those_of_the_goldens(ollama, tmp_path):
    _, template = modelfile_of(folder_with(tmp_path, TOKENIZER), tmp_path / "a.gguf")
    goldens = json.loads((TOKENIZER / "golden.json").read_text(encoding="utf-8"))["chat_template"]
    result = ollama(template, *[as_ollama(**golden["arguments"]) for golden in goldens.values()])
    for (name, golden), prompt in zip(goldens.items(), result["prompts"], strict=True):
        tools = [tool["function"] for tool in golden["arguments"].get("tools", [])]
        calls = [call["arguments"] for m in golden["arguments"]["conversation"] for call in m.get("tool_calls", [])]
        expected = compact(golden["rendered"], *tools, *calls)
        if not golden["arguments"].get("add_generation_prompt"):
            expected = expected.removesuffix("<|im_end|>\n")  # Ollama goes on with a reply that comes last
        assert prompt == expected, name
    assert result["thinking"] == ["<think>", "</think>"]
    assert result["tool_call"] == "<tool_call>\n"


@needs_go
def test_several_calls_and_system_messages_in_the_middle(ollama, tmp_path):
    folder = folder_with(tmp_path, TOKENIZER)
    _, template = modelfile_of(folder, tmp_path / "a.gguf")
    tools = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in "fg"]
    calls = [{"function": {"name": name, "arguments": {"x": [1, "二"]}}} for name in "fg"]
    conversation = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Both?"},
        {"role": "assistant", "content": "Yes.", "reasoning_content": "Two.", "tool_calls": calls},
        {"role": "tool", "content": "1"},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "Done."},
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Thanks."},
    ]
    apply = AutoTokenizer.from_pretrained(folder).apply_chat_template
    for options in ({"tools": tools}, {"open_thinking": True}, {"tools": tools, "open_thinking": True}):
        expected = apply(conversation, tokenize=False, add_generation_prompt=True, **options)
        arguments = json.dumps({"x": [1, "二"]}, ensure_ascii=False)
        assert arguments in expected
        expected = expected.replace(arguments, arguments.replace(" ", ""))
        expected = compact(expected, *[tool["function"] for tool in options.get("tools", [])])
        (prompt,) = ollama(template, as_ollama(conversation, **options))["prompts"]
        assert prompt == expected


@needs_go
@pytest.mark.parametrize("system", [None, "You help."])
def test_chatml(ollama, tmp_path, system):
    folder = folder_with(tmp_path, TINY_MODEL, DEFAULT_SYSTEM if system else None)
    lines, template = modelfile_of(folder, tmp_path / "a.gguf")
    assert [line for line in lines if line.startswith("SYSTEM")] == ([f'SYSTEM """{system}"""'] if system else [])
    chat = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Ho"},
        {"role": "user", "content": "?"},
    ]
    expected = AutoTokenizer.from_pretrained(folder).apply_chat_template(
        chat, tokenize=False, add_generation_prompt=True
    )
    by_ollama = [{"role": "system", "content": system}, *chat] if system else chat
    assert ollama(template, as_ollama(by_ollama))["prompts"] == [expected]


def test_generation_settings_go_along(tmp_path):
    greedy, _ = modelfile_of(folder_with(tmp_path / "1", TOKENIZER), tmp_path / "greedy" / "my model.gguf")
    settings = ["PARAMETER num_ctx 256", "PARAMETER temperature 0", "PARAMETER repeat_penalty 1"]
    assert greedy[1:] == ["FROM ./my model.gguf", *settings]
    sampled = folder_with(tmp_path / "2", TOKENIZER, do_sample=True, temperature=0.85, repetition_penalty=1.05)
    lines, _ = modelfile_of(sampled, tmp_path / "sampled" / "a.gguf")
    expected = {"temperature": "0.85", "top_k": "50", "top_p": "1", "min_p": "0", "repeat_penalty": "1.05"}
    expected["repeat_last_n"] = "-1"  # transformers looks back on all tokens
    written = dict(line.split()[1:] for line in lines if line.startswith("PARAMETER"))
    assert written == {"num_ctx": "256", **expected}


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": "0.5\nFROM other"},
        {"temperature": float("nan")},
        {"temperature": 1e300},
        {"temperature": -1},
        {"top_p": float("-inf")},
        {"top_p": 2},
        {"top_k": [1]},
        {"top_k": 0.5},
        {"top_k": True},
        {"repetition_penalty": "x"},
        {"repetition_penalty": -1},
        {"do_sample": "false"},
    ],
    ids=str,
)
def test_settings_that_ollama_cannot_take_are_refused(tmp_path, settings):
    folder = folder_with(tmp_path, TOKENIZER)
    (folder / "generation_config.json").write_text(json.dumps({"do_sample": True, **settings}))
    with pytest.raises(ConversionError, match="expected"):
        to_gguf(folder, tmp_path / "out" / "a.gguf", modelfile=True, verify=False)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["Modelfile", "m.safetensors", "m.gguf "])
def test_names_that_ollama_would_not_find_are_refused(tmp_path, name):
    with pytest.raises(ConversionError, match=r"ends in \.gguf"):
        to_gguf(folder_with(tmp_path, TOKENIZER), tmp_path / "out" / name, modelfile=True)


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}",
        "{{ raise_exception('never') }}",
        "{% if tools %}tools: {{ tools }}{% endif %}" + DEFAULT_SYSTEM,
        DEFAULT_SYSTEM + "{% if enable_thinking %}<think>{% endif %}",
        DEFAULT_SYSTEM.replace("You help.", "You\u3000help."),
        DEFAULT_SYSTEM.replace("You help.", 'You """help""".'),
        DEFAULT_SYSTEM.replace("<|im_end|>\n{% endfor %}", "<|im_end|>{% endfor %}"),
    ],
)
def test_other_chat_templates_are_refused(tmp_path, template):
    folder = folder_with(tmp_path, TOKENIZER, template)
    with pytest.raises(ConversionError, match="leave --modelfile out"):
        to_gguf(folder, tmp_path / "out" / "a.gguf", modelfile=True, verify=False)
    assert not (tmp_path / "out").exists()


def test_somebody_elses_modelfile_is_left_alone(tmp_path):
    folder = folder_with(tmp_path, TOKENIZER)
    own = tmp_path / "Modelfile"
    own.write_text("FROM llama3\n")
    for overwrite, message in ((False, "pass --overwrite"), (True, "leaves it alone")):
        with pytest.raises(ConversionError, match=message):
            to_gguf(folder, tmp_path / "a.gguf", modelfile=True, overwrite=overwrite, verify=False)
    assert own.read_text() == "FROM llama3\n" and not (tmp_path / "a.gguf").exists()
    own.unlink()
    for _ in range(2):
        to_gguf(folder, tmp_path / "a.gguf", modelfile=True, overwrite=True, verify=False)
    assert own.read_text(encoding="utf-8").count("FROM ./a.gguf") == 1
