"""torchao and bitsandbytes on the CPU, through `from_pretrained(quantization_config=…)`."""

import sys

import pytest
import torch
from conftest import DENSE, MOE, ROOT, tiny_model
from torch.nn.functional import kl_div
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, TorchAoConfig

from minimind_hf.cli import TINY_MODEL

sys.path.insert(0, str(ROOT / "examples"))
import train_tiny

bitsandbytes = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
torchao = pytest.importorskip("torchao.quantization", reason="torchao is not installed")

INT8 = torchao.Int8WeightOnlyConfig()
INT4 = torchao.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=torchao.PerGroup(32))
METHODS = {
    "torchao-int8": TorchAoConfig(INT8),
    "torchao-int8-dynamic": TorchAoConfig(torchao.Int8DynamicActivationInt8WeightConfig()),
    "torchao-int4": TorchAoConfig(INT4),
    "bitsandbytes-8": BitsAndBytesConfig(load_in_8bit=True),
    "bitsandbytes-nf4": BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4"),
}
both_kinds = pytest.mark.parametrize("kind", [DENSE, MOE], ids=["dense", "moe"])
every_method = pytest.mark.parametrize("method", METHODS)


@torch.no_grad()
def logits_of(model, input_ids):
    return model(input_ids).logits


def load(folder, config=None, **options):
    """The quantized model of a folder; fails where a weight was not found, or not wanted."""
    if config is not None:
        options["quantization_config"] = config
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True, **options
    )
    assert not any(info.values()), info
    return model


def dequantized(module):
    """The weight that a quantized linear layer stands for, as float32."""
    weight = module.weight
    if isinstance(weight, bitsandbytes.nn.Params4bit):
        return bitsandbytes.functional.dequantize_4bit(weight.data, weight.quant_state)
    if isinstance(weight, bitsandbytes.nn.Int8Params):
        return weight.data.float() * weight.SCB[:, None] / 127
    return weight.dequantize()


def linear_layers(model):
    return {name: module for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}


def largest_error(weight, method):
    """The largest error of rounding each value of weight [out, in] to the nearest step of its row, block or group."""
    if method == "bitsandbytes-nf4":  # its 16 values reach from -1 to 1, and the widest gap is 0.3038
        groups, half = weight.view(-1, 64), 0.3038 / 2
    elif method == "torchao-int4":  # from -8 to 7 steps
        groups, half = weight.view(-1, 32), 0.5 / 7.5
    else:
        groups, half = weight, 0.5 / 127
    if method == "bitsandbytes-8":
        half += 2**-11  # it casts the weights to float16 before
    error = groups.abs().amax(1, keepdim=True) * half
    return 1.001 * error.expand_as(groups).reshape(weight.shape)


@both_kinds
@every_method
def test_every_weight_is_within_half_a_step(kind, method, tmp_path):
    model = tiny_model(**kind)
    model.save_pretrained(tmp_path)
    layers = linear_layers(load(tmp_path, METHODS[method]))
    assert layers.keys() == linear_layers(model).keys()
    for name, layer in linear_layers(model).items():
        error = (dequantized(layers[name]) - layer.weight).abs()
        if name == "lm_head":
            assert not error.any()
        else:
            assert error.max() > 0, f"{name} is not quantized"
            assert (error <= largest_error(layer.weight, method)).all(), name


@both_kinds
@every_method
def test_logits_are_those_of_the_quantized_weights(kind, method, input_ids, tmp_path):
    model = tiny_model(**kind)
    model.save_pretrained(tmp_path)
    quantized = load(tmp_path, METHODS[method])
    for name, layer in linear_layers(quantized).items():
        model.get_submodule(name).weight.data = dequantized(layer)
    logits, expected = logits_of(quantized, input_ids), logits_of(model, input_ids)
    if method in ("torchao-int8", "torchao-int4"):
        assert_close(logits, expected, rtol=0, atol=1e-4)
    else:  # activations are rounded too: to 8 bits, or to bfloat16
        divergence = kl_div(logits.log_softmax(-1), expected.log_softmax(-1), log_target=True, reduction="none")
        assert 0 < divergence.sum(-1).mean() < 0.01


@every_method
def test_tiny_checkpoint_still_works_out_sums(method):
    tokenizer = AutoTokenizer.from_pretrained(TINY_MODEL)
    sums = train_tiny.held_out_sums()[:20]
    prompts = [[{"role": "user", "content": f"{a} + {b} = ?"}] for a, b in sums]
    answers = train_tiny.answer(load(TINY_MODEL, METHODS[method]), tokenizer, prompts)
    assert answers == [train_tiny.equation("+", a, b) for a, b in sums]


@both_kinds
@pytest.mark.parametrize("tied", [True, False])
@every_method
def test_saved_folder_loads_with_equal_logits(kind, tied, method, input_ids, tmp_path):
    tiny_model(tie_word_embeddings=tied, **kind).save_pretrained(tmp_path / "plain")
    quantized = load(tmp_path / "plain", METHODS[method])
    quantized.save_pretrained(tmp_path / "quantized")  # before the first forward, in which bitsandbytes packs weights
    loaded = load(tmp_path / "quantized")
    for model in (quantized, loaded):
        assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
        assert model.lm_head.weight.dtype == torch.float32
    assert torch.equal(logits_of(loaded, input_ids), logits_of(quantized, input_ids))


@every_method
def test_fused_experts_are_left_alone_unless_named(method, tmp_path):
    model = tiny_model(**MOE)
    model.save_pretrained(tmp_path)
    quantized = load(tmp_path, METHODS[method])
    for layer, expected in zip(quantized.model.layers, model.model.layers, strict=True):
        assert torch.equal(layer.mlp.gate.weight, expected.mlp.gate.weight)
        assert torch.equal(layer.mlp.experts.gate_up_proj, expected.mlp.experts.gate_up_proj)
        assert torch.equal(layer.mlp.experts.down_proj, expected.mlp.experts.down_proj)


EXPERTS_INT8 = {r"re:.*\.experts\.(gate_up|down)_proj": INT8}


def test_fused_experts_can_be_int8(input_ids, tmp_path):
    model = tiny_model(**MOE)
    model.save_pretrained(tmp_path / "plain")
    config = TorchAoConfig(torchao.FqnToConfig(EXPERTS_INT8))
    quantized = load(tmp_path / "plain", config, experts_implementation="eager")
    for layer, expected in zip(quantized.model.layers, model.model.layers, strict=True):
        for name in ("gate_up_proj", "down_proj"):
            weight, original = getattr(layer.mlp.experts, name).dequantize(), getattr(expected.mlp.experts, name)
            for expert in range(4):
                error = (weight[expert] - original[expert]).abs()
                assert error.max() > 0
                assert (error <= largest_error(original[expert], "torchao-int8")).all()
            original.data = weight
    assert_close(logits_of(quantized, input_ids), logits_of(model, input_ids), rtol=0, atol=1e-4)
    quantized.save_pretrained(tmp_path / "quantized")
    loaded = load(tmp_path / "quantized", experts_implementation="eager")
    assert torch.equal(logits_of(loaded, input_ids), logits_of(quantized, input_ids))


def test_int8_experts_are_refused_by_the_kernels_that_cannot_read_them(input_ids, tmp_path):
    tiny_model(**MOE).save_pretrained(tmp_path)
    for implementation in ("batched_mm", "grouped_mm"):
        config = TorchAoConfig(torchao.FqnToConfig(EXPERTS_INT8))
        quantized = load(tmp_path, config, experts_implementation=implementation)
        with pytest.raises(NotImplementedError, match="Int8Tensor"):
            logits_of(quantized, input_ids)
