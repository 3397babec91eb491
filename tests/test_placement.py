"""Where weights are put: device maps, offloading to memory and disk, accelerate, the meta device."""

import re

import pytest
import torch
from accelerate import (
    cpu_offload,
    dispatch_model,
    infer_auto_device_map,
    init_empty_weights,
    load_checkpoint_and_dispatch,
)
from conftest import DENSE, MINIMIND2, MOE, tiny_model
from transformers import AutoModelForCausalLM

from minimind_hf import MiniMindConfig, MiniMindForCausalLM

every_kind = pytest.mark.parametrize("kind", [DENSE, MOE, MINIMIND2], ids=["dense", "moe", "minimind2"])


@torch.no_grad()
def logits_of(model, input_ids):
    return model(input_ids).logits


def assert_no_block_is_split(device_map):
    for name in device_map:
        assert not re.search(r"layers\.\d+\.", name), f"{name} is placed apart from the rest of its block"


@every_kind
def test_device_map_auto_with_offload_to_cpu_and_disk(kind, input_ids, tmp_path):
    model = tiny_model(num_hidden_layers=4, **kind)
    model.save_pretrained(tmp_path / "model")
    block = sum(parameter.nbytes for parameter in model.model.layers[0].parameters())
    loaded = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model",
        device_map="auto",
        max_memory={"cpu": int(3.5 * block)},
        offload_folder=tmp_path / "offload",
    )
    assert {str(device) for device in loaded.hf_device_map.values()} == {"cpu", "disk"}
    assert_no_block_is_split(loaded.hf_device_map)
    assert torch.equal(logits_of(loaded, input_ids), logits_of(model, input_ids))
    settings = {"do_sample": False, "max_new_tokens": 4, "eos_token_id": None}
    assert torch.equal(loaded.generate(input_ids, **settings), model.generate(input_ids, **settings))


@every_kind
def test_offload_of_a_loaded_model(kind, input_ids, tmp_path):
    expected = logits_of(tiny_model(**kind), input_ids)
    offloaded = cpu_offload(tiny_model(**kind), execution_device=torch.device("cpu"))
    assert offloaded.lm_head.weight.is_meta
    assert torch.equal(logits_of(offloaded, input_ids), expected)

    device_map = dict.fromkeys(("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"), "cpu")
    device_map |= {"model.layers.0": "cpu", "model.layers.1": "disk"}
    dispatched = dispatch_model(tiny_model(**kind), device_map, main_device="cpu", offload_dir=tmp_path)
    assert dispatched.model.layers[1].self_attn.q_proj.weight.is_meta
    assert torch.equal(logits_of(dispatched, input_ids), expected)


def load_with_accelerate(folder):
    with init_empty_weights():
        model = MiniMindForCausalLM(MiniMindConfig.from_pretrained(folder))
    model.tie_weights()
    return load_checkpoint_and_dispatch(model, folder, device_map={"": "cpu"}).eval()


@pytest.mark.parametrize("tied", [True, False])
def test_accelerate_loads_a_dense_checkpoint(tied, input_ids, tmp_path):
    model = tiny_model(tie_word_embeddings=tied)
    model.save_pretrained(tmp_path)
    assert torch.equal(logits_of(load_with_accelerate(tmp_path), input_ids), logits_of(model, input_ids))


def test_accelerate_refuses_the_separate_experts(tmp_path):
    """It copies names as they stand and knows no conversion; the weights it left out have no data."""
    tiny_model(**MOE).save_pretrained(tmp_path)
    with pytest.raises(NotImplementedError, match="no data"):
        load_with_accelerate(tmp_path)


MAPS = {
    "sequential": "sequential",
    "balanced": "balanced",
    "cpu": {"": "cpu"},
    "blocks-on-disk": {
        **dict.fromkeys(("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"), "cpu"),
        **{"model.layers.0": "disk", "model.layers.1": "disk"},
    },
    "all-but-a-block-on-disk": {
        **dict.fromkeys(("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"), "disk"),
        **{"model.layers.0": "disk", "model.layers.1": "cpu"},
    },
}


@every_kind
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("placed", MAPS)
def test_every_device_map_gives_the_same_logits(kind, tied, placed, input_ids, tmp_path):
    model = tiny_model(tie_word_embeddings=tied, **kind)
    model.save_pretrained(tmp_path / "model")
    loaded = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", device_map=MAPS[placed], offload_folder=tmp_path / "offload"
    )
    assert torch.equal(logits_of(loaded, input_ids), logits_of(model, input_ids))


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


def test_missing_shard_is_named(tmp_path):
    tiny_model().save_pretrained(tmp_path, max_shard_size="100KB")
    shard = sorted(tmp_path.glob("model-*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(OSError, match=re.escape(shard.name)):
        AutoModelForCausalLM.from_pretrained(tmp_path)
