"""`fast_generation`: the tokens of the compiled model are the plain ones; nothing where it cannot apply."""

import json
import logging

import pytest
import torch
from conftest import DENSE, FACTS, MOE, needs_facts, tiny_model
from torch.testing import assert_close
from torchao.quantization import Int8WeightOnlyConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, TorchAoConfig, pipeline

from minimind_hf import speed
from minimind_hf.cli import TINY_MODEL
from minimind_hf.convert import to_hf
from minimind_hf.speed import fast_generation


@pytest.fixture
def compilations(monkeypatch):
    """How often a forward was handed to the compiler: a test of plain `generate` against itself would show nothing."""
    calls = []

    def counted(*arguments, **options):
        calls.append(options)
        return compile_model(*arguments, **options)

    compile_model = torch.compile
    monkeypatch.setattr(torch, "compile", counted)
    torch._dynamo.reset()
    return calls


def prompts(rows, length, padding=0):
    """Random tokens [B, S]; the first row begins with padding."""
    tokens = torch.randint(3, 192, (rows, length), generator=torch.Generator().manual_seed(length))
    mask = torch.ones_like(tokens)
    mask[0, :padding] = 0
    return {"input_ids": tokens, "attention_mask": mask}


@pytest.mark.parametrize("kind", [DENSE, MOE], ids=["dense", "moe"])
def test_compiled_tokens_are_the_plain_ones(kind, compilations):
    model = tiny_model(**kind)
    options = {"do_sample": False, "max_new_tokens": 12, "pad_token_id": 0, "eos_token_id": None}
    for batch in (prompts(1, 5), prompts(1, 40), prompts(3, 9, padding=4), prompts(2, 20, padding=7)):
        plain = model.generate(**batch, **options)
        assert torch.equal(model.generate(**batch, **options, **fast_generation(model)), plain)
    assert len(compilations) > 0 and all(call["dynamic"] for call in compilations)


def test_compiled_logits_in_bfloat16(compilations):
    """Within the rounding of bfloat16 of the logits in float32, as the plain ones are."""
    exact = tiny_model()
    model = tiny_model().to(torch.bfloat16)
    exact.load_state_dict(model.state_dict())
    batch = prompts(1, 10)
    options = {"do_sample": False, "max_new_tokens": 2, "output_logits": True, "return_dict_in_generate": True}
    options |= {"pad_token_id": 0, "eos_token_id": None}
    fast, plain = (model.generate(**batch, **options, **extra) for extra in (fast_generation(model), {}))
    assert len(compilations) > 0
    assert torch.equal(fast.sequences, plain.sequences)
    logits = exact(fast.sequences[:, :-1]).logits[:, -1]
    scale = logits.abs().max().item()
    for half in (plain.logits[-1], fast.logits[-1]):
        assert_close(half.float(), logits, atol=0.03 * scale, rtol=0)


def test_compiled_pipeline(compilations):
    model = AutoModelForCausalLM.from_pretrained(TINY_MODEL, dtype="float32")
    generator = pipeline("text-generation", model=model, tokenizer=AutoTokenizer.from_pretrained(TINY_MODEL))
    chat = [{"role": "user", "content": "What is 12 plus 30?"}]
    (reply,) = generator(chat, do_sample=False, max_new_tokens=32, **fast_generation(model))
    assert reply["generated_text"][-1]["content"] == "12 + 30 = 42"
    assert len(compilations) > 0


@needs_facts
def test_compiled_int8_keeps_the_answers(compilations, tmp_path):
    to_hf(FACTS / "dense" / "full_sft_256.pth", tmp_path / "model", tokenizer=FACTS.parent / "tokenizer")
    quantization = TorchAoConfig(Int8WeightOnlyConfig())
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", dtype="bfloat16", quantization_config=quantization
    )
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model", padding_side="left")
    recorded = json.loads((FACTS / "dense" / "answers.json").read_text(encoding="utf-8"))
    generator = pipeline("text-generation", model=model, tokenizer=tokenizer)
    chats = [[{"role": "user", "content": question}] for question in recorded]
    replies = generator(chats, batch_size=46, do_sample=False, max_new_tokens=64, **fast_generation(model))
    given = [reply[0]["generated_text"][-1]["content"].strip() for reply in replies]
    assert sum(map(str.__eq__, given, recorded.values())) >= 225
    assert len(compilations) > 0


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"attention": "flex_attention"}, "has flex_attention"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e6}}, "rope_type='dynamic'"),
        ({"device": "meta"}, "not loaded"),
        ({"compiler": "no-such-compiler"}, "install g++ or clang"),
    ],
    ids=["attention", "rope", "meta", "compiler"],
)
def test_where_it_does_not_apply(changes, reason, caplog, monkeypatch):
    if "rope_parameters" in changes:
        model = tiny_model(rope_parameters=changes["rope_parameters"])
    else:
        model = tiny_model().to(changes.get("device", "cpu"))
    model.config._attn_implementation = changes.get("attention", "sdpa")
    if "compiler" in changes:
        monkeypatch.setattr("torch._inductor.config.cpp.cxx", (None, changes["compiler"]))
    with caplog.at_level(logging.WARNING, speed.__name__):
        assert fast_generation(model) == {}
    (record,) = caplog.records
    assert reason in record.getMessage()
