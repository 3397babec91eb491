"""What the wheel holds, and the rules that the two shipped files must keep."""

import ast
import shutil
import subprocess
import sys
import zipfile

import pytest
from conftest import ROOT

SHIPPED = ["configuration_minimind.py", "modeling_minimind.py"]


def imports_of(path):
    """(module, level) of every import of a file."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, 0) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module, node.level


def test_the_only_relative_import_is_of_the_configuration():
    files = [ROOT / name for name in tracked_files() if name.endswith(".py")]
    relative = [(path.name, module) for path in files for module, level in imports_of(path) if level]
    assert relative == [("modeling_minimind.py", "configuration_minimind")]


def tracked_files():
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    return listed.stdout.splitlines()


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_files_need_nothing_but_transformers(name):
    allowed = {*sys.stdlib_module_names, "torch", "transformers", "huggingface_hub"}
    absolute = {module.split(".")[0] for module, level in imports_of(ROOT / name) if not level}
    assert absolute <= allowed


def test_wheel_holds_the_package_and_the_tiny_model(tmp_path):
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        tmp_path,
        ".",
    ]
    built = subprocess.run(command, cwd=copy_of_the_tree(tmp_path / "tree"), capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    (wheel,) = tmp_path.glob("*.whl")
    names = [name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name]
    assert all(name.startswith("minimind_hf/") for name in names)
    modules = {*SHIPPED, "__init__.py", "__main__.py", "chat.py", "cli.py", "serving.py", "speed.py", "vllm_plugin.py"}
    assert {name.removeprefix("minimind_hf/") for name in names if name.count("/") == 1} == modules
    assert {f"minimind_hf/convert/{path.name}" for path in (ROOT / "convert").glob("*.py")} <= set(names)
    tiny = {f"minimind_hf/assets/minimind-tiny/{path.name}" for path in (ROOT / "assets" / "minimind-tiny").iterdir()}
    assert "minimind_hf/assets/minimind-tiny/model.safetensors" in tiny
    assert tiny <= set(names)


def copy_of_the_tree(folder):
    """The files that git knows, so that building leaves nothing in the checkout."""
    for name in tracked_files():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, folder / name)
    return folder
