import json
import math
import re
import shutil

import pytest
import torch
from conftest import CASES_OF, DENSE, MOE, case_name, tiny_config, tiny_model
from huggingface_hub.errors import StrictDataclassFieldValidationError
from transformers import AutoConfig

from minimind_hf import MiniMindConfig, MiniMindForCausalLM

PUBLISHED = {
    "vocab_size": 6400,
    "hidden_size": 768,
    "intermediate_size": 2432,  # ceil(768 * pi / 64) * 64
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 96,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "inference_rope_scaling": False,
    "tie_word_embeddings": True,
    "dropout": 0.0,
    "flash_attn": True,
    "use_moe": False,
    "num_experts": 4,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 2432,
    "norm_topk_prob": True,
    "router_aux_loss_coef": 5e-4,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

# Every field of the config with a value that is not its default.
OTHER_VALUES = {
    "vocab_size": 500,
    "hidden_size": 96,
    "intermediate_size": 136,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 1,
    "head_dim": 24,
    "hidden_act": "gelu",
    "max_position_embeddings": 777,
    "initializer_range": 0.5,
    "rms_norm_eps": 1e-3,
    "rms_norm_scale_in_float32": False,
    "use_qk_norm": False,
    "use_cache": False,
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "linear", "rope_theta": 3e4, "factor": 2.0},
    "inference_rope_scaling": True,
    "dropout": 0.25,
    "attention_dropout": 0.5,
    "flash_attn": False,
    "use_moe": True,
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 72,
    "norm_topk_prob": False,
    "num_shared_experts": 2,
    "router_aux_loss_coef": 0.125,
    "seq_aux": True,
    "bos_token_id": 5,
    "eos_token_id": [6, 7],
    "pad_token_id": 8,
}

REFERENCE_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16,
    "original_max_position_embeddings": 2048,
    "beta_fast": 32,
    "beta_slow": 1,
    "attention_factor": 1.0,
}
STANDARD_YARN = {"rope_type": "yarn", "rope_theta": 5e4, "factor": 4.0, "original_max_position_embeddings": 64}


def reloaded(config, folder):
    config.save_pretrained(folder)
    return AutoConfig.from_pretrained(folder)


def load_dict(values, folder):
    (folder / "config.json").write_text(json.dumps({"model_type": "minimind", **values}), encoding="utf-8")
    return AutoConfig.from_pretrained(folder)


@pytest.mark.parametrize("name", PUBLISHED)
def test_defaults_are_the_published_ones(name):
    assert getattr(MiniMindConfig(), name) == PUBLISHED[name]


def test_other_values_cover_every_field():
    assert set(OTHER_VALUES) == set(MiniMindConfig.__annotations__) - {
        f"base_model_{kind}_plan" for kind in ("tp", "ep", "pp")
    }


@pytest.mark.parametrize("name", OTHER_VALUES)
def test_every_field_is_kept_and_saved(name, tmp_path):
    value = OTHER_VALUES[name]
    config = tiny_config(**{"num_attention_heads": 6, "head_dim": 16, name: value})
    assert getattr(config, name) == value
    assert getattr(reloaded(config, tmp_path), name) == value
    assert json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))[name] == value


def test_only_a_mixture_of_experts_has_output_router_logits(tmp_path):
    assert not hasattr(tiny_config(), "output_router_logits")
    assert not hasattr(tiny_config(output_router_logits=True), "output_router_logits")
    assert tiny_config(**MOE).output_router_logits is False
    assert reloaded(tiny_config(**MOE, output_router_logits=True), tmp_path).output_router_logits is True
    assert AutoConfig.from_pretrained(tmp_path, output_router_logits=False).output_router_logits is False
    with pytest.raises(ValueError, match="output_router_logits"):
        tiny_config(**MOE, output_router_logits="yes")


def test_dense_sizes_are_those_of_the_weights():
    sizes = {"hidden_size": 48, "intermediate_size": 40, "num_attention_heads": 6, "num_key_value_heads": 3}
    model = tiny_model(**sizes, head_dim=10, vocab_size=70, num_hidden_layers=3)
    assert model.lm_head.weight.shape == model.model.embed_tokens.weight.shape == (70, 48)
    assert len(model.model.layers) == 3
    for layer in model.model.layers:
        assert layer.self_attn.q_proj.weight.shape == (60, 48)
        assert layer.self_attn.k_proj.weight.shape == layer.self_attn.v_proj.weight.shape == (30, 48)
        assert layer.self_attn.o_proj.weight.shape == (48, 60)
        assert layer.self_attn.q_norm.weight.shape == layer.self_attn.k_norm.weight.shape == (10,)
        assert layer.mlp.gate_proj.weight.shape == layer.mlp.up_proj.weight.shape == (40, 48)
        assert layer.mlp.down_proj.weight.shape == (48, 40)


def test_expert_sizes_are_those_of_the_weights():
    for layer in tiny_model(use_moe=True, num_experts=5, moe_intermediate_size=24).model.layers:
        assert layer.mlp.gate.weight.shape == (5, 64)
        assert layer.mlp.experts.gate_up_proj.shape == (5, 48, 64)
        assert layer.mlp.experts.down_proj.shape == (5, 64, 24)


def test_derived_sizes():
    config = tiny_config(hidden_size=100, num_attention_heads=5, num_key_value_heads=None)
    assert config.head_dim == 20
    assert config.num_key_value_heads == 5
    assert config.intermediate_size == config.moe_intermediate_size == math.ceil(100 * math.pi / 64) * 64
    assert tiny_config(intermediate_size=40).moe_intermediate_size == 40


@pytest.mark.parametrize("kind", [DENSE, MOE], ids=["dense", "moe"])
def test_initializer_range_is_the_deviation_of_fresh_weights(kind):
    torch.manual_seed(0)
    model = MiniMindForCausalLM(tiny_config(initializer_range=0.3, hidden_size=128, **kind))
    for name, parameter in model.named_parameters():
        if "norm" in name:
            assert (parameter == 1).all()
        elif parameter.numel() > 1000:
            assert abs(parameter.std().item() / 0.3 - 1) < 0.1, name


@pytest.mark.parametrize("tied", [True, False])
def test_tie_word_embeddings(tied):
    model = tiny_model(tie_word_embeddings=tied)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_theta": 5e4},
        {"rope_theta": 5e4, "rope_scaling": None},
        {"rope_parameters": {"rope_theta": 5e4}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e4}},
        {"rope_theta": 5e4, "rope_parameters": {"rope_type": "default"}},
    ],
)
def test_every_spelling_of_theta(spelling, tmp_path):
    for config in (tiny_config(**spelling), reloaded(tiny_config(**spelling), tmp_path)):
        assert config.rope_parameters == {"rope_type": "default", "rope_theta": 5e4}


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_parameters": STANDARD_YARN},
        {"rope_theta": 5e4, "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
        {"rope_theta": 5e4, "rope_scaling": STANDARD_YARN},
        {"rope_scaling": STANDARD_YARN},
        {"rope_parameters": STANDARD_YARN, "inference_rope_scaling": True},
    ],
)
def test_every_spelling_of_yarn(spelling, tmp_path):
    for config in (tiny_config(**spelling), reloaded(tiny_config(**spelling), tmp_path)):
        assert config.rope_parameters == STANDARD_YARN
        assert config.inference_rope_scaling


def test_inference_rope_scaling_is_the_yarn_of_the_reference(tmp_path):
    config = tiny_config(inference_rope_scaling=True, max_position_embeddings=2049)
    assert config.rope_parameters == REFERENCE_YARN
    assert reloaded(config, tmp_path).rope_parameters == REFERENCE_YARN


def test_inference_rope_scaling_changes_nothing_within_the_original_positions():
    config = tiny_config(inference_rope_scaling=True, max_position_embeddings=2048)
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 1e6}


def test_inference_rope_scaling_can_be_switched_on_while_loading(tmp_path):
    tiny_model(max_position_embeddings=4096).save_pretrained(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path, inference_rope_scaling=True).rope_parameters == REFERENCE_YARN
    model = MiniMindForCausalLM.from_pretrained(tmp_path, inference_rope_scaling=True)
    expected = MiniMindForCausalLM(tiny_config(max_position_embeddings=4096, inference_rope_scaling=True))
    assert torch.equal(model.model.rotary_emb.inv_freq, expected.model.rotary_emb.inv_freq)


@pytest.mark.parametrize(
    "spelling",
    [
        {"inference_rope_scaling": True, "rope_parameters": {"rope_type": "linear", "factor": 2.0}},
        {"inference_rope_scaling": False, "rope_parameters": STANDARD_YARN},
        {"rope_scaling": STANDARD_YARN, "rope_parameters": {"rope_type": "linear", "factor": 2.0}},
        {"rope_theta": 1e4, "rope_parameters": {"rope_theta": 5e4}},
        {"rope_theta": 1e4, "rope_scaling": STANDARD_YARN},
    ],
)
def test_contradicting_rope_settings_are_refused(spelling):
    with pytest.raises(ValueError, match=r"contradicts|differ"):
        tiny_config(**spelling)


def test_unknown_keys_survive_saving_and_loading(tmp_path):
    unknown = {"my_note": "trained on 3 books", "my_schedule": {"warmup": [1, 2.5], "decay": None}}
    config = load_dict({"hidden_size": 64, **unknown}, tmp_path)
    again = reloaded(config, tmp_path / "again")
    assert {name: getattr(again, name) for name in unknown} == unknown
    assert unknown.items() <= json.loads((tmp_path / "again" / "config.json").read_text(encoding="utf-8")).items()


def test_dropout_is_the_attention_dropout_unless_that_is_given():
    for changes, expected in (({}, 0.25), ({"attention_dropout": 0.5}, 0.5), ({"attention_dropout": 0}, 0)):
        model = MiniMindForCausalLM(tiny_config(dropout=0.25, **changes))
        assert [layer.self_attn.attention_dropout for layer in model.model.layers] == [expected] * 2


@pytest.mark.parametrize(
    "changes, expected",
    [
        ({}, "sdpa"),
        ({"flash_attn": False}, "eager"),
        ({"flash_attn": False, "attn_implementation": "sdpa"}, "sdpa"),
        ({"attn_implementation": "eager"}, "eager"),
    ],
)
def test_flash_attn_false_selects_eager_attention(changes, expected):
    assert MiniMindForCausalLM(tiny_config(**changes)).config._attn_implementation == expected


def test_flash_attn_false_selects_eager_attention_of_a_saved_model(tmp_path):
    tiny_model(flash_attn=False).save_pretrained(tmp_path / "off")
    assert MiniMindForCausalLM.from_pretrained(tmp_path / "off").config._attn_implementation == "eager"
    tiny_model().save_pretrained(tmp_path / "on")
    model = MiniMindForCausalLM.from_pretrained(tmp_path / "on", flash_attn=False)
    assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize("name", ["dtype", "torch_dtype"])
@pytest.mark.parametrize("value", ["bfloat16", torch.bfloat16])
def test_dtype_in_either_spelling(name, value, tmp_path):
    config = tiny_config(**{name: value})
    assert config.dtype == torch.bfloat16
    assert reloaded(config, tmp_path).dtype == torch.bfloat16


@pytest.mark.parametrize("case", CASES_OF["minimind3"] + CASES_OF["minimind2"], ids=case_name)
def test_the_config_that_the_reference_writes(case, tmp_path):
    shutil.copy(case / "hf_config.json", tmp_path / "config.json")
    config = AutoConfig.from_pretrained(tmp_path)
    assert type(config) is MiniMindConfig
    effective = json.loads((case / "config.json").read_text(encoding="utf-8"))["effective"]
    theta = effective.pop("rope_theta")
    if case.parent.name == "minimind2":
        effective["num_experts"] = effective.pop("n_routed_experts")
        effective["num_shared_experts"] = effective.pop("n_shared_experts")
        effective["router_aux_loss_coef"] = effective.pop("aux_loss_alpha") / 2  # shared among 2 experts per token
        effective |= {"use_qk_norm": False, "rms_norm_scale_in_float32": False}
    assert {name: getattr(config, name) for name in effective} == effective
    yarn = effective["inference_rope_scaling"]
    assert config.rope_parameters == (REFERENCE_YARN if yarn else {"rope_type": "default", "rope_theta": theta})


@pytest.mark.parametrize(
    "neutral",
    [{"pretraining_tp": 1}, {"attention_bias": False}, {"sliding_window": None}, {"partial_rotary_factor": 1.0}],
)
def test_switched_off_features_are_accepted(neutral, tmp_path):
    assert reloaded(tiny_config(**neutral), tmp_path).hidden_size == 64


@pytest.mark.parametrize(
    "feature",
    [
        {"pretraining_tp": 2},
        {"attention_bias": True},
        {"sliding_window": 64},
        {"partial_rotary_factor": 0.5},
        # What transformers itself obeys in any config.
        {"is_causal": False},
        {"is_causal": 1},
        {"attention_chunk_size": 4},
        {"text_config": {}},
        {"decoder": {}},
        {"transformers_weights": "other.safetensors"},
    ],
)
def test_features_that_minimind_lacks_are_refused(feature):
    ((name, value),) = feature.items()
    with pytest.raises(ValueError, match=re.escape(f"{name}={value!r}")):
        tiny_config(**feature)


SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "num_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
)
IMPOSSIBLE = [
    *((name, value) for name in SIZES for value in (0, -2)),
    ("num_key_value_heads", 3),
    ("num_experts_per_tok", 5),
    ("head_dim", 15),
    ("hidden_act", "swishy"),
    *(("rms_norm_eps", value) for value in (0.0, -1e-6, math.nan, math.inf)),
    *(("initializer_range", value) for value in (-0.02, math.nan, math.inf)),
    *(("dropout", value) for value in (1.0, -0.5, math.nan)),
    *(("attention_dropout", value) for value in (1.0, -0.5, math.nan)),
    *(("router_aux_loss_coef", value) for value in (-1.0, math.nan, math.inf)),
    *(("rope_theta", value) for value in (0, -1e6, math.nan, math.inf, "1e6")),
]


@pytest.mark.parametrize("name, value", IMPOSSIBLE)
def test_impossible_values_are_refused(name, value):
    with pytest.raises(ValueError) as raised:
        tiny_config(**{name: value})
    assert name in str(raised.value)
    assert str(value) in str(raised.value)


@pytest.mark.parametrize(
    "rope, named",
    [
        ({"rope_type": "spiral"}, "spiral"),
        ({"rope_type": "default", "type": "yarn", "factor": 4.0}, "contradicts"),
        ({"full_attention": {"rope_type": "yarn", "factor": 4.0}}, "full_attention"),
        ({"rope_type": "yarn", "factor": 4.0, "attention_factor": -3.0}, "attention_factor"),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 0}, "original_max"),
        ({"rope_type": "linear", "factor": True}, "True"),
        ({"rope_theta": 10**400}, "rope_theta"),
        ({"rope_theta": 1.0}, "rope_theta"),
        ({"type": "spiral"}, "spiral"),
        ({"rope_type": "yarn"}, "factor"),
        ({"rope_type": "linear"}, "factor"),
        ({"rope_type": "linear", "factor": -2.0}, "-2.0"),
        ({"rope_type": "linear", "factor": math.nan}, "nan"),
        ({"rope_type": "yarn", "factor": 0.0}, "0.0"),
    ],
    ids=str,
)
def test_impossible_rope_parameters_are_refused(rope, named):
    with pytest.raises(ValueError, match=named):
        tiny_config(rope_parameters=rope)


def test_more_heads_than_hidden_values_are_refused():
    with pytest.raises(ValueError, match="head_dim=0"):
        tiny_config(hidden_size=2)


def test_impossible_values_given_while_loading_are_refused(tmp_path):
    tiny_config().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="num_key_value_heads=3"):
        AutoConfig.from_pretrained(tmp_path, num_key_value_heads=3)


def test_impossible_values_set_later_are_not_saved(tmp_path):
    config = tiny_config()
    config.num_key_value_heads = 3
    with pytest.raises(Exception, match="num_key_value_heads=3"):
        config.save_pretrained(tmp_path)
    assert not (tmp_path / "config.json").exists()


@pytest.mark.parametrize(
    "name, value",
    [
        ("vocab_size", "192"),
        ("hidden_size", 64.0),
        ("num_hidden_layers", True),
        ("use_moe", "yes"),
        ("tie_word_embeddings", 1),
        ("dropout", "0.1"),
        ("rms_norm_eps", "1e-6"),
        ("hidden_act", None),
        ("eos_token_id", "2"),
        ("rope_parameters", ["yarn"]),
    ],
)
def test_wrong_types_are_refused(name, value):
    with pytest.raises(StrictDataclassFieldValidationError, match=name):
        tiny_config(**{name: value})


MINIMIND2 = {"hidden_size": 64, "num_attention_heads": 4, "n_routed_experts": 4}


def test_what_a_minimind2_config_leaves_out(tmp_path):
    config = load_dict(MINIMIND2, tmp_path)
    assert (config.rms_norm_eps, config.num_key_value_heads, config.num_experts_per_tok) == (1e-5, 2, 2)
    assert (config.num_experts, config.num_shared_experts, config.seq_aux) == (4, 1, True)
    assert config.intermediate_size == config.moe_intermediate_size == 192  # 64 * ceil(int(8 * 64 / 3) / 64)
    assert config.router_aux_loss_coef == 0.01 / 2
    assert not config.use_qk_norm and not config.rms_norm_scale_in_float32
    assert reloaded(config, tmp_path / "again").to_diff_dict() == config.to_diff_dict()


def test_minimind2_does_not_normalise_the_weight_of_a_single_expert(tmp_path):
    assert not load_dict({**MINIMIND2, "num_experts_per_tok": 1}, tmp_path).norm_topk_prob
    assert load_dict(MINIMIND2, tmp_path).norm_topk_prob
    config = AutoConfig.from_pretrained(tmp_path, num_experts_per_tok=1)
    assert not config.norm_topk_prob and config.router_aux_loss_coef == 0.01
    assert load_dict({**MINIMIND2, "num_experts_per_tok": 3, "aux_loss_alpha": 0.3}, tmp_path).norm_topk_prob


@pytest.mark.parametrize(
    "values, culprit",
    [
        ({**MINIMIND2, "num_experts": 5}, "n_routed_experts=4 contradicts num_experts=5"),
        ({**MINIMIND2, "scoring_func": "sigmoid"}, "scoring_func"),
        ({**MINIMIND2, "num_experts_per_tok": 0}, "num_experts_per_tok"),
        ({"dim": 64, "n_layers": 2, "n_routed_experts": 4}, "minimind convert to-hf"),
        ({"n_layers": 2}, "minimind convert to-hf"),
        ({"aux_loss_alpha": 0.1}, "MiniMind2's spelling"),
        ({"n_shared_experts": 1}, "MiniMind2's spelling"),
    ],
)
def test_older_configs_that_cannot_be_followed_are_refused(values, culprit, tmp_path):
    with pytest.raises(ValueError, match=culprit):
        load_dict(values, tmp_path)


def test_minimind2_spelling_is_refused_where_it_would_be_ignored():
    for key in ("n_routed_experts", "n_shared_experts", "aux_loss_alpha"):
        with pytest.raises(ValueError, match=f"{key}.*from_dict"):
            MiniMindConfig(**{key: 1})


def test_special_tokens_outside_the_vocabulary_are_refused():
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        for value in (192, -1, [1, 500]) if name == "eos_token_id" else (192, -1):
            with pytest.raises(ValueError, match=name):
                tiny_config(**{name: value})


@pytest.mark.parametrize(
    "name, value", [("rope_theta", 5.0), ("inference_rope_scaling", True), ("num_key_value_heads", 3)]
)
def test_changes_that_a_config_cannot_follow_make_no_model(name, value):
    config = tiny_config(max_position_embeddings=4096)
    setattr(config, name, value)
    with pytest.raises(ValueError, match=name):
        MiniMindForCausalLM(config)


@pytest.mark.parametrize(
    "rope, culprit",
    [
        ({"rope_type": "yarn", "factor": 1e-300}, "factor"),
        ({"rope_type": "linear", "factor": 10**400}, "factor"),
        ({"rope_type": "yarn", "factor": 4, "beta_fast": math.nan}, "beta_fast"),
        ({"rope_type": "yarn", "factor": 4, "mscale": math.nan}, "mscale"),
        ({"rope_type": "yarn", "factor": 4, "truncate": "no"}, "truncate"),
        ({"rope_type": "default", "rope_theta": 10**30}, "rope_theta"),
        ({"rope_type": ["yarn"]}, "rope_type"),
    ],
)
def test_rope_parameters_without_finite_frequencies_are_refused(rope, culprit):
    with pytest.raises(ValueError, match=culprit):
        tiny_config(rope_parameters=rope)


def test_epsilon_that_drowns_the_values_is_refused():
    with pytest.raises(ValueError, match="rms_norm_eps"):
        tiny_config(rms_norm_eps=1e30)


def test_absurd_number_of_labels_is_refused():
    with pytest.raises(ValueError, match="num_labels"):
        tiny_config(num_labels=10**12)
