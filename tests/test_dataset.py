"""Datasets: what TRL's trainers see must be what MiniMind's own training would see; a bad line is named."""

import json
import math
import os
import shutil
import sys
from itertools import repeat

import pytest
from conftest import FIXTURES, tiny_model
from transformers import AutoTokenizer

from minimind_hf.convert import ConversionError
from minimind_hf.convert import dataset as dataset_module
from minimind_hf.convert.dataset import BadLines, compare_rows, convert_dataset, in_batches, read_rows, write_rows

datasets = pytest.importorskip("datasets", minversion="4.7", reason="pip install 'minimind-hf[train]'")

TOKENIZER = FIXTURES / "tokenizer"
GOLDEN = json.loads((TOKENIZER / "golden.json").read_text(encoding="utf-8"))["chat_template"]

SYSTEM = {"role": "system", "content": "你是助手。"}
QUESTION = {"role": "user", "content": "5 加 7？"}
ANSWER = {"role": "assistant", "content": "12"}
PLACEHOLDER = {"role": "assistant", "content": "无"}
NOW = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}
ADD = {"name": "add", "parameters": {"required": ["a"], "default": {"a": 0.5, "b": None}}}
CALL = {"role": "assistant", "content": "", "tool_calls": [{"name": "now", "arguments": {"zone": "UTC", "deep": [1]}}]}
RESULT = {"role": "tool", "content": '{"t": "12:00"}'}


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(TOKENIZER)


def conversation(*messages):
    return {"conversations": list(messages)}


def preference(chosen, rejected):
    return {"chosen": chosen, "rejected": rejected}


def write_lines(path, *lines):
    """Write JSON lines; what is bytes already goes in as it is."""
    lines = [line if isinstance(line, bytes) else json.dumps(line, ensure_ascii=False).encode() for line in lines]
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return path


@pytest.fixture
def convert(tmp_path):
    """Convert samples, and give the rows of the dataset."""

    def convert(*samples, **arguments):
        source = write_lines(tmp_path / "source.jsonl", *samples)
        convert_dataset(source, tmp_path / "dataset", overwrite=True, **arguments)
        return datasets.load_from_disk(tmp_path / "dataset")

    return convert


# What comes out.


def test_pretraining_text_is_kept_to_the_letter(convert):
    texts = ["你好，世界", " \n two\r\nlines\t", "nul \0 and emoji 👍🏽", "\u2028 \ufeff", "123", '{"a": 1}', "null"]
    rows = convert(*({"text": text} for text in texts))
    assert rows.column_names == ["text"]
    assert rows["text"][:] == texts


def test_messages_have_the_keys_they_had_and_no_others(convert):
    thinking = {**ANSWER, "reasoning_content": "add"}
    rows = convert(conversation(QUESTION, ANSWER), conversation(SYSTEM, QUESTION, CALL, RESULT, thinking))
    assert rows[0] == {"messages": [QUESTION, ANSWER], "tools": None}
    assert rows[1] == {"messages": [SYSTEM, QUESTION, CALL, RESULT, thinking], "tools": None}


def test_tools_and_calls_are_the_same_as_objects_and_as_json_text(convert):
    tools, calls = [NOW, ADD], CALL["tool_calls"]
    as_objects = conversation({**SYSTEM, "tools": tools}, QUESTION, CALL, RESULT, ANSWER)
    as_text = conversation(
        {**SYSTEM, "tools": json.dumps(tools)}, QUESTION, {**CALL, "tool_calls": json.dumps(calls)}, RESULT, ANSWER
    )
    rows = convert(as_objects, as_text)
    assert rows[0] == rows[1] == {"messages": [SYSTEM, QUESTION, CALL, RESULT, ANSWER], "tools": tools}


def test_empty_optional_keys_are_left_out(convert):
    empty = {"reasoning_content": None, "tools": "", "tool_calls": None}
    rows = convert(
        conversation(*({**message, **empty} for message in (SYSTEM, QUESTION, ANSWER))),
        conversation({**SYSTEM, "tools": "[]"}, {**QUESTION, "reasoning_content": ""}, {**ANSWER, "tool_calls": []}),
    )
    assert rows[0] == rows[1] == {"messages": [SYSTEM, QUESTION, ANSWER], "tools": None}


def test_an_empty_reasoning_is_kept_because_the_template_heeds_it(convert, tokenizer):
    message = {"role": "assistant", "content": "<think>no</think>yes"}
    rows = convert(conversation(QUESTION, {**message, "reasoning_content": ""}), conversation(QUESTION, message))
    thoughts = [tokenizer.apply_chat_template(row["messages"], tokenize=False) for row in rows]
    assert thoughts[0].endswith("<think>\n\n</think>\n\n<think>no</think>yes<|im_end|>\n")
    assert thoughts[1].endswith("<think>\nno\n</think>\n\nyes<|im_end|>\n")


@pytest.mark.parametrize("case", ["system", "reasoning", "tools"])
def test_sft_rows_render_as_the_goldens(case, convert, tokenizer):
    given = dict(GOLDEN[case]["arguments"])
    messages, tools, expected = given.pop("conversation"), given.pop("tools", None), GOLDEN[case]["rendered"]
    if tools:  # MiniMind's files carry tools in a system message, whose content the template puts before them
        messages = [{**SYSTEM, "tools": json.dumps(tools)}, *messages]
        expected = expected.replace("<|im_start|>system\n", f"<|im_start|>system\n{SYSTEM['content']}\n\n", 1)
    row = convert(conversation(QUESTION, ANSWER), conversation(*messages))[1]
    assert tokenizer.apply_chat_template(row["messages"], tools=row["tools"], tokenize=False, **given) == expected


@pytest.mark.parametrize("case", [case for case in GOLDEN if "add_generation_prompt" in GOLDEN[case]["arguments"]])
def test_rl_prompts_render_as_the_goldens(case, convert, tokenizer):
    given = dict(GOLDEN[case]["arguments"])
    messages, tools, expected = given.pop("conversation"), given.pop("tools", None), GOLDEN[case]["rendered"]
    if tools:
        messages = [{**SYSTEM, "tools": tools}, *messages]
        expected = expected.replace("<|im_start|>system\n", f"<|im_start|>system\n{SYSTEM['content']}\n\n", 1)
    row = convert(conversation(*messages, PLACEHOLDER), conversation(QUESTION, PLACEHOLDER), kind="rl")[0]
    assert tokenizer.apply_chat_template(row["prompt"], tools=row["tools"], tokenize=False, **given) == expected


# 212.6768 is read back as 212.67680000000001 by datasets' Json type, and 1e-12 is written as 0.
UNCARRIED = {"x": 212.6768, "tolerance": 1e-12, "big": 10**30, "nested": {"x": [3.141592653589793]}}


def test_numbers_that_the_json_type_would_change_render_unchanged(convert, tokenizer):
    openai = {"id": "1", "type": "function", "function": {"name": "f", "arguments": UNCARRIED}}
    calls = [{"name": "f", "arguments": UNCARRIED}, openai, {"name": "g", "arguments": {"x": 0.5, "n": 2**53 + 1}}]
    messages = [QUESTION, {**CALL, "tool_calls": calls}]
    expected = tokenizer.apply_chat_template(messages, tokenize=False)
    assert expected.count('{"x": 212.6768, "tolerance": 1e-12, "big": 1000000000000000000000000000000,') == 2
    rows = convert(conversation(*messages))
    for row in (rows[0], rows.map(lambda row: row)[0]):  # trainers re-write the rows with `map`
        assert tokenizer.apply_chat_template(row["messages"], tokenize=False) == expected
    assert rows[0]["messages"][1]["tool_calls"][2] == calls[2]


def test_odd_strings_survive_a_map(convert):
    odd = {"role": "user", "content": 'nul \0 " \\ / \u2028 👍🏽 </s> \x7f é 123 null {"a": 1}'}
    rows = convert(conversation(odd, ANSWER))
    assert rows[0]["messages"] == rows.map(lambda row: row)[0]["messages"] == [odd, ANSWER]


def test_the_prompt_of_a_preference_is_what_both_begin_with(convert):
    better, worse = ANSWER, {**ANSWER, "content": "13", "reasoning_content": "guess"}
    turns = [{**SYSTEM, "tools": [NOW]}, QUESTION, CALL, RESULT]
    rows = convert(preference([QUESTION, better], [QUESTION, worse]), preference([*turns, better], [*turns, worse]))
    assert rows[0] == {"prompt": [QUESTION], "chosen": [better], "rejected": [worse], "tools": None}
    shared = [SYSTEM, QUESTION, CALL, RESULT]
    assert rows[1] == {"prompt": shared, "chosen": [better], "rejected": [worse], "tools": [NOW]}


def test_the_placeholder_of_an_rl_prompt_is_dropped(convert):
    rows = convert(conversation(QUESTION, ANSWER, QUESTION, PLACEHOLDER), kind="rl")
    assert rows[:] == {"prompt": [[QUESTION, ANSWER, QUESTION]], "tools": [None]}


# Files.


def test_byte_order_mark_crlf_blank_lines_and_a_missing_last_newline_are_accepted(tmp_path):
    source = tmp_path / "windows.jsonl"
    source.write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n\r\n  \n{"text": "b"}\r\n\n{"text": "c"}')
    result = convert_dataset(source, tmp_path / "dataset")
    assert result == "verified: 3 pretrain rows (text) read back equal to the lines of windows.jsonl"
    assert datasets.load_from_disk(tmp_path / "dataset")["text"][:] == ["a", "b", "c"]


def test_result_says_when_nothing_was_verified(tmp_path):
    source = write_lines(tmp_path / "source.jsonl", {"text": "a"})
    assert convert_dataset(source, tmp_path / "dataset", verify=False) == "not verified: 1 pretrain rows (text)"


def test_the_folder_is_all_that_is_written_and_all_that_is_needed(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    convert_dataset(write_lines(tmp_path / "source.jsonl", {"text": "a"}), tmp_path / "new" / "dataset")
    assert sorted(os.listdir(tmp_path)) == ["new", "source.jsonl", "temporary"]
    assert os.listdir(tmp_path / "new") == ["dataset"]
    assert os.listdir(tmp_path / "temporary") == []
    assert sorted(os.listdir(tmp_path / "new" / "dataset")) == [
        "data-00000-of-00001.arrow",
        "dataset_info.json",
        "state.json",
    ]
    shutil.move(tmp_path / "new" / "dataset", tmp_path / "moved")
    (tmp_path / "source.jsonl").unlink()
    assert datasets.load_from_disk(tmp_path / "moved")["text"][:] == ["a"]
    assert not [line for path in (tmp_path / "moved").glob("*.json") for line in [path.read_text()] if "/" in line]


def test_rows_are_read_one_by_one_and_written_in_small_batches(tmp_path):
    source = write_lines(tmp_path / "source.jsonl", {"text": "a"}, b"bad")
    bad = BadLines()
    rows = read_rows(source, "pretrain", "", bad)
    assert next(rows) == (1, {"text": "a"})
    assert bad.count == 0  # the second line is not read yet
    long, short = {"prompt": ["x" * 2**20], "tools": None}, {"text": "x"}
    assert len(next(in_batches(repeat(long)))) == 8
    assert len(next(in_batches(repeat(short)))) == 10_000


def test_several_batches_and_shards_make_one_dataset(convert, monkeypatch):
    monkeypatch.setattr(dataset_module, "BATCH_ROWS", 3)
    monkeypatch.setattr(datasets.config, "MAX_SHARD_SIZE", "1KB")
    conversations = [conversation({**QUESTION, "content": f"{n}" * 50}, ANSWER) for n in range(20)]
    rows = convert(*conversations, conversation({**SYSTEM, "tools": [NOW]}, QUESTION, ANSWER))
    assert len(rows.cache_files) > 1
    assert rows["messages"][:20] == [sample["conversations"] for sample in conversations]
    assert rows["tools"][:] == [None] * 20 + [[NOW]]


def test_verification_finds_a_difference(tmp_path):
    write_rows([(1, {"text": "a"}), (2, {"text": "b"})], "pretrain", tmp_path / "dataset")
    compare_rows(tmp_path / "dataset", 2, iter([(1, {"text": "a"}), (2, {"text": "b"})]))
    for rows, message in [
        ([(1, {"text": "a"}), (7, {"text": "c"})], "row of line 7 differs"),
        ([(1, {"text": "a"})], "has changed"),
        ([(1, {"text": "a"}), (2, {"text": "b"}), (3, {"text": "c"})], "has changed"),
    ]:
        with pytest.raises(ConversionError, match=message):
            compare_rows(tmp_path / "dataset", 2, iter(rows))
    with pytest.raises(ConversionError, match="2 rows read back, 3 written"):
        compare_rows(tmp_path / "dataset", 3, iter(()))


def test_an_existing_dataset_is_replaced_only_on_request_and_nothing_else_at_all(tmp_path):
    source, folder = write_lines(tmp_path / "source.jsonl", {"text": "new"}), tmp_path / "dataset"
    convert_dataset(write_lines(tmp_path / "old.jsonl", {"text": "old"}), folder)
    with pytest.raises(ConversionError, match="--overwrite"):
        convert_dataset(source, folder)
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(ConversionError, match=r"notes\.txt, which would be lost"):
        convert_dataset(source, folder, overwrite=True)
    assert datasets.load_from_disk(folder)["text"][:] == ["old"]
    (folder / "notes.txt").unlink()
    convert_dataset(source, folder, overwrite=True)
    assert datasets.load_from_disk(folder)["text"][:] == ["new"]
    with pytest.raises(ConversionError, match="part of the source"):
        convert_dataset(source, tmp_path, overwrite=True)


def test_a_file_that_is_none_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "blank").write_bytes(b"\n \r\n")
    (tmp_path / "binary").write_bytes(bytes(range(256)))
    (tmp_path / "list").write_bytes(b'[{"text": "a"}]')
    (tmp_path / "pointer").write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    before = sorted(os.listdir(tmp_path))
    for name, message in {
        "missing": "does not exist",
        "pipe": "not a regular file",
        "folder": "not a regular file",
        "empty": "is empty",
        "blank": "is empty",
        "binary": r"2 bad lines \(line 1: .*, and no good one",
        "list": r"1 bad line \(line 1: the line is a list, expected an object\), and no good one",
        "pointer": r"3 bad lines \(line 1: broken or cut off: .*, and no good one",
    }.items():
        with pytest.raises(ConversionError, match=message):
            convert_dataset(tmp_path / name, tmp_path / "dataset", on_error="skip")
    assert sorted(os.listdir(tmp_path)) == before


def test_without_a_recent_datasets_library_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConversionError, match=r"minimind-hf\[train\]"):
        convert_dataset(write_lines(tmp_path / "source.jsonl", {"text": "a"}), tmp_path / "dataset")


# Kinds.


@pytest.mark.parametrize(
    "sample, kind, columns",
    [
        ({"text": "a"}, "pretrain", ["text"]),
        (conversation(QUESTION, ANSWER), "sft", ["messages", "tools"]),
        (preference([QUESTION, ANSWER], [QUESTION, CALL]), "preference", ["prompt", "chosen", "rejected", "tools"]),
        (conversation(QUESTION, ANSWER), "rl", ["prompt", "tools"]),
    ],
)
def test_the_kind_is_recognised_or_confirmed(sample, kind, columns, convert):
    assert convert(sample, kind=kind).column_names == columns
    if kind != "rl":
        assert convert(sample).column_names == columns


@pytest.mark.parametrize("on_error", ["stop", "skip"])
def test_a_contradicting_kind_is_refused(on_error, tmp_path):
    for sample, kind, message in [
        ({"text": "a"}, "sft", "line 1 of .* are 'text'; expected conversations for --kind sft"),
        (conversation(QUESTION, ANSWER), "pretrain", "are 'conversations'; expected text for --kind pretrain"),
        (preference([], []), "rl", "are 'chosen', 'rejected'; expected conversations for --kind rl"),
        (conversation(), "preference", "expected chosen and rejected for --kind preference"),
        ({"text": "a"}, "dpo", "--kind dpo: expected one of pretrain, sft, preference, rl"),
        (
            {"history": [], "q": "a"},
            None,
            "line 1 of .* are 'history', 'q'; expected text, or conversations, or chosen",
        ),
        ({"text": "a", "conversations": []}, None, "are 'text', 'conversations'; expected"),
        ({}, None, "are none; expected"),
    ]:
        with pytest.raises(ConversionError, match=message):
            convert_dataset(
                write_lines(tmp_path / "source.jsonl", sample), tmp_path / "dataset", kind, on_error=on_error
            )
    with pytest.raises(ConversionError, match="on_error is 'ignore'"):
        convert_dataset(tmp_path / "source.jsonl", tmp_path / "dataset", on_error="ignore")


# Bad lines.

USER = b'{"conversations": [{"role": "user", "content": '  # begins a line whose content is told by the case


def call(**changes):
    return conversation(QUESTION, {**CALL, "tool_calls": [{**CALL["tool_calls"][0], **changes}]})


BAD = {
    "cut off": (json.dumps(conversation(QUESTION, ANSWER)).encode()[:-9], "broken or cut off: "),
    "no JSON": (b"user: hello", "broken or cut off: Expecting value at character 1"),
    "two objects": (b"{} {}", "broken or cut off: Extra data at character 4"),
    "zeros": (bytes(40), "broken or cut off: "),
    "not UTF-8": (USER + '"你好'.encode("gbk"), f"not UTF-8 at byte {len(USER) + 2}"),
    "half a character": (USER + b'"\\ud83d"}]}', "half of a character"),
    "half a character in tools": (conversation({**SYSTEM, "tools": '["\\udc00"]'}, ANSWER), "tools: half of a char"),
    "deep": (b"[" * 100_000, "nested too deeply"),
    "deep tools": (conversation({**SYSTEM, "tools": "[" * 100_000}, ANSWER), "tools: nested too deeply"),
    "repeated key": (b'{"conversations": [], "conversations": []}', "the key 'conversations' stands there twice"),
    "NaN": (b'{"conversations": NaN}', "NaN is no JSON number"),
    "infinity": (USER + b"1e999", "the number 1e999 is too large"),
    "long number": (USER + b"1" * 5000, "Exceeds the limit"),
    "no object": (["text"], "the line is a list, expected an object"),
    "other kind": ({"text": "a"}, "conversations is missing"),
    "unexpected key": ({**conversation(QUESTION, ANSWER), "id": 7}, "unexpected key 'id'"),
    "no list": ({"conversations": "hello"}, "conversations is a string, expected a list"),
    "null": ({"conversations": None}, "conversations is null, expected a list"),
    "no turn": (conversation(), "conversations is empty"),
    "no assistant": (conversation(SYSTEM, QUESTION), "no assistant turn"),
    "no message": (conversation(QUESTION, "hello"), "turn 2 of conversations: it is a string, expected an object"),
    "no role": (conversation({"content": "a"}, ANSWER), "turn 1 of conversations: role is missing"),
    "no content": (conversation(QUESTION, {"role": "assistant"}), "turn 2 of conversations: content is missing"),
    "null content": (conversation(QUESTION, {**ANSWER, "content": None}), "content is null, expected a string"),
    "number": (conversation(QUESTION, {**ANSWER, "content": 12}), "content is a number, expected a string"),
    "boolean": (conversation({**QUESTION, "role": True}), "role is a boolean, expected a string"),
    "unknown role": (conversation({**QUESTION, "role": "human"}), "role is 'human', expected one of system, user"),
    "unknown key": (conversation({**QUESTION, "from": "human"}), "turn 1 of conversations: unexpected key 'from'"),
    "reasoning of a user": (conversation({**QUESTION, "reasoning_content": "hm"}), "reasoning_content in a turn of u"),
    "reasoning list": (conversation({**ANSWER, "reasoning_content": ["a"]}), "reasoning_content is a list, expected"),
    "calls of a user": (conversation({**CALL, "role": "user"}), "tool_calls in a turn of user"),
    "tools of a user": (
        conversation({**QUESTION, "tools": [NOW]}),
        "tools in a turn of user: they belong into one of",
    ),
    "tools twice": (conversation({**SYSTEM, "tools": [NOW]}, {**SYSTEM, "tools": [ADD]}), "tools are there for a sec"),
    "one tool": (conversation({**SYSTEM, "tools": NOW}, ANSWER), "tools is an object, expected a list"),
    "tools of text": (
        conversation({**SYSTEM, "tools": '["a"]'}, ANSWER),
        "an item of tools is a string, expected an o",
    ),
    "empty tool": (conversation({**SYSTEM, "tools": [{}]}, ANSWER), "an item of tools is empty"),
    "broken tools": (
        conversation({**SYSTEM, "tools": "[{]"}, ANSWER),
        "turn 1 of conversations: tools: broken or cut",
    ),
    "uncarried tools": (
        conversation({**SYSTEM, "tools": [UNCARRIED]}, ANSWER),
        "tools hold a number that datasets' J",
    ),
    "uncarried call": (call(id=212.6768), "tool_calls hold a number that datasets' Json type would change"),
    "call without name": (call(name=None), "name in tool_calls is null, expected a string"),
    "call without arguments": (call(arguments=None), "arguments in tool_calls is null, expected an object"),
    "call of a list": (call(arguments=[1]), "arguments in tool_calls is a list, expected an object"),
    "function of text": (call(function="now"), "function of tool_calls is a string, expected an object"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_line_is_named_and_nothing_written(case, tmp_path):
    line, message = BAD[case]
    source = write_lines(tmp_path / "source.jsonl", conversation(QUESTION, ANSWER), b"", line)
    with pytest.raises(ConversionError) as raised:
        convert_dataset(source, tmp_path / "dataset")
    assert str(raised.value).startswith(f"{source} has 1 bad line (line 3: ")
    assert message in str(raised.value)
    assert "--skip-bad-lines" in str(raised.value)
    assert os.listdir(tmp_path) == ["source.jsonl"]


BAD_PREFERENCES = {
    "no common prompt": (preference([ANSWER], [PLACEHOLDER]), "no common prompt"),
    "other question": (preference([QUESTION, ANSWER], [RESULT, ANSWER]), "no common prompt"),
    "same": (preference([QUESTION, ANSWER], [QUESTION, ANSWER]), "are the same"),
    "one is a part": (preference([QUESTION, ANSWER], [QUESTION]), "rejected differs from turn 2 on"),
    "the other is": (preference([QUESTION], [QUESTION, ANSWER]), "chosen differs from turn 2 on"),
    "other system": (preference([SYSTEM, QUESTION, ANSWER], [SYSTEM, RESULT, ANSWER]), "differs from turn 2 on"),
    "longer": (
        preference([QUESTION, ANSWER, QUESTION, ANSWER], [QUESTION, PLACEHOLDER]),
        "chosen differs from turn 2",
    ),
    "nothing asked": (preference([SYSTEM, ANSWER], [SYSTEM, PLACEHOLDER]), "no turn of a user or a tool"),
    "other tools": (
        preference([{**SYSTEM, "tools": [NOW]}, QUESTION, ANSWER], [SYSTEM, QUESTION, PLACEHOLDER]),
        "different tools",
    ),
    "rejected missing": ({"chosen": [QUESTION, ANSWER]}, "rejected is missing"),
    "bad turn": (preference([QUESTION, ANSWER], [QUESTION, {}]), "turn 2 of rejected: role is missing"),
}
BAD_PROMPTS = {
    "no placeholder": (conversation(QUESTION), "the last turn is one of user"),
    "nothing but a placeholder": (conversation(PLACEHOLDER), "no turn of a user or a tool"),
    "nothing asked": (conversation(SYSTEM, PLACEHOLDER), "no turn of a user or a tool"),
}


@pytest.mark.parametrize("kind, case", [("preference", c) for c in BAD_PREFERENCES] + [("rl", c) for c in BAD_PROMPTS])
def test_a_bad_preference_or_prompt_is_named(kind, case, tmp_path):
    line, message = (BAD_PREFERENCES if kind == "preference" else BAD_PROMPTS)[case]
    with pytest.raises(ConversionError, match=f"1 bad line .line 1: .*{message}"):
        convert_dataset(write_lines(tmp_path / "source.jsonl", line), tmp_path / "dataset", kind)


def test_bad_lines_are_all_counted_and_the_first_ten_named(tmp_path):
    source = write_lines(tmp_path / "source.jsonl", {"text": "a"}, *[b"bad"] * 25, {"text": "b"}, {"text": ""})
    with pytest.raises(ConversionError, match=r"has 26 bad lines \(line 2: .*line 11: [^;]*; …\): mend them"):
        convert_dataset(source, tmp_path / "dataset")


def test_bad_lines_are_skipped_on_request_and_reported(tmp_path):
    source = write_lines(tmp_path / "source.jsonl", b"{", {"text": "a"}, {"text": ""}, {"text": "b"}, {"text": 3})
    result = convert_dataset(source, tmp_path / "dataset", on_error="skip")
    assert result.startswith(
        "verified: 2 pretrain rows (text) read back equal to the lines of source.jsonl; skipped 3 "
    )
    for reason in (
        "line 1: broken or cut off",
        "line 3: text is empty",
        "line 5: text is a number, expected a string",
    ):
        assert reason in result
    assert datasets.load_from_disk(tmp_path / "dataset")["text"][:] == ["a", "b"]


def test_a_file_without_a_good_line_is_refused_even_when_bad_ones_are_skipped(tmp_path):
    source = write_lines(tmp_path / "source.jsonl", {"text": ""})
    with pytest.raises(ConversionError, match=r"1 bad line \(line 1: text is empty\), and no good one"):
        convert_dataset(source, tmp_path / "dataset", on_error="skip")
    assert os.listdir(tmp_path) == ["source.jsonl"]


def test_a_line_beyond_all_measure_is_skipped_without_holding_it(tmp_path, monkeypatch):
    monkeypatch.setattr(dataset_module, "LONGEST_LINE", 64)
    long = {"text": "x" * 1000}
    source = write_lines(tmp_path / "source.jsonl", long, {"text": "a"}, {"text": "x" * 51}, long)  # 64 bytes
    result = convert_dataset(source, tmp_path / "dataset", on_error="skip")
    assert "skipped 2 bad lines (line 1: longer than 64 bytes; line 4: longer than 64 bytes)" in result
    assert datasets.load_from_disk(tmp_path / "dataset")["text"][:] == ["a", "x" * 51]
    assert max(len(line) for _, line in dataset_module.read_lines(source, "")) == 65


# TRL's trainers.


@pytest.fixture
def trained(convert, tmp_path, tokenizer):
    """Train a tiny model for one step on samples with one of TRL's trainers, and give the trainer."""
    trl = pytest.importorskip("trl", reason="TRL is not installed")

    def trained(name, samples, kind=None, config=None, **arguments):
        config = getattr(trl, f"{name}Config")(
            output_dir=str(tmp_path / "trainer"),
            max_steps=1,
            per_device_train_batch_size=2,
            learning_rate=1e-3,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            use_cpu=True,
            bf16=False,
            disable_tqdm=True,
            **(config or {}),
        )
        model = tiny_model(vocab_size=6400, max_position_embeddings=512)
        rows = convert(*samples, kind=kind)
        trainer = getattr(trl, f"{name}Trainer")(
            model, args=config, train_dataset=rows, processing_class=tokenizer, **arguments
        )
        trainer.train()
        assert trainer.state.global_step == 1
        assert math.isfinite(trainer.state.log_history[0]["loss"])
        return trainer

    return trained


def test_sft_trainer_sees_what_the_template_renders(trained, tokenizer):
    call = {**CALL, "tool_calls": [{"name": "f", "arguments": UNCARRIED}]}
    turns = [QUESTION, call, RESULT, {**ANSWER, "reasoning_content": "add"}]
    samples = [conversation({**SYSTEM, "tools": json.dumps([NOW, ADD])}, *turns), conversation(QUESTION, ANSWER)]
    seen = trained("SFT", samples).train_dataset["input_ids"]
    expected = [
        tokenizer.apply_chat_template([SYSTEM, *turns], tools=[NOW, ADD], tokenize=False),
        tokenizer.apply_chat_template([QUESTION, ANSWER], tokenize=False),
    ]
    assert [tokenizer.decode(ids) for ids in seen] == expected


def test_sft_trainer_takes_pretraining_text(trained, tokenizer):
    texts = ["你好，世界！", "Hello world"]
    seen = trained("SFT", [{"text": text} for text in texts]).train_dataset["input_ids"]
    assert seen[:] == [[*tokenizer(text)["input_ids"], tokenizer.eos_token_id] for text in texts]


def test_dpo_trainer_splits_each_text_after_its_prompt(trained, tokenizer):
    turns = [SYSTEM, QUESTION, CALL, RESULT]
    pairs = [([QUESTION], ANSWER, PLACEHOLDER), (turns, PLACEHOLDER, ANSWER)]
    samples = [preference([*prompt, chosen], [*prompt, rejected]) for prompt, chosen, rejected in pairs]
    rows = trained("DPO", samples, ref_model=tiny_model(vocab_size=6400)).train_dataset
    for row, (prompt, chosen, rejected) in zip(rows, pairs, strict=True):
        before = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
        assert tokenizer.decode(row["prompt_ids"]) == before
        for answer, ids in ((chosen, row["chosen_ids"]), (rejected, row["rejected_ids"])):
            assert tokenizer.decode(ids) == f"{answer['content']}<|im_end|>\n"


def test_grpo_trainer_gives_the_prompt_and_the_tools_to_the_reward(trained):
    given = []

    def reward(prompts, completions, tools, **_):
        given.extend(zip(prompts, tools, strict=True))
        return [float(number) for number in range(len(completions))]

    samples = [conversation({**SYSTEM, "tools": [NOW]}, QUESTION, PLACEHOLDER)]
    trained(
        "GRPO",
        samples,
        kind="rl",
        config={"num_generations": 2, "max_completion_length": 4, "beta": 0.0},
        reward_funcs=reward,
    )
    assert given == [([SYSTEM, QUESTION], [NOW])] * 2
