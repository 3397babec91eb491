"""Exports to transformers' own classes, under transformers 5 and 4.57, and the way back."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from conftest import CASES_OF, FACTS, FIXTURES, ROOT, case_name, needs_facts, tiny_model
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Trainer,
    TrainingArguments,
    pipeline,
)

from minimind_hf import MiniMindConfig
from minimind_hf.convert import ConversionError, to_hf, to_torch
from minimind_hf.convert.checkpoint import load_checkpoint
from minimind_hf.convert.exports import from_llama, from_qwen3, to_llama, to_qwen3
from minimind_hf.convert.loading import build_model

TOKENIZER = FIXTURES / "tokenizer"
TINY_CHAT = ROOT / "assets" / "minimind-tiny"
TINY_QUESTIONS = {"12 + 30 = ?": "42", "法国的首都是哪里？": "巴黎", "What is 7 times 8?": "56"}
TRAINED = {"dense": "full_sft_256.pth", "moe": "full_sft_192_moe.pth"}

QWEN3_CASES = CASES_OF["minimind3"]
LLAMA_CASES = [
    case
    for generation in ("minimind2", "minimind2-early", "minimind1")
    for case in CASES_OF[generation]
    if case.name != "moe"
]

needs_457 = pytest.mark.skipif(
    "MINIMIND_PYTHON_457" not in os.environ,
    reason="MINIMIND_PYTHON_457 names no interpreter that has transformers 4.57; `make test` makes one",
)


def export(case: Path, folder: Path, **arguments) -> str:
    convert = to_qwen3 if case in QWEN3_CASES else to_llama
    return convert(case / "weights.pth", folder, config=case / "hf_config.json", **arguments)


def convert_back(case: Path, folder: Path, destination: Path, **arguments) -> str:
    return (from_qwen3 if case in QWEN3_CASES else from_llama)(folder, destination, **arguments)


def stock_class(case: Path):
    if case in LLAMA_CASES:
        return LlamaForCausalLM
    return Qwen3MoeForCausalLM if "moe" in case.name else Qwen3ForCausalLM


def read(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


def change(path: Path, **changes):
    path.write_text(json.dumps({**read(path), **changes}), encoding="utf-8")


def same(found: dict, expected: dict) -> bool:
    return found.keys() == expected.keys() and all(
        found[name].dtype == tensor.dtype and torch.equal(found[name], tensor) for name, tensor in expected.items()
    )


@pytest.fixture(params=QWEN3_CASES + LLAMA_CASES, ids=case_name)
def case(request):
    return request.param


@torch.no_grad()
def test_stock_class_gives_the_reference_outputs(case, tmp_path):
    assert export(case, tmp_path / "stock").startswith("verified: ")
    model, report = AutoModelForCausalLM.from_pretrained(
        tmp_path / "stock", dtype=torch.float32, output_loading_info=True
    )
    assert type(model) is stock_class(case)
    assert not any(report.values())
    golden = load_file(case / "golden.safetensors")
    outputs = model(golden["input_ids"], labels=golden.get("labels"))
    torch.testing.assert_close(outputs.logits, golden["logits"], rtol=0, atol=1e-4)
    if case.parent.name in ("minimind3", "minimind2"):  # the goldens of the early generations hold no more
        torch.testing.assert_close(outputs.loss, golden["loss"].reshape(()), rtol=0, atol=1e-5)
        mask = golden["padded_attention_mask"]
        padded = model(golden["padded_input_ids"], attention_mask=mask).logits[mask.bool()]
        torch.testing.assert_close(padded, golden["padded_logits"][mask.bool()], rtol=0, atol=1e-4)
    prompt = golden["greedy_prompt"]
    generated = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=20, eos_token_id=None
    )
    assert torch.equal(generated[:, prompt.shape[1] :], golden["greedy_tokens"])
    assert ("long_input_ids" in golden) == (case.name == "yarn")
    if case.name == "yarn":
        logits = model(golden["long_input_ids"], logits_to_keep=8).logits
        torch.testing.assert_close(logits, golden["long_logits_last8"], rtol=0, atol=1e-4)


def test_round_trip_keeps_every_bit_and_config_value(case, tmp_path):
    original = load_checkpoint(case / "weights.pth", case / "hf_config.json")
    export(case, tmp_path / "stock")
    written = load_file(tmp_path / "stock" / "model.safetensors")
    assert same(written, original.tensors)
    assert convert_back(case, tmp_path / "stock", tmp_path / "back").startswith("verified: ")
    back = load_checkpoint(tmp_path / "back")
    assert same(back.tensors, original.tensors)
    told = {name for name in read(tmp_path / "stock" / "config.json") if hasattr(original.config, name)}
    told |= {"use_moe", "use_qk_norm", "rms_norm_scale_in_float32", "inference_rope_scaling"}
    told -= {"architectures", "model_type", "dtype", "torch_dtype", "attention_dropout"}
    assert {name: getattr(back.config, name) for name in told} == {
        name: getattr(original.config, name) for name in told
    }
    assert back.config.attention_dropout is None
    assert back.config.rope_parameters == original.config.rope_parameters


def test_config_file_is_complete_for_both_versions(tmp_path):
    """The keys that transformers 4.57 reads, beside the one that 5 reads."""
    yarn = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 2048, "attention_factor": 1.0}
    yarn |= {"beta_fast": 32.0, "beta_slow": 1.0}
    export(FIXTURES / "minimind3" / "yarn", tmp_path / "yarn")
    config = read(tmp_path / "yarn" / "config.json")
    assert config["rope_scaling"] == yarn
    assert config["rope_theta"] == 1e6
    assert config["rope_parameters"] == {**yarn, "rope_theta": 1e6}
    assert config["layer_types"] == ["full_attention", "full_attention"]
    assert config["dtype"] == config["torch_dtype"] == "float16"

    export(FIXTURES / "minimind3" / "moe-unnormalized", tmp_path / "moe")
    config = read(tmp_path / "moe" / "config.json")
    expected = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "decoder_sparse_step": 1,
        "head_dim": 16,
        "max_position_embeddings": 256,
        "mlp_only_layers": [],
        "moe_intermediate_size": 64,
        "norm_topk_prob": False,
        "num_experts": 4,
        "num_experts_per_tok": 1,
        "rope_scaling": None,
        "router_aux_loss_coef": 5e-4,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    assert {name: config[name] for name in expected} == expected
    assert read(tmp_path / "moe" / "generation_config.json") == {
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    assert sorted(os.listdir(tmp_path / "moe")) == ["config.json", "generation_config.json", "model.safetensors"]


@pytest.mark.parametrize("rope_type", ["linear", "dynamic"])
def test_other_rope_types_are_the_same_in_the_stock_class(rope_type, tmp_path):
    model = tiny_model(max_position_embeddings=64, rope_parameters={"rope_type": rope_type, "factor": 2})
    model.save_pretrained(tmp_path / "minimind")
    to_qwen3(tmp_path / "minimind", tmp_path / "stock")
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "stock")
    ids = torch.arange(100).unsqueeze(0)
    with torch.no_grad():
        torch.testing.assert_close(stock(ids).logits, model(ids).logits, rtol=0, atol=1e-5)


def test_half_precision_differs_by_no_more_than_its_rounding(tmp_path):
    """Qwen3 casts inside its norms, MiniMind-3 after them; Llama and MiniMind2 do the same."""
    for generation in ("minimind3", "minimind2"):
        case = FIXTURES / generation / "dense"
        export(case, tmp_path / generation)
        stock = AutoModelForCausalLM.from_pretrained(tmp_path / generation, dtype=torch.bfloat16)
        model = build_model(load_checkpoint(case / "weights.pth", case / "hf_config.json"), torch.bfloat16)
        golden = load_file(case / "golden.safetensors")
        with torch.no_grad():
            ours, theirs = (each(golden["input_ids"]).logits.float() for each in (model, stock))
        if generation == "minimind2":
            assert torch.equal(ours, theirs)
        else:
            assert not torch.equal(ours, theirs)
            assert (ours - theirs).abs().max() < 2**-5 * golden["logits"].abs().max()


def test_dtype_is_kept_or_chosen(tmp_path):
    case = FIXTURES / "minimind3" / "dense"
    export(case, tmp_path / "stock", dtype="bfloat16")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "stock").dtype == torch.bfloat16
    from_qwen3(tmp_path / "stock", tmp_path / "kept")
    from_qwen3(tmp_path / "stock", tmp_path / "chosen", dtype="float32")
    kept, chosen = (load_file(tmp_path / name / "model.safetensors") for name in ("kept", "chosen"))
    assert {tensor.dtype for tensor in kept.values()} == {torch.bfloat16}
    assert same(chosen, {name: tensor.float() for name, tensor in kept.items()})


def test_dropout_that_a_stock_class_lacks_is_reported(tmp_path):
    tiny_model(dropout=0.25).save_pretrained(tmp_path / "minimind")
    report = to_qwen3(tmp_path / "minimind", tmp_path / "stock")
    assert "the dropout 0.25 of embeddings and outputs, in training, is left out" in report
    assert read(tmp_path / "stock" / "config.json")["attention_dropout"] == 0.25


def test_generation_settings_of_the_source_come_along(tmp_path):
    model = tiny_model()
    model.generation_config = GenerationConfig(temperature=0.6, do_sample=True, eos_token_id=[2, 0], bos_token_id=1)
    model.save_pretrained(tmp_path / "minimind")
    to_qwen3(tmp_path / "minimind", tmp_path / "stock")
    from_qwen3(tmp_path / "stock", tmp_path / "back")
    for folder in ("stock", "back"):
        settings = GenerationConfig.from_pretrained(tmp_path / folder)
        assert (settings.temperature, settings.do_sample, settings.eos_token_id) == (0.6, True, [2, 0])
        assert (settings.bos_token_id, settings.pad_token_id) == (1, 0)


def test_unverified_export_says_so_and_is_the_same(tmp_path):
    case = FIXTURES / "minimind3" / "dense"
    assert export(case, tmp_path / "verified").startswith("verified")
    assert export(case, tmp_path / "unverified", verify=False) == "not verified"
    assert convert_back(case, tmp_path / "verified", tmp_path / "back", verify=False) == "not verified"
    for name in os.listdir(tmp_path / "verified"):
        assert (tmp_path / "verified" / name).read_bytes() == (tmp_path / "unverified" / name).read_bytes()


def test_export_is_replaced_only_on_request(tmp_path):
    case = FIXTURES / "minimind3" / "dense"
    export(case, tmp_path / "stock")
    with pytest.raises(ConversionError, match="--overwrite"):
        export(case, tmp_path / "stock")
    export(case, tmp_path / "stock", overwrite=True, dtype="float32")
    assert load_file(tmp_path / "stock" / "model.safetensors")["model.norm.weight"].dtype == torch.float32
    with pytest.raises(ConversionError, match="is not a llama model folder"):
        export(FIXTURES / "minimind2" / "dense", tmp_path / "stock", overwrite=True)


# The tokenizer: as many tokens as the published one has, in a model that is otherwise tiny.


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """A random MiniMind-3 folder with the 6400 embeddings of MiniMind's tokenizer, and its dense Llama counterpart."""
    folder = tmp_path_factory.mktemp("wide")
    tiny_model(vocab_size=6400, hidden_size=16).save_pretrained(folder / "minimind3")
    plain = {"use_qk_norm": False, "rms_norm_scale_in_float32": False}
    tiny_model(vocab_size=6400, hidden_size=16, **plain).save_pretrained(folder / "minimind2")
    return folder


def check_tokenizer(found: dict):
    golden = read(TOKENIZER / "golden.json")
    assert found["ids"] == [example["ids"] for example in golden["encodings"]]
    assert found["rendered"] == [example["rendered"] for example in golden["chat_template"].values()]
    assert found["special"] == [1, 2, 0]
    assert found["inputs"] == ["attention_mask", "input_ids"]


def tokenizer_task(folder: Path) -> dict:
    golden = read(TOKENIZER / "golden.json")
    return {
        "folder": str(folder),
        "texts": [example["text"] for example in golden["encodings"]],
        "chats": [example["arguments"] for example in golden["chat_template"].values()],
    }


@pytest.mark.parametrize("convert, source", [(to_qwen3, "minimind3"), (to_llama, "minimind2")])
def test_tokenizer_comes_along(convert, source, wide, tmp_path):
    assert "the tokenizer is the same" in convert(wide / source, tmp_path / "stock", tokenizer=TOKENIZER)
    from load_export import run_tokenizer

    check_tokenizer(run_tokenizer(**tokenizer_task(tmp_path / "stock")))
    settings = read(tmp_path / "stock" / "tokenizer_config.json")
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast"
    # Back, the source's own tokenizer is copied without being asked for.
    {to_qwen3: from_qwen3, to_llama: from_llama}[convert](tmp_path / "stock", tmp_path / "back")
    check_tokenizer(run_tokenizer(**tokenizer_task(tmp_path / "back")))


def test_what_only_transformers_5_knows_of_a_tokenizer_is_left_out(wide, tmp_path):
    AutoTokenizer.from_pretrained(TOKENIZER).save_pretrained(tmp_path / "tokenizer")
    saved = read(tmp_path / "tokenizer" / "tokenizer_config.json")
    assert saved["tokenizer_class"] == "TokenizersBackend"
    to_qwen3(wide / "minimind3", tmp_path / "stock", tokenizer=tmp_path / "tokenizer")
    written = read(tmp_path / "stock" / "tokenizer_config.json")
    assert not {"backend", "extra_special_tokens", "is_local", "local_files_only"} & written.keys()
    assert written["additional_special_tokens"] == saved["extra_special_tokens"]
    assert written["chat_template"] == (tmp_path / "tokenizer" / "chat_template.jinja").read_text(encoding="utf-8")


def test_tokenizers_that_do_not_fit_are_refused(wide, tmp_path):
    shutil.copytree(TOKENIZER, tmp_path / "slow", copy_function=shutil.copyfile)
    (tmp_path / "slow" / "tokenizer.json").unlink()
    dense = FIXTURES / "minimind3" / "dense" / "weights.pth"
    for source, tokenizer, message in [
        (dense, TOKENIZER, "ids up to 6399, but the model only 192 embeddings"),
        (wide / "minimind3", tmp_path / "slow", "tokenizer"),
        (wide / "minimind3", tmp_path, "holds no tokenizer"),
    ]:
        with pytest.raises(ConversionError, match=message):
            to_qwen3(source, tmp_path / "stock", tokenizer=tokenizer)
    assert os.listdir(tmp_path) == ["slow"]


def test_own_tokenizer_may_pad_differently_from_the_config(wide, tmp_path):
    shutil.copytree(wide / "minimind3", tmp_path / "minimind")
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER, pad_token="<|im_end|>")
    tokenizer.save_pretrained(tmp_path / "minimind")
    to_qwen3(tmp_path / "minimind", tmp_path / "stock")
    assert GenerationConfig.from_pretrained(tmp_path / "stock").pad_token_id == 0
    assert AutoTokenizer.from_pretrained(tmp_path / "stock").pad_token_id == 2
    with pytest.raises(ConversionError, match="pad_token_id is 0 in the config, but 2 in the tokenizer"):
        to_qwen3(wide / "minimind3", tmp_path / "other", tokenizer=tmp_path / "minimind")


# What a trained model answers.


def test_tiny_chat_model_answers_and_stops(tmp_path):
    to_qwen3(TINY_CHAT, tmp_path / "stock")
    generator = pipeline("text-generation", str(tmp_path / "stock"), dtype=torch.float32)
    for question, expected in TINY_QUESTIONS.items():
        answer = generator([{"role": "user", "content": question}])[0]["generated_text"][-1]["content"]
        assert expected in answer
        assert len(answer) < 60


@needs_facts
@pytest.mark.parametrize("name", TRAINED)
def test_trained_checkpoint_answers_as_recorded(name, tmp_path):
    to_qwen3(FACTS / name / TRAINED[name], tmp_path / "stock", tokenizer=TOKENIZER)
    answers = read(FACTS / name / "answers.json")
    assert len(answers) == 230
    from load_export import answer

    given = answer(str(tmp_path / "stock"), list(answers))
    assert [reply.strip() for reply in given] == list(answers.values())


def test_one_training_step_of_the_stock_class_and_back_to_the_reference(tmp_path):
    case = FIXTURES / "minimind3" / "dense"
    export(case, tmp_path / "stock", dtype="float32")
    rows = torch.randint(3, 192, (4, 16), generator=torch.Generator().manual_seed(0))
    trainer = Trainer(
        model=Qwen3ForCausalLM.from_pretrained(tmp_path / "stock"),
        args=TrainingArguments(
            output_dir=tmp_path / "run",
            max_steps=1,
            learning_rate=1e-3,
            report_to="none",
            use_cpu=True,
            disable_tqdm=True,
        ),
        train_dataset=[{"input_ids": row, "labels": row} for row in rows],
    )
    trainer.train()
    trainer.save_model(tmp_path / "tuned")
    from_qwen3(tmp_path / "tuned", tmp_path / "minimind")
    to_torch(tmp_path / "minimind", tmp_path / "tuned.pth")
    original = torch.load(case / "weights.pth", weights_only=True)
    tuned = torch.load(tmp_path / "tuned.pth", weights_only=True)
    assert list(tuned) == list(original)
    assert [tensor.shape for tensor in tuned.values()] == [tensor.shape for tensor in original.values()]
    trained = trainer.model.state_dict()
    assert all(torch.equal(tensor, trained[name].cpu()) for name, tensor in tuned.items())
    assert not any(torch.equal(tensor, original[name].float()) for name, tensor in tuned.items())


# What others wrote: stock models that never were a MiniMind.


def random_stock_model(model_class, config_class, **changes):
    torch.manual_seed(0)
    sizes = {"vocab_size": 192, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "initializer_range": 0.2}
    tokens = {"bos_token_id": None, "eos_token_id": [2, 5], "pad_token_id": None}
    config = config_class(**{**sizes, **tokens, "max_position_embeddings": 128, **changes})
    model = model_class(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
    return model


EXPERTS = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True}
OTHERS = {
    "qwen3": (from_qwen3, Qwen3ForCausalLM, Qwen3Config, {"rope_parameters": {"rope_theta": 5e5}}),
    "qwen3 tied": (from_qwen3, Qwen3ForCausalLM, Qwen3Config, {"tie_word_embeddings": True, "attention_dropout": 0.1}),
    "qwen3_moe": (from_qwen3, Qwen3MoeForCausalLM, Qwen3MoeConfig, EXPERTS),
    "llama": (from_llama, LlamaForCausalLM, LlamaConfig, {"rms_norm_eps": 1e-3, "hidden_act": "gelu"}),
}


@pytest.mark.parametrize("kind", OTHERS)
@pytest.mark.parametrize("shard", ["5GB", "50KB"])
@torch.no_grad()
def test_stock_model_becomes_a_minimind(kind, shard, tmp_path):
    convert, model_class, config_class, changes = OTHERS[kind]
    stock = random_stock_model(model_class, config_class, **changes)
    stock.save_pretrained(tmp_path / "stock", max_shard_size=shard)
    assert (tmp_path / "stock" / "model.safetensors.index.json").exists() == (shard == "50KB")
    convert(tmp_path / "stock", tmp_path / "minimind")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "minimind")
    ids = torch.randint(192, (2, 40), generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(model(ids).logits, stock(ids).logits, rtol=0, atol=1e-5)
    assert model.config.eos_token_id == model.generation_config.eos_token_id == [2, 5]
    assert model.config.pad_token_id is None
    assert model.config.dropout == 0
    assert model.config.attention_dropout == changes.get("attention_dropout")


def test_config_in_the_words_of_transformers_4_is_read(tmp_path):
    random_stock_model(LlamaForCausalLM, LlamaConfig, head_dim=None).save_pretrained(tmp_path / "stock")
    config = read(tmp_path / "stock" / "config.json")
    del config["rope_parameters"], config["dtype"], config["head_dim"]
    scaling = {"factor": 4.0, "original_max_position_embeddings": 32}
    config |= {"rope_theta": 3e5, "rope_scaling": {"type": "yarn", **scaling}, "torch_dtype": "float32"}
    (tmp_path / "stock" / "config.json").write_text(json.dumps(config))
    from_llama(tmp_path / "stock", tmp_path / "minimind")
    config = MiniMindConfig.from_pretrained(tmp_path / "minimind")
    assert config.rope_parameters == {"rope_type": "yarn", "rope_theta": 3e5, **scaling}
    assert config.inference_rope_scaling
    assert (config.use_qk_norm, config.rms_norm_scale_in_float32) == (False, False)


# Refusals: one error that names the culprit, and nothing written.

NOT_EXPRESSIBLE = {
    "MiniMind2 experts as Qwen3": (to_qwen3, "minimind2/moe", "no shared experts: those 1 .*which norms queries and"),
    "MiniMind2 as Qwen3": (to_qwen3, "minimind2/dense", "which norms queries and keys.*LlamaForCausalLM fits"),
    "MiniMind-3 as Llama": (to_llama, "minimind3/dense", "q_norm and k_norm .* lost; Qwen3ForCausalLM fits"),
    "experts as Llama": (to_llama, "minimind3/moe-top1", "no experts: those 4 .*Qwen3MoeForCausalLM fits"),
    "MiniMind2 experts as Llama": (to_llama, "minimind2/moe", "no experts: those 4.*no class of transformers fits"),
}


@pytest.mark.parametrize("name", NOT_EXPRESSIBLE)
def test_what_would_be_lost_is_refused(name, tmp_path):
    convert, case, message = NOT_EXPRESSIBLE[name]
    with pytest.raises(ConversionError, match=message):
        convert(FIXTURES / case / "weights.pth", tmp_path / "stock", config=FIXTURES / case / "hf_config.json")
    assert os.listdir(tmp_path) == []


def test_llama_whose_heads_do_not_divide_the_width_is_refused(tmp_path):
    plain = {"use_qk_norm": False, "rms_norm_scale_in_float32": False}
    odd = {"hidden_size": 40, "num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 16}
    tiny_model(**plain, **odd).save_pretrained(tmp_path / "minimind")
    with pytest.raises(ConversionError, match=r"hidden size \(40\) is not a multiple"):
        to_llama(tmp_path / "minimind", tmp_path / "stock")
    assert os.listdir(tmp_path) == ["minimind"]


def test_flags_and_damaged_files_are_refused(tmp_path):
    case = FIXTURES / "minimind3" / "dense"
    with pytest.raises(ConversionError, match="--num-attention-heads is 8"):
        export(case, tmp_path / "stock", **{"num_attention_heads": 8})
    with pytest.raises(ConversionError, match="--dtype int3"):
        export(case, tmp_path / "stock", dtype="int3")
    whole = (case / "weights.pth").read_bytes()
    (tmp_path / "half.pth").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ConversionError, match="truncated"):
        to_qwen3(tmp_path / "half.pth", tmp_path / "stock")
    assert os.listdir(tmp_path) == ["half.pth"]


BEYOND_MINIMIND = {
    "attention_bias": ({"attention_bias": True}, "attention_bias=True"),
    "sliding window": ({"use_sliding_window": True, "sliding_window": 64}, "sliding_window"),
    "windowed layer": ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types .*sliding_attention"),
    "rope type": (
        {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, "factor": 2.0, "short_factor": [1.0] * 8}},
        "longrope",
    ),
    "part of the head": (
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        "partial_rotary_factor",
    ),
    "hidden_act": ({"hidden_act": "cubic"}, "hidden_act='cubic'"),
    "quantized": ({"quantization_config": {"quant_method": "fp8"}}, "quantized"),
    "two thetas": ({"rope_theta": 5e5}, "rope_theta=500000.0, which transformers 4 reads, but rope_parameters"),
    "layers without end": (
        {"num_hidden_layers": 10**9, "layer_types": None},
        "1000000000 in its config, but only 24 t",
    ),
    "other model": ({"model_type": "qwen2"}, "qwen2 model, expected qwen3 or qwen3_moe"),
    "no model type": ({"model_type": None}, "None model, expected qwen3"),
    "other size": ({"hidden_size": 32}, r"model\.embed_tokens\.weight is \[192, 64\] instead of \[192, 32\]"),
    "more layers": ({"num_hidden_layers": 3, "layer_types": None}, r"missing: model\.layers\.2\."),
    "wrong type": ({"hidden_size": "wide"}, "hidden_size"),
    "negative": ({"rms_norm_eps": -1.0}, "rms_norm_eps"),
    "bad token": ({"eos_token_id": 7000}, "eos_token_id=7000"),
    "rope is a list": ({"rope_parameters": [1]}, "rope|list"),
    "untied": ({"tie_word_embeddings": False}, r"missing: lm_head\.weight"),
}


@pytest.fixture(scope="module")
def stock_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stock") / "stock"
    export(FIXTURES / "minimind3" / "dense", folder)
    config = read(folder / "config.json")
    for spelling in ("rope_theta", "rope_scaling"):
        del config[spelling]
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("name", BEYOND_MINIMIND)
def test_what_minimind_lacks_is_refused_by_name(name, stock_folder, tmp_path):
    changes, message = BEYOND_MINIMIND[name]
    shutil.copytree(stock_folder, tmp_path / "stock")
    change(tmp_path / "stock" / "config.json", **changes)
    with pytest.raises(ConversionError, match=message):
        from_qwen3(tmp_path / "stock", tmp_path / "minimind")
    assert os.listdir(tmp_path) == ["stock"]


@pytest.mark.parametrize(
    "case, changes, message",
    [
        ("minimind3/moe-top2", {"mlp_only_layers": [0]}, r"mlp_only_layers=\[0\]"),
        ("minimind3/moe-top2", {"decoder_sparse_step": 2}, "decoder_sparse_step=2"),
        ("minimind3/moe-top2", {"num_experts_per_tok": 9}, "num_experts_per_tok=9"),
        ("minimind3/moe-top2", {"use_sliding_window": True, "sliding_window": 64}, "sliding_window"),
        ("minimind2/dense", {"mlp_bias": True}, "mlp_bias=True"),
        ("minimind2/dense", {"sliding_window": 64}, "sliding_window=64"),
        ("minimind2/dense", {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "llama3|factor"),
    ],
)
def test_what_minimind_lacks_of_others_is_refused_by_name(case, changes, message, tmp_path):
    export(FIXTURES / case, tmp_path / "stock")
    change(tmp_path / "stock" / "config.json", **changes)
    with pytest.raises(ConversionError, match=message):
        convert_back(FIXTURES / case, tmp_path / "stock", tmp_path / "minimind")
    assert os.listdir(tmp_path) == ["stock"]


def test_tensors_that_contradict_the_config_are_refused(stock_folder, tmp_path):
    shutil.copytree(stock_folder, tmp_path / "stock")
    weights = tmp_path / "stock" / "model.safetensors"
    tensors = load_file(weights)
    embedding = tensors["model.embed_tokens.weight"]
    for changes, message in [
        ({"lm_head.weight": embedding + 1}, "an lm_head.weight of its own, but tie_word_embeddings is true"),
        ({"model.layers.0.self_attn.q_proj.bias": torch.ones(64)}, r"unexpected: .*q_proj\.bias"),
        ({"model.norm.weight": torch.full((64,), float("nan"))}, "NaN"),
    ]:
        save_file({**tensors, **changes}, weights)
        with pytest.raises(ConversionError, match=message):
            from_qwen3(tmp_path / "stock", tmp_path / "minimind")
    save_file({**tensors, "lm_head.weight": embedding.clone()}, weights)  # some tools store a tied head again
    from_qwen3(tmp_path / "stock", tmp_path / "minimind")
    assert same(load_file(tmp_path / "minimind" / "model.safetensors"), tensors)


def test_sources_that_are_no_stock_folder_are_refused(stock_folder, tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    (tmp_path / "gguf").mkdir()
    shutil.copyfile(stock_folder / "config.json", tmp_path / "gguf" / "config.json")
    (tmp_path / "empty").mkdir()
    to_hf(FIXTURES / "minimind3" / "dense" / "weights.pth", tmp_path / "minimind")
    before = sorted(os.listdir(tmp_path))
    for source, message in [
        ("model.gguf", "is not a folder"),
        ("missing", "does not exist"),
        ("gguf", "neither model.safetensors nor"),
        ("empty", "config.json does not exist"),
        ("minimind", "holds a minimind model, expected qwen3"),
    ]:
        with pytest.raises(ConversionError, match=message):
            from_qwen3(tmp_path / source, tmp_path / "back")
    with pytest.raises(ConversionError, match="holds a qwen3 model, expected llama"):
        from_llama(stock_folder, tmp_path / "back")
    assert sorted(os.listdir(tmp_path)) == before


def test_verification_notices_other_logits_and_tensors(tmp_path, monkeypatch):
    """A config that says something else, or a file that holds something else, must not pass."""
    from minimind_hf.convert import exports

    case = FIXTURES / "minimind3" / "dense"
    describe, write = exports.describe_as_stock, exports.write_safetensors
    monkeypatch.setattr(exports, "describe_as_stock", lambda *args: {**describe(*args), "rms_norm_eps": 1e-2})
    with pytest.raises(ConversionError, match="the logits of Qwen3ForCausalLM differ"):
        export(case, tmp_path / "stock")
    monkeypatch.setattr(exports, "describe_as_stock", describe)
    monkeypatch.setattr(
        exports, "write_safetensors", lambda tensors, path: write({k: v * 2 for k, v in tensors.items()}, path)
    )
    with pytest.raises(ConversionError, match="differs from the source"):
        export(case, tmp_path / "stock")
    assert os.listdir(tmp_path) == []


def test_code_in_a_stock_folder_is_not_run(stock_folder, tmp_path):
    shutil.copytree(stock_folder, tmp_path / "stock")
    (tmp_path / "stock" / "hostile.py").write_text(f"open({str(tmp_path / 'EXECUTED')!r}, 'w')")
    change(
        tmp_path / "stock" / "config.json",
        auto_map={"AutoModelForCausalLM": "hostile.Model", "AutoConfig": "hostile.C"},
    )
    from_qwen3(tmp_path / "stock", tmp_path / "minimind")
    assert "auto_map" in read(tmp_path / "minimind" / "config.json")  # MiniMind's own
    assert sorted(os.listdir(tmp_path)) == ["minimind", "stock"]
    assert not (tmp_path / "minimind" / "hostile.py").exists()


# transformers 4.57, in an environment of its own.


@pytest.fixture(scope="module")
def under_457(wide, tmp_path_factory):
    """What one process with transformers 4.57 makes of the exports: the folder of files, and what it wrote down."""
    folder = tmp_path_factory.mktemp("457")
    for case in QWEN3_CASES + LLAMA_CASES:
        export(case, folder / case_name(case))
    AutoTokenizer.from_pretrained(TOKENIZER).save_pretrained(folder / "saved by 5")
    to_qwen3(wide / "minimind3", folder / "qwen3", tokenizer=TOKENIZER)
    to_llama(wide / "minimind2", folder / "llama", tokenizer=TOKENIZER)
    to_qwen3(wide / "minimind3", folder / "resaved", tokenizer=folder / "saved by 5")
    to_qwen3(TINY_CHAT, folder / "tiny")
    questions = {"tiny": list(TINY_QUESTIONS)}
    for name, checkpoint in TRAINED.items() if FACTS.exists() else ():
        to_qwen3(FACTS / name / checkpoint, folder / name, tokenizer=TOKENIZER)
        questions[name] = list(read(FACTS / name / "answers.json"))
    job = {
        "models": {
            case_name(case): [str(folder / case_name(case)), str(case / "golden.safetensors")]
            for case in QWEN3_CASES + LLAMA_CASES
        },
        "tokenizers": {name: tokenizer_task(folder / name) for name in ("qwen3", "llama", "resaved")},
        "chats": {name: {"folder": str(folder / name), "questions": asked} for name, asked in questions.items()},
    }
    (folder / "job.json").write_text(json.dumps(job), encoding="utf-8")
    (folder / "results").mkdir()
    finished = subprocess.run(
        [os.environ["MINIMIND_PYTHON_457"], ROOT / "tests" / "load_export.py", "job.json", "results"],
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        cwd=folder,
    )
    assert finished.returncode == 0, finished.stderr
    written = read(folder / "results" / "results.json")
    assert written["version"].startswith("4.57.")
    assert written["ran_code"] == []
    return folder, written


@needs_457
def test_model_gives_the_reference_outputs_under_457(case, under_457):
    folder, written = under_457
    expected_class, facts = stock_class(case), written["models"][case_name(case)]
    assert facts["class"] == f"{expected_class.__module__}.{expected_class.__name__}"
    assert facts["faults"] == {}
    assert facts["dtype"] == "torch.float16"
    golden = load_file(case / "golden.safetensors")
    found = load_file(folder / "results" / f"{case_name(case)}.safetensors")
    expected = {"logits", "greedy_tokens", *(["long_logits_last8"] if case.name == "yarn" else [])}
    assert found.keys() == expected
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, golden[name], rtol=0, atol=1e-4)


@needs_457
def test_what_457_saves_in_shards_comes_back_bit_for_bit(case, under_457, tmp_path):
    saved = under_457[0] / "results" / case_name(case)
    assert (saved / "model.safetensors.index.json").exists()
    convert_back(case, saved, tmp_path / "back")
    original = load_checkpoint(case / "weights.pth", case / "hf_config.json")
    back = load_checkpoint(tmp_path / "back")
    assert same(back.tensors, original.tensors)
    assert back.config.rope_parameters == original.config.rope_parameters


@needs_457
@pytest.mark.parametrize("name", ["qwen3", "llama", "resaved"])
def test_tokenizer_is_the_same_under_457(name, under_457):
    check_tokenizer(under_457[1]["tokenizers"][name])


@needs_457
def test_tiny_chat_model_answers_and_stops_under_457(under_457):
    for answer, expected in zip(under_457[1]["answers"]["tiny"], TINY_QUESTIONS.values(), strict=True):
        assert expected in answer
        assert len(answer) < 60


@needs_457
@needs_facts
@pytest.mark.parametrize("name", TRAINED)
def test_trained_checkpoint_answers_as_recorded_under_457(name, under_457):
    answers = read(FACTS / name / "answers.json")
    assert [reply.strip() for reply in under_457[1]["answers"][name]] == list(answers.values())
