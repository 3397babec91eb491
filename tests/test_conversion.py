"""Conversion: what must come out, and what must be refused with nothing written."""

import json
import math
import os
import pickle
import re
import shutil
import zipfile

import pytest
import torch
from conftest import FIXTURES, GOLDEN_CASES, MINIMIND2, MOE, SAVED_FILES, case_name, tiny_config, tiny_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, GenerationConfig

from minimind_hf.convert import ConversionError, to_hf, to_torch
from minimind_hf.convert.compare import compare_logits, load_for_comparison
from minimind_hf.convert.files import MINIMIND_FOLDER, written_whole
from minimind_hf.convert.inspection import cache_bytes, count_active, count_parameters, describe
from minimind_hf.convert.layout import clean_names, expected_shapes, fuse_experts

DENSE = FIXTURES / "minimind3" / "dense"
WEIGHTS = DENSE / "weights.pth"
TOKENIZER = FIXTURES / "tokenizer"


def load(path):
    return torch.load(path, weights_only=True)


def save(tensors, path):
    torch.save(tensors, path)
    return path


@pytest.fixture
def tensors():
    return load(WEIGHTS)


def test_expected_shapes_are_those_of_the_model():
    experts = {"use_moe": True, "num_experts": 3, "moe_intermediate_size": 32}
    for sizes in ({}, experts, {"use_qk_norm": False}, {**experts, "num_shared_experts": 2}):
        config = tiny_config(tie_word_embeddings=False, head_dim=8, **sizes)
        with torch.device("meta"):
            parameters = AutoModelForCausalLM.from_config(config).state_dict()
        fused = fuse_experts({name: torch.empty(shape) for name, shape in expected_shapes(config).items()})
        assert {name: tensor.shape for name, tensor in fused.items()} == {k: v.shape for k, v in parameters.items()}


def test_fuse_experts_on_small_numbers():
    numbers = {"gate": [[[1.0]], [[2.0]]], "up": [[[3.0]], [[4.0]]], "down": [[[5.0]], [[6.0]]]}
    tensors = {
        f"model.layers.0.mlp.experts.{expert}.{part}_proj.weight": torch.tensor(values[expert])
        for part, values in numbers.items()
        for expert in (1, 0)
    }
    fused = fuse_experts(tensors)
    assert fused["model.layers.0.mlp.experts.gate_up_proj"].tolist() == [[[1.0], [3.0]], [[2.0], [4.0]]]
    assert fused["model.layers.0.mlp.experts.down_proj"].tolist() == [[[5.0]], [[6.0]]]


def test_wrapper_prefixes_are_stripped_in_either_order_and_buffers_dropped():
    one = torch.ones(1)
    names = ["module._orig_mod.a", "_orig_mod.module.b", "_orig_mod.c", "d", "model.freqs_cos", "pos_cis"]
    assert list(clean_names(dict.fromkeys(names, one))) == ["a", "b", "c", "d"]
    with pytest.raises(ConversionError, match=r"module\.a"):
        clean_names({"a": one, "module.a": one})


@pytest.mark.parametrize("variant", ["dense_compiled", "dense_ddp", "dense_resume"])
def test_training_variants_give_the_same_model(variant, tmp_path, tensors):
    to_hf(FIXTURES / "variants" / f"{variant}.pth", tmp_path / "model")
    to_torch(tmp_path / "model", tmp_path / "back.pth")
    back = load(tmp_path / "back.pth")
    assert list(back) == list(tensors)
    assert all(torch.equal(back[name], tensors[name]) for name in tensors)


def test_file_of_an_old_torch_is_read(tmp_path, tensors):
    torch.save(tensors, tmp_path / "old.pth", _use_new_zipfile_serialization=False)
    to_hf(tmp_path / "old.pth", tmp_path / "model")
    written = load_file(tmp_path / "model" / "model.safetensors")
    assert all(torch.equal(written[name], tensors[name]) for name in written)


def test_every_case_comes_back_bit_for_bit(tmp_path):
    for case in GOLDEN_CASES:
        folder, back = tmp_path / case_name(case), tmp_path / f"{case_name(case)}.pth"
        to_hf(case / "weights.pth", folder, config=case / "hf_config.json")
        to_torch(folder, back, layout=case.parent.name)
        original, returned = load(case / "weights.pth"), load(back)
        assert list(returned) == list(original)
        assert all(torch.equal(returned[k], original[k]) and returned[k].dtype == original[k].dtype for k in original)


def test_sharded_folder_to_torch(tmp_path, tensors):
    to_hf(WEIGHTS, tmp_path / "whole")
    AutoModelForCausalLM.from_pretrained(tmp_path / "whole").save_pretrained(
        tmp_path / "sharded", max_shard_size="50KB"
    )
    assert (tmp_path / "sharded" / "model.safetensors.index.json").exists()
    to_torch(tmp_path / "sharded", tmp_path / "back.pth")
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in load(tmp_path / "back.pth").items())


def test_dtype_is_kept_or_chosen(tmp_path, tensors):
    to_hf(WEIGHTS, tmp_path / "kept")
    to_hf(WEIGHTS, tmp_path / "chosen", dtype="bfloat16")
    assert {t.dtype for t in load_file(tmp_path / "kept" / "model.safetensors").values()} == {torch.float16}
    chosen = load_file(tmp_path / "chosen" / "model.safetensors")
    assert all(torch.equal(tensor, tensors[name].bfloat16()) for name, tensor in chosen.items())


def test_mixed_dtypes_become_one_that_holds_both(tmp_path, tensors):
    tensors["model.norm.weight"] = tensors["model.norm.weight"].bfloat16()
    to_hf(save(tensors, tmp_path / "mixed.pth"), tmp_path / "model")
    written = load_file(tmp_path / "model" / "model.safetensors")
    assert all(torch.equal(tensor, tensors[name].float()) for name, tensor in written.items())


def test_folder_holds_what_a_hub_repository_needs(tmp_path):
    to_hf(WEIGHTS, tmp_path / "model")
    assert set(os.listdir(tmp_path / "model")) == SAVED_FILES


def test_tokenizer_comes_along_with_its_special_tokens(tmp_path, facts_sized_checkpoint):
    to_hf(facts_sized_checkpoint, tmp_path / "model", tokenizer=TOKENIZER)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    for example in json.loads((TOKENIZER / "golden.json").read_text(encoding="utf-8"))["encodings"]:
        assert tokenizer(example["text"])["input_ids"] == example["ids"]
    generation = GenerationConfig.from_pretrained(tmp_path / "model")
    assert (generation.bos_token_id, generation.eos_token_id, generation.pad_token_id) == (1, 2, 0)


@pytest.fixture
def facts_sized_checkpoint(tmp_path):
    """A random checkpoint with the 6400 tokens of MiniMind's tokenizer."""
    config = tiny_config(vocab_size=6400, hidden_size=16)
    tensors = {name: torch.randn(shape) for name, shape in expected_shapes(config).items()}
    return save(tensors, tmp_path / "wide.pth")


def test_config_tells_what_the_tensors_cannot(tmp_path):
    case = FIXTURES / "minimind3" / "moe-unnormalized"
    to_hf(case / "weights.pth", tmp_path / "model", config=case / "hf_config.json")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert config["norm_topk_prob"] is False
    assert config["max_position_embeddings"] == 256


def test_unknown_config_keys_come_along(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "minimind", "trained_on": "poems"}')
    to_hf(WEIGHTS, tmp_path / "model", config=tmp_path / "config.json")
    assert json.loads((tmp_path / "model" / "config.json").read_text())["trained_on"] == "poems"


def test_untied_weights_that_happen_to_be_equal_stay_untied_if_the_config_says_so(tmp_path):
    (tmp_path / "config.json").write_text('{"tie_word_embeddings": false}')
    to_hf(WEIGHTS, tmp_path / "model", config=tmp_path / "config.json")
    assert "lm_head.weight" in load_file(tmp_path / "model" / "model.safetensors")


# What must be refused. Each case makes a checkpoint and flags; the message must name the culprit.


def without(name):
    return lambda tensors: {key: tensor for key, tensor in tensors.items() if key != name}


def changed(**changes):
    return lambda tensors: {**tensors, **{name.replace("__", "."): value for name, value in changes.items()}}


NORM = "model.layers.1.input_layernorm.weight"
BROKEN = {
    "missing tensor": (without(NORM), NORM),
    "missing layer": (
        lambda tensors: {k.replace("layers.1.", "layers.7."): v for k, v in tensors.items()},
        r"missing: model\.layers\.1\.",
    ),
    "unexpected tensor": (changed(surprise=torch.ones(2)), "unexpected: surprise"),
    "wrong shape": (changed(model__norm__weight=torch.ones(63)), r"model\.norm\.weight is \[63\] instead of \[64\]"),
    "NaN": (changed(model__norm__weight=torch.full((64,), float("nan"))), r"model\.norm\.weight.*NaN"),
    "integers": (changed(model__norm__weight=torch.ones(64, dtype=torch.int8)), r"model\.norm\.weight.*int8"),
    "float8": (changed(model__norm__weight=torch.ones(64).to(torch.float8_e5m2)), r"model\.norm\.weight.*float8"),
    "expanded": (changed(model__norm__weight=torch.zeros(1).expand(10**12)), r"model\.norm\.weight.*holds fewer"),
    "not a tensor": (changed(epoch=3), "'epoch' is the name of a int"),
    "empty": (lambda tensors: {}, "no tensor at all"),
    "another model": (lambda tensors: {"transformer.wte.weight": torch.ones(2, 2)}, "transformer.wte.weight"),
    "a LoRA": (lambda tensors: {"model.layers.0.self_attn.q_proj.lora.A.weight": torch.ones(2, 2)}, "LoRA"),
    "empty embedding": (changed(model__embed_tokens__weight=torch.ones(192, 0)), "embed_tokens"),
    "no heads": (lambda tensors: {k: v for k, v in tensors.items() if "_norm." not in k}, "--num-attention-heads"),
    "a list": (lambda tensors: list(tensors.values()), "holds a list"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_checkpoint_is_refused_by_name(case, tensors, tmp_path):
    break_it, message = BROKEN[case]
    checkpoint = save(break_it(tensors), tmp_path / "broken.pth")
    with pytest.raises(ConversionError, match=message):
        to_hf(checkpoint, tmp_path / "model")
    assert os.listdir(tmp_path) == ["broken.pth"]


def test_tensors_beside_the_model_of_a_resume_file_are_not_dropped_in_silence(tmp_path, tensors):
    save({"model": tensors, "epoch": 3, "lm_head.weight": torch.ones(2)}, tmp_path / "resume.pth")
    with pytest.raises(ConversionError, match=r"beside it, lm_head\.weight"):
        to_hf(tmp_path / "resume.pth", tmp_path / "model")


def test_token_id_beyond_the_embeddings_is_refused(tmp_path, facts_sized_checkpoint):
    shutil.copytree(TOKENIZER, tmp_path / "tokenizer")
    content = json.loads((TOKENIZER / "tokenizer.json").read_text(encoding="utf-8"))
    last = next(token for token, number in content["model"]["vocab"].items() if number == 6399)
    content["model"]["vocab"][last] = 9999
    (tmp_path / "tokenizer" / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ConversionError, match="ids up to 9999"):
        to_hf(facts_sized_checkpoint, tmp_path / "model", tokenizer=tmp_path / "tokenizer")


CONTRADICTIONS = {
    "flag against tensors": ({"num_attention_heads": 8}, {}, "--num-attention-heads is 8 .* say 4"),
    "config against tensors": ({}, {"hidden_size": 128}, "hidden_size is 128 .* say 64"),
    "tied against tensors": ({}, {"tie_word_embeddings": True}, "tie_word_embeddings is True .* say False"),
    "other architecture": ({}, {"model_type": "llama"}, "llama"),
    "impossible config": ({}, {"num_experts_per_tok": 9}, "num_experts_per_tok=9"),
    "older generation": ({}, {"n_routed_experts": 4}, "another generation: .* MiniMind-3"),
    "early generation": ({}, {"dim": 64}, "another generation: .* MiniMind-3"),
    "flag against config": ({"rope_theta": 1e4}, {"rope_theta": 1e6}, "--rope-theta is 10000.0 .* says 1000000.0"),
    "wrong generation": ({"generation": "minimind1"}, {"head_dim": 16}, "--generation minimind1"),
    "nothing known": ({}, {"effective": {"hidden_size": 64}}, "no key of a MiniMind config"),
    "flag that is no number": ({"rope_theta": math.nan}, {"head_dim": 16}, "--rope-theta is nan"),
    "flag for experts that are none": ({"num_experts_per_tok": 2}, {"head_dim": 16}, "--num-experts-per-tok is 2"),
    "unknown generation": ({"generation": "minimind9"}, {"head_dim": 16}, "--generation minimind9"),
    "attention by foreign code": ({}, {"attn_implementation": "evil/kernel", "head_dim": 16}, "evil/kernel"),
    "not causal": ({}, {"is_causal": False, "head_dim": 16}, "is_causal"),
    "quantized": ({}, {"quantization_config": {"quant_method": "fp8"}, "head_dim": 16}, "quantized"),
    "shadowed method": ({}, {"model_type": "minimind", "to_dict": 3}, "to_dict"),
    "unknown dtype": ({"dtype": "int3"}, {}, "int3"),
}


@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_contradiction_is_refused(case, tmp_path):
    flags, config, message = CONTRADICTIONS[case]
    (tmp_path / "config.json").write_text(json.dumps(config))
    source = FIXTURES / "minimind3" / ("untied" if "tied" in case else "dense") / "weights.pth"
    with pytest.raises(ConversionError, match=message):
        to_hf(source, tmp_path / "model", config=tmp_path / "config.json", **flags)
    assert os.listdir(tmp_path) == ["config.json"]


def test_value_beyond_float16_is_refused(tmp_path, tensors):
    tensors = {name: tensor.float() for name, tensor in tensors.items()}
    tensors["model.norm.weight"][3] = 1e6
    with pytest.raises(ConversionError, match=r"model\.norm\.weight holds 1e\+06, beyond the 65504"):
        to_hf(save(tensors, tmp_path / "large.pth"), tmp_path / "model", dtype="float16")


class Hostile:
    def __reduce__(self):
        return os.system, ("touch EXECUTED",)


def test_hostile_pickle_is_refused_and_not_run(tmp_path, tensors, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({**tensors, "x": Hostile()}, "zip.pth")
    (tmp_path / "bare.pth").write_bytes(pickle.dumps(Hostile()))
    for name in ("zip.pth", "bare.pth"):
        with pytest.raises(ConversionError, match="Nothing in it was executed"):
            to_hf(tmp_path / name, tmp_path / "model")
    assert sorted(os.listdir(tmp_path)) == ["bare.pth", "zip.pth"]


def test_hostile_file_is_called_what_it_is(tmp_path, tensors):
    torch.save({**tensors, "x": Hostile()}, tmp_path / "hostile.pth")
    with pytest.raises(ConversionError, match=r"it holds (posix|nt)\.system"):
        to_hf(tmp_path / "hostile.pth", tmp_path / "model")


def test_half_downloaded_files_are_refused(tmp_path):
    whole = WEIGHTS.read_bytes()
    (tmp_path / "half.pth").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "empty.pth").write_bytes(b"")
    (tmp_path / "pointer.pth").write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    for name, message in [("half", "truncated"), ("empty", "truncated"), ("pointer", "git lfs pull"), ("no", "exist")]:
        with pytest.raises(ConversionError, match=message):
            to_hf(tmp_path / f"{name}.pth", tmp_path / "model")


def test_damaged_archive_is_refused_although_it_loads(tmp_path):
    whole = WEIGHTS.read_bytes()
    hole = bytearray(whole)
    hole[100_000:180_000] = bytes(80_000)  # what an interrupted download into a preallocated file leaves
    (tmp_path / "hole.pth").write_bytes(hole)
    with zipfile.ZipFile(WEIGHTS) as source, zipfile.ZipFile(tmp_path / "packed.pth", "w") as target:
        for name in source.namelist():
            target.writestr(name, source.read(name), zipfile.ZIP_DEFLATED)
    for name, message in [("hole", "checksum of .*data/"), ("packed", "compressed after")]:
        with pytest.raises(ConversionError, match=message):
            to_hf(tmp_path / f"{name}.pth", tmp_path / "model")


def test_tensors_that_share_memory_are_converted(tmp_path, tensors):
    tensors["model.layers.1.self_attn.q_proj.weight"] = tensors["model.layers.0.self_attn.q_proj.weight"]
    to_hf(save(tensors, tmp_path / "shared.pth"), tmp_path / "model")
    written = load_file(tmp_path / "model" / "model.safetensors")
    assert all(torch.equal(written[name], tensors[name]) for name in written)


def test_broken_folders_are_refused(tmp_path):
    to_hf(WEIGHTS, tmp_path / "good")
    good = (tmp_path / "good" / "model.safetensors").read_bytes()
    breakages = {
        "no weights": lambda folder: (folder / "model.safetensors").unlink(),
        "half a file": lambda folder: (folder / "model.safetensors").write_bytes(good[: len(good) // 2]),
        "no config": lambda folder: (folder / "config.json").unlink(),
        "bad config": lambda folder: (folder / "config.json").write_text("{"),
        "list config": lambda folder: (folder / "config.json").write_text("[]"),
        "quantized": lambda folder: (folder / "config.json").write_text(
            '{"model_type": "minimind", "quantization_config": {"quant_method": "fp8"}}'
        ),
        "repeated key": lambda folder: (folder / "config.json").write_text('{"head_dim": 16, "head_dim": 16}'),
        "deep config": lambda folder: (folder / "config.json").write_text("[" * 100_000),
        "stale index": lambda folder: (folder / "model.safetensors.index.json").write_text(
            '{"weight_map": {"model.norm.weight": "model.safetensors"}}'
        ),
        "escaping index": lambda folder: (folder / "model.safetensors.index.json").write_text(
            '{"weight_map": {"model.norm.weight": "../good/model.safetensors"}}'
        ),
    }
    for name, break_it in breakages.items():
        shutil.copytree(tmp_path / "good", tmp_path / name)
        break_it(tmp_path / name)
        with pytest.raises(ConversionError):
            to_torch(tmp_path / name, tmp_path / "back.pth")
        assert not (tmp_path / "back.pth").exists()


def test_tokenizer_larger_than_the_vocabulary_is_refused(tmp_path):
    with pytest.raises(ConversionError, match="ids up to 6399, but the model only 192"):
        to_hf(WEIGHTS, tmp_path / "model", tokenizer=TOKENIZER)


def test_tokenizer_that_contradicts_the_config_is_refused(tmp_path, facts_sized_checkpoint):
    (tmp_path / "config.json").write_text('{"eos_token_id": 7}')
    with pytest.raises(ConversionError, match="eos_token_id is 7"):
        to_hf(facts_sized_checkpoint, tmp_path / "m", tokenizer=TOKENIZER, config=tmp_path / "config.json")


# Outputs appear whole, or not at all.


def test_existing_results_are_replaced_only_on_request(tmp_path):
    folder, file = tmp_path / "model", tmp_path / "back.pth"
    to_hf(WEIGHTS, folder)
    to_torch(folder, file)
    before = file.stat().st_mtime_ns, (folder / "config.json").stat().st_mtime_ns
    with pytest.raises(ConversionError, match="--overwrite"):
        to_hf(WEIGHTS, folder, dtype="float32")
    with pytest.raises(ConversionError, match="--overwrite"):
        to_torch(folder, file)
    assert before == (file.stat().st_mtime_ns, (folder / "config.json").stat().st_mtime_ns)
    to_hf(WEIGHTS, folder, dtype="float32", overwrite=True)
    to_torch(folder, file, overwrite=True)
    assert {tensor.dtype for tensor in load(file).values()} == {torch.float32}


def test_overwrite_keeps_the_card_and_replaces_old_shards(tmp_path):
    to_hf(WEIGHTS, tmp_path / "model")
    AutoModelForCausalLM.from_pretrained(tmp_path / "model").save_pretrained(tmp_path / "model", max_shard_size="50KB")
    (tmp_path / "model" / "model.safetensors").unlink(missing_ok=True)
    (tmp_path / "model" / "README.md").write_text("My own words.")
    to_hf(WEIGHTS, tmp_path / "model", overwrite=True)
    assert (tmp_path / "model" / "README.md").read_text() == "My own words."
    assert [name for name in os.listdir(tmp_path / "model") if "safetensors" in name] == ["model.safetensors"]


@pytest.mark.parametrize("name", ["notes.txt", "tokenizer.json", "model-best-run.safetensors"])
def test_overwrite_never_loses_files_of_the_user(name, tmp_path):
    to_hf(WEIGHTS, tmp_path / "model")
    (tmp_path / "model" / name).write_text("mine")
    with pytest.raises(ConversionError, match=f"{re.escape(name)}, which would be lost"):
        to_hf(WEIGHTS, tmp_path / "model", overwrite=True)
    assert (tmp_path / "model" / name).read_text() == "mine"


@pytest.mark.parametrize("config", [None, '{"model_type": "llama"}'])
def test_overwrite_replaces_nothing_but_a_minimind_folder(config, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "README.md").write_text("mine")
    if config:
        (tmp_path / "model" / "config.json").write_text(config)
    with pytest.raises(ConversionError, match="model"):
        to_hf(WEIGHTS, tmp_path / "model", overwrite=True)
    assert (tmp_path / "model" / "README.md").read_text() == "mine"


def test_destination_in_the_source_is_refused(tmp_path):
    to_hf(WEIGHTS, tmp_path / "model")
    before = (tmp_path / "model" / "config.json").read_bytes()
    for name in ("config.json", "new.pth"):
        with pytest.raises(ConversionError, match="part of the source"):
            to_torch(tmp_path / "model", tmp_path / "model" / name, overwrite=True)
    shutil.copyfile(WEIGHTS, tmp_path / "weights.pth")
    with pytest.raises(ConversionError, match="part of the source"):
        to_hf(tmp_path / "weights.pth", tmp_path / "weights.pth", overwrite=True)
    with pytest.raises(ConversionError, match="part of the source"):
        to_hf(tmp_path / "weights.pth", tmp_path, overwrite=True)
    assert (tmp_path / "model" / "config.json").read_bytes() == before


def test_model_folders_and_safetensors_are_converted_too(tmp_path, tensors):
    to_hf(WEIGHTS, tmp_path / "model")
    to_hf(tmp_path / "model", tmp_path / "copy", dtype="float32")
    to_hf(tmp_path / "model" / "model.safetensors", tmp_path / "bare")
    for name in ("copy", "bare"):
        written = load_file(tmp_path / name / "model.safetensors")
        assert len(written) == 24
        assert all(torch.equal(written[key], tensors[key].to(written[key].dtype)) for key in written)


def test_folder_with_pickled_weights_is_converted(tmp_path, tensors):
    (tmp_path / "old").mkdir()
    shutil.copyfile(DENSE / "hf_config.json", tmp_path / "old" / "config.json")
    names, half = list(tensors), len(tensors) // 2
    for number, part in enumerate([names[:half], names[half:]], 1):
        save({name: tensors[name] for name in part}, tmp_path / "old" / f"pytorch_model-{number}-of-2.bin")
    index = {name: f"pytorch_model-{1 if name in names[:half] else 2}-of-2.bin" for name in names}
    (tmp_path / "old" / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": index}))
    to_torch(tmp_path / "old", tmp_path / "back.pth")
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in load(tmp_path / "back.pth").items())


def test_tokenizer_of_the_source_folder_comes_along(tmp_path, facts_sized_checkpoint):
    to_hf(facts_sized_checkpoint, tmp_path / "model", tokenizer=TOKENIZER)
    to_hf(tmp_path / "model", tmp_path / "copy")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "copy" / name).read_bytes() == (TOKENIZER / name).read_bytes()


def test_special_tokens_of_a_source_folder_are_kept(tmp_path, facts_sized_checkpoint):
    (tmp_path / "config.json").write_text('{"eos_token_id": [2, 0]}')
    to_hf(facts_sized_checkpoint, tmp_path / "model", tokenizer=TOKENIZER, config=tmp_path / "config.json")
    to_hf(tmp_path / "model", tmp_path / "copy")
    assert GenerationConfig.from_pretrained(tmp_path / "copy").eos_token_id == [2, 0]


def test_null_in_a_folder_of_its_own_stays_null(tmp_path):
    model = tiny_model(pad_token_id=None)
    model.save_pretrained(tmp_path / "model")
    to_hf(tmp_path / "model", tmp_path / "copy")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "copy").config.pad_token_id is None


def test_source_that_is_no_checkpoint_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe.pth")
    with pytest.raises(ConversionError, match="not a regular file"):
        to_hf(tmp_path / "pipe.pth", tmp_path / "again")
    with pytest.raises(ConversionError, match="not a regular file"):
        to_hf(WEIGHTS, tmp_path / "again", config=tmp_path / "pipe.pth")
    for name in ("model.safetensors", "pytorch_model.bin", "model.safetensors.index.json"):
        (tmp_path / name[:5]).mkdir(exist_ok=True)
        os.mkfifo(tmp_path / name[:5] / name)
        shutil.copyfile(DENSE / "hf_config.json", tmp_path / name[:5] / "config.json")
        with pytest.raises(ConversionError, match=r"not a regular file|remove the one that is stale"):
            to_hf(tmp_path / name[:5], tmp_path / "again")


def test_generation_settings_of_a_source_folder_are_kept(tmp_path):
    to_hf(WEIGHTS, tmp_path / "model")
    settings = {"temperature": 0.7, "do_sample": True, "eos_token_id": [2, 5], "repetition_penalty": 1.1}
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps(settings))
    to_hf(tmp_path / "model", tmp_path / "copy")
    copied = GenerationConfig.from_pretrained(tmp_path / "copy")
    assert {name: getattr(copied, name) for name in settings} == settings
    assert copied.bos_token_id == 1
    (tmp_path / "model" / "generation_config.json").write_text("{broken")
    with pytest.raises(ConversionError, match=r"generation_config\.json cannot be read"):
        to_hf(tmp_path / "model", tmp_path / "again")


def test_named_chat_templates_come_along(tmp_path, facts_sized_checkpoint):
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    tokenizer.chat_template = {"default": "{{ messages }}", "rag": "{{ documents }}"}
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    to_hf(facts_sized_checkpoint, tmp_path / "model", tokenizer=tmp_path / "tokenizer")
    assert AutoTokenizer.from_pretrained(tmp_path / "model").chat_template == tokenizer.chat_template


def test_rounding_is_reported(tmp_path, tensors):
    assert "rounded" not in to_hf(WEIGHTS, tmp_path / "wider", dtype="float32")
    assert "; rounded from float16 to bfloat16" in to_hf(WEIGHTS, tmp_path / "narrower", dtype="bfloat16")


def test_old_buffers_are_dropped_whatever_they_hold(tmp_path, tensors):
    tensors["pos_cis"] = torch.ones(8, 4, dtype=torch.complex64)
    tensors["layers.0.attention.mask"] = torch.full((1, 1, 8, 8), float("-inf"))
    to_hf(save(tensors, tmp_path / "old.pth"), tmp_path / "model")
    assert len(load_file(tmp_path / "model" / "model.safetensors")) == 24


class Interrupted(BaseException):
    pass


@pytest.fixture
def existing(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "minimind"}')
    return tmp_path / "model"


def write(folder, content):
    with written_whole(folder, [WEIGHTS], True, MINIMIND_FOLDER) as draft:
        (draft / "config.json").write_text(content)
        if content == "unfinished":
            raise Interrupted


def assert_untouched(existing):
    assert os.listdir(existing.parent) == ["model"]
    assert (existing / "config.json").read_text() == '{"model_type": "minimind"}'


def test_failure_leaves_the_existing_folder_and_no_draft(existing):
    with pytest.raises(Interrupted):
        write(existing, "unfinished")
    assert_untouched(existing)


def test_interrupt_between_the_renames_restores_the_folder(existing, monkeypatch):
    rename = type(existing).rename

    def rename_and_be_interrupted(path, target):
        rename(path, target)
        if target.name == "replaced":
            raise Interrupted

    monkeypatch.setattr(type(existing), "rename", rename_and_be_interrupted)
    with pytest.raises(Interrupted):
        write(existing, "finished")
    assert_untouched(existing)


def test_overwrite_replaces_no_file_of_another_kind(tmp_path):
    (tmp_path / "thesis.docx").write_text("mine")
    with zipfile.ZipFile(tmp_path / "photos.zip", "w") as archive:
        archive.writestr("photo", "mine")
    for name in ("thesis.docx", "photos.zip"):
        before = (tmp_path / name).read_bytes()
        with pytest.raises(ConversionError, match="--overwrite leaves it alone"):
            to_torch(WEIGHTS, tmp_path / name, overwrite=True)
        assert (tmp_path / name).read_bytes() == before


def test_files_that_are_read_are_not_replaced(tmp_path):
    shutil.copyfile(DENSE / "hf_config.json", tmp_path / "config.json")
    with pytest.raises(ConversionError, match="part of the source"):
        to_torch(WEIGHTS, tmp_path / "config.json", config=tmp_path / "config.json", overwrite=True)
    to_hf(WEIGHTS, tmp_path / "model")
    (tmp_path / "links").mkdir()
    for path in (tmp_path / "model").iterdir():
        (tmp_path / "links" / path.name).symlink_to(path)
    with pytest.raises(ConversionError, match="part of the source"):
        to_hf(tmp_path / "links", tmp_path / "model", dtype="bfloat16", overwrite=True)
    assert json.loads((tmp_path / "model" / "config.json").read_text())["dtype"] == "float16"


def test_folder_is_not_named_like_a_file(tmp_path):
    for name in ("model.gguf", "model.PTH", "model.safetensors"):
        with pytest.raises(ConversionError, match="leave the ending out"):
            to_hf(WEIGHTS, tmp_path / name)


def test_failure_leaves_no_new_parent_folders(tmp_path):
    with pytest.raises(Interrupted):
        write(tmp_path / "new" / "folders" / "model", "unfinished")
    assert os.listdir(tmp_path) == []


def test_destination_of_the_wrong_kind_is_refused(tmp_path):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    with pytest.raises(ConversionError, match="not a folder"):
        to_hf(WEIGHTS, tmp_path / "file", overwrite=True)
    to_hf(WEIGHTS, tmp_path / "model")
    with pytest.raises(ConversionError, match="not a file"):
        to_torch(tmp_path / "model", tmp_path / "folder", overwrite=True)
    assert (tmp_path / "file").read_text() == "mine"


def test_written_files_can_be_read_by_whoever_can_read_the_config(tmp_path):
    to_hf(WEIGHTS, tmp_path / "model")
    assert len({path.stat().st_mode for path in (tmp_path / "model").iterdir()}) == 1


# Inspect and verify.


@pytest.mark.parametrize("kind", [{}, {"tie_word_embeddings": False}, MOE, MINIMIND2])
def test_parameters_and_cache_are_those_of_the_model(kind):
    model = tiny_model(**kind)
    counts = count_parameters(model.config)
    assert sum(counts.values()) == model.num_parameters()
    layers = model.model.layers
    assert counts["attention"] == sum(
        p.numel() for layer in layers for p in layer.self_attn.parameters() if p.dim() > 1
    )
    asleep = sum(layer.mlp.experts.down_proj[2:].numel() * 3 for layer in layers) if kind.get("use_moe") else 0
    assert count_active(model.config) == model.num_parameters() - asleep  # 2 of 4 experts, 3 matrices each
    cache = DynamicCache(config=model.config)
    model(torch.ones(1, 1, dtype=torch.long), cache=cache)
    stored = [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]
    assert cache_bytes(model.config, 4) == sum(tensor.nbytes for tensor in stored)


def test_describe_counts_tied_parameters_once(tensors):
    facts = describe(WEIGHTS)
    expected = sum(tensor.numel() for name, tensor in tensors.items() if name != "lm_head.weight")
    assert facts["parameters"] == f"{expected:,}"
    assert (facts["generation"], facts["dtype"], facts["embeddings"]) == ("MiniMind-3", "float16", "tied")
    untied = describe(FIXTURES / "minimind3" / "untied" / "weights.pth")
    assert (untied["parameters"], untied["embeddings"]) == (
        f"{expected + tensors['lm_head.weight'].numel():,}",
        "not tied",
    )


def test_bare_checkpoint_is_compared_under_the_config_of_its_folder(tmp_path):
    case = FIXTURES / "minimind3" / "moe-top2"
    to_hf(case / "weights.pth", tmp_path / "model", config=case / "hf_config.json")
    bare = load_for_comparison(case / "weights.pth", other=tmp_path / "model")[0]
    assert compare_logits(load_for_comparison(tmp_path / "model")[0], bare).max_difference == 0


def test_folder_whose_config_does_not_fit_its_weights_is_not_loaded(tmp_path):
    to_hf(WEIGHTS, tmp_path / "good")
    for change in ({"num_hidden_layers": 1}, {"num_hidden_layers": 10**9}, {"use_moe": True}, {"model_type": "llama"}):
        shutil.copytree(tmp_path / "good", tmp_path / "bad", dirs_exist_ok=True)
        config = json.loads((tmp_path / "good" / "config.json").read_text()) | change
        (tmp_path / "bad" / "config.json").write_text(json.dumps(config))
        with pytest.raises(ConversionError):
            load_for_comparison(tmp_path / "bad")


def test_compare_logits_of_equal_and_of_different_models():
    first, second = (load_for_comparison(WEIGHTS)[0] for _ in range(2))
    same = compare_logits(first, second)
    assert (same.max_difference, same.greedy_agreement, same.kl_divergence) == (0, 1, 0)
    with torch.no_grad():
        second.model.embed_tokens.weight[:96] *= -1
    other = compare_logits(first, second)
    assert other.max_difference > 0.1 and other.greedy_agreement < 1 and other.kl_divergence > 0


def test_kl_divergence_against_arithmetic():
    class Fixed(torch.nn.Module):
        """Gives the same logits at every position."""

        def __init__(self, probabilities):
            super().__init__()
            self.config = tiny_config(vocab_size=2, eos_token_id=1)
            self.logits = torch.tensor(probabilities).log()

        def forward(self, ids):
            return type("Output", (), {"logits": self.logits.expand(*ids.shape, 2)})

    result = compare_logits(Fixed([0.5, 0.5]), Fixed([0.25, 0.75]))
    # KL = 0.5 ln(0.5 / 0.25) + 0.5 ln(0.5 / 0.75) = 0.5 ln(4 / 3)
    assert result.kl_divergence == pytest.approx(0.14384103622589042, abs=1e-6)
