"""Older generations: their names, order of rows, defaults and published folders; and what no layout can express."""

import json
import os
import shutil

import pytest
import torch
from conftest import CASES_OF, FIXTURES, GOLDEN_CASES, case_name, tiny_config
from safetensors.torch import load_file, save_file
from test_conversion import Hostile
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from minimind_hf.configuration_minimind import YARN_PARAMETERS
from minimind_hf.convert import ConversionError, to_hf, to_torch
from minimind_hf.convert.checkpoint import load_checkpoint
from minimind_hf.convert.conversions import to_state_dict
from minimind_hf.convert.generations import GENERATIONS, names_for, own_names
from minimind_hf.convert.layout import expected_shapes, pair_halves, pair_neighbours

EARLY = GENERATIONS["minimind2-early"]
COUNTS = {"layer": 1, "expert": 1, "shared": 1}

# The tensors of one early block with one expert, and what each is called in a MiniMind folder.
EARLY_BLOCK = {
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "layers.0.attention.wq.weight": "model.layers.0.self_attn.q_proj.weight",
    "layers.0.attention.wk.weight": "model.layers.0.self_attn.k_proj.weight",
    "layers.0.attention.wv.weight": "model.layers.0.self_attn.v_proj.weight",
    "layers.0.attention.wo.weight": "model.layers.0.self_attn.o_proj.weight",
    "layers.0.attention_norm.weight": "model.layers.0.input_layernorm.weight",
    "layers.0.ffn_norm.weight": "model.layers.0.post_attention_layernorm.weight",
    "layers.0.feed_forward.experts.0.w1.weight": "model.layers.0.mlp.experts.0.gate_proj.weight",
    "layers.0.feed_forward.experts.0.w2.weight": "model.layers.0.mlp.experts.0.down_proj.weight",
    "layers.0.feed_forward.experts.0.w3.weight": "model.layers.0.mlp.experts.0.up_proj.weight",
    "layers.0.feed_forward.gate.weight": "model.layers.0.mlp.gate.weight",
    "layers.0.feed_forward.shared_experts.w1.weight": "model.layers.0.mlp.shared_experts.0.gate_proj.weight",
    "layers.0.feed_forward.shared_experts.w2.weight": "model.layers.0.mlp.shared_experts.0.down_proj.weight",
    "layers.0.feed_forward.shared_experts.w3.weight": "model.layers.0.mlp.shared_experts.0.up_proj.weight",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


def test_early_names_and_their_inverse_on_tensors_of_four_numbers(tmp_path):
    """One layer of width 2, every tensor with four numbers or fewer of its own, there and back."""
    shapes = {name: (2, 2) for name in EARLY_BLOCK} | {name: (2,) for name in EARLY_BLOCK if "norm" in name}
    shapes["layers.0.feed_forward.gate.weight"] = (1, 2)
    numbers = {name: torch.arange(4.0)[: 2 * shape[0]].reshape(shape) if len(shape) == 2 else torch.arange(2.0)
               for name, shape in shapes.items()}  # fmt: skip
    own = {name: 10 * position + tensor for position, (name, tensor) in enumerate(numbers.items(), 1)}
    own["output.weight"] = own["tok_embeddings.weight"]
    torch.save(own, tmp_path / "early.pth")
    flags = {"generation": "minimind2-early", "num_attention_heads": 1, "num_experts_per_tok": 1}
    (tmp_path / "config.json").write_text('{"bos_token_id": 0, "eos_token_id": 1}')
    checkpoint = load_checkpoint(tmp_path / "early.pth", tmp_path / "config.json", flags)
    assert checkpoint.tensors.keys() == set(EARLY_BLOCK.values()) - {"lm_head.weight"}
    for own_name, name in EARLY_BLOCK.items():
        if name != "lm_head.weight":  # a head of two values is one pair: its rows stay where they are
            assert checkpoint.tensors[name].tolist() == own[own_name].tolist()
    back = to_state_dict(checkpoint, EARLY)
    assert list(back) == list(EARLY_BLOCK)
    assert all(torch.equal(back[name], own[name]) for name in own)


def test_rows_of_interleaved_pairs_become_halves():
    rows = torch.tensor([[0.0], [1.0], [2.0], [3.0], [10.0], [11.0], [12.0], [13.0]])  # two heads of two pairs
    halves = pair_halves(rows, head_dim=4)
    assert halves.flatten().tolist() == [0, 2, 1, 3, 10, 12, 11, 13]
    assert torch.equal(pair_neighbours(halves, head_dim=4), rows)


@pytest.mark.parametrize("key", GENERATIONS)
def test_no_two_names_of_a_generation_are_one(key):
    names = own_names(GENERATIONS[key], {"layer": 2, "expert": 3, "shared": 1})
    assert len(set(names.values())) == len(names)


@pytest.mark.parametrize("case", GOLDEN_CASES, ids=case_name)
def test_names_of_the_reference(case):
    """Each fixture holds exactly the names, in the order, that the tables say for its config."""
    checkpoint = load_checkpoint(case / "weights.pth", case / "hf_config.json")
    names = names_for(GENERATIONS[case.parent.name], checkpoint.config)
    assert list(names) == list(torch.load(case / "weights.pth", weights_only=True))
    assert set(names.values()) - {"lm_head.weight"} == expected_shapes(checkpoint.config).keys() - {"lm_head.weight"}


@pytest.mark.parametrize("generation", ["minimind2", "minimind2-early", "minimind1"])
def test_older_dense_models_are_llamas(generation):
    """A stock class that knows nothing of this package's model gives the goldens with the reordered rows."""
    case = FIXTURES / generation / "dense"
    checkpoint = load_checkpoint(case / "weights.pth", case / "hf_config.json")
    names = "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads"
    values = {name: getattr(checkpoint.config, name) for name in [*names.split(), "rms_norm_eps", "rope_parameters"]}
    llama = LlamaForCausalLM(LlamaConfig(**values, tie_word_embeddings=True)).eval()
    state = {name: tensor.float() for name, tensor in checkpoint.tensors.items()}
    llama.load_state_dict({**state, "lm_head.weight": state["model.embed_tokens.weight"]})
    golden = load_file(case / "golden.safetensors")
    with torch.no_grad():
        torch.testing.assert_close(llama(golden["input_ids"]).logits, golden["logits"], rtol=0, atol=1e-4)


# Published folders.


def publish(case, folder, file):
    """A folder as the reference implementation's own `save_pretrained` leaves it."""
    folder.mkdir()
    shutil.copyfile(case / "hf_config.json", folder / "config.json")
    tensors = torch.load(case / "weights.pth", weights_only=True)
    if file == "pytorch_model.bin":
        torch.save({**tensors, "model.freqs_cos": torch.ones(4)}, folder / file)
    else:
        tied = torch.equal(tensors["lm_head.weight"], tensors["model.embed_tokens.weight"])
        kept = {name: tensor for name, tensor in tensors.items() if not (tied and name == "lm_head.weight")}
        save_file(kept, folder / file, metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("case", CASES_OF["minimind3"] + CASES_OF["minimind2"], ids=case_name)
@torch.no_grad()
def test_published_folders_load_as_they_are(case, file, tmp_path):
    folder = publish(case, tmp_path / "published", file)
    model, report = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not any(report.values()), report
    golden = load_file(case / "golden.safetensors")
    torch.testing.assert_close(model(golden["input_ids"]).logits, golden["logits"], rtol=0, atol=1e-4)
    to_hf(folder, tmp_path / "converted")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "converted", dtype=torch.float32)
    assert torch.equal(again(golden["input_ids"]).logits, model(golden["input_ids"]).logits)


@pytest.mark.parametrize("generation", ["minimind2-early", "minimind1"])
def test_published_folders_of_early_layouts_name_the_converter(generation, tmp_path):
    case = CASES_OF[generation][0]
    (tmp_path / "published").mkdir()
    shutil.copyfile(case / "hf_config.json", tmp_path / "published" / "config.json")
    shutil.copyfile(case / "weights.pth", tmp_path / "published" / "pytorch_model.bin")
    with pytest.raises(ValueError, match="minimind convert to-hf"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "published")
    to_hf(tmp_path / "published", tmp_path / "converted")
    golden = load_file(case / "golden.safetensors")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "converted", dtype=torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(model(golden["input_ids"]).logits, golden["logits"], rtol=0, atol=1e-4)


def test_hostile_published_weights_are_refused_and_not_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copyfile(CASES_OF["minimind2"][0] / "hf_config.json", tmp_path / "config.json")
    torch.save({"model.norm.weight": Hostile()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(Exception, match=r"[Ww]eights"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
    with pytest.raises(ConversionError, match="Nothing in it was executed"):
        to_hf(tmp_path, tmp_path.parent / "converted")
    assert "EXECUTED" not in os.listdir(tmp_path)


# What no tensor tells.


def published_size(generation, folder, hidden_size=512):
    """A checkpoint with the published widths of a generation (one block, tiny vocabulary), and its config."""
    facts = GENERATIONS[generation]
    config = tiny_config(
        hidden_size=hidden_size,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=facts.heads,
        num_key_value_heads=facts.key_value_heads,
        use_qk_norm=generation == "minimind3",
        rope_theta=1e4 if generation == "minimind1" else 1e6,
    )
    names = names_for(facts, config)
    generator = torch.Generator().manual_seed(0)
    shapes = expected_shapes(config)
    tensors = {
        own: torch.randn(shapes.get(name, (192, hidden_size)), generator=generator) for own, name in names.items()
    }
    tensors[list(names)[-1]] = tensors[next(iter(names))]  # tied
    torch.save(tensors, folder / "weights.pth")
    return folder / "weights.pth"


DEFAULTS = {
    "minimind3": {"theta": 1e6, "eps": 1e-6, "heads": 8, "kv": 4, "positions": 32768},
    "minimind2": {"theta": 1e6, "eps": 1e-5, "heads": 8, "kv": 2, "positions": 32768},
    "minimind2-early": {"theta": 1e6, "eps": 1e-5, "heads": 8, "kv": 2, "positions": 8192},
    "minimind1": {"theta": 1e4, "eps": 1e-5, "heads": 16, "kv": 8, "positions": 512},
}


@pytest.mark.parametrize("generation", GENERATIONS)
def test_published_sizes_get_the_defaults_of_their_generation(generation, tmp_path):
    report = to_hf(published_size(generation, tmp_path), tmp_path / "model")
    config = AutoModelForCausalLM.from_pretrained(tmp_path / "model").config
    expected = DEFAULTS[generation]
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": expected["theta"]}
    assert (config.rms_norm_eps, config.max_position_embeddings) == (expected["eps"], expected["positions"])
    assert (config.num_attention_heads, config.num_key_value_heads) == (expected["heads"], expected["kv"])
    assert config.use_qk_norm == config.rms_norm_scale_in_float32 == (generation == "minimind3")
    assert "assumed" in report and f"rope_theta {expected['theta']}" in report
    assert (f"num_attention_heads {expected['heads']}" in report) == (generation != "minimind3")
    assert ("generation " in report) == (generation in ("minimind2-early", "minimind1"))


def test_nothing_is_assumed_where_a_config_tells(tmp_path):
    for case in GOLDEN_CASES:
        assert load_checkpoint(case / "weights.pth", case / "hf_config.json").assumed == ()


def test_config_of_a_converted_folder_fits_its_source(tmp_path):
    for case in GOLDEN_CASES:
        first, again = tmp_path / f"{case_name(case)}-1", tmp_path / f"{case_name(case)}-2"
        to_hf(case / "weights.pth", first, config=case / "hf_config.json")
        to_hf(case / "weights.pth", again, config=first / "config.json")
        assert (first / "config.json").read_bytes() == (again / "config.json").read_bytes()
        assert (first / "model.safetensors").read_bytes() == (again / "model.safetensors").read_bytes()


def test_flags_tell_what_tensors_cannot(tmp_path):
    case = FIXTURES / "minimind1" / "moe"
    flags = {"generation": "minimind2-early", "num_attention_heads": 4, "rms_norm_eps": 1e-4, "num_experts_per_tok": 3}
    report = to_hf(case / "weights.pth", tmp_path / "model", rope_theta=5e3, **flags)
    config = AutoModelForCausalLM.from_pretrained(tmp_path / "model").config
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (4, 2, 16)
    assert (config.rms_norm_eps, config.num_experts_per_tok) == (1e-4, 3)
    assert config.rope_parameters["rope_theta"] == 5e3
    assert "assumed" in report and "rms_norm_eps" not in report and "rope_theta" not in report


UNTOLD = {
    "heads of a small MiniMind2": ("minimind2/dense", {}, "--num-attention-heads"),
    "generation of a small early file": ("minimind1/dense", {}, "--generation"),
    "heads of a small early file": ("minimind1/dense", {"generation": "minimind1"}, "--num-attention-heads"),
    "heads that do not divide": ("minimind2/dense", {"num_attention_heads": 3}, "--num-attention-heads 3"),
    "more heads than key rows": ("minimind2/dense", {"num_attention_heads": 1}, "--num-attention-heads 1"),
    "no heads": ("minimind2/dense", {"num_attention_heads": 0}, "--num-attention-heads 0"),
    "generation of other names": ("minimind2/dense", {"generation": "minimind1"}, "--generation minimind1"),
}


@pytest.mark.parametrize("case", UNTOLD)
def test_what_cannot_be_told_is_asked_for(case, tmp_path):
    path, flags, culprit = UNTOLD[case]
    with pytest.raises(ConversionError, match=culprit):
        to_hf(FIXTURES / path / "weights.pth", tmp_path / "model", **flags)
    assert os.listdir(tmp_path) == []


def test_what_the_code_of_a_generation_has_fixed_is_not_asked_for_otherwise(tmp_path):
    case = FIXTURES / "minimind1" / "dense"
    with pytest.raises(ConversionError, match="MiniMind v1 has rope_theta=10000"):
        to_hf(case / "weights.pth", tmp_path / "model", config=case / "hf_config.json", rope_theta=1e6)
    early = FIXTURES / "minimind2-early" / "dense"
    for change in ({"hidden_act": "gelu"}, {"rope_scaling": {"type": "yarn", "factor": 4}}):
        config = json.loads((early / "hf_config.json").read_text()) | change
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(ConversionError, match="fixed in its code"):
            to_hf(early / "weights.pth", tmp_path / "model", config=tmp_path / "config.json")


def test_early_config_that_does_not_tell_which_one_is_reported(tmp_path):
    case = FIXTURES / "minimind2-early" / "dense"
    config = json.loads((case / "hf_config.json").read_text())
    del config["rope_theta"]
    (tmp_path / "config.json").write_text(json.dumps(config))  # its architecture still names the generation
    checkpoint = load_checkpoint(case / "weights.pth", tmp_path / "config.json")
    assert checkpoint.assumed == ("rope_theta 1000000.0",)
    del config["architectures"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    checkpoint = load_checkpoint(case / "weights.pth", tmp_path / "config.json")
    assert checkpoint.assumed == ("generation MiniMind v1", "rope_theta 10000.0")


def test_wrong_number_of_heads_is_refused(tmp_path):
    case = FIXTURES / "minimind2" / "dense"
    with pytest.raises(ConversionError, match=r"--num-attention-heads is 8 .* says 4"):
        to_hf(case / "weights.pth", tmp_path / "model", config=case / "hf_config.json", num_attention_heads=8)
    config = json.loads((case / "hf_config.json").read_text()) | {"num_attention_heads": 8}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConversionError, match=r"num_key_value_heads is 2 .* say 4"):
        to_hf(case / "weights.pth", tmp_path / "model", config=tmp_path / "config.json")


def test_config_of_another_generation_is_refused(tmp_path):
    for weights, config in [("minimind3", "minimind2"), ("minimind2", "minimind3"), ("minimind2", "minimind1")]:
        source = FIXTURES / weights / "dense" / "weights.pth"
        with pytest.raises(ConversionError, match="another generation"):
            to_hf(source, tmp_path / "model", config=FIXTURES / config / "dense" / "hf_config.json")
    assert os.listdir(tmp_path) == []


# Layouts that cannot express a model.


def test_the_layout_that_a_folder_comes_from_is_the_default(tmp_path):
    for case in GOLDEN_CASES:
        folder, back = tmp_path / case_name(case), tmp_path / f"{case_name(case)}.pth"
        to_hf(case / "weights.pth", folder, config=case / "hf_config.json")
        to_hf(folder, tmp_path / f"{case_name(case)}-copy")
        to_torch(tmp_path / f"{case_name(case)}-copy", back)
        original, written = (torch.load(path, weights_only=True) for path in (case / "weights.pth", back))
        assert list(written) == list(original)
        assert all(torch.equal(written[name], original[name]) for name in original)


def test_what_a_script_must_be_told_is_reported(tmp_path):
    config = tiny_config(rope_theta=5e4, max_position_embeddings=32768, num_attention_heads=8, num_key_value_heads=4)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    assert to_torch(tmp_path / "model", tmp_path / "back.pth").endswith("; give MiniMind's scripts rope_theta 50000.0")


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"rope_parameters": {"rope_type": "linear", "factor": 4.0}}, "one yarn fixed"),
        ({"rope_parameters": {**YARN_PARAMETERS, "factor": 4}}, "one yarn fixed"),
        ({"use_qk_norm": False, "use_moe": True}, "does not normalise the weight of a single expert"),
        ({"use_qk_norm": False, "head_dim": 8}, "head_dim=8"),
        ({"use_qk_norm": False, "tie_word_embeddings": False}, "tie_word_embeddings"),
        ({"use_moe": True, "num_shared_experts": 1}, "shared_experts"),
    ],
)
def test_what_no_script_computes_is_refused(changes, reason, tmp_path):
    AutoModelForCausalLM.from_config(tiny_config(**changes)).save_pretrained(tmp_path / "model")
    with pytest.raises(ConversionError, match=reason):
        to_torch(tmp_path / "model", tmp_path / "back.pth")
    assert os.listdir(tmp_path) == ["model"]


@pytest.mark.parametrize("layout", GENERATIONS)
@pytest.mark.parametrize("case", GOLDEN_CASES, ids=case_name)
def test_another_layout_holds_the_same_model_or_is_refused(case, layout, tmp_path):
    """Between MiniMind2 and the early layouts a dense model or one with one shared expert can move."""
    to_hf(case / "weights.pth", tmp_path / "model", config=case / "hf_config.json")
    generation = case.parent.name
    older = {"minimind2", "minimind2-early"}
    movable = generation == layout or (layout in older and generation in older | {"minimind1"} and case.name != "yarn")
    if not movable:
        with pytest.raises(ConversionError, match=f"{re_escape(GENERATIONS[layout].title)} has"):
            to_torch(tmp_path / "model", tmp_path / "moved.pth", layout=layout)
        assert os.listdir(tmp_path) == ["model"]
        return
    to_torch(tmp_path / "model", tmp_path / "moved.pth", layout=layout)
    moved = load_checkpoint(tmp_path / "moved.pth", flags={
        "generation": layout, "num_attention_heads": 4, "rope_theta": 1e4 if generation == "minimind1" else 1e6,
    })  # fmt: skip
    original = load_checkpoint(tmp_path / "model")
    assert moved.tensors.keys() == original.tensors.keys()
    assert all(torch.equal(moved.tensors[name], original.tensors[name]) for name in original.tensors)


def re_escape(title):
    return title.replace("(", r"\(").replace(")", r"\)")


def test_unknown_layout_is_refused(tmp_path):
    with pytest.raises(ConversionError, match="--layout minimind9"):
        to_torch(FIXTURES / "minimind3" / "dense" / "weights.pth", tmp_path / "back.pth", layout="minimind9")
