"""PEFT on MiniMind: adapters train, save, load, generate and merge; the experts too."""

import pytest
import torch
from conftest import DENSE, MINIMIND2, MOE, tiny_model
from torch.testing import assert_close

from minimind_hf import MiniMindForCausalLM
from minimind_hf.modeling_minimind import CACHE

peft = pytest.importorskip("peft", reason="pip install 'minimind-hf[peft]'")

EXPERTS = {"target_modules": [], "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}
CASES = {
    "dense": (DENSE, {"target_modules": "all-linear"}),
    "moe": (MOE, {"target_modules": "all-linear"}),
    "minimind2": (MINIMIND2, {"target_modules": "all-linear"}),
    "experts": (MOE, EXPERTS),
    "experts-and-attention": (MINIMIND2, {**EXPERTS, "target_modules": ["q_proj", "o_proj"]}),
}
every_case = pytest.mark.parametrize("kind, targets", CASES.values(), ids=CASES)
both_kinds = pytest.mark.parametrize("kind", [DENSE, MOE], ids=["dense", "moe"])


def with_lora(model, filled=True, **targets):
    """Wrap a model; B, which starts as zeros, is filled, so that the adapter does something."""
    wrapped = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", r=2, lora_alpha=8, **targets))
    if filled:
        torch.manual_seed(3)
        for name, parameter in wrapped.named_parameters():
            if "lora_" in name:
                torch.nn.init.normal_(parameter, std=0.1)
    return wrapped.eval()


@torch.no_grad()
def logits_of(model, input_ids):
    return model(input_ids=input_ids).logits


@every_case
def test_only_the_adapter_trains(kind, targets, input_ids):
    base = tiny_model(**kind).train()
    expected = base(input_ids, labels=input_ids).loss  # with the balance loss
    wrapped = with_lora(base, filled=False, **targets).train()
    before = {name: parameter.clone() for name, parameter in wrapped.named_parameters()}
    optimizer = torch.optim.AdamW([p for p in wrapped.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(10):
        optimizer.zero_grad()
        losses.append(wrapped(input_ids=input_ids, labels=input_ids).loss)
        losses[-1].backward()
        optimizer.step()
    assert_close(losses[0], expected)
    assert losses[-1] < losses[0] - 0.5
    for name, parameter in wrapped.named_parameters():
        assert torch.equal(parameter, before[name]) != ("lora_" in name), name


@every_case
def test_saved_adapter_gives_the_same_logits(kind, targets, input_ids, tmp_path):
    """Through PEFT, through its Auto class, and through transformers' own `load_adapter`."""
    tiny_model(**kind).save_pretrained(tmp_path / "base")
    base = MiniMindForCausalLM.from_pretrained(tmp_path / "base")
    plain = logits_of(base, input_ids)
    wrapped = with_lora(base, **targets)
    wrapped.save_pretrained(tmp_path / "adapter")
    expected = logits_of(wrapped, input_ids)
    assert not torch.allclose(expected, plain, atol=0.1)
    loaded = peft.PeftModel.from_pretrained(
        MiniMindForCausalLM.from_pretrained(tmp_path / "base"), tmp_path / "adapter"
    )
    assert_close(logits_of(loaded, input_ids), expected)
    assert_close(logits_of(peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter"), input_ids), expected)
    native = MiniMindForCausalLM.from_pretrained(tmp_path / "base")
    native.load_adapter(str(tmp_path / "adapter"))
    assert_close(logits_of(native.eval(), input_ids), expected)


@every_case
def test_merged_model_equals_base_and_adapter_also_when_saved(kind, targets, input_ids, tmp_path):
    wrapped = with_lora(tiny_model(**kind), **targets)
    expected = logits_of(wrapped, input_ids)
    merged = wrapped.merge_and_unload()
    assert type(merged) is MiniMindForCausalLM
    assert_close(logits_of(merged, input_ids), expected, rtol=0, atol=1e-4)
    merged.save_pretrained(tmp_path)
    loaded, info = MiniMindForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values())
    assert torch.equal(logits_of(loaded, input_ids), logits_of(merged, input_ids))


def test_merged_weights_are_those_of_the_formula():
    """W + alpha / r * B A (arXiv:2106.09685); PEFT keeps the A and B of all experts of a tensor in one pair."""
    wrapped = with_lora(tiny_model(**MOE), target_modules=["v_proj"], target_parameters=["mlp.experts.down_proj"])
    layer, weights = "base_model.model.model.layers.1.", dict(wrapped.named_parameters())
    v_a, v_b = (weights[f"{layer}self_attn.v_proj.lora_{x}.default.weight"] for x in "AB")
    v_proj = weights[f"{layer}self_attn.v_proj.base_layer.weight"] + 4 * v_b @ v_a
    a, b = (weights[f"{layer}mlp.experts.lora_{x}.default.weight"] for x in "AB")
    experts_a, experts_b = a.view(4, 2, 96), b.view(64, 2, 4)  # [E, r, I], [H, r, E]
    down_proj = weights[f"{layer}mlp.experts.base_layer.down_proj"] + 4 * torch.einsum(
        "hre,eri->ehi", experts_b, experts_a
    )
    merged = wrapped.merge_and_unload().model.layers[1]
    assert_close(merged.self_attn.v_proj.weight, v_proj)
    assert_close(merged.mlp.experts.down_proj, down_proj)


@every_case
def test_wrapped_model_generates_as_the_merged_one(kind, targets, input_ids):
    wrapped = with_lora(tiny_model(**kind), **targets)
    assert wrapped.can_generate()
    mask = torch.ones_like(input_ids)
    mask[0, :5] = 0
    settings = {"attention_mask": mask, "max_new_tokens": 10, "do_sample": False, "eos_token_id": None}
    given = wrapped.generate(input_ids=input_ids, **settings)
    assert torch.equal(given, wrapped.merge_and_unload().generate(input_ids, **settings))
    assert given.shape == (2, 22)


@pytest.mark.parametrize("reentrant", [False, True])
@both_kinds
def test_gradient_checkpointing_of_a_frozen_model(kind, reentrant, input_ids):
    """Trainer's way: the embeddings' output is made to require a gradient, or reentrant blocks would get none."""
    given = []
    for checkpointing in (False, True):
        wrapped = with_lora(tiny_model(router_aux_loss_coef=0, **kind), target_modules=["q_proj", "v_proj"]).train()
        if checkpointing:
            wrapped.enable_input_require_grads()
            wrapped.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        wrapped(input_ids=input_ids, labels=input_ids).loss.backward()
        given.append({name: p.grad for name, p in wrapped.named_parameters() if p.requires_grad})
    assert all(gradient.any() for gradient in given[0].values())
    assert_close(given[1], given[0], rtol=0, atol=1e-6)


# Tied embeddings: a LoRA on one of the two would change the other when it is merged.


@pytest.mark.parametrize("target", ["lm_head", "embed_tokens"])
def test_peft_warns_of_an_adapter_on_tied_embeddings(target):
    with pytest.warns(UserWarning, match="tie_word_embeddings=True"):
        with_lora(tiny_model(), target_modules=[target])


@pytest.mark.parametrize("target", ["lm_head", "embed_tokens"])
def test_adapter_on_untied_embeddings_merges_exactly(target, input_ids, tmp_path):
    model = tiny_model()
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    wrapped = with_lora(model, target_modules=[target])
    expected = logits_of(wrapped, input_ids)
    wrapped.merge_and_unload().save_pretrained(tmp_path)
    loaded = MiniMindForCausalLM.from_pretrained(tmp_path)
    assert not loaded.config.tie_word_embeddings
    assert_close(logits_of(loaded, input_ids), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("module", ["lm_head", "embed_tokens"])
@pytest.mark.filterwarnings("ignore:.*tie_word_embeddings")
def test_embeddings_trained_whole_are_untied_and_the_config_says_so(module, input_ids, tmp_path):
    wrapped = with_lora(tiny_model(), target_modules=["q_proj"], modules_to_save=[module])
    copies = [p for name, p in wrapped.named_parameters() if "modules_to_save" in name]
    assert len(copies) == 1
    torch.nn.init.normal_(copies[0], std=0.2)
    expected = logits_of(wrapped, input_ids)
    wrapped.merge_and_unload().save_pretrained(tmp_path)
    loaded = MiniMindForCausalLM.from_pretrained(tmp_path)
    assert not loaded.config.tie_word_embeddings
    assert_close(logits_of(loaded, input_ids), expected, rtol=0, atol=1e-4)


# Other adapters that PEFT has.


@both_kinds
def test_prompt_tuning_is_the_prompt_before_the_embeddings(kind, input_ids):
    model = tiny_model(**kind)
    wrapped = peft.get_peft_model(model, peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)).eval()
    prompt = wrapped.prompt_encoder["default"].embedding.weight.detach()
    embedded = torch.cat([prompt.expand(2, 3, 64), model.get_input_embeddings()(input_ids)], dim=1)
    with torch.no_grad():
        expected = model(inputs_embeds=embedded).logits
    mask = torch.ones_like(input_ids)
    with torch.no_grad():
        assert_close(wrapped(input_ids=input_ids, attention_mask=mask).logits, expected)
    # With a cache, PEFT 0.21 adds the prompt at every token under transformers 5.24, to stock models too.
    settings = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "use_cache": False}
    generated = wrapped.generate(input_ids=input_ids, attention_mask=mask, **settings)
    assert torch.equal(generated[:, 12:], model.generate(inputs_embeds=embedded, **settings))


@both_kinds
def test_prefix_tuning_reaches_every_layer_through_the_cache(kind, input_ids):
    wrapped = peft.get_peft_model(
        tiny_model(**kind), peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    ).eval()
    mask = torch.ones_like(input_ids)
    with torch.no_grad():
        outputs = wrapped(input_ids=input_ids, attention_mask=mask)
    assert getattr(outputs, CACHE).get_seq_length() == 15
    wrapped.train()(input_ids=input_ids, attention_mask=mask, labels=input_ids).loss.backward()
    gradient = wrapped.prompt_encoder["default"].embedding.weight.grad.view(3, 2, 2, -1)  # token, layer, key or value
    assert gradient.abs().amax(dim=(0, 3)).min() > 0
