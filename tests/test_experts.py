"""Mixtures of experts: all implementations agree, the balance loss is that of the reference, state dicts load."""

import pytest
import torch
import torch.nn.functional as F
from conftest import MINIMIND2, MOE, tiny_model
from safetensors.torch import load_file
from torch.testing import assert_close
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.trainer_utils import load_sharded_checkpoint

from minimind_hf import (
    MiniMindConfig,
    MiniMindForCausalLM,
    MiniMindForQuestionAnswering,
    MiniMindForSequenceClassification,
    MiniMindForTokenClassification,
)

TOP_1 = {**MOE, "num_experts_per_tok": 1}
KINDS = {
    "top-1": TOP_1,
    "top-2": MOE,
    "unnormalised": {**MOE, "norm_topk_prob": False},
    "minimind2": MINIMIND2,
    "three-shared": {**MOE, "num_shared_experts": 3},
}
ON_THE_CPU = ["batched_mm", "grouped_mm"]
FOR_GPUS = ["deepgemm", "sonicmoe"]


def gradients(model, **inputs):
    model.train().zero_grad()
    outputs = model(**inputs)
    outputs.loss.backward()
    return outputs, {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("experts", ON_THE_CPU)
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_every_implementation_gives_the_outputs_and_gradients_of_eager(kind, experts, input_ids):
    results = []
    for implementation in ("eager", experts):
        model = tiny_model(router_aux_loss_coef=0.5, **kind)
        model.set_experts_implementation(implementation)
        assert model.config._experts_implementation == implementation
        outputs, gradient = gradients(model, input_ids=input_ids, labels=input_ids)
        results.append([outputs.logits, outputs.loss, outputs.aux_loss, gradient])
    assert_close(results[1], results[0], rtol=1e-4, atol=1e-5)


def test_no_implementation_is_left_out():
    assert sorted(ALL_EXPERTS_FUNCTIONS.keys()) == sorted(ON_THE_CPU + FOR_GPUS)


@pytest.mark.parametrize("experts", ["eager", *ON_THE_CPU])
def test_with_every_token_on_one_expert_the_model_is_the_dense_one_of_that_expert(experts, input_ids):
    """Forward and backward; a router of zeros gives every token the same choice, and sends nothing further back."""
    model, dense = tiny_model(router_aux_loss_coef=0, **TOP_1), tiny_model(intermediate_size=96)
    model.set_experts_implementation(experts)
    weights = model.state_dict()
    for layer in range(2):
        model.model.layers[layer].mlp.gate.weight.data.zero_()
        block = f"model.layers.{layer}.mlp."
        (chosen,) = set(model.model.layers[layer].mlp.gate(torch.randn(50, 64))[2].flatten().tolist())
        gate_up = weights.pop(block + "experts.gate_up_proj")[chosen]
        weights[block + "gate_proj.weight"], weights[block + "up_proj.weight"] = gate_up[:96], gate_up[96:]
        weights[block + "down_proj.weight"] = weights.pop(block + "experts.down_proj")[chosen]
        del weights[block + "gate.weight"]
    dense.load_state_dict(weights)
    outputs, given = gradients(model, input_ids=input_ids, labels=input_ids)
    dense_outputs, expected = gradients(dense, input_ids=input_ids, labels=input_ids)
    assert_close(outputs.logits, dense_outputs.logits, rtol=1e-4, atol=1e-5)
    for name in given.keys() & expected.keys():
        assert_close(given[name], expected[name], rtol=1e-3, atol=1e-5)
    for layer in range(2):
        block = f"model.layers.{layer}.mlp."
        down = given[block + "experts.down_proj"]
        assert_close(down[chosen], expected[block + "down_proj.weight"], rtol=1e-3, atol=1e-5)
        idle = [expert for expert in range(4) if expert != chosen]
        assert not down[idle].any()
        assert not given[block + "experts.gate_up_proj"][idle].any()


@torch.no_grad()
def test_shared_experts_see_every_token_once(input_ids):
    """With the routed experts switched off, what is left is a dense model, as wide as the shared experts together."""
    model, dense = tiny_model(**{**MOE, "num_shared_experts": 3}), tiny_model(intermediate_size=3 * 96)
    weights = model.state_dict()
    for layer in range(2):
        block = f"model.layers.{layer}.mlp."
        model.model.layers[layer].mlp.experts.down_proj.zero_()
        for name, dim in (("gate_proj", 0), ("up_proj", 0), ("down_proj", 1)):
            parts = [weights[f"{block}shared_experts.{expert}.{name}.weight"] for expert in range(3)]
            weights[f"{block}{name}.weight"] = torch.cat(parts, dim=dim)
    dense.load_state_dict({name: tensor for name, tensor in weights.items() if name in dense.state_dict()})
    assert_close(model(input_ids).logits, dense(input_ids).logits, rtol=0, atol=1e-4)


# The balance loss.


def balance_of_minimind3(logits, top_k):
    """E * sum over experts of (choices of the expert per token) * (its mean probability), token by token."""
    tokens, experts = logits.shape
    load, probability = [0.0] * experts, [0.0] * experts
    for scores in logits.softmax(-1).tolist():
        for expert in sorted(range(experts), key=scores.__getitem__)[-top_k:]:
            load[expert] += 1 / tokens
        for expert in range(experts):
            probability[expert] += scores[expert] / tokens
    return experts * sum(f * p for f, p in zip(load, probability, strict=True))


def test_loss_of_minimind3_has_its_balance_loss(input_ids):
    model = tiny_model(router_aux_loss_coef=0.5, **MOE).train()
    outputs = model(input_ids, labels=input_ids, output_router_logits=True)
    language_model_loss = F.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), input_ids[:, 1:].flatten())
    balance = sum(balance_of_minimind3(logits, 2) for logits in outputs.router_logits)
    assert_close(outputs.loss.item(), language_model_loss.item() + 0.5 * balance, rtol=0, atol=1e-4)


def test_loss_of_minimind2_has_its_balance_loss(input_ids):
    """Within each sequence, and the load averaged over the k choices of a token (arXiv:2405.04434)."""
    values = {"model_type": "minimind", "n_routed_experts": 4, "aux_loss_alpha": 0.5, "use_moe": True}
    sizes = {"vocab_size": 192, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    model = MiniMindForCausalLM(MiniMindConfig.from_dict({**values, **sizes, "initializer_range": 0.2})).train()
    outputs = model(input_ids, labels=input_ids, output_router_logits=True)
    language_model_loss = F.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), input_ids[:, 1:].flatten())
    rows = [logits[row * 12 : row * 12 + 12] for logits in outputs.router_logits for row in range(2)]
    balance = sum(balance_of_minimind3(row, 2) / 2 for row in rows) / 2
    assert_close(outputs.loss.item(), language_model_loss.item() + 0.5 * balance, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    "model_class", [MiniMindForSequenceClassification, MiniMindForTokenClassification, MiniMindForQuestionAnswering]
)
def test_heads_train_experts_without_a_balance_loss(model_class, input_ids):
    """As the heads of transformers' own mixtures of experts do; the loss still reaches the router."""
    labels = {"labels": torch.tensor([0, 1])}
    if model_class is MiniMindForTokenClassification:
        labels = {"labels": input_ids % 2}
    elif model_class is MiniMindForQuestionAnswering:
        labels = {"start_positions": torch.tensor([1, 2]), "end_positions": torch.tensor([3, 4])}
    losses = []
    for coefficient in (0, 0.5):
        model = tiny_model(model_class=model_class, router_aux_loss_coef=coefficient, **MOE)
        outputs, given = gradients(model, input_ids=input_ids, **labels)
        assert "aux_loss" not in outputs
        assert all(given[f"model.layers.{layer}.mlp.gate.weight"].any() for layer in range(2))
        losses.append(outputs.loss)
    assert torch.equal(*losses)


# State dicts.


def test_load_state_dict_takes_the_tensors_of_single_experts(tmp_path):
    """The names of the reference implementation, and of a saved folder."""
    model, other = tiny_model(**MINIMIND2), tiny_model(seed=1, **MINIMIND2)
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert "model.layers.1.mlp.experts.3.up_proj.weight" in tensors
    missing, unexpected = other.load_state_dict(tensors, strict=False)
    assert missing == ["lm_head.weight"]  # tied
    assert not unexpected
    assert all(torch.equal(tensor, other.state_dict()[name]) for name, tensor in model.state_dict().items())


def test_load_state_dict_names_the_experts_that_are_missing_or_too_many(tmp_path):
    model, other = tiny_model(**MOE), tiny_model(seed=1, **MOE)
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    lost, extra = "model.layers.1.mlp.experts.2.up_proj.weight", "model.layers.0.mlp.experts.4.up_proj.weight"
    tensors[extra] = tensors.pop(lost)
    missing, unexpected = other.load_state_dict(tensors, strict=False)
    assert set(missing) == {lost, "lm_head.weight"}
    assert unexpected == [extra]
    with pytest.raises(RuntimeError, match=r"experts\.2\.up_proj"):
        other.load_state_dict(tensors)


def test_sharded_checkpoint_is_resumed_whole(tmp_path):
    """Trainer loads shard after shard; one often ends in the middle of a block's experts."""
    model, other = tiny_model(**MOE), tiny_model(seed=1, **MOE)
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    load_sharded_checkpoint(other, tmp_path, strict=False)
    assert all(torch.equal(tensor, other.state_dict()[name]) for name, tensor in model.state_dict().items())


def test_fused_tensors_load_as_ever():
    model, other = tiny_model(**MOE), tiny_model(seed=1, **MOE)
    other.load_state_dict(model.state_dict())
    assert all(torch.equal(tensor, other.state_dict()[name]) for name, tensor in model.state_dict().items())
