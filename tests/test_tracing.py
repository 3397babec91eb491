"""`minimind trace`: what it shows is what the model's own modules computed."""

import json
import re
import xml.etree.ElementTree as ElementTree

import pytest
import torch
from conftest import MINIMIND2, MOE, tiny_model
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM
from typer.testing import CliRunner

from minimind_hf import modeling_minimind
from minimind_hf.cli import TINY_MODEL, app
from minimind_hf.tracing import to_html, to_json, to_svg, to_text, trace, trace_cache


def run(*arguments):
    result = CliRunner().invoke(app, ["trace", *map(str, arguments)])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.output


def shapes_of(text):
    """The lines of the table: the name of each step, and its shape."""
    return re.findall(r"^ *(\S.*?) +(\(.*?\))(?: |$)", text.partition("\n\n")[2].partition("\n\n")[0], re.MULTILINE)


def rms(tensor):
    return tensor.float().square().mean().sqrt().item()


BLOCK = [
    ("block input", "(2, 6, 64)"),
    ("input_layernorm", "(2, 6, 64)"),
    ("q heads", "(2, 6, 4, 16)"),
    ("k heads", "(2, 6, 2, 16)"),
    ("v heads", "(2, 6, 2, 16)"),
    ("q rotary", "(2, 4, 6, 16)"),
    ("k rotary", "(2, 2, 6, 16)"),
    ("attention output", "(2, 6, 64)"),
    ("residual add", "(2, 6, 64)"),
    ("post_attention_layernorm", "(2, 6, 64)"),
    ("mlp", "(2, 6, 64)"),
    ("block output", "(2, 6, 64)"),
]


def test_the_default_shows_every_step():
    text = run()
    first, last = [("input_ids", "(2, 6)"), ("embed_tokens", "(2, 6, 64)")], [("norm", "(2, 6, 64)")]
    assert shapes_of(text) == [*first, *BLOCK, *BLOCK, *last, ("logits", "(2, 6, 6400)")]
    assert "block 0\n" in text and "block 1\n" in text and "block 2" not in text
    assert "(batch, seq, hidden) = (2, 6, 64)" in text.splitlines()[-1]


def test_width_and_depth_change_nothing_else():
    wider = [(name, shape.replace(" 64)", " 96)").replace(" 16)", " 24)")) for name, shape in BLOCK]
    shapes = shapes_of(run("--hidden-size", 96, "--num-hidden-layers", 3))
    assert shapes[2:-2] == wider * 3
    assert shapes[1] == ("embed_tokens", "(2, 6, 96)") and shapes[-1] == ("logits", "(2, 6, 6400)")


def test_values_are_those_of_the_modules(model, input_ids):
    attention_outputs = []
    hooks = [
        layer.self_attn.register_forward_hook(lambda module, given, output: attention_outputs.append(output[0]))
        for layer in model.model.layers
    ]
    with torch.no_grad():
        output = model(input_ids, output_hidden_states=True)
    for hook in hooks:
        hook.remove()
    *stream, normed = output.hidden_states
    seen = trace(model, input_ids)
    for block, (before, attended) in enumerate(zip(stream, attention_outputs, strict=True)):
        steps = {step.name: step for step in seen.of_block(block)}
        assert_close(steps["block input"].rms, rms(before))
        assert_close(steps["attention output"].rms, rms(attended))
        assert_close(steps["residual add"].rms, rms(before + attended))
        assert ("router" in steps) == model.config.use_moe
        if block + 1 < len(stream):
            assert_close(steps["block output"].rms, rms(stream[block + 1]))
    outside = {step.name: step for step in seen.of_block(None)}
    assert_close(outside["embed_tokens"].rms, rms(stream[0]))
    assert_close(outside["norm"].rms, rms(normed))
    assert_close(outside["logits"].rms, rms(output.logits))


def test_the_model_is_left_as_it_was(input_ids):
    model = tiny_model().train()
    rotate = modeling_minimind.apply_rotary_pos_emb
    trace(model, input_ids)
    with pytest.raises(IndexError):
        trace(model, input_ids + 192)  # beyond the vocabulary
    assert model.training and modeling_minimind.apply_rotary_pos_emb is rotate
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_remote_code_is_traced_too(tmp_path, input_ids):
    tiny_model().save_pretrained(tmp_path)
    remote = AutoModelForCausalLM.from_pretrained(tmp_path, trust_remote_code=True)
    assert trace(remote, input_ids) == trace(tiny_model(), input_ids)


def test_other_models_are_refused(input_ids):
    config = Qwen3Config(vocab_size=192, hidden_size=64, intermediate_size=64, num_hidden_layers=1)
    with pytest.raises(ValueError, match="expected a MiniMindForCausalLM"):
        trace(Qwen3ForCausalLM(config), input_ids)
    with pytest.raises(ValueError, match="expected a MiniMindForCausalLM"):
        trace(tiny_model().model, input_ids)


@pytest.mark.parametrize("kind", [{}, MOE, MINIMIND2], ids=["dense", "moe", "minimind2"])
def test_the_cache_grows_and_changes_nothing(kind, input_ids):
    steps = trace_cache(tiny_model(**kind), input_ids)
    assert [step.name for step in steps] == ["prefill", "decode", "decode", "decode"]
    assert [step.input_shape for step in steps] == [(2, 12), (2, 1), (2, 1), (2, 1)]
    assert [step.cache_shape for step in steps] == [(2, 2, length, 16) for length in (12, 13, 14, 15)]
    # Keys and values of 2 blocks, in float32.
    assert [step.cache_bytes for step in steps] == [2 * 2 * 2 * 2 * length * 16 * 4 for length in (12, 13, 14, 15)]
    assert max(step.difference for step in steps) < 1e-4


@pytest.mark.parametrize("kind", [{"num_hidden_layers": 1}, {"num_hidden_layers": 7}, MOE])
def test_every_format_shows_the_shapes(kind, input_ids):
    model = tiny_model(**kind)
    seen, cache = trace(model, input_ids), trace_cache(model, input_ids)
    content = json.loads(to_json(seen, cache))
    assert [tuple(step["shape"]) for step in content["steps"]] == [step.shape for step in seen.steps]
    assert content["cache"][0]["cache_shape"] == [2, 2, 12, 16] and content["sizes"]["hidden_size"] == 64

    picture = ElementTree.fromstring(to_svg(seen))
    texts = [element.text for element in picture.iter() if element.tag.endswith("text")]
    shapes = {str(step.shape) for step in seen.steps}
    assert shapes - {f"(24, {model.config.num_experts})"} <= set(texts)
    drawn = [text for text in texts if text.startswith("block ")]
    assert drawn == {1: ["block 0"], 2: ["block 0", "block 1"], 7: ["block 0", "block 6"]}[len(model.model.layers)]

    page = to_html(seen, cache)
    assert page.count("<details") == model.config.num_hidden_layers
    assert all(f">{shape}<" in page for shape in shapes)
    assert all(str(step.shape) in to_text(seen) for step in seen.steps)


def test_a_folder_is_traced(tmp_path):
    output = tmp_path / "tiny.svg"
    assert run(TINY_MODEL, "--seq-len", 9, "--format", "svg", "--output", output) == ""
    assert "(2, 9, " in output.read_text(encoding="utf-8")
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.svg"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([TINY_MODEL, "--moe", "--hidden-size", 32], "--hidden-size, --moe: these are for the random model"),
        (["--format", "pdf"], "expected one of text, json, svg, html"),
        (["--format", "svg", "--cache"], "no place in the diagram"),
        (["--seq-len", 40000], "--seq-len 40000: this model has room for"),
        (["--hidden-size", 0], "hidden_size"),
        (["no/such/folder"], "does not exist"),
    ],
)
def test_what_cannot_be_is_refused(arguments, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        run(*arguments)


def test_an_existing_file_is_kept(tmp_path):
    output = tmp_path / "trace.txt"
    output.write_text("mine")
    with pytest.raises(ValueError, match="pass --overwrite"):
        run("--output", output)
    assert output.read_text() == "mine"
    run("--output", output, "--overwrite")
    assert output.read_text(encoding="utf-8").startswith("hidden_size 64")
