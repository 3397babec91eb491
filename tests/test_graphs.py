"""Graphs of the model: `torch.export`, ONNX run by ONNX Runtime, and transformers' own exporters."""

import pytest
import torch
from conftest import DENSE, MOE, tiny_model
from torch.export import Dim
from torch.testing import assert_close
from transformers import DynamicCache
from transformers.integrations.executorch import TorchExportableModuleForDecoderOnlyLM

pytest.importorskip("onnxscript", reason="onnxscript is not installed")
onnxruntime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
exporters = pytest.importorskip("transformers.exporters")
needs_runners = pytest.mark.skipif(
    not hasattr(exporters.base, "ExportedModel"),
    reason="the exporters of this version of transformers have nothing that runs their results",
)

BATCHED = {**MOE, "experts_implementation": "batched_mm"}
GROUPED = {**MOE, "experts_implementation": "grouped_mm"}
every_kind = pytest.mark.parametrize("kind", [DENSE, BATCHED, GROUPED], ids=["dense", "moe-batched", "moe-grouped"])

ANY = {0: Dim.AUTO, 1: Dim.AUTO}  # [B, S]
ANY_CACHE = {0: Dim.AUTO, 2: Dim.AUTO}  # [B, K, L, D]


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


@pytest.fixture
def traced(input_ids):
    """What the graphs are traced with: two rows of twelve tokens, the first of them padded on the left."""
    attention_mask = torch.ones_like(input_ids)
    attention_mask[0, :3] = 0
    return {"input_ids": input_ids, "attention_mask": attention_mask}


@pytest.fixture
def other():
    """What they are then run with: three rows of seven tokens, the second of them padded."""
    input_ids = torch.randint(3, 192, (3, 7), generator=torch.Generator().manual_seed(2))
    attention_mask = torch.ones_like(input_ids)
    attention_mask[1, :2] = 0
    return {"input_ids": input_ids, "attention_mask": attention_mask}


def cache_after(model, input_ids):
    cache = DynamicCache(config=model.config)
    model(input_ids, cache=cache)
    return cache


@every_kind
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_exported_forward_takes_any_batch_and_length(kind, attention, traced, other, tmp_path):
    model = tiny_model(attn_implementation=attention, **kind)
    shapes = {"input_ids": ANY, "attention_mask": ANY, "use_cache": None}
    exported = torch.export.export(model, (), {**traced, "use_cache": False}, dynamic_shapes=shapes)
    torch.export.save(exported, tmp_path / "model.pt2")
    graph = torch.export.load(tmp_path / "model.pt2").module()
    assert_close(graph(**other, use_cache=False).logits, model(**other).logits, rtol=0, atol=1e-5)


def test_eager_experts_are_refused(traced):
    """They loop over the experts that are chosen, which no graph can hold."""
    model = tiny_model(**MOE, experts_implementation="eager")
    with pytest.raises(RuntimeError, match="data-dependent"):
        torch.export.export(model, (), traced)


class Step(torch.nn.Module):
    """The model with a cache that goes in and comes out as tensors: graphs know no cache objects."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids, attention_mask, keys, values):
        cache = DynamicCache(config=self.model.config)
        for layer, key, value in zip(cache.layers, keys, values, strict=True):
            layer.lazy_initialization(key, value)
            layer.keys, layer.values = key, value
        logits = self.model(input_ids, attention_mask=attention_mask, cache=cache).logits
        return logits, [layer.keys for layer in cache.layers], [layer.values for layer in cache.layers]


def example_of_a_step(model, input_ids):
    """Two tokens after seven; and which sizes of these inputs may be others."""
    cache = cache_after(model, input_ids[:, :7])
    keys, values = [layer.keys for layer in cache.layers], [layer.values for layer in cache.layers]
    attention_mask = torch.ones(2, 9, dtype=torch.long)
    return (input_ids[:, 7:9], attention_mask, keys, values), (ANY, ANY, [ANY_CACHE] * 2, [ANY_CACHE] * 2)


def prefill_and_go_on(graph, input_ids, attention_mask):
    """Logits [B, S, V] and the cache of a graph of `Step`, which sees five tokens, then one, then the rest."""
    empty = torch.zeros(len(input_ids), 2, 0, 16)  # [B, K, 0, D]
    keys, values, logits = [empty] * 2, [empty] * 2, []
    for first, last in ((0, 5), (5, 6), (6, input_ids.shape[1])):
        some, keys, values = graph(input_ids[:, first:last], attention_mask[:, :last], keys, values)
        logits.append(some)
    return torch.cat(logits, dim=1), keys + values


@every_kind
def test_exported_step_continues_a_cache(kind, input_ids, other):
    model = tiny_model(**kind)
    example, shapes = example_of_a_step(model, input_ids)
    graph = torch.export.export(Step(model).eval(), example, dynamic_shapes=shapes).module()
    logits, cached = prefill_and_go_on(graph, **other)
    tokens = other["attention_mask"].bool()
    assert_close(logits[tokens], model(**other).logits[tokens], rtol=0, atol=1e-5)
    assert [tensor.shape for tensor in cached] == [(3, 2, 7, 16)] * 4


@every_kind
def test_exported_static_cache_generates_as_the_model_does(kind, input_ids):
    model, prompt = tiny_model(**kind), input_ids[:1]
    expected = model.generate(prompt, max_new_tokens=8, do_sample=False, eos_token_id=None)
    model.generation_config.cache_implementation = "static"
    recipe = TorchExportableModuleForDecoderOnlyLM(model, batch_size=1, max_cache_len=32)
    length = Dim("length", max=30)
    shapes = {"input_ids": {1: length}, "cache_position": {0: length}}
    example = {"input_ids": prompt[:, :5], "cache_position": torch.arange(5)}
    graph = recipe.export(**example, dynamic_shapes=shapes, strict=False).module()
    tokens, first = prompt, 0
    while tokens.shape[1] < expected.shape[1]:
        logits = graph(input_ids=tokens[:, first:], cache_position=torch.arange(first, tokens.shape[1]))
        first = tokens.shape[1]
        tokens = torch.cat((tokens, logits[:, -1:].argmax(-1)), dim=1)
    assert torch.equal(tokens, expected)


@pytest.mark.parametrize(("kind", "attention"), [(DENSE, "eager"), (BATCHED, "sdpa")], ids=["dense-eager", "moe-sdpa"])
def test_onnx_runtime_prefills_and_goes_on(kind, attention, input_ids, other, tmp_path):
    model = tiny_model(attn_implementation=attention, **kind)
    example, shapes = example_of_a_step(model, input_ids)
    torch.onnx.export(
        Step(model).eval(), example, tmp_path / "model.onnx", dynamic_shapes=shapes, dynamo=True, verbose=False
    )
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    names = [node.name for node in session.get_inputs()]

    def graph(input_ids, attention_mask, keys, values):
        inputs = (tensor.numpy() for tensor in (input_ids, attention_mask, *keys, *values))
        outputs = session.run(None, dict(zip(names, inputs, strict=True)))
        logits, *cached = (torch.from_numpy(output) for output in outputs)
        return logits, cached[:2], cached[2:]

    logits, cached = prefill_and_go_on(graph, **other)
    tokens = other["attention_mask"].bool()
    assert_close(logits[tokens], model(**other).logits[tokens], rtol=0, atol=2e-5)
    assert [tensor.shape for tensor in cached] == [(3, 2, 7, 16)] * 4


both_exporters = pytest.mark.parametrize(
    ("name", "kind"),
    [("Dynamo", DENSE), ("Dynamo", BATCHED), ("Onnx", GROUPED)],
    ids=["dense-dynamo", "moe-dynamo", "moe-onnx"],
)


def export_with(name):
    """An exporter of transformers and its settings for any batch and length."""
    return getattr(exporters, f"{name}Exporter")(), getattr(exporters, f"{name}Config")(dynamic=True)


@needs_runners
@both_exporters
def test_transformers_exporters_write_folders_that_run(name, kind, traced, other, tmp_path):
    model = tiny_model(**kind)
    exporter, config = export_with(name)
    exporter.export(model, {**traced, "use_cache": False}, config).save_pretrained(tmp_path)
    loaded = exporters.base.ExportedModel.from_pretrained(tmp_path, trust_remote_code=True)
    assert_close(loaded(**other).logits, model(**other).logits, rtol=0, atol=2e-5)


@needs_runners
@both_exporters
def test_transformers_exporters_prefill_and_go_on(name, kind, traced, other):
    model = tiny_model(**kind)
    exporter, config = export_with(name)
    exported = exporter.export_for_generation(model, traced, config)
    input_ids, attention_mask = other.values()
    position_ids = (attention_mask.cumsum(1) - 1).clamp(min=0)
    expected = model(**other, position_ids=position_ids).logits
    cache = DynamicCache(config=model.config)
    for component, first, last in (("prefill", 0, 6), ("decode", 6, 7)):
        outputs = exported.runners[component](
            input_ids=input_ids[:, first:last],
            attention_mask=attention_mask[:, :last],
            position_ids=position_ids[:, first:last],
            cache=cache,
        )
        cache = outputs.cache
        assert_close(outputs.logits[:, -1], expected[:, last - 1], rtol=0, atol=2e-5)
