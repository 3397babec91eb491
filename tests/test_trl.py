"""TRL's trainers: MiniMind trains as the stock class of the same computation does, and on the right tokens."""

import json

import pytest
import torch
import torch.nn.functional as F
from conftest import DENSE, FIXTURES, MOE, ROOT, tiny_config, tiny_model
from test_modeling import stock_twin
from torch.testing import assert_close
from transformers import AutoTokenizer
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from minimind_hf import MiniMindConfig, MiniMindForSequenceClassification

datasets = pytest.importorskip("datasets", reason="pip install 'minimind-hf[train]'")
trl = pytest.importorskip("trl", reason="TRL is not installed; it needs Python 3.11")

TRAINING_TEMPLATE = ROOT / "assets" / "training_chat_template.jinja"
RENDERED = json.loads((FIXTURES / "tokenizer" / "golden.json").read_text(encoding="utf-8"))["chat_template"]
SIZES = {"vocab_size": 6400, "max_position_embeddings": 512}
both_kinds = pytest.mark.parametrize("kind", [DENSE, MOE], ids=["dense", "moe"])


def user(content):
    return {"role": "user", "content": content}


def assistant(content):
    return {"role": "assistant", "content": content}


QUESTIONS = [[user("5 加 7？")], [user("What is the capital of France?")]]
ANSWERS = [[assistant("12")], [assistant("It is Paris.")]]
WRONG_ANSWERS = [[assistant("12000 大约")], [assistant("?")]]
CONVERSATIONS = [[*question, *answer] for question, answer in zip(QUESTIONS, ANSWERS, strict=True)]
PREFERENCES = {"prompt": QUESTIONS, "chosen": ANSWERS, "rejected": WRONG_ANSWERS}


def reward_sum(completion_ids, **_):
    return [float(sum(ids)) for ids in completion_ids]


# What each trainer needs for one step on two rows.
STEPS = {
    "SFT": {"rows": {"messages": CONVERSATIONS}},
    "DPO": {"rows": PREFERENCES},
    "KTO": {
        "rows": {
            "prompt": QUESTIONS + QUESTIONS[::-1],
            "completion": ANSWERS + WRONG_ANSWERS[::-1],
            "label": [True, True, False, False],
        },
        "config": {"per_device_train_batch_size": 4},
    },
    "GRPO": {
        "rows": {"prompt": QUESTIONS},
        "config": {"num_generations": 2, "max_completion_length": 4, "beta": 0.1},
        "reward_funcs": reward_sum,
    },
}


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(FIXTURES / "tokenizer")


@pytest.fixture
def train(tokenizer, tmp_path):
    """Train a model in place for one step with one of TRL's trainers, and give the trainer."""

    def train(name, model, rows, config=None, **arguments):
        if name != "Reward":  # a reference model is loaded from where the model came from
            model.save_pretrained(tmp_path / type(model).__name__)
            model.config.name_or_path = str(tmp_path / type(model).__name__)
        settings = {
            "output_dir": str(tmp_path / "trainer"),
            "max_steps": 1,
            "per_device_train_batch_size": 2,
            "learning_rate": 0.1,
            "max_grad_norm": 0.0,
            "optim": "sgd",  # a step as large as the gradient, which Adam would hide
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": "none",
            "use_cpu": True,
            "bf16": False,
            "disable_tqdm": True,
            **(config or {}),
        }
        trainer = getattr(trl, f"{name}Trainer")(
            model,
            args=getattr(trl, f"{name}Config")(**settings),
            train_dataset=datasets.Dataset.from_dict(rows),
            processing_class=tokenizer,
            **arguments,
        )
        trainer.train()
        assert trainer.state.global_step == 1
        return trainer

    return train


@both_kinds
@pytest.mark.parametrize("name", STEPS)
def test_one_step_trains_minimind_as_its_stock_twin(name, kind, train):
    """The same loss, and the same weights afterwards; of a mixture of experts with its balance loss."""
    model = tiny_model(router_aux_loss_coef=0.5, **kind, **SIZES)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    twin = stock_twin(model)
    for token in ("bos_token_id", "eos_token_id", "pad_token_id"):
        setattr(twin.config, token, getattr(model.config, token))
        setattr(twin.generation_config, token, getattr(model.config, token))
    if kind is MOE:
        twin.config.router_aux_loss_coef = 0.5
    given, expected = train(name, model, **STEPS[name]), train(name, twin, **STEPS[name])
    assert_close(given.state.log_history[0]["loss"], expected.state.log_history[0]["loss"], rtol=1e-5, atol=1e-6)
    assert ("aux_loss" in given.state.log_history[0]) == (kind is MOE)
    after, twin_after = model.state_dict(), twin.state_dict()
    for key, start in before.items():
        step = twin_after[key] - start
        assert step.any(), key
        assert (after[key] - twin_after[key]).norm() <= 1e-3 * step.norm(), key


def test_balance_loss_is_counted_once(train):
    """TRL computes it from the router logits by Mixtral's formula, over all the blocks together, for every model."""
    model = tiny_model(router_aux_loss_coef=0.5, **MOE, **SIZES)
    trainer = train("SFT", model, STEPS["SFT"]["rows"], {"learning_rate": 0.0})
    batch = trainer.data_collator(list(trainer.train_dataset))
    labels = batch.pop("labels")
    with torch.no_grad():
        outputs = model.eval()(**batch, output_router_logits=True)
    language_model_loss = F.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    balance = load_balancing_loss_func(outputs.router_logits, 4, 2, batch["attention_mask"])
    assert_close(trainer.state.log_history[0]["loss"], (language_model_loss + 0.5 * balance).item(), rtol=0, atol=1e-4)


def test_trainers_one_after_another_take_a_dense_model_for_dense(train, tmp_path):
    """The SFT trainer writes `output_router_logits` into the config; trainers take a model that has it for sparse."""
    model = tiny_model(**SIZES)
    for name in ("SFT", "DPO"):
        assert not hasattr(model.config, "output_router_logits")
        assert not train(name, model, **STEPS[name]).aux_loss_enabled
    model.config.save_pretrained(tmp_path)
    assert not hasattr(MiniMindConfig.from_pretrained(tmp_path), "output_router_logits")
    assert tiny_config(**MOE).output_router_logits is False


def test_balance_loss_of_a_dense_model_is_refused(train):
    with pytest.raises(ValueError, match="not a Mixture-of-Experts model"):
        train("SFT", tiny_model(**SIZES), STEPS["SFT"]["rows"], {"router_aux_loss_coef": 0.5})


def test_reentrant_checkpointing_of_experts_is_refused(train):
    arguments = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
    with pytest.raises(ValueError, match="use_reentrant"):
        train("SFT", tiny_model(**MOE, **SIZES), STEPS["SFT"]["rows"], arguments)


@both_kinds
def test_sft_with_lora_trains_the_adapter_alone(kind, train):
    peft = pytest.importorskip("peft", reason="pip install 'minimind-hf[peft]'")
    model = tiny_model(**kind, **SIZES)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    adapter = peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules="all-linear")
    trainer = train("SFT", model, STEPS["SFT"]["rows"], peft_config=adapter)
    trained = dict(trainer.model.named_parameters())
    for key, value in before.items():
        name = f"base_model.model.{key}"
        plain = trained.get(name, trained.get(name.replace(".weight", ".base_layer.weight")))
        assert key == "lm_head.weight" or torch.equal(plain, value), key  # lm_head is the tied embedding
    assert all(parameter.any() for name, parameter in trained.items() if "lora_B" in name)


@both_kinds
def test_reward_model(kind, train):
    """The loss is -log sigmoid(reward of the chosen - reward of the rejected) (arXiv:2203.02155)."""
    model = tiny_model(model_class=MiniMindForSequenceClassification, num_labels=1, **kind, **SIZES)
    trainer = train("Reward", model, PREFERENCES, {"learning_rate": 0.0, "center_rewards_coefficient": None})
    batch = trainer.data_collator(list(trainer.train_dataset))
    with torch.no_grad():
        scores = model.eval()(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, 0]
    expected = F.softplus(scores[2:] - scores[:2]).mean()
    assert_close(trainer.state.log_history[0]["loss"], expected.item(), rtol=0, atol=1e-4)


# Training on the assistant's turns alone.


@pytest.mark.parametrize("case", RENDERED)
def test_training_template_renders_the_goldens(case, tokenizer):
    template = TRAINING_TEMPLATE.read_text(encoding="utf-8")
    rendered = tokenizer.apply_chat_template(**RENDERED[case]["arguments"], chat_template=template, tokenize=False)
    assert rendered == RENDERED[case]["rendered"]


THINKING = {**assistant("12"), "reasoning_content": "5+7"}
CALLING = {**assistant(""), "tool_calls": [{"name": "now", "arguments": {"zone": "UTC"}}]}
NO_THOUGHT = "<think>\n\n</think>\n\n"


@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
def test_assistant_only_loss(packing, train, tokenizer):
    messages = [
        [{"role": "system", "content": "Be brief."}, user("5 加 7？"), THINKING, user("And 1 more?"), assistant("13")],
        [user("What time is it?"), CALLING, {"role": "tool", "content": "12:00"}, assistant("Noon.")],
    ]
    config = {"assistant_only_loss": True, "chat_template_path": str(TRAINING_TEMPLATE), "packing": packing}
    trainer = train("SFT", tiny_model(**SIZES), {"messages": messages}, {**config, "max_length": 256})
    labels = trainer.data_collator(list(trainer.train_dataset))["labels"]
    expected = [
        "<think>\n5+7\n</think>\n\n12<|im_end|>\n" + NO_THOUGHT + "13<|im_end|>\n",
        NO_THOUGHT
        + '<tool_call>\n{"name": "now", "arguments": {"zone": "UTC"}}\n</tool_call><|im_end|>\n'
        + NO_THOUGHT
        + "Noon.<|im_end|>\n",
    ]
    learnt = tokenizer.decode(labels[labels != -100])
    assert learnt in ("".join(expected), "".join(expected[::-1]))
