"""transformers.pipeline: a folder or a model is enough, and every task supports it."""

from threading import Thread

import pytest
import torch
from conftest import DENSE, FIXTURES, MOE, tiny_model
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, AutoTokenizer, TextIteratorStreamer, pipeline
from transformers.utils import logging as transformers_logging

from minimind_hf import MiniMindForSequenceClassification, MiniMindForTokenClassification, MiniMindModel
from minimind_hf.chat import RESPONSE_TEMPLATE
from minimind_hf.cli import TINY_MODEL

both_kinds = pytest.mark.parametrize("kind", [DENSE, MOE], ids=["dense", "moe"])

# Of different lengths, so that a batch is padded.
QUESTIONS = ["12 + 30 = ?", "What is 21 plus 9?", "7 + 5 = ?", "3 + 4 = ?"]
ANSWERS = ["12 + 30 = 42", "21 + 9 = 30", "7 + 5 = 12", "3 + 4 = 7"]
CHATS = [[{"role": "user", "content": question}] for question in QUESTIONS]
TEXTS = ["MiniMind is small.", "你好，世界！", "a", "one two three four five six"]


@pytest.fixture(autouse=True)
def every_model_is_supported(caplog):
    """No pipeline here may say "The model … is not supported for …"."""
    transformers_logging.enable_propagation()
    yield
    transformers_logging.disable_propagation()
    messages = [record.getMessage() for when in ("setup", "call") for record in caplog.get_records(when)]
    assert [message for message in messages if "not supported" in message] == []


@pytest.fixture(params=["folder", "model"])
def generator(request):
    if request.param == "folder":
        return pipeline("text-generation", str(TINY_MODEL))
    model = AutoModelForCausalLM.from_pretrained(TINY_MODEL)
    return pipeline("text-generation", model, tokenizer=AutoTokenizer.from_pretrained(TINY_MODEL))


@pytest.mark.parametrize("batch_size", [1, 4])
def test_text_generation_of_chats(generator, batch_size):
    outputs = generator(CHATS, batch_size=batch_size)
    answers = [[{"role": "assistant", "content": answer}] for answer in ANSWERS]
    assert [output["generated_text"] for [output] in outputs] == [
        chat + answer for chat, answer in zip(CHATS, answers, strict=True)
    ]


@pytest.mark.parametrize("batch_size", [1, 4])
def test_text_generation_of_strings(generator, batch_size):
    prompts = [f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n" for question in QUESTIONS]
    outputs = generator(prompts, batch_size=batch_size)
    assert [output["generated_text"] for [output] in outputs] == [
        prompt + answer for prompt, answer in zip(prompts, ANSWERS, strict=True)
    ]
    outputs = generator(prompts, batch_size=batch_size, return_full_text=False)
    assert [output["generated_text"] for [output] in outputs] == ANSWERS


def test_text_generation_as_a_stream(generator):
    streamer = TextIteratorStreamer(generator.tokenizer, skip_prompt=True, skip_special_tokens=True, timeout=60)
    thread = Thread(target=generator, args=(CHATS[0],), kwargs={"streamer": streamer})
    thread.start()
    pieces = [piece for piece in streamer if piece]
    thread.join()
    assert "".join(pieces) == ANSWERS[0]
    assert len(pieces) > 1


def test_chats_with_a_response_template_are_parsed(generator):
    generator.tokenizer.response_template = RESPONSE_TEMPLATE
    outputs = generator(CHATS, batch_size=4)
    assert [output["generated_text"][1:] for [output] in outputs] == [
        [{"role": "assistant", "content": answer}] for answer in ANSWERS
    ]


def saved(model_class, folder, **changes):
    """A random model and MiniMind's tokenizer in one folder; the model itself, to compare with; and the tokenizer."""
    model = tiny_model(model_class=model_class, vocab_size=6400, **changes)
    tokenizer = AutoTokenizer.from_pretrained(FIXTURES / "tokenizer")
    for part in (model, tokenizer):
        part.save_pretrained(folder)
    return str(folder), model, tokenizer


@torch.no_grad()
def each_alone(model, tokenizer):
    return [model(**tokenizer(text, return_tensors="pt"), return_dict=True) for text in TEXTS]


@both_kinds
@pytest.mark.parametrize("batch_size", [1, 4])
def test_text_classification(kind, batch_size, tmp_path):
    names = {0: "calm", 1: "glad", 2: "sad"}
    folder, model, tokenizer = saved(MiniMindForSequenceClassification, tmp_path, id2label=names, **kind)
    outputs = pipeline("text-classification", folder)(TEXTS, batch_size=batch_size)
    for output, alone in zip(outputs, each_alone(model, tokenizer), strict=True):
        score, index = alone.logits[0].softmax(-1).max(-1)
        assert output == {"label": names[index.item()], "score": pytest.approx(score.item(), abs=1e-5)}


@both_kinds
@pytest.mark.parametrize("batch_size", [1, 4])
def test_token_classification(kind, batch_size, tmp_path):
    names = {0: "thing", 1: "deed"}
    folder, model, tokenizer = saved(MiniMindForTokenClassification, tmp_path, id2label=names, **kind)
    outputs = pipeline("token-classification", folder)(TEXTS, batch_size=batch_size)
    for text, entities, alone in zip(TEXTS, outputs, each_alone(model, tokenizer), strict=True):
        scores, indices = alone.logits[0].softmax(-1).max(-1)
        encoded = tokenizer(text, return_offsets_mapping=True)
        assert [entity["word"] for entity in entities] == tokenizer.convert_ids_to_tokens(encoded["input_ids"])
        assert [(entity["start"], entity["end"]) for entity in entities] == encoded["offset_mapping"]
        assert [entity["entity"] for entity in entities] == [names[index] for index in indices.tolist()]
        assert [entity["score"] for entity in entities] == pytest.approx(scores.tolist(), abs=1e-5)


@both_kinds
def test_zero_shot_classification(kind, tmp_path):
    names = {0: "contradiction", 1: "neutral", 2: "entailment"}
    label2id = {name: index for index, name in names.items()}
    folder, model, tokenizer = saved(
        MiniMindForSequenceClassification, tmp_path, id2label=names, label2id=label2id, **kind
    )
    labels = ["rain", "sun"]
    output = pipeline("zero-shot-classification", folder)(TEXTS[0], candidate_labels=labels)
    with torch.no_grad():
        entailed = [
            model(**tokenizer(TEXTS[0], f"This example is {label}.", return_tensors="pt")).logits[0, 2]
            for label in labels
        ]
    expected = dict(zip(labels, torch.stack(entailed).softmax(-1).tolist(), strict=True))
    assert dict(zip(output["labels"], output["scores"], strict=True)) == pytest.approx(expected, abs=1e-5)


@both_kinds
@pytest.mark.parametrize("batch_size", [1, 4])
def test_feature_extraction(kind, batch_size, tmp_path):
    folder, model, tokenizer = saved(MiniMindModel, tmp_path, **kind)
    outputs = pipeline("feature-extraction", folder)(TEXTS, batch_size=batch_size, return_tensors=True)
    for output, alone in zip(outputs, each_alone(model, tokenizer), strict=True):
        length = alone.last_hidden_state.shape[1]  # a batch is padded, on the right as MiniMind's tokenizer does
        assert_close(output[:, :length], alone.last_hidden_state, rtol=0, atol=1e-5)
