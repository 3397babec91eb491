"""Two processes that share a model, by transformers' tensor and expert parallelism, give what one gives."""

import os
import subprocess
import sys

import pytest
import torch
from conftest import DENSE, MINIMIND2, MOE, ROOT, tiny_config, tiny_model
from documents import blocks
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

from minimind_hf import MiniMindForCausalLM

WORKER = ROOT / "tests" / "parallel_worker.py"
TOP1 = {**MOE, "num_experts_per_tok": 1}
SHARED = {
    "tensor-dense": DENSE,
    "tensor-untied": {"tie_word_embeddings": False},
    "tensor-minimind2": {"use_qk_norm": False},
    "tensor-moe-top1": TOP1,
    "tensor-moe-top2": MOE,
    "tensor-minimind2-moe": MINIMIND2,
    "expert-moe-top1": TOP1,
    "expert-moe-top2": MOE,
    "expert-minimind2-moe": MINIMIND2,
}
REFUSED = {
    "tensor-one-kv-head": {"num_key_value_heads": 1},
    "tensor-three-kv-heads": {"hidden_size": 48, "num_attention_heads": 3, "num_key_value_heads": 3},
}


def run_in_two_processes(*command, **options):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *command]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, **options)
    assert run.returncode == 0, run.stderr[-3000:]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """Folders of models, each with the outcome of two processes that loaded it together."""
    directory = tmp_path_factory.mktemp("models")
    for name, changes in {**SHARED, **REFUSED}.items():
        tiny_model(**changes).save_pretrained(directory / name)
    torch.save(torch.randint(3, 192, (2, 12), generator=torch.Generator().manual_seed(1)), directory / "input_ids.pt")
    run_in_two_processes(WORKER, directory)
    return directory


@pytest.mark.parametrize("name", SHARED)
def test_two_processes_give_the_logits_and_tokens_of_one(name, directory, input_ids):
    model, outcome = tiny_model(**SHARED[name]), torch.load(directory / name / "outcome.pt")
    assert "error" not in outcome, outcome
    with torch.no_grad():
        assert_close(outcome["logits"], model(input_ids).logits, rtol=0, atol=2e-5)
    expected = model.generate(input_ids, max_new_tokens=8, do_sample=False, eos_token_id=None)
    assert torch.equal(outcome["tokens"], expected)


def test_block_of_the_page(tmp_path):
    tiny_model().save_pretrained(tmp_path / "my-minimind")
    (block,) = blocks("docs/scaling.md", "Plans of transformers", "python")
    check = "assert tuple(model.model.layers[0].mlp.up_proj.weight.to_local().shape) == (128, 64)\n"  # half of 256
    (tmp_path / "script.py").write_text(block + check)
    run_in_two_processes("script.py", cwd=tmp_path)


def test_each_process_holds_its_share(directory):
    model, shapes = tiny_model(**MOE), torch.load(directory / "tensor-moe-top2" / "outcome.pt")["local_shapes"]
    halves = {"q_proj": 0, "k_proj": 0, "v_proj": 0, "o_proj": 1, "gate_up_proj": 1, "down_proj": 2}
    for name, parameter in model.model.layers.named_parameters(prefix="model.layers"):
        kind = name.removesuffix(".weight").rpartition(".")[2]
        if kind in halves:
            expected = list(parameter.shape)
            expected[halves[kind]] //= 2
            assert list(shapes[name]) == expected, name
    shapes = torch.load(directory / "expert-moe-top2" / "outcome.pt")["local_shapes"]
    assert shapes["model.layers.0.mlp.experts.gate_up_proj"] == (2, 192, 64)  # two experts of four


@pytest.mark.parametrize("name", SHARED)
def test_what_two_processes_save_is_whole(name, directory):
    saved = AutoModelForCausalLM.from_pretrained(directory / name / "saved")
    for (key, parameter), (_, expected) in zip(
        saved.named_parameters(), tiny_model(**SHARED[name]).named_parameters(), strict=True
    ):
        assert torch.equal(parameter, expected), key


@pytest.mark.parametrize("name", REFUSED)
def test_key_value_heads_are_not_cut(name, directory):
    error = torch.load(directory / name / "outcome.pt")["error"]
    assert f"num_key_value_heads={REFUSED[name]['num_key_value_heads']}" in error


@torch.no_grad()
@pytest.mark.parametrize("kind", [DENSE, MOE, MINIMIND2], ids=["dense", "moe", "minimind2"])
def test_pipeline_plan_names_every_stage(kind, input_ids):
    """Stage by stage, each given what the plan says, the model computes what it computes as a whole."""
    model = MiniMindForCausalLM(tiny_config(**kind)).eval()
    plan = {f"model.{name}": value for name, value in model.config.base_model_pp_plan.items()} | model._pp_plan
    stages = {name.rpartition(".")[0] for name, _ in model.named_parameters()}
    assert all(any(stage == name or stage.startswith(f"{name}.") for name in plan) for stage in stages)
    position_ids = torch.arange(input_ids.shape[1])[None]
    values = {"input_ids": input_ids, "attention_mask": None}
    for name, (inputs, outputs) in plan.items():
        module = model.get_submodule(name)
        if isinstance(module, torch.nn.ModuleList):
            position_embeddings = model.model.rotary_emb(values["inputs_embeds"], position_ids)
            values["hidden_states"] = values["inputs_embeds"]
            for layer in module:
                values["hidden_states"] = layer(
                    **{key: values[key] for key in inputs}, position_embeddings=position_embeddings
                )
        else:
            values[outputs[0]] = module(*(values[key] for key in inputs))
    assert_close(values["logits"], model(input_ids).logits, rtol=0, atol=1e-5)


def test_fsdp_plan_names_modules_of_the_model():
    model = MiniMindForCausalLM(tiny_config())
    names = {name for name, _ in model.named_modules()}
    assert sorted(model._fsdp_plan) == ["lm_head", "model.embed_tokens", "model.layers.*", "model.norm"]
    assert {name.replace("*", "0") for name in model._fsdp_plan} <= names
