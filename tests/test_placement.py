"""Where weights are put: device maps, offloading to memory and disk, accelerate, the meta device."""

import json
import logging
import os
import re
import subprocess
import sys

import pytest
import torch
from accelerate import (
    cpu_offload,
    disk_offload,
    dispatch_model,
    infer_auto_device_map,
    init_empty_weights,
    load_checkpoint_and_dispatch,
)
from conftest import DENSE, MINIMIND2, MOE, tiny_model
from safetensors.torch import save_file
from transformers import AutoModel, AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from minimind_hf import MiniMindForCausalLM

APART = ("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head")  # all that is not a block
GREEDY = {"do_sample": False, "max_new_tokens": 4, "eos_token_id": None}

every_kind = pytest.mark.parametrize("kind", [DENSE, MOE, MINIMIND2], ids=["dense", "moe", "minimind2"])


@torch.no_grad()
def logits_of(model, input_ids):
    return model(input_ids).logits


def assert_no_block_is_split(device_map):
    for name in device_map:
        assert not re.search(r"layers\.\d+\.", name), f"{name} is placed apart from the rest of its block"


@every_kind
@pytest.mark.parametrize("strategy", ["auto", "balanced", "sequential"])
def test_every_strategy_offloads_to_disk_what_exceeds_the_memory(kind, strategy, input_ids, tmp_path):
    model = tiny_model(num_hidden_layers=4, **kind)
    model.save_pretrained(tmp_path / "model")
    block = sum(parameter.nbytes for parameter in model.model.layers[0].parameters())
    loaded = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model",
        device_map=strategy,
        max_memory={"cpu": int(3.5 * block)},
        offload_folder=tmp_path / "offload",
    )
    assert {str(device) for device in loaded.hf_device_map.values()} == {"cpu", "disk"}
    assert_no_block_is_split(loaded.hf_device_map)
    assert torch.equal(logits_of(loaded, input_ids), logits_of(model, input_ids))
    assert torch.equal(loaded.generate(input_ids, **GREEDY), model.generate(input_ids, **GREEDY))


@every_kind
def test_offload_of_a_loaded_model(kind, input_ids, tmp_path):
    expected = logits_of(tiny_model(**kind), input_ids)
    offloaded = cpu_offload(tiny_model(**kind), execution_device=torch.device("cpu"))
    assert offloaded.lm_head.weight.is_meta
    assert torch.equal(logits_of(offloaded, input_ids), expected)

    offloaded = disk_offload(tiny_model(**kind), tmp_path / "all", execution_device=torch.device("cpu"))
    assert offloaded.lm_head.weight.is_meta
    assert torch.equal(logits_of(offloaded, input_ids), expected)

    device_map = {**dict.fromkeys(APART, "cpu"), "model.layers.0": "cpu", "model.layers.1": "disk"}
    dispatched = dispatch_model(tiny_model(**kind), device_map, main_device="cpu", offload_dir=tmp_path / "block")
    assert dispatched.model.layers[1].self_attn.q_proj.weight.is_meta
    assert torch.equal(logits_of(dispatched, input_ids), expected)


@pytest.mark.parametrize("head_on_disk", [True, False])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_head_apart_from_the_embedding_keeps_its_values(tied, head_on_disk, input_ids, tmp_path):
    model = tiny_model(tie_word_embeddings=tied)
    model.save_pretrained(tmp_path / "model")
    expected = logits_of(model, input_ids)
    device_map = {**dict.fromkeys(APART, "cpu"), "model.layers": "cpu"}
    device_map["lm_head" if head_on_disk else "model.embed_tokens"] = "disk"
    dispatched = dispatch_model(model, device_map, main_device="cpu", offload_dir=tmp_path / "dispatched")
    assert torch.equal(logits_of(dispatched, input_ids), expected)

    def load():
        return AutoModelForCausalLM.from_pretrained(
            tmp_path / "model", device_map=device_map, offload_folder=tmp_path / "loaded"
        )

    if tied:  # no file holds the head: transformers refuses, as for its own models
        with pytest.raises((KeyError, ValueError), match=r"lm_head\.weight|meta device"):
            logits_of(load(), input_ids)
    else:
        assert torch.equal(logits_of(load(), input_ids), expected)


ACCELERATE_MAPS = {
    "cpu": {"": "cpu"},
    "a-block-on-disk": {**dict.fromkeys(APART, "cpu"), "model.layers.0": "cpu", "model.layers.1": "disk"},
    "blocks-on-disk": {**dict.fromkeys(APART, "cpu"), "model.layers": "disk"},
}
every_accelerate_map = pytest.mark.parametrize("placed", ACCELERATE_MAPS)


def load_with_accelerate(config, checkpoint, offload, placed):
    with init_empty_weights():
        model = MiniMindForCausalLM(config)
    model.tie_weights()
    return load_checkpoint_and_dispatch(
        model,
        str(checkpoint),
        device_map=ACCELERATE_MAPS[placed],
        offload_folder=offload,
        no_split_module_classes=list(model._no_split_modules),
    ).eval()


@every_accelerate_map
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_accelerate_loads_every_form_of_a_dense_checkpoint(tied, placed, input_ids, tmp_path):
    model = tiny_model(tie_word_embeddings=tied)
    model.save_pretrained(tmp_path / "one")
    model.save_pretrained(tmp_path / "many", max_shard_size="300KB")
    assert (tmp_path / "many/model.safetensors.index.json").exists()
    for form in ("one", "one/model.safetensors", "many", "many/model.safetensors.index.json"):
        loaded = load_with_accelerate(model.config, tmp_path / form, tmp_path / "offload", placed)
        assert torch.equal(logits_of(loaded, input_ids), logits_of(model, input_ids)), form


@every_accelerate_map
@pytest.mark.parametrize("kind", [MOE, MINIMIND2], ids=["moe", "minimind2"])
def test_accelerate_refuses_separate_experts_and_loads_fused_ones(kind, placed, input_ids, tmp_path, caplog):
    """It copies names as they stand and knows no conversion; the weights it left out have no data."""
    model = tiny_model(**kind)
    model.save_pretrained(tmp_path / "separate")
    with pytest.raises((NotImplementedError, ValueError, KeyError), match=r"no data|gate_up_proj"):
        logits_of(load_with_accelerate(model.config, tmp_path / "separate", tmp_path / "offload", placed), input_ids)
    if placed != "a-block-on-disk":  # there, the error comes before accelerate's list of what it left out
        assert "were not used" in caplog.text and "mlp.experts.3.down_proj.weight" in caplog.text

    model.save_pretrained(tmp_path / "fused", save_original_format=False)
    loaded = load_with_accelerate(model.config, tmp_path / "fused", tmp_path / "fused-offload", placed)
    assert torch.equal(logits_of(loaded, input_ids), logits_of(model, input_ids))
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "fused")
    assert torch.equal(logits_of(again, input_ids), logits_of(model, input_ids))


@pytest.mark.parametrize("size", ["1GB", "300KB"], ids=["one-file", "shards"])
def test_accelerate_fills_a_model_without_a_device_map(model, size, input_ids, tmp_path):
    model.save_pretrained(tmp_path, max_shard_size=size)
    loaded = load_checkpoint_and_dispatch(MiniMindForCausalLM(model.config), tmp_path).eval()
    assert torch.equal(logits_of(loaded, input_ids), logits_of(model, input_ids))


MAPS = {
    "sequential": "sequential",
    "balanced": "balanced",
    "cpu": {"": "cpu"},
    "blocks-on-disk": {
        **dict.fromkeys(APART, "cpu"),
        **{"model.layers.0": "disk", "model.layers.1": "disk"},
    },
    "all-but-a-block-on-disk": {
        **dict.fromkeys(APART, "disk"),
        **{"model.layers.0": "disk", "model.layers.1": "cpu"},
    },
}


@every_kind
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("placed", MAPS)
def test_every_device_map_gives_the_same_logits_and_tokens(kind, tied, placed, input_ids, tmp_path):
    model = tiny_model(tie_word_embeddings=tied, **kind)
    model.save_pretrained(tmp_path / "model")
    loaded = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", device_map=MAPS[placed], offload_folder=tmp_path / "offload"
    )
    assert torch.equal(logits_of(loaded, input_ids), logits_of(model, input_ids))
    assert torch.equal(loaded.generate(input_ids, **GREEDY), model.generate(input_ids, **GREEDY))


@every_kind
def test_offloaded_half_precision_keeps_float32_position_tables(kind, input_ids, tmp_path):
    tiny_model(**kind).save_pretrained(tmp_path / "model")
    expected = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype="bfloat16")
    loaded = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model",
        dtype="bfloat16",
        device_map=MAPS["blocks-on-disk"],
        offload_folder=tmp_path / "offload",
    )
    assert loaded.model.rotary_emb.inv_freq.dtype == torch.float32
    assert torch.equal(logits_of(loaded, input_ids), logits_of(expected, input_ids))


@every_kind
def test_no_block_is_split_however_little_memory_there_is(kind):
    model = tiny_model(num_hidden_layers=3, **kind)
    block = sum(parameter.nbytes for parameter in model.model.layers[0].parameters())
    everything = sum(parameter.nbytes for parameter in model.parameters())
    for limit in range(block // 2, everything, block // 2):
        memory = {"cpu": limit, "disk": 10**9}
        assert_no_block_is_split(infer_auto_device_map(model, memory, list(model._no_split_modules)))


@every_kind
def test_model_made_without_memory_takes_a_state_dict(kind, input_ids):
    model = tiny_model(**kind)
    with torch.device("meta"):
        empty = MiniMindForCausalLM(model.config).eval()
    assert all(parameter.is_meta for parameter in empty.parameters())
    empty.load_state_dict(model.state_dict(), assign=True)
    empty.tie_weights()
    empty.model.rotary_emb.to_empty(device="cpu")  # no state dict holds the frequencies: they are computed again
    assert torch.equal(logits_of(empty, input_ids), logits_of(model, input_ids))


def test_loading_under_a_default_device(input_ids, tmp_path):
    model = tiny_model()
    model.save_pretrained(tmp_path)
    with torch.device("cpu"):
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(logits_of(loaded, input_ids), logits_of(model, input_ids))
    with pytest.raises(RuntimeError, match="meta device"), torch.device("meta"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


@torch.no_grad()
def test_trunk_loads_from_the_shards_of_a_causal_lm(model, input_ids, tmp_path):
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    trunk = AutoModel.from_pretrained(tmp_path)
    assert torch.equal(trunk(input_ids).last_hidden_state, model.model(input_ids).last_hidden_state)


REMOTE = """
import sys
sys.modules["minimind_hf"] = None  # importing it raises ModuleNotFoundError
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

expected = load_file("expected.safetensors")
for folder in ("dense", "moe", "minimind2"):
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    assert type(model).__module__.startswith("transformers_modules."), type(model)
    with torch.no_grad():
        assert torch.equal(model(expected["input_ids"]).logits, expected[folder]), folder
"""


def test_remote_code_loads_shards(input_ids, tmp_path):
    expected = {"input_ids": input_ids}
    for folder, kind in (("dense", DENSE), ("moe", MOE), ("minimind2", MINIMIND2)):
        model = tiny_model(**kind)
        model.save_pretrained(tmp_path / folder, max_shard_size="100KB")
        assert len(list((tmp_path / folder).glob("model-*.safetensors"))) > 2
        expected[folder] = logits_of(model, input_ids)
    save_file(expected, tmp_path / "expected.safetensors")
    environment = {**os.environ, "HF_MODULES_CACHE": str(tmp_path / "modules")}
    finished = subprocess.run(
        [sys.executable, "-c", REMOTE], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=180
    )
    assert finished.returncode == 0, finished.stderr


def test_missing_shard_is_named(tmp_path):
    tiny_model().save_pretrained(tmp_path, max_shard_size="100KB")
    shard = sorted(tmp_path.glob("model-*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(OSError, match=re.escape(shard.name)):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_missing_file_that_the_index_names_is_named(tmp_path):
    tiny_model().save_pretrained(tmp_path, max_shard_size="100KB")
    path = tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.norm.weight"] = "nowhere.safetensors"
    path.write_text(json.dumps(index))
    with pytest.raises(OSError, match=re.escape("nowhere.safetensors")):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def tiny_qwen3(tied):
    sizes = {"vocab_size": 192, "hidden_size": 64, "num_hidden_layers": 2, "head_dim": 16, "intermediate_size": 256}
    return Qwen3ForCausalLM(
        Qwen3Config(**sizes, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=tied)
    )


@every_kind
def test_untying_a_tied_folder_warns_of_the_missing_head(kind, tmp_path, caplog, monkeypatch):
    """As for stock models: the head is new, and a warning says so."""
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    for name, model in (("minimind", tiny_model(**kind)), ("qwen3", tiny_qwen3(tied=True))):
        model.save_pretrained(tmp_path / name)
        caplog.clear()
        loaded, info = AutoModelForCausalLM.from_pretrained(
            tmp_path / name, tie_word_embeddings=False, output_loading_info=True
        )
        assert set(info["missing_keys"]) == {"lm_head.weight"}
        assert "lm_head.weight" in caplog.text
        assert torch.equal(loaded.model.embed_tokens.weight, model.model.embed_tokens.weight)


@every_kind
def test_tying_an_untied_folder_keeps_both_matrices(kind, input_ids, tmp_path):
    """As for stock models: weights that differ are not tied, loaded or saved again."""
    for name, model in (
        ("minimind", tiny_model(tie_word_embeddings=False, **kind)),
        ("qwen3", tiny_qwen3(tied=False).eval()),
    ):
        model.save_pretrained(tmp_path / name)
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / name, tie_word_embeddings=True)
        assert torch.equal(logits_of(loaded, input_ids), logits_of(model, input_ids))
        loaded.save_pretrained(tmp_path / "again" / name)
        again = AutoModelForCausalLM.from_pretrained(tmp_path / "again" / name)
        assert torch.equal(logits_of(again, input_ids), logits_of(model, input_ids))
