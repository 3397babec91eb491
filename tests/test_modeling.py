import pytest
import torch
import torch.nn.functional as F
from conftest import DENSE, MOE, tiny_config, tiny_model
from torch.testing import assert_close
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from minimind_hf import (
    MiniMindForCausalLM,
    MiniMindForQuestionAnswering,
    MiniMindForSequenceClassification,
    MiniMindForTokenClassification,
    MiniMindModel,
)
from minimind_hf.modeling_minimind import CACHE, MiniMindRMSNorm, MiniMindRotaryEmbedding

both_kinds = pytest.mark.parametrize("kind", [DENSE, MOE], ids=["dense", "moe"])
both_attentions = pytest.mark.parametrize("attention", ["eager", "sdpa"])

PADDED_MASK = torch.tensor([[0] * 5 + [1] * 7, [1] * 12])
POSITIONS = (PADDED_MASK.cumsum(-1) - 1).clamp(min=0)


def stock_twin(model):
    """Transformers' own Qwen3 model with the weights of `model`, of the same sizes."""
    config = model.config
    shared = (
        "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim "
        "hidden_act max_position_embeddings rms_norm_eps rope_parameters tie_word_embeddings"
    )
    sizes = {name: getattr(config, name) for name in shared.split()}
    if config.use_moe:
        for name in ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob"):
            sizes[name] = getattr(config, name)
        twin = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes))
    else:
        twin = Qwen3ForCausalLM(Qwen3Config(**sizes))
    twin.load_state_dict(model.state_dict(), strict=True)
    twin.set_attn_implementation(model.config._attn_implementation)
    return twin.eval()


def pack(input_ids):
    """The first five tokens of row 0 and all of row 1 in one row [1, 17], and the position of each in its own text."""
    positions = torch.cat([torch.arange(5), torch.arange(12)])
    return torch.cat([input_ids[:1, :5], input_ids[1:]], dim=1), positions[None]


def assert_equals_stock(model, input_ids):
    twin = stock_twin(model)
    with torch.no_grad():
        assert_close(model(input_ids).logits, twin(input_ids).logits, rtol=0, atol=1e-5)
        padded = {"input_ids": input_ids, "attention_mask": PADDED_MASK}
        real = PADDED_MASK.bool()
        assert_close(model(**padded).logits[real], twin(**padded).logits[real], rtol=0, atol=1e-5)


@both_attentions
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_key_value_heads": 1, "head_dim": 32},
        {"num_key_value_heads": None, "intermediate_size": 40},
        {"tie_word_embeddings": False},
        {"hidden_act": "gelu"},
        {"rms_norm_eps": 0.5},
        {"rope_theta": 100.0},
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0}},
        {"rope_parameters": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32}},
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}, "max_position_embeddings": 8},
    ],
    ids=lambda changes: "-".join(changes) or "tiny",
)
def test_dense_logits_equal_stock_qwen3(changes, attention, input_ids):
    assert_equals_stock(tiny_model(attn_implementation=attention, **changes), input_ids)


@pytest.mark.parametrize("top_k", [1, 2])
@pytest.mark.parametrize("normalised", [True, False])
def test_moe_logits_equal_stock_qwen3_moe(top_k, normalised, input_ids):
    routing = {"num_experts_per_tok": top_k, "norm_topk_prob": normalised}
    assert_equals_stock(tiny_model(**{**MOE, **routing}), input_ids)


def test_moe_settings_change_the_logits(input_ids):
    """So that the agreement with stock classes says something about them."""
    logits = [
        tiny_model(**{**MOE, "num_experts_per_tok": top_k, "norm_topk_prob": normalised})(input_ids).logits
        for top_k in (1, 2)
        for normalised in (True, False)
    ]
    for i in range(4):
        for j in range(i):
            assert (logits[i] - logits[j]).abs().max() > 0.1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rms_norm_casts_once(dtype):
    norm = MiniMindRMSNorm(64, eps=1e-6).to(dtype)
    torch.manual_seed(0)
    with torch.no_grad():
        norm.weight.uniform_(0.5, 1.5)
    values = (3 * torch.randn(50, 64)).to(dtype)
    exact = values.double() / (values.double().pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * norm.weight.double()
    difference = norm(values).double() - exact
    assert norm(values).dtype == dtype
    # One rounding is off by half a unit in the last place, eps / 2 of the power of two below; two roundings by more.
    half_unit = torch.finfo(dtype).eps / 2 * 2.0 ** exact.abs().log2().floor()
    assert (difference.abs() <= 1.01 * half_unit).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_older_numerics_of_the_norm_are_those_of_llama(dtype):
    ours, stock = MiniMindRMSNorm(64, eps=1e-5, scale_in_float32=False).to(dtype), LlamaRMSNorm(64, eps=1e-5).to(dtype)
    torch.manual_seed(0)
    with torch.no_grad():
        ours.weight.uniform_(0.5, 1.5)
        stock.weight.copy_(ours.weight)
    values = (3 * torch.randn(50, 64)).to(dtype)
    assert torch.equal(ours(values), stock(values))


def test_older_numerics_reach_every_norm_of_a_model():
    older = tiny_model(rms_norm_scale_in_float32=False)
    norms = [module for module in older.modules() if isinstance(module, MiniMindRMSNorm)]
    assert len(norms) == 2 * 4 + 1
    assert not any(norm.scale_in_float32 for norm in norms)
    assert all(module.scale_in_float32 for module in tiny_model().modules() if isinstance(module, MiniMindRMSNorm))


def test_shared_experts_are_added_for_every_token(input_ids):
    """With routed experts of zero weights, a block's feed-forward is the sum of the shared ones."""
    block = tiny_model(num_shared_experts=2, **MOE).model.layers[0].mlp
    hidden_states = torch.randn(2, 5, 64)
    with torch.no_grad():
        block.experts.down_proj.zero_()
        first, second = block.shared_experts
        assert_close(block(hidden_states), first(hidden_states) + second(hidden_states))


def test_rms_norm_of_large_float16_values_is_finite():
    norm = MiniMindRMSNorm(64).half()
    assert_close(norm(torch.full((1, 64), 6e4, dtype=torch.float16)), torch.ones(1, 64, dtype=torch.float16))


def test_rotary_frequencies():
    rotary = MiniMindRotaryEmbedding(tiny_config(head_dim=6, rope_theta=1000.0))
    assert_close(rotary.inv_freq, torch.tensor([1.0, 0.1, 0.01]))  # 1000^(0), 1000^(-1/3), 1000^(-2/3)
    cos, sin = rotary(torch.zeros(1, 2, 64), torch.tensor([[0, 7]]))
    angles = torch.tensor([[[0.0] * 6, [7.0, 0.7, 0.07] * 2]])
    assert_close(cos, angles.cos())
    assert_close(sin, angles.sin())


@pytest.mark.parametrize(
    "rope",
    [
        {"inference_rope_scaling": True, "max_position_embeddings": 32768},
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0}},
    ],
    ids=["reference-yarn", "yarn", "linear"],
)
def test_scaled_frequencies_are_those_of_transformers(rope):
    config = tiny_config(**rope)
    rotary = MiniMindRotaryEmbedding(config)
    frequencies, scale = ROPE_INIT_FUNCTIONS[config.rope_parameters["rope_type"]](config)
    assert torch.equal(rotary.inv_freq, frequencies)
    assert (rotary.inv_freq < MiniMindRotaryEmbedding(tiny_config()).inv_freq).any()
    cos, sin = rotary(torch.zeros(1, 1, 64), torch.tensor([[200]]))
    angles = (200 * frequencies).repeat(2)
    assert_close(cos[0, 0], scale * angles.cos())
    assert_close(sin[0, 0], scale * angles.sin())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_casting_the_model_keeps_the_frequencies_exact(dtype):
    model = tiny_model().to(dtype)
    frequencies = torch.tensor([1e6 ** (-i / 8) for i in range(8)])
    assert_close(model.model.rotary_emb.inv_freq, frequencies, rtol=1e-6, atol=0)
    cos, sin = model.model.rotary_emb(torch.zeros(1, 1, 64, dtype=dtype), torch.tensor([[250]]))
    angles = (250 * frequencies.double()).repeat(2)
    assert_close(cos[0, 0], angles.cos().to(dtype), rtol=0, atol=2 * torch.finfo(dtype).eps)
    assert_close(sin[0, 0], angles.sin().to(dtype), rtol=0, atol=2 * torch.finfo(dtype).eps)


@torch.no_grad()
def test_inputs_embeds_equal_input_ids(model, input_ids):
    embeds = model.get_input_embeddings()(input_ids)
    assert torch.equal(model(inputs_embeds=embeds).logits, model(input_ids).logits)


def test_both_or_neither_of_ids_and_embeds_is_an_error(model, input_ids):
    with pytest.raises(ValueError, match="exactly one of input_ids and inputs_embeds"):
        model(input_ids, inputs_embeds=model.get_input_embeddings()(input_ids))
    with pytest.raises(ValueError, match="exactly one of input_ids and inputs_embeds"):
        model()


@both_kinds
@torch.no_grad()
def test_hidden_states(kind, input_ids):
    model = tiny_model(**kind)
    outputs = model(input_ids, output_hidden_states=True)
    assert len(outputs.hidden_states) == 3
    assert torch.equal(outputs.hidden_states[0], model.model.embed_tokens(input_ids))
    assert torch.equal(outputs.hidden_states[-1], model.model(input_ids).last_hidden_state)
    assert_close(model.lm_head(outputs.hidden_states[-1]), outputs.logits)
    expected = stock_twin(model)(input_ids, output_hidden_states=True).hidden_states
    for hidden_states, stock in zip(outputs.hidden_states, expected, strict=True):
        assert_close(hidden_states, stock, rtol=0, atol=1e-5)
    assert model(input_ids).hidden_states is None


@both_kinds
@torch.no_grad()
def test_attentions(kind, input_ids):
    model = tiny_model(attn_implementation="eager", **kind)
    attentions = model(input_ids, output_attentions=True).attentions
    assert len(attentions) == 2
    for weights in attentions:
        assert weights.shape == (2, 4, 12, 12)
        assert_close(weights.sum(-1), torch.ones(2, 4, 12))
        assert (weights.triu(1) == 0).all()
    expected = stock_twin(model)(input_ids, output_attentions=True).attentions
    for weights, stock in zip(attentions, expected, strict=True):
        assert_close(weights, stock, rtol=0, atol=1e-5)


@torch.no_grad()
def test_return_dict_false_gives_the_same_values_as_a_tuple(model, input_ids):
    outputs = model(input_ids, labels=input_ids)
    values = model(input_ids, labels=input_ids, return_dict=False)
    assert type(values) is tuple
    assert torch.equal(values[0], outputs.loss)
    assert torch.equal(values[1], outputs.logits)
    assert torch.equal(model.model(input_ids, return_dict=False)[0], model.model(input_ids).last_hidden_state)


@torch.no_grad()
def test_use_cache_false_returns_no_cache(model, input_ids):
    outputs = model(input_ids, use_cache=False)
    assert getattr(outputs, CACHE) is None
    assert_close(outputs.logits, model(input_ids).logits)


@pytest.mark.parametrize(
    "keep, positions", [(0, range(12)), (1, [11]), (5, range(7, 12)), (torch.tensor([0, 7, 11]), [0, 7, 11])]
)
@torch.no_grad()
def test_logits_to_keep(model, input_ids, keep, positions):
    assert_close(model(input_ids, logits_to_keep=keep).logits, model(input_ids).logits[:, list(positions)])


@torch.no_grad()
def test_logits_to_keep_of_each_row(model, input_ids):
    full = model(input_ids).logits
    kept = model(input_ids, logits_to_keep=torch.tensor([[0, 5, 7], [11, 2, 2]])).logits
    assert_close(kept, torch.stack([full[0, [0, 5, 7]], full[1, [11, 2, 2]]]))
    assert_close(model(input_ids, logits_to_keep=PADDED_MASK.bool()).logits, torch.cat([full[0, 5:], full[1]]))


@torch.no_grad()
def test_loss_is_the_mean_cross_entropy_of_the_next_tokens(model, input_ids):
    labels = input_ids.masked_fill(torch.arange(12) % 3 == 1, -100)
    outputs = model(input_ids, labels=labels)
    rows = outputs.logits.log_softmax(-1)
    terms = [-rows[b, s, labels[b, s + 1]] for b in range(2) for s in range(11) if labels[b, s + 1] != -100]
    assert_close(outputs.loss, torch.stack(terms).mean())


@both_kinds
@both_attentions
@pytest.mark.parametrize("given_positions", [True, False])
@torch.no_grad()
def test_left_padding_is_exact(kind, attention, given_positions, input_ids):
    model = tiny_model(attn_implementation=attention, **kind)
    positions = POSITIONS if given_positions else None
    logits = model(input_ids, attention_mask=PADDED_MASK, position_ids=positions).logits
    assert logits.isfinite().all()
    assert_close(logits[:1, 5:], model(input_ids[:1, 5:]).logits, rtol=0, atol=1e-5)
    assert_close(logits[1:], model(input_ids[1:]).logits, rtol=0, atol=1e-5)


@both_kinds
@both_attentions
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.no_grad()
def test_left_padding_in_half_precision(kind, attention, dtype, input_ids):
    model = tiny_model(attn_implementation=attention, **kind).to(dtype)
    logits = model(input_ids, attention_mask=PADDED_MASK, position_ids=POSITIONS).logits
    assert logits.isfinite().all()
    assert_close(logits[:1, 5:], model(input_ids[:1, 5:]).logits, rtol=0, atol=0.06)  # logits of some 6
    assert_close(logits[1:], model(input_ids[1:]).logits, rtol=0, atol=0.06)


@both_kinds
@both_attentions
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_of_padding_alone_never_spread_nan(kind, attention, dtype, input_ids):
    model = tiny_model(attn_implementation=attention, **kind).to(dtype)
    mask = PADDED_MASK.clone()
    mask[0] = 0
    outputs = model(input_ids, attention_mask=mask, labels=input_ids.masked_fill(mask == 0, -100))
    assert outputs.logits.isfinite().all()
    assert_close(
        outputs.logits[1:], model(input_ids[1:]).logits, rtol=0, atol=1e-5 if dtype == torch.float32 else 0.06
    )
    outputs.loss.backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters() if parameter.grad is not None)


@both_kinds
@both_attentions
@pytest.mark.parametrize("form", ["bool", "int", "float", "4-D float", "4-D bool", "4-D int"])
@torch.no_grad()
def test_masks_of_every_form(kind, attention, form, input_ids):
    model = tiny_model(attn_implementation=attention, **kind)
    allowed = torch.ones(12, 12, dtype=torch.bool).tril() & PADDED_MASK.bool()[:, None, None, :]
    mask = {
        "bool": PADDED_MASK.bool(),
        "int": PADDED_MASK.int(),
        "float": PADDED_MASK.float(),
        "4-D float": torch.zeros(2, 1, 12, 12).masked_fill(~allowed, torch.finfo(torch.float32).min),
        "4-D bool": allowed,
        "4-D int": allowed.long(),
    }[form]
    logits = model(input_ids, attention_mask=mask).logits
    assert_close(logits[:1, 5:], model(input_ids[:1, 5:]).logits, rtol=0, atol=1e-5)
    assert_close(logits[1:], model(input_ids[1:]).logits, rtol=0, atol=1e-5)


@both_kinds
@pytest.mark.parametrize("size", [250, 100])
@pytest.mark.parametrize("tied", [True, False])
@torch.no_grad()
def test_resized_embeddings_keep_rows_and_tie(kind, size, tied, input_ids, tmp_path):
    model = tiny_model(tie_word_embeddings=tied, **kind)
    input_ids = input_ids % 100
    before = model(input_ids).logits
    model.resize_token_embeddings(size)
    assert model.config.vocab_size == size
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    after = model(input_ids).logits
    assert after.shape[-1] == size
    assert_close(after[..., :100], before[..., :100])
    model.save_pretrained(tmp_path)
    loaded = MiniMindForCausalLM.from_pretrained(tmp_path)
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied
    assert torch.equal(loaded(input_ids).logits, after)


@pytest.mark.parametrize(
    "kind, experts",
    [(DENSE, None), (MOE, "batched_mm"), (MOE, "grouped_mm")],
    ids=["dense", "moe-batched", "moe-grouped"],
)
@pytest.mark.parametrize("use_cache", [False, True])
@torch.no_grad()
def test_forward_compiles_to_one_graph(kind, experts, use_cache, input_ids):
    model = tiny_model(**kind)
    expected = model(input_ids, attention_mask=PADDED_MASK).logits
    if experts:
        model.set_experts_implementation(experts)
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    logits = compiled(input_ids, attention_mask=PADDED_MASK, use_cache=use_cache).logits
    assert_close(logits, expected, rtol=0, atol=1e-5)


def test_experts_implementations_agree(input_ids):
    results = []
    for experts in ("eager", "batched_mm", "grouped_mm"):
        model = tiny_model(**MOE)
        model.set_experts_implementation(experts)
        outputs = model(input_ids, labels=input_ids)
        outputs.loss.backward()
        results.append([outputs.logits, *(parameter.grad for parameter in model.parameters())])
    for result in results[1:]:
        assert_close(result, results[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("experts", ["eager", "batched_mm", "grouped_mm"])
@pytest.mark.parametrize(
    "chosen",
    [[[2], [2], [2], [2], [2]], [[0], [0], [3], [0], [0]], [[0, 1], [1, 0], [2, 1], [1, 2], [0, 2]], [[3, 2]]],
    ids=["all", "one", "top-2", "one token"],
)
def test_zero_one_and_all_tokens_on_an_expert(experts, chosen):
    block = tiny_model(**MOE).model.layers[0].mlp.experts
    block.config._experts_implementation = experts
    torch.manual_seed(0)
    tokens, index = torch.randn(len(chosen), 64), torch.tensor(chosen)
    weights = torch.rand(index.shape)
    expected = torch.zeros(len(chosen), 64)
    for t, choices in enumerate(chosen):
        for k, e in enumerate(choices):
            gate, up = block.gate_up_proj[e, :96] @ tokens[t], block.gate_up_proj[e, 96:] @ tokens[t]
            expected[t] += weights[t, k] * (block.down_proj[e] @ (F.silu(gate) * up))
    output = block(tokens, index, weights)
    assert_close(output, expected, rtol=1e-4, atol=1e-4)
    output.square().sum().backward()
    used = sorted(index.unique().tolist())
    assert [e for e in range(4) if block.down_proj.grad[e].any()] == used


def test_experts_of_no_tokens_at_all():
    block = tiny_model(**MOE).model.layers[0].mlp
    assert block(torch.empty(1, 0, 64)).shape == (1, 0, 64)


@both_kinds
@both_attentions
@torch.no_grad()
def test_packed_sequences_do_not_see_each_other(kind, attention, input_ids):
    model = tiny_model(attn_implementation=attention, **kind)
    packed, positions = pack(input_ids)
    logits = model(packed, position_ids=positions, use_cache=False).logits
    assert_close(logits[:, :5], model(input_ids[:1, :5]).logits, rtol=0, atol=1e-5)
    assert_close(logits[:, 5:], model(input_ids[1:]).logits, rtol=0, atol=1e-5)


@both_kinds
@torch.no_grad()
def test_registered_attention_function_is_called_once_per_layer(kind, input_ids, monkeypatch):
    """As an inference engine does it: packed tokens with their positions, and no mask."""
    calls = []

    def packed_attention(module, query, key, value, attention_mask, scaling, position_ids, **kwargs):
        calls.append((module.layer_idx, tuple(query.shape), tuple(key.shape), attention_mask))
        sequence = (position_ids[0] == 0).cumsum(0)
        allowed = (sequence[:, None] == sequence) & (position_ids[0][:, None] >= position_ids[0])
        key, value = key.repeat_interleave(2, dim=1), value.repeat_interleave(2, dim=1)
        scores = (query @ key.transpose(2, 3) * scaling).masked_fill(~allowed, -torch.inf)
        return (scores.softmax(-1) @ value).transpose(1, 2), None

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "packed_attention_of_a_test", packed_attention)
    model = tiny_model(**kind)
    alone = [model.model(input_ids[:1, :5]).last_hidden_state, model.model(input_ids[1:]).last_hidden_state]
    model.set_attn_implementation("packed_attention_of_a_test")
    packed, positions = pack(input_ids)
    hidden_states = model.model(packed, position_ids=positions, use_cache=False).last_hidden_state
    assert calls == [(i, (1, 4, 17, 16), (1, 2, 17, 16), None) for i in range(2)]
    assert_close(hidden_states, torch.cat(alone, dim=1), rtol=0, atol=1e-5)


@both_kinds
def test_sequence_classification(kind, input_ids):
    model = tiny_model(model_class=MiniMindForSequenceClassification, num_labels=3, **kind)
    input_ids = input_ids.clone()
    input_ids[0, 8:] = 0  # padding on the right
    mask = (input_ids != 0).long()
    outputs = model(input_ids, attention_mask=mask, labels=torch.tensor([2, 0]))
    hidden_states = model.model(input_ids, attention_mask=mask).last_hidden_state
    scores = torch.stack([hidden_states[0, 7], hidden_states[1, 11]]) @ model.score.weight.T
    assert_close(outputs.logits, scores)
    assert_close(outputs.loss, -(scores.log_softmax(-1)[0, 2] + scores.log_softmax(-1)[1, 0]) / 2)
    outputs.loss.backward()
    assert model.score.weight.grad.any()
    assert model.model.embed_tokens.weight.grad.any()


@both_kinds
def test_token_classification(kind, input_ids):
    model = tiny_model(model_class=MiniMindForTokenClassification, num_labels=5, **kind)
    labels = input_ids % 5
    outputs = model(input_ids, labels=labels.masked_fill(torch.arange(12) < 3, -100))
    scores = model.model(input_ids).last_hidden_state @ model.score.weight.T + model.score.bias
    assert_close(outputs.logits, scores)
    assert_close(outputs.loss, -scores.log_softmax(-1).gather(2, labels[..., None])[:, 3:].mean())
    outputs.loss.backward()
    assert model.model.embed_tokens.weight.grad.any()


@both_kinds
def test_question_answering(kind, input_ids):
    model = tiny_model(model_class=MiniMindForQuestionAnswering, **kind)
    start, end = torch.tensor([1, 4]), torch.tensor([3, 11])
    outputs = model(input_ids, start_positions=start, end_positions=end)
    scores = model.model(input_ids).last_hidden_state @ model.qa_outputs.weight.T + model.qa_outputs.bias
    assert_close(outputs.start_logits, scores[..., 0])
    assert_close(outputs.end_logits, scores[..., 1])
    terms = scores.log_softmax(1)
    chosen = [terms[b, start[b], 0] + terms[b, end[b], 1] for b in range(2)]
    assert_close(outputs.loss, -torch.stack(chosen).sum() / 4)
    outputs.loss.backward()
    assert model.model.embed_tokens.weight.grad.any()


@torch.no_grad()
def test_router_logits_and_aux_loss_on_request(input_ids):
    model = tiny_model(router_aux_loss_coef=0.5, **MOE)
    plain = model(input_ids, labels=input_ids)
    assert plain.router_logits is None
    assert plain.aux_loss is None
    outputs = model(input_ids, labels=input_ids, output_router_logits=True)
    assert torch.equal(outputs.loss, plain.loss)
    assert [tuple(logits.shape) for logits in outputs.router_logits] == [(24, 4), (24, 4)]
    expected = 0.0
    for logits in outputs.router_logits:
        probabilities = logits.softmax(-1)
        load = [(probabilities.topk(2).indices == e).sum() / 24 for e in range(4)]
        expected += 4 * sum(load[e] * probabilities[:, e].mean() for e in range(4))
    assert_close(outputs.aux_loss, expected)
    embedded = model.model.embed_tokens(input_ids)
    layer = model.model.layers[0]
    position_embeddings = model.model.rotary_emb(embedded, torch.arange(12)[None])
    causal = torch.ones(12, 12, dtype=torch.bool).tril()[None, None]
    attended, _ = layer.self_attn(layer.input_layernorm(embedded), position_embeddings, causal)
    first = layer.post_attention_layernorm(embedded + attended) @ layer.mlp.gate.weight.T
    assert_close(outputs.router_logits[0], first.reshape(24, 4), rtol=0, atol=1e-5)


@torch.no_grad()
def test_aux_loss_of_a_cached_step_counts_its_own_tokens(input_ids):
    model = tiny_model(router_aux_loss_coef=0.5, **MOE)
    mask = torch.tensor([[0] * 8 + [1] * 4, [1] * 12])
    cache = getattr(model(input_ids[:, :5], attention_mask=mask[:, :5]), CACHE)
    outputs = model(input_ids[:, 5:], attention_mask=mask, output_router_logits=True, **{CACHE: cache})
    expected = 0.0
    for logits in outputs.router_logits:
        probabilities = logits.softmax(-1)[mask[:, 5:].flatten().bool()]
        load = torch.stack([(probabilities.topk(2).indices == e).sum() / 11 for e in range(4)])
        expected += 4 * (load * probabilities.mean(0)).sum()
    assert_close(outputs.aux_loss, expected)


@torch.no_grad()
def test_router_logits_by_config(input_ids):
    outputs = tiny_model(output_router_logits=True, **MOE)(input_ids)
    assert len(outputs.router_logits) == 2
    assert outputs.aux_loss is not None
    dense = tiny_model(output_router_logits=True)(input_ids, output_router_logits=True)
    assert dense.router_logits is None
    assert dense.aux_loss is None


def test_can_generate():
    assert MiniMindForCausalLM.can_generate()
    assert not MiniMindModel.can_generate()
