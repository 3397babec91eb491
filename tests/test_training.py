import pytest
import torch
from conftest import DENSE, MINIMIND2, MOE, tiny_config, tiny_model
from torch.testing import assert_close
from transformers import Trainer, TrainingArguments

from minimind_hf import MiniMindForCausalLM, MiniMindForTokenClassification
from minimind_hf.modeling_minimind import CACHE

both_kinds = pytest.mark.parametrize("kind", [DENSE, MOE], ids=["dense", "moe"])

# Large enough for the balance loss to matter in a comparison.
BALANCED = {**MOE, "router_aux_loss_coef": 0.5}


def gradients(model, **inputs):
    """The outputs of a training step, and the gradient of every parameter."""
    model.train()
    model.zero_grad()
    outputs = model(**inputs)
    outputs.loss.backward()
    return outputs, {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def cross_entropy_of(outputs, labels):
    scores = outputs.logits[:, :-1].log_softmax(-1)
    kept = labels[:, 1:] != -100
    return -scores.gather(2, labels[:, 1:, None].clamp(min=0))[..., 0][kept].mean()


@pytest.mark.parametrize(
    "kind, reentrant",
    [(DENSE, False), (MOE, False), (DENSE, True), ({**MOE, "router_aux_loss_coef": 0}, True)],
    ids=["dense", "moe", "dense-reentrant", "moe-reentrant-without-balance"],
)
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_gradient_checkpointing_changes_no_gradient(kind, reentrant, dropout, input_ids):
    model = tiny_model(dropout=dropout, **kind)
    torch.manual_seed(3)
    plain_outputs, expected = gradients(model, input_ids=input_ids, labels=input_ids)
    assert getattr(plain_outputs, CACHE) is not None
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    torch.manual_seed(3)
    outputs, given = gradients(model, input_ids=input_ids, labels=input_ids, use_cache=True)
    assert getattr(outputs, CACHE) is None
    assert_close(outputs.loss, plain_outputs.loss, rtol=0, atol=1e-6)
    assert_close(given, expected, rtol=0, atol=1e-6)


def test_gradient_checkpointing_refuses_a_cache_instead_of_dropping_it(model, input_ids):
    with torch.no_grad():
        cache = getattr(model(input_ids), CACHE)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    with pytest.raises(ValueError, match="cache"):
        model.train()(input_ids, **{CACHE: cache})


def test_gradient_checkpointing_runs_every_block_twice(model, input_ids):
    calls = []
    for layer in model.model.layers:
        layer.mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    gradients(model, input_ids=input_ids, labels=input_ids)
    assert len(calls) == 2
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    gradients(model, input_ids=input_ids, labels=input_ids)
    assert len(calls) == 2 + 4


def test_gradient_checkpointing_still_caches_in_evaluation(model, input_ids):
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    with torch.no_grad():
        assert getattr(model.eval()(input_ids), CACHE).get_seq_length() == 12


def test_reentrant_checkpointing_of_experts_is_refused(input_ids):
    model = tiny_model(**MOE).train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    with pytest.raises(ValueError, match="use_reentrant"):
        model(input_ids, labels=input_ids)


def test_loss_includes_the_balance_loss_in_training_only(input_ids):
    model = tiny_model(**BALANCED)
    evaluated = model(input_ids, labels=input_ids)
    assert_close(evaluated.loss, cross_entropy_of(evaluated, input_ids))
    trained = model.train()(input_ids, labels=input_ids, output_router_logits=True)
    balance = torch.zeros(())
    for logits in trained.router_logits:
        probabilities = logits.softmax(-1)
        load = torch.stack([(probabilities.topk(2).indices == e).sum() / 24 for e in range(4)])
        balance = balance + 4 * (load * probabilities.mean(0)).sum()
    assert_close(trained.aux_loss, balance)
    assert_close(trained.loss, evaluated.loss + 0.5 * balance)
    assert trained.loss > evaluated.loss + 0.5
    unasked = model(input_ids, labels=input_ids)
    assert unasked.router_logits is None
    assert_close(unasked.loss, trained.loss)
    assert_close(unasked.aux_loss, trained.aux_loss)


def test_balance_loss_of_even_routing_is_top_k_per_block(input_ids):
    """Equal probabilities: experts * sum of load * 1 / experts = top-k, in each of two blocks."""
    model = tiny_model(**BALANCED).train()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.gate.weight.zero_()
    assert_close(model(input_ids).aux_loss, torch.tensor(2.0 * 2))


def test_no_balance_loss_without_coefficient_or_experts(input_ids):
    for settings in ({**MOE, "router_aux_loss_coef": 0}, DENSE):
        outputs = tiny_model(**settings).train()(input_ids, labels=input_ids)
        assert outputs.aux_loss is None
        assert_close(outputs.loss, cross_entropy_of(outputs, input_ids))


def test_balance_loss_trains_the_router_towards_balance(input_ids):
    model = tiny_model(**BALANCED)
    optimizer = torch.optim.SGD([layer.mlp.gate.weight for layer in model.model.layers], lr=0.05)
    losses = []
    for _ in range(10):
        optimizer.zero_grad()
        loss = model.train()(input_ids).aux_loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.01


def test_top_1_weight_is_exactly_one_and_passes_the_gradient_of_the_probability():
    torch.manual_seed(0)
    gate = tiny_model(use_moe=True, num_experts_per_tok=1).model.layers[0].mlp.gate
    tokens = torch.randn(30, 64)
    logits, weights, index = gate(tokens)
    assert (weights == 1).all()
    assert torch.equal(index, logits.argmax(-1, keepdim=True))
    upstream = torch.randn(30, 1)
    (given,) = torch.autograd.grad((upstream * weights).sum(), gate.weight)
    probabilities = (tokens @ gate.weight.T).softmax(-1)
    (expected,) = torch.autograd.grad((upstream * probabilities.max(-1, keepdim=True).values).sum(), gate.weight)
    assert_close(given, expected)
    assert given.any()


@pytest.mark.parametrize("experts", ["eager", "batched_mm", "grouped_mm"])
def test_language_model_loss_reaches_the_top_1_router(experts, input_ids):
    model = tiny_model(use_moe=True, num_experts_per_tok=1, router_aux_loss_coef=0)
    model.set_experts_implementation(experts)
    _, given = gradients(model, input_ids=input_ids, labels=input_ids)
    for layer in range(2):
        assert given[f"model.layers.{layer}.mlp.gate.weight"].norm() > 1e-3


def test_every_parameter_gets_a_gradient(model, input_ids):
    _, given = gradients(model, input_ids=input_ids, labels=input_ids)
    assert all(gradient.any() for gradient in given.values())


@torch.no_grad()
def test_training_and_evaluation_agree_without_dropout(model, input_ids):
    assert torch.equal(model.eval()(input_ids).logits, model.train()(input_ids).logits)


@both_kinds
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize(
    "dropout", [{"dropout": 0.3}, {"attention_dropout": 0.3}, {"dropout": 0.3, "attention_dropout": 0.0}], ids=str
)
@torch.no_grad()
def test_dropout_acts_in_training_only(kind, attention, dropout, input_ids):
    model = tiny_model(attn_implementation=attention, **dropout, **kind)
    expected = tiny_model(attn_implementation=attention, **kind)(input_ids).logits
    assert torch.equal(model.eval()(input_ids).logits, expected)
    model.train()
    assert not torch.equal(model(input_ids).logits, model(input_ids).logits)


@torch.no_grad()
def test_dropout_of_the_embedding_output(input_ids):
    model = tiny_model(dropout=0.5).train()
    torch.manual_seed(0)
    first = model(input_ids, output_hidden_states=True).hidden_states[0]
    embedded = model.model.embed_tokens(input_ids)
    assert 0.3 < (first == 0).float().mean() < 0.7
    assert_close(first, torch.where(first == 0, 0, 2 * embedded))


@torch.no_grad()
def test_dropout_of_the_attention_weights(input_ids):
    model = tiny_model(attention_dropout=0.5, attn_implementation="eager")
    whole = model.eval()(input_ids, output_attentions=True).attentions[0]
    torch.manual_seed(0)
    dropped = model.train()(input_ids, output_attentions=True).attentions[0]
    causal = torch.ones(12, 12, dtype=torch.bool).tril().expand(2, 4, 12, 12)
    assert 0.3 < (dropped[causal] == 0).float().mean() < 0.7
    assert_close(dropped, torch.where(dropped == 0, 0, 2 * whole))


@torch.no_grad()
def test_dropout_of_the_attention_output(input_ids):
    model = tiny_model(dropout=0.5, attention_dropout=0.0)
    attention = model.model.layers[0].self_attn
    embedded, positions = model.model.embed_tokens(input_ids), torch.arange(12)[None]
    rotary, causal = model.model.rotary_emb(embedded, positions), torch.ones(1, 1, 12, 12, dtype=torch.bool).tril()
    whole, _ = attention(embedded, rotary, causal)
    torch.manual_seed(0)
    dropped, _ = attention.train()(embedded, rotary, causal)
    assert 0.3 < (dropped == 0).float().mean() < 0.7
    assert_close(dropped, torch.where(dropped == 0, 0, 2 * whole))


@torch.no_grad()
def test_dropout_before_the_token_classifier(input_ids):
    model = tiny_model(model_class=MiniMindForTokenClassification, dropout=0.5)
    seen = []
    model.score.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    model.eval()(input_ids)
    model.train()(input_ids)
    assert (seen[0] != 0).all()
    assert 0.3 < (seen[1] == 0).float().mean() < 0.7


def unequal_micro_batches():
    """Eight rows that end in 0 to 7 ignored labels, split into parts of unequal size."""
    input_ids = torch.randint(3, 192, (8, 12), generator=torch.Generator().manual_seed(4))
    labels = input_ids.clone()
    for row in range(8):
        labels[row, 12 - row :] = -100
    return input_ids, labels, [slice(0, 1), slice(1, 4), slice(4, 8)]


def accumulated(model, input_ids, labels, parts):
    """The outputs of every part, the loss summed, and the gradients summed."""
    total = (labels[:, 1:] != -100).sum()
    model.train()
    model.zero_grad()
    outputs = []
    for part in parts:
        outputs.append(model(input_ids[part], labels=labels[part], num_items_in_batch=total))
        outputs[-1].loss.backward()
    summed = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    return outputs, sum(output.loss for output in outputs), summed


@pytest.mark.parametrize("kind", [DENSE, {**MOE, "router_aux_loss_coef": 0}], ids=["dense", "moe"])
def test_loss_does_not_depend_on_the_split_into_micro_batches(kind):
    model = tiny_model(**kind)
    input_ids, labels, parts = unequal_micro_batches()
    whole, expected = gradients(model, input_ids=input_ids, labels=labels)
    _, loss, summed = accumulated(model, input_ids, labels, parts)
    assert_close(loss, whole.loss, rtol=0, atol=1e-5)
    assert_close(summed, expected, rtol=0, atol=1e-5)


def test_num_items_in_batch_can_be_a_number():
    model = tiny_model(**BALANCED).train()
    input_ids, labels, _ = unequal_micro_batches()
    total = (labels[:, 1:] != -100).sum()
    by_tensor = model(input_ids, labels=labels, num_items_in_batch=total).loss
    assert_close(model(input_ids, labels=labels, num_items_in_batch=total.item()).loss, by_tensor)
    assert_close(model(input_ids, labels=labels).loss, by_tensor)


def test_shares_of_the_balance_loss_sum_to_one():
    model = tiny_model(**BALANCED)
    input_ids, labels, parts = unequal_micro_batches()
    outputs, _, _ = accumulated(model, input_ids, labels, parts)
    kept = [(labels[part, 1:] != -100).sum() for part in parts]
    shares = []
    for part, output, count in zip(parts, outputs, kept, strict=True):
        language_model_loss = cross_entropy_of(output, labels[part]) * count / sum(kept)
        shares.append((output.loss - language_model_loss) / (0.5 * output.aux_loss))
    assert_close(torch.stack(shares), torch.stack(kept) / sum(kept), rtol=0, atol=1e-5)
    assert_close(sum(shares), torch.tensor(1.0), rtol=0, atol=1e-5)


def test_padding_does_not_change_the_balance_loss(input_ids):
    model = tiny_model(**BALANCED).train()
    row = input_ids[:1, :7]
    expected = model(row).aux_loss
    for side in ("left", "right"):
        padding = torch.full((1, 5), 9)
        parts, mask = ([padding, row], [0] * 5 + [1] * 7) if side == "left" else ([row, padding], [1] * 7 + [0] * 5)
        padded = model(torch.cat(parts, dim=1), attention_mask=torch.tensor([mask]))
        assert_close(padded.aux_loss, expected, rtol=0, atol=1e-5)
        assert (model(torch.cat(parts, dim=1)).aux_loss - expected).abs() > 1e-3


def test_balance_loss_within_sequences_is_the_mean_of_each_alone(input_ids):
    model = tiny_model(seq_aux=True, **BALANCED).train()
    together, alone = model(input_ids).aux_loss, [model(row[None]).aux_loss for row in input_ids]
    assert_close(together, sum(alone) / 2)
    over_the_batch = tiny_model(**BALANCED).train()(input_ids).aux_loss
    assert (together - over_the_batch).abs() > 1e-3
    padded = torch.cat([torch.zeros(2, 5, dtype=torch.long), input_ids], dim=1)
    mask = torch.cat([torch.zeros(2, 5, dtype=torch.long), torch.ones_like(input_ids)], dim=1)
    assert_close(model(padded, attention_mask=mask).aux_loss, together, rtol=0, atol=1e-5)


def test_balance_loss_under_a_ready_mask(input_ids):
    model = tiny_model(**BALANCED).train()
    causal = torch.zeros(2, 1, 12, 12).masked_fill(torch.ones(12, 12, dtype=torch.bool).triu(1), -torch.inf)
    assert_close(model(input_ids, attention_mask=causal).aux_loss, model(input_ids).aux_loss)


@pytest.mark.parametrize(
    "kind", [DENSE, MOE, {**MOE, "num_experts_per_tok": 1}, MINIMIND2], ids=["dense", "moe", "top-1", "minimind2"]
)
def test_one_batch_can_be_memorised(kind, input_ids):
    torch.manual_seed(0)
    model = MiniMindForCausalLM(tiny_config(**kind)).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(50):
        optimizer.zero_grad()
        model(input_ids, labels=input_ids).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    model.eval()
    with torch.no_grad():
        assert model(input_ids, labels=input_ids).loss < 0.05
    tokens = model.generate(input_ids[:, :4], do_sample=False, max_new_tokens=8, eos_token_id=None)
    assert torch.equal(tokens, input_ids)


@both_kinds
def test_bfloat16_autocast(kind, input_ids):
    model = tiny_model(**kind)
    exact = model.train()(input_ids, labels=input_ids).loss
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outputs, given = gradients(model, input_ids=input_ids, labels=input_ids)
    assert outputs.logits.dtype == torch.bfloat16
    assert_close(outputs.loss, exact, rtol=0, atol=0.3)
    for name, gradient in given.items():
        assert gradient.dtype == torch.float32, name
        assert gradient.isfinite().all(), name


# Trainer.


@pytest.fixture
def trainer_of(tmp_path):
    """A Trainer on rows of `unequal_micro_batches`, in their order."""

    def trainer_of(model, folder="trainer", rows=8, evaluation=None, **settings):
        arguments = TrainingArguments(
            output_dir=tmp_path / folder,
            **{
                "train_sampling_strategy": "sequential",
                "per_device_train_batch_size": 2,
                "logging_steps": 1,
                "max_grad_norm": 1e9,  # so that the norm is logged, and nothing clipped
                "save_strategy": "no",
                "report_to": "none",
                "use_cpu": True,
                "disable_tqdm": True,
                **settings,
            },
        )
        input_ids, labels, _ = unequal_micro_batches()
        samples = [{"input_ids": ids, "labels": row} for ids, row in zip(input_ids, labels, strict=True)]
        return Trainer(model, arguments, train_dataset=samples[:rows], eval_dataset=samples, **(evaluation or {}))

    return trainer_of


def logged(trainer, name):
    return torch.tensor([entry[name] for entry in trainer.state.log_history if name in entry])


@pytest.mark.parametrize("kind", [DENSE, {**MOE, "router_aux_loss_coef": 0}], ids=["dense", "moe"])
def test_trainer_gives_the_same_loss_for_any_accumulation(kind, trainer_of):
    seen = []
    for size in (8, 1):
        model = tiny_model(**kind)
        settings = {"per_device_train_batch_size": size, "gradient_accumulation_steps": 8 // size, "max_steps": 1}
        trainer = trainer_of(model, **settings)
        trainer.train()
        seen.append([logged(trainer, "loss"), logged(trainer, "grad_norm")])
    assert_close(seen[1], seen[0], rtol=1e-4, atol=1e-4)


def test_trainer_counts_the_balance_loss_once(trainer_of):
    model, changed = tiny_model(**BALANCED), tiny_model(**BALANCED)
    input_ids, labels, _ = unequal_micro_batches()
    outputs = model.train()(input_ids)
    trainer = trainer_of(changed, per_device_train_batch_size=8, max_steps=1)
    trainer.train()
    expected = cross_entropy_of(outputs, labels) + 0.5 * outputs.aux_loss
    assert_close(logged(trainer, "loss")[0], expected, rtol=0, atol=1e-4)


@both_kinds
def test_trainer_smooths_labels(kind, trainer_of):
    """The loss of Trainer's label smoother: (1 - e) * cross entropy + e * the mean over the vocabulary."""
    model = tiny_model(**kind)
    input_ids, labels, _ = unequal_micro_batches()
    outputs = model(input_ids)
    kept = labels[:, 1:] != -100
    uniform = -outputs.logits[:, :-1].log_softmax(-1).mean(-1)[kept].mean()
    trainer = trainer_of(model, label_smoothing_factor=0.25, per_device_train_batch_size=8, max_steps=1)
    trainer.train()
    expected = 0.75 * cross_entropy_of(outputs, labels) + 0.25 * uniform
    assert_close(logged(trainer, "loss")[0], expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", [DENSE, MOE, {**MOE, "output_router_logits": True}], ids=["dense", "moe", "routers"])
def test_trainer_evaluates_and_gives_the_metrics_one_array(kind, trainer_of):
    model, seen = tiny_model(**kind), []

    def compute_metrics(prediction):
        seen.append(prediction)
        return {"rows": len(prediction.predictions)}

    trainer = trainer_of(model, evaluation={"compute_metrics": compute_metrics}, per_device_eval_batch_size=4)
    metrics = trainer.evaluate()
    input_ids, labels, _ = unequal_micro_batches()
    outputs = model.eval()(input_ids)
    assert_close(torch.tensor(seen[0].predictions), outputs.logits, rtol=0, atol=1e-5)
    assert torch.equal(torch.tensor(seen[0].label_ids), labels)
    assert metrics["eval_rows"] == 8
    halves = [cross_entropy_of(model(input_ids[part]), labels[part]) for part in (slice(0, 4), slice(4, 8))]
    assert_close(metrics["eval_loss"], (sum(halves) / 2).item(), rtol=0, atol=1e-5)


@both_kinds
def test_resumed_training_goes_on_as_if_never_stopped(kind, trainer_of, tmp_path):
    """Dropout is on, so the state of the random numbers has to come back too."""
    schedule = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "learning_rate": 1e-2}
    through = trainer_of(tiny_model(dropout=0.2, **kind), **schedule)
    through.train()
    resumed = trainer_of(tiny_model(seed=1, dropout=0.2, **kind), "resumed", **schedule)
    resumed.train(resume_from_checkpoint=str(tmp_path / "trainer" / "checkpoint-2"))
    assert len(logged(through, "loss")) == 4
    assert torch.equal(logged(resumed, "loss"), logged(through, "loss"))
    for name, parameter in through.model.named_parameters():
        assert torch.equal(resumed.model.get_parameter(name), parameter), name


@both_kinds
def test_trainer_in_bfloat16(kind, trainer_of):
    losses = []
    for bf16 in (False, True):
        trainer = trainer_of(tiny_model(**kind), bf16=bf16, max_steps=2, learning_rate=1e-3)
        trainer.train()
        losses.append(logged(trainer, "loss"))
    assert_close(losses[1], losses[0], rtol=0.03, atol=0)
    assert not torch.equal(losses[1], losses[0])
    assert all(parameter.dtype == torch.float32 for parameter in trainer.model.parameters())


def test_neftune_adds_noise_in_training_only(model, trainer_of):
    """Uniform noise within alpha / sqrt(S * H) on the embeddings (arXiv:2310.05914)."""
    seen = []
    model.model.layers[0].register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].detach().clone()))
    trainer = trainer_of(model, neftune_noise_alpha=5.0, max_steps=1, learning_rate=0.0)
    trainer.train()
    input_ids, _, _ = unequal_micro_batches()
    noise = (seen[0] - model.model.embed_tokens(input_ids[:2])).abs()
    bound = 5 / (12 * 64) ** 0.5
    assert 0.95 * bound < noise.max() <= bound * 1.0001
    model.eval()(input_ids[:2])
    assert torch.equal(seen[-1], model.model.embed_tokens(input_ids[:2]))


@both_kinds
def test_trainer_with_gradient_checkpointing_trains_the_same(kind, trainer_of):
    weights = []
    for checkpointing in (False, True):
        trainer = trainer_of(tiny_model(**kind), gradient_checkpointing=checkpointing, max_steps=2, optim="sgd")
        trainer.train()
        weights.append(dict(trainer.model.named_parameters()))
    assert_close(weights[1], weights[0], rtol=0, atol=1e-6)
