"""Fixtures shared by all tests. Nothing here or in the tests reaches the network."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from pathlib import Path

import pytest
import torch
from transformers.utils import logging

from minimind_hf import MiniMindConfig, MiniMindForCausalLM

logging.disable_progress_bar()
torch.set_num_threads(1)  # the models are tiny: more threads only wait for each other

ROOT = Path(__file__).parent.parent
FIXTURES = ROOT / "tests" / "fixtures"
CASES_OF = {
    generation: sorted((FIXTURES / generation).iterdir())
    for generation in ("minimind3", "minimind2", "minimind2-early", "minimind1")
}
GOLDEN_CASES = [case for cases in CASES_OF.values() for case in cases]


def case_name(case: Path) -> str:
    return f"{case.parent.name}-{case.name}"


# Checkpoints of some 13 MB that answer questions; too large for the repository.
FACTS = Path(os.environ.get("MINIMIND_FIXTURES", ROOT.parent / "shared" / "fixtures")) / "facts"
needs_facts = pytest.mark.skipif(
    not FACTS.exists(), reason=f"the trained checkpoints are not at {FACTS}; MINIMIND_FIXTURES names another folder"
)

# What a saved causal language model consists of.
SAVED_FILES = {
    "README.md",
    "config.json",
    "configuration_minimind.py",
    "generation_config.json",
    "model.safetensors",
    "modeling_minimind.py",
}

DENSE = {}
MOE = {"use_moe": True, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 96}
# What tells the mixture of experts of MiniMind2 from that of MiniMind-3.
MINIMIND2 = {
    **MOE,
    "use_qk_norm": False,
    "rms_norm_scale_in_float32": False,
    "num_shared_experts": 1,
    "seq_aux": True,
}


def tiny_config(**changes) -> MiniMindConfig:
    sizes = {"vocab_size": 192, "hidden_size": 64, "num_hidden_layers": 2, "max_position_embeddings": 256}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return MiniMindConfig(**{**sizes, **heads, **changes})


def tiny_model(seed=0, model_class=MiniMindForCausalLM, **changes):
    """A random model whose weights are large and asymmetric enough for a swap or a transpose to show."""
    torch.manual_seed(seed)
    model = model_class(tiny_config(initializer_range=0.2, **changes)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
    return model


@pytest.fixture(params=[DENSE, MOE, MINIMIND2], ids=["dense", "moe", "minimind2"])
def model(request):
    return tiny_model(**request.param)


@pytest.fixture
def input_ids():
    return torch.randint(3, 192, (2, 12), generator=torch.Generator().manual_seed(1))
