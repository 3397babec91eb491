"""LoRA: MiniMind's files, PEFT's folders and merged models are the same model, or are refused with a reason."""

import json
import os
import re
import shutil
import sys

import pytest
import torch
import torch.nn.functional as F
from conftest import DENSE, FACTS, FIXTURES, MOE, needs_facts, tiny_model
from huggingface_hub import ModelCard
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from minimind_hf.convert import ConversionError, to_hf
from minimind_hf.convert.lora import LowRank, lora_to_peft, merge_lora, peft_to_lora

TOKENIZER = FIXTURES / "tokenizer"
LORA = FACTS / "lora"
Q0 = "model.layers.0.self_attn.q_proj"
O1 = "model.layers.1.self_attn.o_proj"
SQUARE = [f"model.layers.{layer}.self_attn.{part}" for layer in (0, 1) for part in ("q_proj", "o_proj")]


def load(path):
    return torch.load(path, weights_only=True)


def save(tensors, path):
    torch.save(tensors, path)
    return path


def random_lora(modules=SQUARE, rank=4, size=64, seed=5):
    """A LoRA of square layers, large enough for a forgotten one to show; `rank` may be one per module."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for module, r in zip(modules, [rank] * len(modules) if isinstance(rank, int) else rank, strict=True):
        tensors[f"{module}.lora.A.weight"] = torch.randn(r, size, generator=generator) / 8
        tensors[f"{module}.lora.B.weight"] = torch.randn(size, r, generator=generator) / 8
    return tensors


def updates(lora):
    """The W' - W of each layer of a LoRA file, multiplied out."""
    modules = [name.removesuffix(".lora.A.weight") for name in lora if ".A." in name]
    return {m: lora[f"{m}.lora.B.weight"].double() @ lora[f"{m}.lora.A.weight"].double() for m in modules}


def add_beside(model, lora):
    """Attach a LoRA file as MiniMind does: the output of a layer, and beside it B(A(x))."""
    for module in updates(lora):
        a, b = (lora[f"{module}.lora.{half}.weight"].float() for half in "AB")
        layer = model.get_submodule(module)
        layer.register_forward_hook(lambda _, inputs, output, a=a, b=b: output + F.linear(F.linear(inputs[0], a), b))
    return model


@pytest.fixture
def base(tmp_path):
    tiny_model().save_pretrained(tmp_path / "base")
    return tmp_path / "base"


@pytest.fixture
def lora(tmp_path):
    return save(random_lora(), tmp_path / "lora.pth")


def plain(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def with_peft(base, adapter):
    return PeftModel.from_pretrained(plain(base), adapter).eval()


def train_with_peft(model, folder, save_embedding_layers=False, **changes):
    """Save an adapter as PEFT trains it, with a random B; return the model with it."""
    settings = {"r": 4, "lora_alpha": 4, "target_modules": ["q_proj", "o_proj"], "task_type": "CAUSAL_LM"}
    adapted = get_peft_model(model, LoraConfig(**{**settings, **changes})).eval()
    torch.manual_seed(7)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.normal_(0, 0.125)
    adapted.save_pretrained(folder, save_embedding_layers=save_embedding_layers)
    return adapted


@torch.no_grad()
def logits(model, seed=1):
    ids = torch.randint(3, 192, (2, 12), generator=torch.Generator().manual_seed(seed))
    return model(ids).logits


def assert_close(found, expected):
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


# The trained LoRA: attached, as a PEFT adapter and merged, it is the model that the reference implementation computed.


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    to_hf(FACTS / "dense" / "full_sft_256.pth", folder / "base", tokenizer=TOKENIZER)
    lora_to_peft(LORA / "lora_identity_256.pth", folder / "peft")
    merge_lora(folder / "base", LORA / "lora_identity_256.pth", folder / "merged", dtype="float32")
    merge_lora(folder / "base", folder / "peft", folder / "merged_by_peft", dtype="float32")
    merge_lora(FACTS / "dense" / "full_sft_256.pth", LORA / "lora_identity_256.pth", folder / "merged.pth")
    merge_lora(FACTS / "dense" / "full_sft_256.pth", folder / "peft", folder / "with_tokenizer", tokenizer=TOKENIZER)
    return folder


FORMS = {
    "attached": lambda folder: add_beside(plain(folder / "base"), load(LORA / "lora_identity_256.pth")),
    "peft": lambda folder: with_peft(folder / "base", folder / "peft"),
    "merged": lambda folder: plain(folder / "merged"),
    "merged by peft": lambda folder: plain(folder / "merged_by_peft"),
}


@needs_facts
@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_the_trained_lora_gives_the_golden_outputs(form, trained):
    model = FORMS[form](trained)
    golden = load_file(LORA / "golden.safetensors")
    for prompt in range(4):
        ids, expected = golden[f"prompt{prompt}_input_ids"], golden[f"prompt{prompt}_new_tokens"]
        assert_close(model(ids).logits[:, -1], golden[f"prompt{prompt}_last_logits"])
        generated = model.generate(input_ids=ids, max_new_tokens=expected.shape[1], do_sample=False)
        assert torch.equal(generated[:, ids.shape[1] :], expected)


@needs_facts
@pytest.mark.parametrize("name", ["merged", "with_tokenizer"])
def test_merged_model_has_the_tokenizer_and_answers(name, trained):
    model, tokenizer = plain(trained / name), AutoTokenizer.from_pretrained(trained / name)
    for question, answer in json.loads((LORA / "answers.json").read_text(encoding="utf-8")).items():
        chat = [{"role": "user", "content": question}]
        inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        generated = model.generate(**inputs, max_new_tokens=32, do_sample=False)
        assert tokenizer.decode(generated[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True) == answer


@needs_facts
def test_half_precision_merge_is_rounded_once(trained):
    """The file is float16: each merged weight is the float16 next to W + B A, every other one is as it was."""
    base, merged = load(FACTS / "dense" / "full_sft_256.pth"), load(trained / "merged.pth")
    added = updates(load(LORA / "lora_identity_256.pth"))
    assert list(merged) == list(base)
    for name, weight in base.items():
        update = added.pop(name.removesuffix(".weight"), None)
        if update is None:
            assert torch.equal(merged[name], weight)
        else:
            spacing = torch.finfo(torch.float16).eps * merged[name].double().abs().clamp(min=2**-14)
            distance = (merged[name].double() - (weight.double() + update)).abs()
            assert (distance <= spacing / 2 + 1e-8).all()  # the sum itself is float32
    assert not added


@needs_facts
def test_trained_lora_comes_back_bit_for_bit(trained, tmp_path):
    peft_to_lora(trained / "peft", tmp_path / "back.pth")
    original, back = load(LORA / "lora_identity_256.pth"), load(tmp_path / "back.pth")
    assert original.keys() == back.keys()
    assert all(torch.equal(back[name], original[name]) and back[name].dtype == torch.float16 for name in original)


# A LoRA file becomes a PEFT adapter.


def test_adapter_is_what_peft_itself_would_save(base, lora, tmp_path):
    lora_to_peft(lora, tmp_path / "peft")
    with_peft(base, tmp_path / "peft").save_pretrained(tmp_path / "again")
    ours, theirs = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("peft", "again"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert f"base_model.model.{Q0}.lora_A.weight" in ours
    configs = [json.loads((tmp_path / name / "adapter_config.json").read_text()) for name in ("peft", "again")]
    configs[1]["target_modules"].sort()  # PEFT writes a set
    configs[0]["base_model_name_or_path"] = configs[1]["base_model_name_or_path"]
    assert configs[0] == configs[1]
    assert configs[0]["target_modules"] == sorted(SQUARE)
    assert configs[0]["lora_alpha"] == configs[0]["r"] == 4


def test_peft_loads_every_tensor_and_adds_none(base, lora, tmp_path):
    lora_to_peft(lora, tmp_path / "peft")
    adapted = get_peft_model(plain(base), LoraConfig.from_pretrained(tmp_path / "peft"))
    report = adapted.load_adapter(tmp_path / "peft", "default")
    assert not report.unexpected_keys and not [key for key in report.missing_keys if "lora" in key]
    assert_close(logits(adapted.eval()), logits(add_beside(plain(base), load(lora))))


def test_rank_is_that_of_each_layer(base, tmp_path):
    ranks = random_lora(rank=[3, 5, 3, 16])
    lora_to_peft(save(ranks, tmp_path / "ranks.pth"), tmp_path / "peft")
    merged = with_peft(base, tmp_path / "peft").merge_and_unload().state_dict()
    for module, update in updates(ranks).items():
        expected = plain(base).state_dict()[f"{module}.weight"] + update
        assert_close(merged[f"{module}.weight"].double(), expected.double())


def test_prefixes_of_wrappers_are_stripped(lora, tmp_path):
    lora_to_peft(lora, tmp_path / "plain")
    for prefix in ("_orig_mod.", "module.", "_orig_mod.module.", "module._orig_mod."):
        wrapped = save({prefix + name: tensor for name, tensor in load(lora).items()}, tmp_path / "wrapped.pth")
        lora_to_peft(wrapped, tmp_path / "wrapped", overwrite=True)
        for name in ("adapter_config.json", "adapter_model.safetensors"):
            assert (tmp_path / "wrapped" / name).read_bytes() == (tmp_path / "plain" / name).read_bytes()


def test_base_is_named_in_config_and_card(base, lora, tmp_path):
    lora_to_peft(lora, tmp_path / "hub", base="someone/minimind")
    lora_to_peft(lora, tmp_path / "local", base=str(base))
    assert LoraConfig.from_pretrained(tmp_path / "hub").base_model_name_or_path == "someone/minimind"
    assert LoraConfig.from_pretrained(tmp_path / "local").base_model_name_or_path == str(base)
    card = ModelCard.load(tmp_path / "hub" / "README.md")
    assert (card.data.base_model, card.data.library_name) == ("someone/minimind", "peft")
    assert str(tmp_path) not in (tmp_path / "local" / "README.md").read_text()


def test_base_that_peft_cannot_load_is_refused(lora, tmp_path):
    with pytest.raises(ConversionError, match=r"--base .* is a file"):
        lora_to_peft(lora, tmp_path / "peft", base=str(lora))


def test_missing_peft_names_the_extra(lora, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ConversionError, match=r"minimind-hf\[peft\]"):
        lora_to_peft(lora, tmp_path / "peft")
    assert os.listdir(tmp_path) == ["lora.pth"]


def test_tensors_of_any_stride_are_converted(lora, tmp_path):
    strided = {name: tensor.t().contiguous().t() for name, tensor in load(lora).items()}
    lora_to_peft(save(strided, tmp_path / "strided.pth"), tmp_path / "peft")
    peft_to_lora(tmp_path / "peft", tmp_path / "back.pth")
    assert all(torch.equal(tensor, load(lora)[name]) for name, tensor in load(tmp_path / "back.pth").items())


# A PEFT adapter becomes a LoRA file.


@pytest.mark.parametrize("sizes", [DENSE, MOE], ids=["dense", "moe"])
def test_adapter_trained_with_peft_becomes_a_lora_and_an_adapter_again(sizes, tmp_path):
    expected = logits(train_with_peft(tiny_model(**sizes), tmp_path / "trained"))
    peft_to_lora(tmp_path / "trained", tmp_path / "lora.pth")
    lora_to_peft(tmp_path / "lora.pth", tmp_path / "again")
    assert (expected - logits(tiny_model(**sizes))).abs().max() > 0.1
    assert_close(logits(add_beside(tiny_model(**sizes), load(tmp_path / "lora.pth"))), expected)
    assert torch.equal(logits(PeftModel.from_pretrained(tiny_model(**sizes), tmp_path / "again").eval()), expected)


def test_lora_has_one_rank_and_a_pair_for_every_square_layer_of_the_model(base, tmp_path):
    """MiniMind's loader makes LoRAs of one rank for all square Linear layers, and wants a value for each."""
    rank_pattern = {"layers.1.self_attn.q_proj": 7}
    trained = train_with_peft(plain(base), tmp_path / "peft", target_modules=["q_proj"], rank_pattern=rank_pattern)
    line = peft_to_lora(tmp_path / "peft", tmp_path / "lora.pth")
    assert "1 of a lower rank" in line and "2 layers that MiniMind expects" in line and "scaling" in line
    lora = load(tmp_path / "lora.pth")
    linear = {n: m for n, m in plain(base).named_modules() if isinstance(m, torch.nn.Linear)}
    square = {name for name, layer in linear.items() if layer.in_features == layer.out_features}
    assert lora.keys() == {f"{name}.lora.{half}.weight" for name in square for half in "AB"}
    assert {t.shape for t in lora.values()} == {(7, 64), (64, 7)}
    assert_close(logits(add_beside(plain(base), lora)), logits(trained))


@pytest.mark.parametrize(
    ("changes", "scaling", "how"),
    [
        ({}, 1, None),
        ({"lora_alpha": 16}, 4, "exactly"),
        ({"lora_alpha": 1}, 0.25, "exactly"),
        ({"lora_alpha": 3}, 0.75, "rounded to float32"),
        ({"lora_alpha": 6, "use_rslora": True}, 3, "rounded to float32"),
        ({"lora_alpha": 4, "use_rslora": True}, 2, "exactly"),
        ({"alpha_pattern": {r"layers\.\d\.self_attn\.q_proj": 8, "o_proj": 8}}, 2, "exactly"),
    ],
)
def test_scaling_is_multiplied_into_b(changes, scaling, how, base, tmp_path):
    train_with_peft(plain(base), tmp_path / "peft", **changes)
    line = peft_to_lora(tmp_path / "peft", tmp_path / "lora.pth")
    assert how in line if how else "scaling" not in line
    lora, trained = load(tmp_path / "lora.pth"), load_file(tmp_path / "peft" / "adapter_model.safetensors")
    for module in SQUARE:
        assert torch.equal(lora[f"{module}.lora.A.weight"], trained[f"base_model.model.{module}.lora_A.weight"])
        b = trained[f"base_model.model.{module}.lora_B.weight"]
        assert torch.equal(lora[f"{module}.lora.B.weight"], (b.double() * scaling).float())


def edit(folder, change=lambda tensors: tensors, **settings):
    """Change the tensors and the config of an adapter folder in place."""
    tensors = change(load_file(folder / "adapter_model.safetensors"))
    save_file(tensors, folder / "adapter_model.safetensors")
    config = json.loads((folder / "adapter_config.json").read_text()) | settings
    (folder / "adapter_config.json").write_text(json.dumps(config))


def test_scaled_half_precision_b_keeps_its_dtype_only_where_that_is_exact(lora, tmp_path):
    for alpha, dtype in [(8, torch.float16), (6, torch.float32), (4 * 2**20, torch.float32)]:
        halved = {name: tensor.half() for name, tensor in load(lora).items()}
        lora_to_peft(save(halved, tmp_path / "half.pth"), tmp_path / "peft", overwrite=True)
        edit(tmp_path / "peft", lora_alpha=alpha)
        line = peft_to_lora(tmp_path / "peft", tmp_path / "back.pth", overwrite=True)
        back = load(tmp_path / "back.pth")[f"{Q0}.lora.B.weight"]
        assert back.dtype == dtype and "exactly" in line
        assert torch.equal(back.double(), halved[f"{Q0}.lora.B.weight"].double() * alpha / 4)


def compiled(tensors):
    """The names that PEFT gives the adapter of a compiled model."""
    return {name.replace("model.layers.", "_orig_mod.model.layers."): t.clone() for name, t in tensors.items()}


def test_adapter_of_a_compiled_model_is_read(lora, tmp_path):
    lora_to_peft(lora, tmp_path / "peft")
    edit(tmp_path / "peft", compiled)
    assert any("._orig_mod." in name for name in load_file(tmp_path / "peft" / "adapter_model.safetensors"))
    peft_to_lora(tmp_path / "peft", tmp_path / "back.pth")
    assert all(torch.equal(tensor, load(lora)[name]) for name, tensor in load(tmp_path / "back.pth").items())


def test_bin_file_of_an_older_peft_is_read(lora, tmp_path):
    lora_to_peft(lora, tmp_path / "peft")
    tensors = load_file(tmp_path / "peft" / "adapter_model.safetensors")
    (tmp_path / "peft" / "adapter_model.safetensors").unlink()
    save(tensors, tmp_path / "peft" / "adapter_model.bin")
    peft_to_lora(tmp_path / "peft", tmp_path / "back.pth")
    assert all(torch.equal(tensor, load(lora)[name]) for name, tensor in load(tmp_path / "back.pth").items())


# Merging.


@pytest.mark.parametrize("sizes", [DENSE, MOE, {"tie_word_embeddings": False}], ids=["dense", "moe", "untied"])
def test_merge_equals_that_of_peft(sizes, tmp_path):
    tiny_model(**sizes).save_pretrained(tmp_path / "base")
    targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
    targets += [] if "use_moe" in sizes else ["gate_proj", "up_proj", "down_proj"]
    targets += [] if sizes.get("tie_word_embeddings", True) else ["lm_head"]
    trained = train_with_peft(plain(tmp_path / "base"), tmp_path / "peft", lora_alpha=6, target_modules=targets)
    merge_lora(tmp_path / "base", tmp_path / "peft", tmp_path / "merged")
    expected = trained.merge_and_unload()
    merged = plain(tmp_path / "merged").state_dict()
    for name, tensor in expected.state_dict().items():
        torch.testing.assert_close(merged[name], tensor, atol=1e-6, rtol=0)
    assert_close(logits(plain(tmp_path / "merged")), logits(expected))


def test_merge_into_a_file_for_minimind(base, lora, tmp_path):
    line = merge_lora(base, lora, tmp_path / "merged.pth")
    assert "cannot record the merge" in line and "logits differ by at most" in line
    merged, before = load(tmp_path / "merged.pth"), plain(base).state_dict()
    assert next(iter(merged)) == "model.embed_tokens.weight" and list(merged)[-1] == "lm_head.weight"
    added = updates(load(lora))
    for name, tensor in merged.items():
        update = added.get(name.removesuffix(".weight"), torch.zeros(()).double())
        torch.testing.assert_close(tensor.double(), before[name].double() + update, atol=1e-6, rtol=0)
        assert name.removesuffix(".weight") in added or torch.equal(tensor, before[name])


def test_merged_dtype_is_that_of_the_base_or_the_chosen_one(lora, tmp_path):
    weights = FIXTURES / "minimind3" / "dense" / "weights.pth"
    line = merge_lora(weights, lora, tmp_path / "half")
    assert "in float32, by" in line and "once the weights are float16" in line
    merge_lora(weights, lora, tmp_path / "bfloat16", dtype="bfloat16")
    merge_lora(weights, lora, tmp_path / "whole", dtype="float32")
    whole = load_file(tmp_path / "whole" / "model.safetensors")
    for folder, dtype in (("half", torch.float16), ("bfloat16", torch.bfloat16)):
        written = load_file(tmp_path / folder / "model.safetensors")
        assert written.keys() == whole.keys()
        assert all(torch.equal(tensor, whole[name].to(dtype)) for name, tensor in written.items())


def test_merge_keeps_what_belongs_to_the_base_folder(base, lora, tmp_path):
    config = json.loads((base / "config.json").read_text()) | {"trained_on": "poems"}
    (base / "config.json").write_text(json.dumps(config))
    (base / "generation_config.json").write_text('{"temperature": 0.3, "do_sample": true, "eos_token_id": [2, 0]}')
    merge_lora(base, lora, tmp_path / "merged")
    merged = json.loads((tmp_path / "merged" / "config.json").read_text())
    assert merged.pop("merged_adapters") and merged == config
    assert (tmp_path / "merged" / "generation_config.json").read_bytes() == (
        base / "generation_config.json"
    ).read_bytes()


def test_merging_twice_is_refused_in_every_form_of_the_adapter(base, lora, tmp_path):
    lora_to_peft(lora, tmp_path / "peft")
    peft_to_lora(tmp_path / "peft", tmp_path / "back.pth")
    merge_lora(base, lora, tmp_path / "merged")
    for form in (lora, tmp_path / "peft", tmp_path / "back.pth"):
        with pytest.raises(ConversionError, match="merged into this model already"):
            merge_lora(tmp_path / "merged", form, tmp_path / "twice")
    other = save(random_lora(seed=6), tmp_path / "other.pth")
    merge_lora(tmp_path / "merged", other, tmp_path / "both")
    with pytest.raises(ConversionError, match="merged into this model already"):
        merge_lora(tmp_path / "both", lora, tmp_path / "twice")
    assert len(json.loads((tmp_path / "both" / "config.json").read_text())["merged_adapters"]) == 2
    shutil.copyfile(base / "config.json", tmp_path / "config.json")  # which knows of no merge
    with pytest.raises(ConversionError, match="merged into this model already"):
        merge_lora(tmp_path / "merged", lora, tmp_path / "twice", config=tmp_path / "config.json")
    assert not (tmp_path / "twice").exists()


def test_adapter_filled_up_with_zeros_is_still_known_as_merged(base, tmp_path):
    train_with_peft(plain(base), tmp_path / "peft", target_modules=["q_proj"], rank_pattern={"1.self_attn.q_proj": 6})
    peft_to_lora(tmp_path / "peft", tmp_path / "filled.pth")
    merge_lora(base, tmp_path / "peft", tmp_path / "merged")
    with pytest.raises(ConversionError, match="merged into this model already"):
        merge_lora(tmp_path / "merged", tmp_path / "filled.pth", tmp_path / "twice")


@pytest.mark.parametrize(
    ("target", "message"),
    [("lm_head", "lm_head, whose weight is the embedding table"), ("embed_tokens", "embed_tokens")],
)
def test_adapter_of_tied_embeddings_is_refused(target, message, base, tmp_path):
    train_with_peft(plain(base), tmp_path / "peft", target_modules=[target, "q_proj"])
    weights = (base / "model.safetensors").read_bytes()
    with pytest.raises(ConversionError, match=message):
        merge_lora(base, tmp_path / "peft", tmp_path / "merged")
    assert not (tmp_path / "merged").exists() and (base / "model.safetensors").read_bytes() == weights


def test_copies_of_the_models_own_weights_are_refused(base, tmp_path):
    train_with_peft(plain(base), tmp_path / "peft", target_modules=["lm_head"], save_embedding_layers=True)
    with pytest.raises(ConversionError, match=r"lm_head\.base_layer\.weight.*save_embedding_layers=False"):
        merge_lora(base, tmp_path / "peft", tmp_path / "merged")


def test_wrong_merge_does_not_pass_the_verification(base, lora, tmp_path, monkeypatch):
    right = LowRank.delta
    monkeypatch.setattr(LowRank, "delta", lambda update: right(update) * 1.01)
    with pytest.raises(ConversionError, match="verification failed: the logits of the merge"):
        merge_lora(base, lora, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()
    assert merge_lora(base, lora, tmp_path / "merged", verify=False).startswith("not verified")


def test_verification_can_be_left_out(lora, tmp_path):
    assert lora_to_peft(lora, tmp_path / "peft", verify=False) == "not verified"
    assert peft_to_lora(tmp_path / "peft", tmp_path / "back.pth", verify=False) == "not verified"
    assert all(torch.equal(tensor, load(lora)[name]) for name, tensor in load(tmp_path / "back.pth").items())


def test_untrained_adapter_is_not_merged(base, tmp_path):
    zeros = {name: tensor * (".A." in name) for name, tensor in random_lora().items()}
    with pytest.raises(ConversionError, match="changes no weight"):
        merge_lora(base, save(zeros, tmp_path / "zeros.pth"), tmp_path / "merged")


def test_result_beyond_the_range_of_its_dtype_is_refused(base, tmp_path):
    large = save({n: t * 100_000 for n, t in random_lora().items()}, tmp_path / "large.pth")
    with pytest.raises(ConversionError, match="beyond the 65504"):
        merge_lora(base, large, tmp_path / "merged", dtype="float16")
    huge = save({n: t * 1e25 for n, t in random_lora().items()}, tmp_path / "huge.pth")
    with pytest.raises(ConversionError, match="infinity"):
        merge_lora(base, huge, tmp_path / "merged")


# Early generations: other names, and rotary pairs that are neighbours.


EARLY = FIXTURES / "minimind2-early" / "dense"


@pytest.fixture
def early(tmp_path):
    """A LoRA under early names, and the early checkpoint with it merged by hand."""
    lora = random_lora([f"layers.{layer}.attention.{part}" for layer in (0, 1) for part in ("wq", "wo")])
    merged = {name: tensor.float() for name, tensor in load(EARLY / "weights.pth").items()}
    for module, update in updates(lora).items():
        merged[f"{module}.weight"] += update.float()
    return save(lora, tmp_path / "early.pth"), save(merged, tmp_path / "expected.pth")


def assert_same_tensors(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name], atol=1e-6, rtol=0)


def test_lora_of_an_early_generation_is_reordered(early, tmp_path):
    lora, expected = early
    config = EARLY / "hf_config.json"
    to_hf(EARLY / "weights.pth", tmp_path / "base", config=config)
    to_hf(expected, tmp_path / "expected", config=config)
    merge_lora(EARLY / "weights.pth", lora, tmp_path / "merged", config=config, dtype="float32")
    merge_lora(tmp_path / "base", lora, tmp_path / "of_folder", dtype="float32")
    merge_lora(EARLY / "weights.pth", lora, tmp_path / "merged.pth", config=config, dtype="float32")
    by_hand = load_file(tmp_path / "expected" / "model.safetensors")
    assert_same_tensors(load_file(tmp_path / "merged" / "model.safetensors"), by_hand)
    assert_same_tensors(load_file(tmp_path / "of_folder" / "model.safetensors"), by_hand)
    assert_same_tensors(load(tmp_path / "merged.pth"), load(expected))  # under the early names

    lora_to_peft(lora, tmp_path / "peft", base=str(tmp_path / "base"))
    assert_close(logits(with_peft(tmp_path / "base", tmp_path / "peft")), logits(plain(tmp_path / "expected")))


def test_lora_of_an_early_generation_needs_its_model(early, tmp_path):
    for base in (None, "someone/minimind"):
        with pytest.raises(ConversionError, match="--base"):
            lora_to_peft(early[0], tmp_path / "peft", base=base)


# PEFT and generation.


def test_wrapped_model_generates_what_the_merged_one_does(base, lora, tmp_path):
    lora_to_peft(lora, tmp_path / "peft")
    merge_lora(base, lora, tmp_path / "merged")
    wrapped, merged = with_peft(base, tmp_path / "peft"), plain(tmp_path / "merged")
    ids = torch.tensor([[3, 14, 15, 92, 65]])
    assert wrapped.can_generate() and merged.can_generate()
    found = wrapped.generate(input_ids=ids, max_new_tokens=12, do_sample=False, eos_token_id=None)
    assert torch.equal(found, merged.generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=None))
    assert found.shape == (1, 17)
    with wrapped.disable_adapter():
        assert torch.equal(logits(wrapped), logits(plain(base)))


# What must be refused. Each case changes a good LoRA; the message must name the culprit.


def without(name):
    return lambda tensors: {key: tensor for key, tensor in tensors.items() if key != name}


def plus(name, *shape):
    return lambda tensors: {**tensors, name: torch.ones(shape)}


def plus_pair(module):
    return lambda tensors: tensors | random_lora([module])


class Hostile:
    def __reduce__(self):
        return os.system, ("touch EXECUTED",)


BROKEN = {
    "unknown key": (plus("surprise", 2), "surprise"),
    "weights of the model too": (plus(f"{Q0}.weight", 64, 64), rf"holds {Q0}\.weight"),
    "missing B": (without(f"{Q0}.lora.B.weight"), rf"lacks {Q0}\.lora\.B\.weight"),
    "missing A": (without(f"{Q0}.lora.A.weight"), rf"lacks {Q0}\.lora\.A\.weight"),
    "two ranks": (plus(f"{Q0}.lora.A.weight", 3, 64), rf"{Q0} .* A \[3, 64\] and B \[64, 4\]"),
    "rank 0": (lambda t: t | random_lora([Q0], rank=0), rf"{Q0} .* A \[0, 64\]"),
    "three dimensions": (plus(f"{Q0}.lora.A.weight", 4, 64, 1), rf"{Q0} .* A \[4, 64, 1\]"),
    "embeddings": (plus_pair("model.embed_tokens"), "embed_tokens"),
    "norm": (plus_pair("model.norm"), r"model\.norm"),
    "router": (plus_pair("model.layers.0.mlp.gate"), r"mlp\.gate"),
    "expert": (plus_pair("model.layers.0.mlp.experts.0.gate_proj"), r"mlp\.experts\.0\.gate_proj"),
    "two generations": (plus_pair("layers.0.attention.wq"), "early"),
    "NaN": (lambda t: {k: v * float("nan") for k, v in t.items()}, "NaN"),
    "integers": (lambda t: {k: v.char() for k, v in t.items()}, "int8"),
    "hostile": (lambda t: {**t, "x": Hostile()}, "Nothing in it was executed"),
    "a list": (lambda t: list(t.values()), "holds a list"),
    "empty": (lambda t: {}, "no tensor at all"),
    "two prefixes": (lambda t: t | {f"module.{k}": v for k, v in t.items()}, "two tensors are named"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_lora_is_refused_by_name(case, base, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    break_it, message = BROKEN[case]
    broken = save(break_it(random_lora()), tmp_path / "broken.pth")
    with pytest.raises(ConversionError, match=message):
        lora_to_peft(broken, tmp_path / "peft", base=str(base))
    with pytest.raises(ConversionError, match=message):
        merge_lora(base, broken, tmp_path / "merged")
    assert sorted(os.listdir(tmp_path)) == ["base", "broken.pth"]


MISFITS = {
    "a layer too many": (random_lora([Q0, "model.layers.2.self_attn.q_proj"]), r"layers\.2\.self_attn\.q_proj"),
    "a very far layer": (random_lora([f"model.layers.{10**12}.self_attn.q_proj"]), "1000000000000"),
    "another size": (random_lora(size=32), rf"{Q0} is \[64, 64\] .* \[32, 32\]"),
    "not square here": (random_lora(["model.layers.0.self_attn.k_proj"]), r"k_proj is \[32, 64\]"),
}


@pytest.mark.parametrize("case", MISFITS)
def test_adapter_of_another_model_is_refused(case, base, tmp_path):
    tensors, message = MISFITS[case]
    lora = save(tensors, tmp_path / "lora.pth")
    with pytest.raises(ConversionError, match=message):
        merge_lora(base, lora, tmp_path / "merged")
    with pytest.raises(ConversionError, match=message):
        lora_to_peft(lora, tmp_path / "peft", base=str(base))
    assert sorted(os.listdir(tmp_path)) == ["base", "lora.pth"]


FEATURES = {
    "DoRA": ({"use_dora": True}, "magnitudes of DoRA"),
    "bias": ({"bias": "lora_only"}, "biases would be lost"),
    "LoRA bias": ({"lora_bias": True}, "biases of the LoRA"),
    "whole modules": ({"modules_to_save": ["lm_head"]}, "modules trained in full"),
    "tokens": ({"trainable_token_indices": [1, 2]}, "token embeddings"),
    "parameters": ({"target_parameters": ["mlp.experts.gate_up_proj"]}, "target_parameters"),
    "repeated layers": ({"layer_replication": [[0, 2], [1, 2]]}, "repeated layers"),
    "transposed": ({"fan_in_fan_out": True}, "fan_in_fan_out"),
    "pissa": ({"init_lora_weights": "pissa_niter_4"}, "pissa_niter_4.* changes the weights of the model"),
    "a list as initialisation": ({"init_lora_weights": ["pissa"]}, "changes the weights of the model"),
    "something of the future": ({"use_warp": {"speed": 9}}, "use_warp"),
    "not LoRA": ({"peft_type": "IA3"}, "type IA3"),
    "another rank": ({"r": 8}, "rank 4 in the tensors, but 8"),
    "no rank": ({"r": None}, "rank 4 in the tensors, but None"),
    "another rank by pattern": ({"rank_pattern": {"q_proj": 2}}, "rank 4 in the tensors, but 2"),
    "alpha is no number": ({"lora_alpha": "16"}, "lora_alpha .* '16'"),
    "alpha is infinite": ({"lora_alpha": float("inf")}, "lora_alpha .* inf"),
    "alpha is beyond any float": ({"lora_alpha": 10**400}, "lora_alpha .* 1000"),
    "bad pattern": ({"alpha_pattern": {"(": 2}}, "alpha_pattern"),
    "list of patterns": ({"rank_pattern": ["q_proj"]}, "rank_pattern"),
}


@pytest.mark.parametrize("case", FEATURES)
def test_adapter_that_is_more_than_a_lora_is_refused(case, base, lora, tmp_path):
    settings, message = FEATURES[case]
    lora_to_peft(lora, tmp_path / "peft")
    edit(tmp_path / "peft", **settings)
    with pytest.raises(ConversionError, match=message):
        peft_to_lora(tmp_path / "peft", tmp_path / "back.pth")
    with pytest.raises(ConversionError, match=message):
        merge_lora(base, tmp_path / "peft", tmp_path / "merged")
    assert sorted(os.listdir(tmp_path)) == ["base", "lora.pth", "peft"]


def test_adapter_that_minimind_would_lose_is_refused_but_can_be_merged(base, tmp_path):
    for changes, message in [
        ({"target_modules": ["q_proj", "v_proj"]}, "v_proj in .* not square"),
        ({"layers_to_transform": [0]}, r"for the layers \[0\] only"),
        ({"target_modules": [O1]}, r"for the layers \[1\] only"),
    ]:
        expected = logits(train_with_peft(plain(base), tmp_path / "peft", **changes))
        with pytest.raises(ConversionError, match=message):
            peft_to_lora(tmp_path / "peft", tmp_path / "lora.pth")
        merge_lora(base, tmp_path / "peft", tmp_path / "merged")
        assert_close(logits(plain(tmp_path / "merged")), expected)
        shutil.rmtree(tmp_path / "peft")
        shutil.rmtree(tmp_path / "merged")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: {k.replace("base_model.model.", ""): v for k, v in t.items()}, r"start with base_model\.model\."),
        (plus("base_model.model.model.norm.weight", 64), r"model\.norm\.weight"),
        (lambda tensors: tensors | compiled(tensors), "two tensors are named"),
        (plus(f"base_model.model.{Q0}.lora_magnitude_vector", 64), "lora_magnitude_vector"),
        (without(f"base_model.model.{Q0}.lora_B.weight"), rf"lacks {Q0}\.lora_B\.weight"),
    ],
    ids=["no prefix", "embeddings saved along", "two prefixes", "magnitudes", "missing half"],
)
def test_adapter_with_other_tensors_is_refused(change, message, lora, tmp_path):
    lora_to_peft(lora, tmp_path / "peft")
    edit(tmp_path / "peft", change)
    with pytest.raises(ConversionError, match=message):
        peft_to_lora(tmp_path / "peft", tmp_path / "back.pth")


def test_hostile_bin_file_is_refused_and_not_run(lora, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lora_to_peft(lora, tmp_path / "peft")
    (tmp_path / "peft" / "adapter_model.safetensors").unlink()
    save({"x": Hostile()}, tmp_path / "peft" / "adapter_model.bin")
    with pytest.raises(ConversionError, match="Nothing in it was executed"):
        peft_to_lora(tmp_path / "peft", tmp_path / "back.pth")
    assert sorted(os.listdir(tmp_path)) == ["lora.pth", "peft"]


def test_source_of_the_wrong_kind_is_refused(base, lora, tmp_path):
    lora_to_peft(lora, tmp_path / "peft")
    with pytest.raises(ConversionError, match=r"expected the \.pth file of a LoRA"):
        lora_to_peft(tmp_path / "peft", tmp_path / "out")
    for source in (base, lora, tmp_path / "nowhere"):
        with pytest.raises(ConversionError, match="not a PEFT adapter folder"):
            peft_to_lora(source, tmp_path / "out.pth")
    with pytest.raises(ConversionError, match=r"embed_tokens\.weight"):
        merge_lora(base, FIXTURES / "minimind3" / "dense" / "weights.pth", tmp_path / "out")
    (tmp_path / "peft" / "adapter_model.safetensors").unlink()
    with pytest.raises(ConversionError, match="not a whole PEFT adapter folder"):
        peft_to_lora(tmp_path / "peft", tmp_path / "out.pth")


def test_record_of_earlier_merges_that_is_no_list_is_refused(base, lora, tmp_path):
    config = json.loads((base / "config.json").read_text()) | {"merged_adapters": 3}
    (base / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConversionError, match="merged_adapters in the config is 3"):
        merge_lora(base, lora, tmp_path / "merged")


# Outputs appear whole, or not at all.


def test_existing_results_are_replaced_only_on_request(base, lora, tmp_path):
    def convert(overwrite=False):
        lora_to_peft(lora, tmp_path / "peft", overwrite=overwrite)

    def back(overwrite=False):
        peft_to_lora(tmp_path / "peft", tmp_path / "back.pth", overwrite=overwrite)

    def merge(overwrite=False):
        merge_lora(base, lora, tmp_path / "merged", overwrite=overwrite, verify=False)

    for run in (convert, back, merge):
        run()
        with pytest.raises(ConversionError, match="--overwrite"):
            run()
        run(overwrite=True)


def test_overwrite_keeps_the_card_and_other_folders(base, lora, tmp_path):
    lora_to_peft(lora, tmp_path / "peft")
    (tmp_path / "peft" / "README.md").write_text("My own words.")
    lora_to_peft(lora, tmp_path / "peft", overwrite=True)
    assert (tmp_path / "peft" / "README.md").read_text() == "My own words."
    (tmp_path / "peft" / "optimizer.pt").write_text("mine")
    with pytest.raises(ConversionError, match=re.escape("optimizer.pt, which would be lost")):
        lora_to_peft(lora, tmp_path / "peft", overwrite=True)
    for folder in (base, tmp_path / "peft"):
        with pytest.raises(ConversionError, match="part of the source"):
            merge_lora(base, tmp_path / "peft", folder, overwrite=True)
    with pytest.raises(ConversionError, match="part of the source"):
        lora_to_peft(lora, base, base=str(base), overwrite=True)
    with pytest.raises(ConversionError):
        lora_to_peft(lora, base, overwrite=True)
    assert "adapter_config.json" not in os.listdir(base)
