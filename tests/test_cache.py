"""The pass in pieces, with a cache between them, or packed with others, against the pass in one piece; its limits."""

import pytest
import torch
from conftest import DENSE, MOE, tiny_config, tiny_model
from torch.testing import assert_close
from transformers import DataCollatorWithFlattening, DynamicCache, StaticCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from minimind_hf import MiniMindForCausalLM
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


def flattened(input_ids, lengths):
    """Rows cut to these lengths and packed into one, with all that transformers' collator gives."""
    rows = [{"input_ids": row[:length].tolist()} for row, length in zip(input_ids, lengths, strict=True)]
    return rows, DataCollatorWithFlattening(return_tensors="pt", return_flash_attn_kwargs=True)(rows)


@both_kinds
@both_attentions
@torch.no_grad()
def test_flattened_rows_equal_each_row_alone(kind, attention, input_ids):
    model = tiny_model(attn_implementation=attention, **kind)
    rows, batch = flattened(input_ids, (5, 12))
    assert {"position_ids", "cu_seq_lens_q", "max_length_q"} <= batch.keys()
    logits = model(**batch, use_cache=False).logits
    alone = [model(torch.tensor([row["input_ids"]])).logits for row in rows]
    assert_close(logits, torch.cat(alone, dim=1), rtol=0, atol=1e-5)


@torch.no_grad()
def test_lengths_of_packed_rows_reach_the_attention_function(model, input_ids, monkeypatch):
    """Flash attention goes by them; here a function does that knows nothing else of where the rows begin."""

    def attention_of_a_test(module, query, key, value, attention_mask, cu_seq_lens_q, scaling, **kwargs):
        assert attention_mask is None
        key, value = (tensor.repeat_interleave(2, dim=1) for tensor in (key, value))
        parts = []
        for first, end in zip(cu_seq_lens_q[:-1].tolist(), cu_seq_lens_q[1:].tolist(), strict=True):
            part = [tensor[:, :, first:end] for tensor in (query, key, value)]
            parts.append(torch.nn.functional.scaled_dot_product_attention(*part, is_causal=True, scale=scaling))
        return torch.cat(parts, dim=2).transpose(1, 2), None

    rows, batch = flattened(input_ids, (5, 12))
    alone = [model(torch.tensor([row["input_ids"]])).logits for row in rows]
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "attention_of_a_test", attention_of_a_test)
    model.set_attn_implementation("attention_of_a_test")
    assert_close(model(**batch, use_cache=False).logits, torch.cat(alone, dim=1), rtol=0, atol=1e-5)


@pytest.mark.parametrize("shape", [(2, 11), (2, 13), (1, 12), (3, 12)])
def test_mask_of_another_shape_is_an_error(model, input_ids, shape):
    for given in ({"input_ids": input_ids}, {"inputs_embeds": model.get_input_embeddings()(input_ids)}):
        with pytest.raises(ValueError, match=rf"attention_mask is \[{shape[0]}, {shape[1]}\], .* \[2, 12\]"):
            model(**given, attention_mask=torch.ones(shape))


@torch.no_grad()
def test_mask_must_cover_the_cached_tokens(model, input_ids):
    _, cache = in_chunks(model, input_ids, (7,), DynamicCache(config=model.config))
    for length in (5, 7):
        with pytest.raises(ValueError, match=rf"attention_mask is \[2, {length}\], .* \[2, 12\]"):
            model(input_ids[:, 7:], attention_mask=torch.ones(2, length), **{CACHE: cache})
    assert cache.get_seq_length() == 7
    logits = model(input_ids[:, 7:], attention_mask=torch.ones(2, 12), **{CACHE: cache}).logits
    assert_close(logits, model(input_ids).logits[:, 7:], rtol=0, atol=1e-5)


@torch.no_grad()
def test_mask_may_cover_the_room_of_a_static_cache(model, input_ids):
    cache = StaticCache(config=model.config, max_cache_len=20)
    mask = torch.tensor([[1] * 12 + [0] * 8])
    logits = [model(part, attention_mask=mask, **{CACHE: cache}).logits for part in input_ids[:1].split((7, 5), dim=1)]
    assert_close(torch.cat(logits, dim=1), model(input_ids[:1]).logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("rope", "longest"),
    [
        ({"rope_type": "default"}, 16),
        ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 8}, 16),
        ({"rope_type": "linear", "factor": 1.5}, 24),
        ({"rope_type": "dynamic", "factor": 2.0}, None),
    ],
    ids=lambda value: value["rope_type"] if isinstance(value, dict) else "",
)
@torch.no_grad()
def test_positions_end_where_the_config_says(rope, longest):
    model = tiny_model(max_position_embeddings=16, rope_parameters=rope)
    input_ids = torch.arange(3, 63).unsqueeze(0)
    if longest is None:
        assert model(input_ids).logits.isfinite().all()
        return
    model(input_ids[:, :longest])
    cache = DynamicCache(config=model.config)
    model(input_ids[:, :10], **{CACHE: cache})
    position = torch.tensor([[longest]])
    for too_far in (
        {"input_ids": input_ids[:, : longest + 1]},
        {"input_ids": input_ids[:, 10 : longest + 1], CACHE: cache},
        {"input_ids": input_ids[:, :1], "position_ids": position},
        {"inputs_embeds": torch.zeros(1, 1, 64), "position_ids": position},
    ):
        with pytest.raises(ValueError, match=f"position {longest} is too far: max_position_embeddings=16"):
            model(**too_far)
    assert cache.get_seq_length() == 10


@both_kinds
@torch.no_grad()
def test_padding_and_packing_take_no_positions(kind):
    """Sixteen positions are enough for rows of sixteen tokens, however long the input is."""
    model = tiny_model(max_position_embeddings=16, **kind)
    input_ids = torch.arange(3, 35).view(2, 16)
    alone = model(input_ids).logits
    positions = torch.arange(16).repeat(2)[None]
    packed = model(input_ids.view(1, 32), position_ids=positions, use_cache=False).logits
    assert_close(packed.view(2, 16, -1), alone, rtol=0, atol=1e-5)
    padding = torch.zeros(2, 4, dtype=torch.long)
    mask = torch.cat([padding, torch.ones_like(input_ids)], dim=1)
    padded = torch.cat([padding, input_ids], dim=1)
    logits = model(padded, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp(min=0)).logits
    assert_close(logits[:, 4:], alone, rtol=0, atol=1e-5)


def test_positions_are_not_read_from_a_device_unless_the_input_is_too_long():
    """Reading them makes the host wait for the device; from the device "meta" they cannot be read at all."""
    with torch.device("meta"):
        model = MiniMindForCausalLM(tiny_config())
        assert model(torch.ones(2, 256, dtype=torch.long), position_ids=torch.arange(256)[None]).logits.is_meta
