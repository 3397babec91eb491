import ast
import json
import os
import re
from pathlib import Path

import pytest
import torch
import yaml
from conftest import DENSE, GOLDEN_CASES, MOE, SAVED_FILES, tiny_config, tiny_model
from huggingface_hub import HfApi
from safetensors.torch import load_file
from torch.testing import assert_close
from transformers import AutoModel, AutoModelForCausalLM

import minimind_hf
from minimind_hf import MiniMindConfig, MiniMindForCausalLM, MiniMindForSequenceClassification, MiniMindModel

both_kinds = pytest.mark.parametrize("kind", [DENSE, MOE], ids=["dense", "moe"])

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
THETA = 1e6


@torch.no_grad()
def logits_of(model, input_ids):
    return model(input_ids).logits


def fill_memory_with_nan():
    """Whoever allocates memory without writing to it finds NaN."""
    rubbish = [
        torch.full((size,), torch.nan) for size in (4, 8, 16, 32, 64, 1024, 4096, 16384, 65536) for _ in range(20)
    ]
    del rubbish


def fill_with_sentinels(model):
    """Values that no initialisation gives, different in every place."""
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters(), start=1):
            values = torch.arange(parameter.numel(), dtype=torch.float32) / parameter.numel() + number
            parameter.copy_(values.view_as(parameter))
    return model


def assert_same_parameters(model, expected):
    names = [name for name, _ in expected.named_parameters()]
    assert [name for name, _ in model.named_parameters()] == names
    for name in names:
        assert torch.equal(model.get_parameter(name), expected.get_parameter(name)), name


def assert_nothing_to_report(info):
    assert {key: list(value) for key, value in info.items() if value} == {}


@pytest.mark.parametrize(
    "rope", [{}, {"inference_rope_scaling": True, "max_position_embeddings": 4096}], ids=["plain", "yarn"]
)
def test_every_load_gives_bit_equal_logits(rope, input_ids, tmp_path):
    model = tiny_model(**rope)
    expected = logits_of(model, input_ids)
    model.save_pretrained(tmp_path)
    for _ in range(5):
        fill_memory_with_nan()
        assert torch.equal(logits_of(MiniMindForCausalLM.from_pretrained(tmp_path), input_ids), expected)


@both_kinds
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("loader", [MiniMindForCausalLM, AutoModelForCausalLM])
def test_no_weight_is_initialised_again_after_loading(kind, tied, loader, tmp_path):
    model = fill_with_sentinels(tiny_model(tie_word_embeddings=tied, **kind))
    model.save_pretrained(tmp_path)
    loaded, info = loader.from_pretrained(tmp_path, output_loading_info=True)
    assert_nothing_to_report(info)
    assert type(loaded) is MiniMindForCausalLM
    assert_same_parameters(loaded, model)
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied


@both_kinds
def test_no_weight_of_a_head_is_initialised_again_after_loading(kind, tmp_path):
    model = fill_with_sentinels(tiny_model(model_class=MiniMindForSequenceClassification, num_labels=5, **kind))
    model.save_pretrained(tmp_path)
    loaded, info = MiniMindForSequenceClassification.from_pretrained(tmp_path, output_loading_info=True)
    assert_nothing_to_report(info)
    assert_same_parameters(loaded, model)


@both_kinds
@pytest.mark.parametrize("tied", [True, False])
def test_names_on_disk_are_those_of_the_reference(kind, tied, tmp_path):
    model = tiny_model(tie_word_embeddings=tied, **kind)
    model.save_pretrained(tmp_path)
    names = {"model.embed_tokens.weight", "model.norm.weight"} | (set() if tied else {"lm_head.weight"})
    for i in range(2):
        block = f"model.layers.{i}"
        names |= {f"{block}.input_layernorm.weight", f"{block}.post_attention_layernorm.weight"}
        names |= {f"{block}.self_attn.{part}.weight" for part in ATTENTION}
        if kind:
            names |= {f"{block}.mlp.gate.weight"}
            names |= {f"{block}.mlp.experts.{e}.{part}.weight" for e in range(4) for part in PROJECTIONS}
        else:
            names |= {f"{block}.mlp.{part}.weight" for part in PROJECTIONS}
    assert set(load_file(tmp_path / "model.safetensors")) == names


def test_experts_on_disk_are_bit_equal_to_the_fused_ones(tmp_path):
    model = fill_with_sentinels(tiny_model(**MOE))
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for i, layer in enumerate(model.model.layers):
        experts = layer.mlp.experts
        for e in range(4):
            names = [f"model.layers.{i}.mlp.experts.{e}.{part}.weight" for part in PROJECTIONS]
            parts = (*experts.gate_up_proj[e].chunk(2), experts.down_proj[e])
            for name, part in zip(names, parts, strict=True):
                assert torch.equal(tensors[name], part), name


@both_kinds
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("loader", [MiniMindModel, AutoModel])
@torch.no_grad()
def test_trunk_loads_from_a_causal_lm_folder(kind, tied, loader, input_ids, tmp_path):
    model = tiny_model(tie_word_embeddings=tied, **kind)
    model.save_pretrained(tmp_path)
    trunk, info = loader.from_pretrained(tmp_path, output_loading_info=True)
    assert type(trunk) is MiniMindModel
    assert not info["missing_keys"]
    assert set(info["unexpected_keys"]) == (set() if tied else {"lm_head.weight"})
    assert torch.equal(trunk(input_ids).last_hidden_state, model.model(input_ids).last_hidden_state)


@both_kinds
def test_causal_lm_from_a_trunk_folder_says_what_is_missing(kind, input_ids, tmp_path):
    for tied in (True, False):
        model = tiny_model(tie_word_embeddings=tied, **kind)
        model.model.save_pretrained(tmp_path / str(tied))
        loaded, info = MiniMindForCausalLM.from_pretrained(tmp_path / str(tied), output_loading_info=True)
        assert set(info["missing_keys"]) == (set() if tied else {"lm_head.weight"})
        assert_same_parameters(loaded.model, model.model)
        if tied:
            assert torch.equal(logits_of(loaded, input_ids), logits_of(model, input_ids))


def test_head_from_a_causal_lm_folder_says_what_is_missing(model, tmp_path):
    model.save_pretrained(tmp_path)
    loaded, info = MiniMindForSequenceClassification.from_pretrained(tmp_path, num_labels=3, output_loading_info=True)
    assert set(info["missing_keys"]) == {"score.weight"}
    assert_same_parameters(loaded.model, model.model)


@both_kinds
def test_missing_weights_are_reported(kind, tmp_path):
    model = tiny_model(**kind)
    model.save_pretrained(
        tmp_path, state_dict={k: v for k, v in model.state_dict().items() if "layers.1.self_attn" not in k}
    )
    _, info = MiniMindForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert set(info["missing_keys"]) == {f"model.layers.1.self_attn.{part}.weight" for part in ATTENTION}


def test_sharded_folder_loads(model, input_ids, tmp_path):
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert_nothing_to_report(info)
    assert_same_parameters(loaded, model)
    assert torch.equal(logits_of(loaded, input_ids), logits_of(model, input_ids))


@both_kinds
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dtypes(kind, dtype, input_ids, tmp_path):
    model = tiny_model(**kind)
    model.save_pretrained(tmp_path / "float32")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "float32", dtype=dtype)
    loaded.save_pretrained(tmp_path / "half")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "half", dtype="auto")
    by_default = AutoModelForCausalLM.from_pretrained(tmp_path / "half")
    by_name = AutoModelForCausalLM.from_pretrained(tmp_path / "float32", dtype=str(dtype).removeprefix("torch."))
    for half in (loaded, again, by_default, by_name):
        assert half.dtype == dtype
        assert half.model.rotary_emb.inv_freq.dtype == torch.float32
        for name, parameter in half.named_parameters():
            assert torch.equal(parameter, model.get_parameter(name).to(dtype)), name
    assert torch.equal(logits_of(again, input_ids), logits_of(loaded, input_ids))
    for float32 in (torch.float32, "float32"):
        assert AutoModelForCausalLM.from_pretrained(tmp_path / "half", dtype=float32).dtype == torch.float32


def test_half_precision_logits_are_close(input_ids, tmp_path):
    model = tiny_model()
    model.save_pretrained(tmp_path)
    for dtype in (torch.bfloat16, torch.float16):
        logits = logits_of(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype), input_ids)
        assert logits.dtype == dtype
        assert_close(logits.float(), logits_of(model, input_ids), rtol=0, atol=40 * torch.finfo(dtype).eps)


@both_kinds
def test_weights_made_on_the_meta_device_can_be_initialised(kind):
    with torch.device("meta"):
        model = MiniMindForCausalLM(tiny_config(**kind))
    fill_memory_with_nan()
    model.to_empty(device="cpu")
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data.fill_(torch.nan)
    model.init_weights()
    frequencies = torch.tensor([THETA ** (-i / 8) for i in range(8)])
    assert_close(model.model.rotary_emb.inv_freq, frequencies)
    assert_close(model.model.rotary_emb.original_inv_freq, frequencies)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            assert (parameter == 1).all(), name
        else:
            assert abs(parameter.std() / 0.02 - 1) < 0.2, name
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_yarn_made_on_the_meta_device_can_be_initialised():
    config = tiny_config(inference_rope_scaling=True, max_position_embeddings=4096)
    with torch.device("meta"):
        model = MiniMindModel(config)
    model.to_empty(device="cpu")
    model.rotary_emb.inv_freq.fill_(torch.nan)
    model.init_weights()
    assert torch.equal(model.rotary_emb.inv_freq, MiniMindModel(config).rotary_emb.inv_freq)


def test_tie_weights_twice_changes_nothing(model, input_ids):
    expected = logits_of(model, input_ids)
    model.tie_weights()
    model.tie_weights()
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.equal(logits_of(model, input_ids), expected)


def test_saved_folder_holds_these_files_and_no_others(model, tmp_path):
    model.save_pretrained(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == SAVED_FILES
    for name in ("configuration_minimind.py", "modeling_minimind.py"):
        assert (tmp_path / name).read_bytes() == Path(minimind_hf.__file__).with_name(name).read_bytes()


AUTO_CLASSES = {
    "AutoConfig",
    "AutoModel",
    "AutoModelForCausalLM",
    "AutoModelForSequenceClassification",
    "AutoModelForTokenClassification",
    "AutoModelForQuestionAnswering",
}


@pytest.mark.parametrize("model_class", [MiniMindModel, MiniMindForCausalLM])
def test_saved_auto_map_names_the_files_beside_it_whatever_the_config_said(model_class, tmp_path):
    reference = json.loads((GOLDEN_CASES[0] / "hf_config.json").read_text(encoding="utf-8"))
    assert reference["auto_map"]["AutoConfig"] == "model_minimind.MiniMindConfig"
    model_class(MiniMindConfig.from_dict(reference)).save_pretrained(tmp_path)
    auto_map = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))["auto_map"]
    assert set(auto_map) == AUTO_CLASSES
    for name in auto_map.values():
        module, class_name = name.split(".")
        assert f"class {class_name}(" in (tmp_path / f"{module}.py").read_text(encoding="utf-8")


def test_saved_generation_config_can_stop(tmp_path):
    tiny_model().save_pretrained(tmp_path / "published")
    tiny_model(bos_token_id=5, eos_token_id=[6, 7], pad_token_id=8).save_pretrained(tmp_path / "own")
    for name, expected in (("published", (1, 2, 0)), ("own", (5, [6, 7], 8))):
        saved = json.loads((tmp_path / name / "generation_config.json").read_text(encoding="utf-8"))
        assert (saved["bos_token_id"], saved["eos_token_id"], saved["pad_token_id"]) == expected


def assert_is_model_card(text):
    _, header, body = text.split("---\n", 2)
    header = yaml.safe_load(header)
    assert header["license"] == "apache-2.0"
    assert header["library_name"] == "transformers"
    assert header["pipeline_tag"] == "text-generation"
    assert "minimind" in header["tags"]
    (snippet,) = re.findall(r"```python\n(.*?)```", body, re.DOTALL)
    ast.parse(snippet)
    assert "trust_remote_code=True" in snippet


def test_saved_folder_has_a_model_card(model, tmp_path):
    model.save_pretrained(tmp_path)
    card = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert_is_model_card(card)
    assert f"{sum(parameter.numel() for parameter in model.parameters()):,} parameters" in card


def test_an_existing_readme_is_kept(model, tmp_path):
    (tmp_path / "README.md").write_text("# Mine\n", encoding="utf-8")
    model.save_pretrained(tmp_path)
    assert (tmp_path / "README.md").read_text(encoding="utf-8") == "# Mine\n"


def test_saving_into_the_source_folder_is_refused(tmp_path):
    source = Path(minimind_hf.__file__).parent
    link = tmp_path / "link"
    link.symlink_to(source)
    for folder in (source, str(source), os.path.relpath(source), link):
        with pytest.raises(ValueError, match="source code"):
            tiny_model().save_pretrained(folder)
    assert not {"config.json", "model.safetensors"} & set(os.listdir(source))


@pytest.fixture
def pushed(monkeypatch):
    """Every commit that would have gone to the hub, as a dict from the file's name to its content."""
    commits = []

    def create_repo(self, repo_id, **kwargs):
        return type("Repo", (), {"repo_id": repo_id})

    def create_commit(self, repo_id, operations, **kwargs):
        commits.append({op.path_in_repo: Path(op.path_or_fileobj).read_bytes() for op in operations})

    monkeypatch.setattr(HfApi, "create_repo", create_repo)
    monkeypatch.setattr(HfApi, "create_commit", create_commit)
    return commits


def test_push_to_hub_sends_the_files_that_saving_writes(model, pushed, tmp_path):
    model.push_to_hub("someone/minimind")
    model.save_pretrained(tmp_path)
    (files,) = pushed
    assert files == {name: (tmp_path / name).read_bytes() for name in SAVED_FILES}
    assert_is_model_card(files["README.md"].decode())


def test_push_to_hub_keeps_the_tags_it_is_given(model, pushed):
    model.push_to_hub("someone/minimind", tags=["mine"])
    header = yaml.safe_load(pushed[0]["README.md"].decode().split("---\n")[1])
    assert {"minimind", "mine"} <= set(header["tags"])


def test_card_names_the_task_of_the_head(tmp_path):
    model = tiny_model(model_class=MiniMindForSequenceClassification)
    model.save_pretrained(tmp_path)
    card = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert "pipeline_tag: text-classification" in card
    assert "AutoModelForSequenceClassification.from_pretrained" in card
