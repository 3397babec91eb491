"""The checkpoint in assets/minimind-tiny really answers."""

import sys

import pytest
from conftest import ROOT
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

from minimind_hf.cli import TINY_MODEL

sys.path.insert(0, str(ROOT / "examples"))
import train_tiny


@pytest.fixture(scope="module")
def tiny():
    return AutoModelForCausalLM.from_pretrained(TINY_MODEL), AutoTokenizer.from_pretrained(TINY_MODEL)


def test_at_least_98_of_100_held_out_sums_are_right(tiny):
    sums = train_tiny.held_out_sums()
    assert len(set(sums)) == 100
    prompts = [[{"role": "user", "content": f"{a} + {b} = ?"}] for a, b in sums]
    answers = train_tiny.answer(*tiny, prompts)
    right = [answer.split("=")[-1].strip() == str(a + b) for answer, (a, b) in zip(answers, sums, strict=True)]
    assert sum(right) >= 98


def test_training_never_shows_a_held_out_sum():
    held_out = {frozenset(pair) for pair in train_tiny.held_out_sums()}
    for conversation in train_tiny.training_conversations(2000, seed=5):
        for message in conversation:
            if message["role"] == "assistant" and " + " in message["content"]:
                a, b = message["content"].split(" = ")[0].split(" + ")
                assert frozenset((int(a), int(b))) not in held_out


def test_second_turn_knows_the_first(tiny):
    generator = pipeline("text-generation", model=tiny[0], tokenizer=tiny[1])
    chat = generator([{"role": "user", "content": "What is 12 plus 30?"}])[0]["generated_text"]
    chat = generator([*chat, {"role": "user", "content": "And plus 5?"}])[0]["generated_text"]
    answers = [message["content"] for message in chat if message["role"] == "assistant"]
    assert answers == ["12 + 30 = 42", "42 + 5 = 47"]


def test_tokenizer_loses_nothing(tiny):
    tokenizer = tiny[1]
    for text in (
        "12+30=?",
        " 前导空格",
        "tabs\tand\n\nblank lines",
        "emoji 😀👍🏽",
        "ＡＢＣ１２３",
        "naïve café \x00",
    ):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert len(tokenizer("1234567890")["input_ids"]) == 10
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1, 2)


def test_chat_template_marks_the_answers(tiny):
    tokenizer = tiny[1]
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    encoded = tokenizer.apply_chat_template(chat, return_dict=True, return_assistant_tokens_mask=True)
    marked = [token for token, mask in zip(encoded["input_ids"], encoded["assistant_masks"], strict=True) if mask]
    assert tokenizer.decode(marked) == "yes<|im_end|>"


def test_folder_is_small_and_holds_no_code():
    files = list(TINY_MODEL.iterdir())
    assert sum(path.stat().st_size for path in files) <= 4 * 2**20
    assert not [path.name for path in files if path.suffix == ".py"]


def test_training_script_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train_tiny.py", "--smoke", "--output", str(tmp_path / "model")])
    train_tiny.main()
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "model").config.model_type == "minimind"
