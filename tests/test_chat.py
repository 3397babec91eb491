"""Chats become prompts, and replies become messages again."""

import json

import pytest
from conftest import FIXTURES
from transformers import AutoTokenizer
from transformers.utils.chat_parsing import ResponseParser

from minimind_hf.chat import RESPONSE_TEMPLATE

GOLDEN = json.loads((FIXTURES / "tokenizer" / "golden.json").read_text(encoding="utf-8"))
RENDERED = {name: case["rendered"] for name, case in GOLDEN["chat_template"].items()}
NOT_THINKING, THINKING = RENDERED["plain"], RENDERED["thinking"]  # two prompts


@pytest.fixture(scope="module")
def tokenizer():
    tokenizer = AutoTokenizer.from_pretrained(FIXTURES / "tokenizer")
    tokenizer.response_template = RESPONSE_TEMPLATE
    return tokenizer


def now(time_zone, **more):
    """The call of a tool, as the chat template takes it and as the parser gives it."""
    return {"type": "function", "function": {"name": "now", "arguments": {"tz": time_zone, **more}}}


def call(arguments):
    return f'<tool_call>\n{{"name": "now", "arguments": {arguments}}}\n</tool_call>'


CALL_UTC = call('{"tz": "UTC"}')
CALL_NESTED = call('{"tz": "a<b>", "n": [-1.5e3, {"x": null}]}')


@pytest.mark.parametrize("name", GOLDEN["chat_template"])
def test_chat_template_renders_the_goldens(tokenizer, name):
    """System, tools, thinking on and off, reasoning, several turns."""
    arguments = GOLDEN["chat_template"][name]["arguments"]
    assert tokenizer.apply_chat_template(**arguments, tokenize=False) == RENDERED[name]
    ids = tokenizer.apply_chat_template(**arguments, return_dict=True)["input_ids"]
    assert ids == tokenizer(RENDERED[name], add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids) == RENDERED[name]


@pytest.mark.parametrize("example", GOLDEN["encodings"], ids=lambda example: repr(example["text"][:12]))
def test_tokenizer_encodes_the_goldens(tokenizer, example):
    assert tokenizer(example["text"])["input_ids"] == example["ids"]
    assert tokenizer.decode(example["ids"]) == example["text"]


def test_python_functions_are_tools(tokenizer):
    def now(tz: str):
        """Tell the time.

        Args:
            tz: the time zone
        """

    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "time?"}], tools=[now], tokenize=False)
    [tool] = prompt.split("<tools>\n")[1].split("\n</tools>")[0].splitlines()
    assert json.loads(tool)["function"] == {
        "name": "now",
        "description": "Tell the time.",
        "parameters": {
            "type": "object",
            "properties": {"tz": {"type": "string", "description": "the time zone"}},
            "required": ["tz"],
        },
    }


@pytest.mark.parametrize(
    ("prompt", "reply", "message"),
    [
        (NOT_THINKING, "2<|im_end|>", {"content": "2"}),
        (THINKING, "add\n</think>\n\n2<|im_end|>", {"reasoning_content": "add", "content": "2"}),
        (NOT_THINKING, f"{CALL_UTC}<|im_end|>", {"tool_calls": [now("UTC")]}),
        (
            THINKING,
            f"two\n</think>\n\nWait.\n{CALL_UTC}\n{CALL_NESTED}",
            {
                "reasoning_content": "two",
                "content": "Wait.",
                "tool_calls": [now("UTC"), now("a<b>", n=[-1500.0, {"x": None}])],
            },
        ),
        (
            NOT_THINKING,
            f"Wait.\n{CALL_UTC}\nDone.<|im_end|>",
            {"content": "Wait.\n\nDone.", "tool_calls": [now("UTC")]},
        ),
        (NOT_THINKING, "<think>\nadd\n</think>\n\n2<|im_end|>", {"reasoning_content": "add", "content": "2"}),
        (NOT_THINKING, "2<|im_end|><|endoftext|><|endoftext|>", {"content": "2"}),
        (NOT_THINKING, " a\n\n<b>\tc </b> ", {"content": "a\n\n<b>\tc </b>"}),
        (THINKING, "it breaks o", {"reasoning_content": "it breaks o"}),
        (THINKING, "it stops<|im_end|>", {"reasoning_content": "it stops"}),
        (NOT_THINKING, "<|im_end|>", {}),
        (NOT_THINKING, "", {}),
    ],
    ids="answer reasoning call calls call-within thinking-unasked padding whitespace cut stopped end empty".split(),
)
def test_reply_is_split_into_reasoning_answer_and_tool_calls(tokenizer, prompt, reply, message):
    message = {"role": "assistant", **message}
    assert tokenizer.parse_response(reply, prefix=prompt) == message
    ids, prompt_ids = (tokenizer(text)["input_ids"] for text in (reply, prompt))
    assert tokenizer.parse_response([ids], prefix=prompt_ids) == [message]
    parser = ResponseParser(RESPONSE_TEMPLATE, prefix=prompt)
    for character in reply:  # as a stream
        parser.feed(character)
    assert parser.finalize()[0] == message


@pytest.mark.parametrize(
    "arguments",
    ["", "{", '{"tz": }', '{"tz": "UTC",}', "{'tz': 1}", '{"n": 01}', '{"b": True}', '{"s": "\n"}', '{"n": 1}}', "[]"],
)
def test_damaged_tool_call_stays_in_the_content(tokenizer, arguments):
    reply = f"Wait.\n{call(arguments)}"
    message = tokenizer.parse_response(reply + "<|im_end|>", prefix=NOT_THINKING)
    assert message == {"role": "assistant", "content": reply}


@pytest.mark.parametrize(
    "reply", ["<tool_call>", '<tool_call>\n{"name": "now", "arg', '<tool_call>{"name": "now"}</tool_call>']
)
def test_unfinished_tool_call_stays_in_the_content(tokenizer, reply):
    assert tokenizer.parse_response(reply, prefix=NOT_THINKING) == {"role": "assistant", "content": reply}


@pytest.mark.parametrize("name", ["reasoning", "tools"])
def test_parsed_reply_renders_as_it_was(tokenizer, name):
    """The golden chat, with its assistant message replaced by what the parser makes of the rendered one."""
    arguments = json.loads(json.dumps(GOLDEN["chat_template"][name]["arguments"]))
    prompt, rest = RENDERED[name].split("<|im_start|>assistant\n", 1)
    reply = rest.split("<|im_end|>")[0] + "<|im_end|>"
    message = tokenizer.parse_response(reply, prefix=prompt + "<|im_start|>assistant\n")
    arguments["conversation"][1] = message
    assert tokenizer.apply_chat_template(**arguments, tokenize=False) == RENDERED[name]


def test_saved_tokenizer_keeps_the_response_template(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded.parse_response("add</think>2<|im_end|>", prefix=THINKING) == {
        "role": "assistant",
        "reasoning_content": "add",
        "content": "2",
    }
    assert loaded.chat_template == tokenizer.chat_template
