"""The pass in pieces, with a cache between them, against the pass in one piece."""

import pytest
import torch
from conftest import DENSE, MOE, tiny_model
from torch.testing import assert_close
from transformers import DynamicCache, StaticCache

from minimind_hf.modeling_minimind import CACHE

both_kinds = pytest.mark.parametrize("kind", [DENSE, MOE], ids=["dense", "moe"])
both_attentions = pytest.mark.parametrize("attention", ["eager", "sdpa"])
every_cache = pytest.mark.parametrize("cache_type", ["dynamic", "static"])
every_split = pytest.mark.parametrize("chunks", [(8, 4), (11, 1), (5, 4, 3), (1,) * 12], ids=str)


def new_cache(cache_type, model):
    if cache_type == "static":
        return StaticCache(config=model.config, max_cache_len=20)
    return DynamicCache(config=model.config)


def in_chunks(model, input_ids, chunks, cache, attention_mask=None, position_ids=None):
    """The logits of all chunks [B, S, V], and the cache after the last one."""
    logits, first = [], 0
    for size in chunks:
        chunk, first = slice(first, first + size), first + size
        outputs = model(
            input_ids[:, chunk],
            attention_mask=None if attention_mask is None else attention_mask[:, :first],
            position_ids=None if position_ids is None else position_ids[:, chunk],
            **{CACHE: cache},
        )
        assert getattr(outputs, CACHE) is cache
        logits.append(outputs.logits)
    return torch.cat(logits, dim=1), cache


@both_kinds
@both_attentions
@every_cache
@every_split
@torch.no_grad()
def test_pass_in_pieces_equals_the_full_pass(kind, attention, cache_type, chunks, input_ids):
    model = tiny_model(attn_implementation=attention, **kind)
    logits, _ = in_chunks(model, input_ids, chunks, new_cache(cache_type, model))
    assert_close(logits, model(input_ids, use_cache=False).logits, rtol=0, atol=1e-5)


@both_kinds
@both_attentions
@every_cache
@every_split
@torch.no_grad()
def test_left_padded_pass_in_pieces_equals_each_row_alone(kind, attention, cache_type, chunks, input_ids):
    model = tiny_model(attn_implementation=attention, **kind)
    lengths = (3, 7, 12)
    input_ids = torch.cat([input_ids, input_ids.flip(1)[:1]])
    mask = torch.tensor([[0] * (12 - length) + [1] * length for length in lengths])
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    logits, _ = in_chunks(model, input_ids, chunks, new_cache(cache_type, model), mask, positions)
    assert logits.isfinite().all()
    for row, length in enumerate(lengths):
        alone = model(input_ids[row : row + 1, 12 - length :]).logits
        assert_close(logits[row : row + 1, 12 - length :], alone, rtol=0, atol=1e-5)


@both_kinds
@torch.no_grad()
def test_shapes_and_length_of_the_dynamic_cache(kind, input_ids):
    model = tiny_model(num_key_value_heads=1, head_dim=24, **kind)
    _, cache = in_chunks(model, input_ids, (5, 4), DynamicCache(config=model.config))
    assert cache.get_seq_length() == 9
    assert len(cache.layers) == 2
    for layer in cache.layers:
        assert layer.keys.shape == layer.values.shape == (2, 1, 9, 24)


@both_kinds
@torch.no_grad()
def test_shapes_and_length_of_the_static_cache(kind, input_ids):
    model = tiny_model(**kind)
    cache = StaticCache(config=model.config, max_cache_len=20)
    in_chunks(model, input_ids, (5, 4), cache)
    assert cache.get_seq_length() == 9
    for layer in cache.layers:
        assert layer.keys.shape == layer.values.shape == (2, 2, 20, 16)
        assert layer.keys[:, :, :9].any(-1).all()
        assert not layer.keys[:, :, 9:].any()


@torch.no_grad()
def test_cached_values_are_those_of_the_layer(model, input_ids):
    _, cache = in_chunks(model, input_ids, (5, 7), DynamicCache(config=model.config))
    layer = model.model.layers[0]
    normed = layer.input_layernorm(model.model.embed_tokens(input_ids))
    values = (normed @ layer.self_attn.v_proj.weight.T).view(2, 12, 2, 16).transpose(1, 2)
    assert_close(cache.layers[0].values, values, rtol=0, atol=1e-5)


@torch.no_grad()
def test_a_cache_is_made_and_returned_unless_switched_off(model, input_ids):
    cache = getattr(model(input_ids), CACHE)
    assert isinstance(cache, DynamicCache)
    assert cache.get_seq_length() == 12
    assert getattr(model(input_ids, use_cache=False), CACHE) is None
    model.config.use_cache = False
    assert getattr(model(input_ids), CACHE) is None
    assert getattr(model(input_ids, use_cache=True), CACHE).get_seq_length() == 12


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
@torch.no_grad()
def test_cache_by_either_name(model, input_ids, name):
    full = model(input_ids).logits
    for module in (model, model.model):
        cache = DynamicCache(config=model.config)
        module(input_ids[:, :7], **{name: cache})
        outputs = module(input_ids[:, 7:], **{name: cache})
        assert getattr(outputs, CACHE) is cache
        assert cache.get_seq_length() == 12
    assert_close(model.lm_head(outputs.last_hidden_state), full[:, 7:], rtol=0, atol=1e-5)


@torch.no_grad()
def test_both_names_at_once_are_refused(model, input_ids):
    cache = DynamicCache(config=model.config)
    for module in (model, model.model):
        with pytest.raises(ValueError, match="cache and past_key_values"):
            module(input_ids, cache=cache, past_key_values=cache)
    assert cache.get_seq_length() == 0


@torch.no_grad()
def test_pass_in_pieces_of_embeddings(model, input_ids):
    embeds = model.get_input_embeddings()(input_ids)
    cache = DynamicCache(config=model.config)
    pieces = [model(inputs_embeds=embeds[:, part], **{CACHE: cache}).logits for part in (slice(0, 5), slice(5, 12))]
    assert_close(torch.cat(pieces, dim=1), model(input_ids).logits, rtol=0, atol=1e-5)


@torch.no_grad()
def test_a_cropped_cache_continues(model, input_ids):
    full = model(input_ids).logits
    _, cache = in_chunks(model, input_ids, (12,), DynamicCache(config=model.config))
    cache.crop(-4)
    outputs = model(input_ids[:, 8:], **{CACHE: cache})
    assert_close(outputs.logits, full[:, 8:], rtol=0, atol=1e-5)
