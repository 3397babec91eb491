"""Saved folders in fresh processes: with the package out of reach, and with both it and a folder's own code."""

import ast
import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from conftest import DENSE, FIXTURES, MINIMIND2, MOE, tiny_model
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer
from transformers.dynamic_module_utils import get_relative_imports

import minimind_hf
from minimind_hf import (
    MiniMindForCausalLM,
    MiniMindForQuestionAnswering,
    MiniMindForSequenceClassification,
    MiniMindForTokenClassification,
    MiniMindModel,
)

SHIPPED = [Path(minimind_hf.__file__).with_name(f"{name}_minimind.py") for name in ("configuration", "modeling")]
KINDS = {"dense": DENSE, "moe": MOE, "minimind2": MINIMIND2}
CLASSES = {
    "AutoModel": MiniMindModel,
    "AutoModelForCausalLM": MiniMindForCausalLM,
    "AutoModelForSequenceClassification": MiniMindForSequenceClassification,
    "AutoModelForTokenClassification": MiniMindForTokenClassification,
    "AutoModelForQuestionAnswering": MiniMindForQuestionAnswering,
}

BLOCKED = """
import sys
sys.modules["minimind_hf"] = None  # importing it raises ModuleNotFoundError
"""
HELPERS = f"""
AUTO_CLASSES = {list(CLASSES)}

import torch, transformers
from safetensors.torch import load_file

input_ids = load_file("expected.safetensors")["input_ids"]

@torch.no_grad()
def values_of(model):
    outputs = model(input_ids)
    return next(outputs[name] for name in ("last_hidden_state", "start_logits", "logits") if name in outputs)
"""


def run(code, folder, preamble=BLOCKED, check=True):
    """Run Python code in `folder` in a fresh process that knows no modules of earlier ones, with nobody to answer."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": str(folder / "modules")}
    finished = subprocess.run(
        [sys.executable, "-c", preamble + HELPERS + textwrap.dedent(code)],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=180,
    )
    if check:
        assert finished.returncode == 0, finished.stderr
    return finished


@torch.no_grad()
def values_of(model, input_ids):
    outputs = model(input_ids)
    return next(outputs[name] for name in ("last_hidden_state", "start_logits", "logits") if name in outputs)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """`KIND/CLASS` folders of every model class, and what each of them computes for `input_ids`.

    `KIND/trunk` is what the trunk inside the language model computes.
    """
    folder = tmp_path_factory.mktemp("saved")
    input_ids = torch.randint(3, 192, (2, 12), generator=torch.Generator().manual_seed(1))
    expected = {"input_ids": input_ids}
    for kind, changes in KINDS.items():
        for auto_class, model_class in CLASSES.items():
            labels = {} if auto_class in ("AutoModel", "AutoModelForCausalLM") else {"num_labels": 2}
            model = tiny_model(model_class=model_class, **labels, **changes)
            model.save_pretrained(folder / kind / auto_class)
            expected[f"{kind}/{auto_class}"] = values_of(model, input_ids)
            if auto_class == "AutoModelForCausalLM":
                expected[f"{kind}/trunk"] = values_of(model.model, input_ids)
    save_file(expected, folder / "expected.safetensors")
    return folder


def test_every_auto_class_loads_a_saved_folder_without_the_package(saved, tmp_path):
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    code = """
    expected = load_file("expected.safetensors")
    for kind in ("dense", "moe", "minimind2"):
        for auto_class in AUTO_CLASSES:
            loader, name = getattr(transformers, auto_class), f"{kind}/{auto_class}"
            config = transformers.AutoConfig.from_pretrained(name, trust_remote_code=True)
            assert type(config).__module__.startswith("transformers_modules."), type(config)
            assert config.use_moe == (kind != "dense")
            model, info = loader.from_pretrained(name, trust_remote_code=True, output_loading_info=True)
            assert type(model).__module__.startswith("transformers_modules."), type(model)
            assert not any(info.values()), info
            assert torch.equal(values_of(model), expected[name]), name

            # Every class loads from the folder of a language model too.
            model = loader.from_pretrained(f"{kind}/AutoModelForCausalLM", trust_remote_code=True)
            trunk = getattr(model, "model", model)
            assert torch.equal(values_of(trunk), expected[f"{kind}/trunk"]), name
    """
    run(code, tmp_path)


def test_a_folder_saved_by_remote_code_loads_again(saved, tmp_path):
    for kind in KINDS:
        shutil.copytree(saved / kind, tmp_path / "first" / kind)
    shutil.copy(saved / "expected.safetensors", tmp_path)
    code = """
    expected = load_file("expected.safetensors")
    for name in [f"{kind}/{auto_class}" for kind in ("dense", "moe", "minimind2") for auto_class in AUTO_CLASSES]:
        loader = getattr(transformers, name.split("/")[1])
        model = loader.from_pretrained(f"{SOURCE}/{name}", trust_remote_code=True)
        assert torch.equal(values_of(model), expected[name]), name
        model.save_pretrained(f"{TARGET}/{name}")
    """
    run(code, tmp_path, BLOCKED + "SOURCE, TARGET = 'first', 'second'\n")
    expected = load_file(tmp_path / "expected.safetensors")
    for kind in KINDS:
        first, second = (tmp_path / step / kind / "AutoModelForCausalLM" for step in ("first", "second"))
        assert {path.name for path in second.iterdir()} == {path.name for path in first.iterdir()}
        tensors, again = load_file(first / "model.safetensors"), load_file(second / "model.safetensors")
        assert set(again) == set(tensors)
        assert all(torch.equal(again[name], tensors[name]) for name in tensors)
        for source in SHIPPED:
            assert (second / source.name).read_bytes() == source.read_bytes()
        with_the_package = MiniMindForCausalLM.from_pretrained(second)
        assert torch.equal(
            values_of(with_the_package, expected["input_ids"]), expected[f"{kind}/AutoModelForCausalLM"]
        )
    shutil.rmtree(tmp_path / "first")
    shutil.rmtree(tmp_path / "modules")
    run(code, tmp_path, BLOCKED + "SOURCE, TARGET = 'second', 'third'\n")


def test_nothing_loads_without_trust_and_without_the_package(saved, tmp_path):
    """Nobody can answer the question whether to trust, so that it must not be waited for."""
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    code = """
    def refuse(folder, loader, **trust):
        try:
            loader.from_pretrained(folder, **trust)
        except ValueError as error:
            assert "trust_remote_code" in str(error), error
        else:
            raise AssertionError(f"{loader.__name__} ran the code of {folder}")

    for trust in ({}, {"trust_remote_code": False}):
        for auto_class in ("AutoModel", "AutoModelForCausalLM", "AutoModelForQuestionAnswering"):
            refuse(f"dense/{auto_class}", transformers.AutoConfig, **trust)
            refuse(f"dense/{auto_class}", getattr(transformers, auto_class), **trust)

    # Trust in one folder is no trust in another.
    transformers.AutoModelForCausalLM.from_pretrained("dense/AutoModelForCausalLM", trust_remote_code=True)
    refuse("moe/AutoModelForCausalLM", transformers.AutoModelForCausalLM)
    assert not any(name.startswith("minimind_hf.") for name in sys.modules)
    """
    run(code, tmp_path)


def save_with_tokenizer(model, folder, prompt):
    """Save a model that stops at its seventh token or earlier, and return the text it should generate."""
    tokenizer = AutoTokenizer.from_pretrained(FIXTURES / "tokenizer")
    input_ids = tokenizer(prompt, return_tensors="pt").input_ids
    tokens = model.generate(input_ids, do_sample=False, max_new_tokens=12, eos_token_id=None)[0]
    end = tokens[input_ids.shape[1] + 6].item()
    model.generation_config.eos_token_id = end
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    first_end = tokens.tolist().index(end, input_ids.shape[1])
    return tokenizer.decode(tokens[: first_end + 1], skip_special_tokens=True)


def test_pipeline_without_the_package(saved, tmp_path):
    shutil.copy(saved / "expected.safetensors", tmp_path)
    texts = {
        kind: save_with_tokenizer(tiny_model(vocab_size=6400, **changes), tmp_path / kind, "你好，世界")
        for kind, changes in KINDS.items()
    }
    (tmp_path / "texts.json").write_text(json.dumps(texts), encoding="utf-8")
    code = """
    import json
    for kind, text in json.load(open("texts.json")).items():
        generator = transformers.pipeline("text-generation", kind, trust_remote_code=True)
        assert type(generator.model).__module__.startswith("transformers_modules."), type(generator.model)
        (answer,) = generator("你好，世界", do_sample=False, max_new_tokens=12)
        assert answer["generated_text"] == text, (answer, text)
    """
    finished = run(code, tmp_path)
    assert "not supported" not in finished.stderr


@pytest.mark.parametrize("first", ["plugin", "remote code"])
def test_plugin_and_remote_code_in_one_process(first, saved, tmp_path):
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    code = """
    expected = load_file("expected.safetensors")

    def check(plugin_is_imported):
        for kind in ("dense", "moe", "minimind2"):
            for auto_class in ("AutoModel", "AutoModelForCausalLM", "AutoModelForTokenClassification"):
                loader, name = getattr(transformers, auto_class), f"{kind}/{auto_class}"
                model, info = loader.from_pretrained(name, trust_remote_code=True, output_loading_info=True)
                remote = type(model).__module__.startswith("transformers_modules.")
                assert remote != plugin_is_imported, type(model)
                assert not any(info.values()), info
                assert torch.equal(values_of(model), expected[name]), name
                if plugin_is_imported:
                    assert torch.equal(values_of(loader.from_pretrained(name)), expected[name]), name
                model.save_pretrained(f"again/{plugin_is_imported}/{name}")
                again = loader.from_pretrained(f"again/{plugin_is_imported}/{name}", trust_remote_code=True)
                assert torch.equal(values_of(again), expected[name]), name

    def remote_classes():
        from transformers.dynamic_module_utils import get_class_from_dynamic_module
        for kind in ("dense", "moe", "minimind2"):
            folder = f"{kind}/AutoModelForCausalLM"
            model_class = get_class_from_dynamic_module("modeling_minimind.MiniMindForCausalLM", folder)
            assert model_class.__module__.startswith("transformers_modules.")
            assert torch.equal(values_of(model_class.from_pretrained(folder)), expected[folder])

    if FIRST == "remote code":
        check(plugin_is_imported=False)
        check(plugin_is_imported=False)
    import minimind_hf
    check(plugin_is_imported=True)
    remote_classes()
    import importlib
    importlib.reload(minimind_hf)
    check(plugin_is_imported=True)
    remote_classes()
    """
    run(code, tmp_path, preamble=f"FIRST = {first!r}\n")


def test_the_one_relative_import_of_the_shipped_files_is_the_configuration():
    """The loader of transformers reads imports by a regular expression, and follows one level of sibling files."""
    configuration, modeling = SHIPPED
    assert get_relative_imports(configuration) == []
    assert get_relative_imports(modeling) == ["configuration_minimind"]


def test_shipped_files_import_only_what_every_installation_of_transformers_has():
    allowed = {"torch", "transformers", "huggingface_hub"} | set(sys.stdlib_module_names)
    for path in SHIPPED:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                assert {alias.name.split(".")[0] for alias in node.names} <= allowed
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                assert node.module.split(".")[0] in allowed
