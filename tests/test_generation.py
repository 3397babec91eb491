import inspect

import pytest
import torch
from conftest import DENSE, MOE, tiny_model
from test_modeling import stock_twin
from torch._dynamo.testing import CompileCounter
from torch._dynamo.utils import counters
from torch.testing import assert_close
from transformers import (
    CompileConfig,
    ContinuousBatchingConfig,
    DynamicCache,
    GenerationConfig,
    GenerationMixin,
    LogitsProcessor,
    StaticCache,
    StoppingCriteria,
)
from transformers.generation.streamers import BaseStreamer

from minimind_hf import MiniMindForCausalLM
from minimind_hf.modeling_minimind import CACHE

both_kinds = pytest.mark.parametrize("kind", [DENSE, MOE], ids=["dense", "moe"])


def endless(model):
    """A random model may choose <|im_end|> at any time; tests that are about the end set it themselves."""
    model.generation_config.eos_token_id = None
    return model


@pytest.fixture
def model(model):
    return endless(model)


def prompts(lengths):
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(3, 192, (1, length), generator=generator) for length in lengths]


def left_padded(rows):
    longest = max(row.shape[1] for row in rows)
    input_ids, mask = (
        torch.zeros(len(rows), longest, dtype=torch.long),
        torch.zeros(len(rows), longest, dtype=torch.long),
    )
    for i, row in enumerate(rows):
        input_ids[i, longest - row.shape[1] :] = row
        mask[i, longest - row.shape[1] :] = 1
    return {"input_ids": input_ids, "attention_mask": mask}


def greedy(model, input_ids, **changes):
    return model.generate(input_ids, **{"do_sample": False, "max_new_tokens": 12, **changes})


@torch.no_grad()
def by_argmax(model, input_ids, new_tokens=12):
    """Greedy generation without any cache and without `generate`."""
    for _ in range(new_tokens):
        input_ids = torch.cat([input_ids, model(input_ids).logits[:, -1:].argmax(-1)], dim=1)
    return input_ids


def test_greedy_takes_the_likeliest_token(model, input_ids):
    assert torch.equal(greedy(model, input_ids), by_argmax(model, input_ids))


def test_greedy_without_cache(model, input_ids):
    assert torch.equal(greedy(model, input_ids, use_cache=False), by_argmax(model, input_ids))


def test_sampling_depends_on_the_seed_alone(model, input_ids):
    def sample(seed):
        torch.manual_seed(seed)
        return model.generate(input_ids, do_sample=True, top_k=0, max_new_tokens=12)

    assert torch.equal(sample(5), sample(5))
    assert not torch.equal(sample(5), sample(6))


def test_sampling_from_one_token_is_greedy(model, input_ids):
    sampled = model.generate(input_ids, do_sample=True, top_k=1, max_new_tokens=12)
    assert torch.equal(sampled, by_argmax(model, input_ids))


def test_beams_with_and_without_cache_agree_and_beat_greedy(model, input_ids):
    def beams(**changes):
        return greedy(model, input_ids, num_beams=4, length_penalty=0.0, **changes)

    def log_probability(tokens):
        scores = model(tokens).logits[:, 11:-1].log_softmax(-1)
        return scores.gather(2, tokens[:, 12:, None]).sum((1, 2))

    assert torch.equal(beams(), beams(use_cache=False))
    with torch.no_grad():
        assert (log_probability(beams()) > log_probability(by_argmax(model, input_ids))).all()


def test_num_return_sequences(model, input_ids):
    tokens = greedy(model, input_ids, num_beams=4, num_return_sequences=3)
    assert tokens.shape == (6, 24)
    assert len({tuple(row.tolist()) for row in tokens[:3]}) == 3
    assert torch.equal(tokens[[0, 3]], greedy(model, input_ids, num_beams=4))
    torch.manual_seed(0)
    sampled = model.generate(input_ids, do_sample=True, top_k=0, max_new_tokens=12, num_return_sequences=3)
    assert sampled.shape == (6, 24)
    assert torch.equal(sampled[:, :12], input_ids.repeat_interleave(3, dim=0))


def test_streamer(model, input_ids):
    class Collect(BaseStreamer):
        tokens, ended = (), False

        def put(self, value):
            self.tokens += tuple(value.flatten().tolist())

        def end(self):
            self.ended = True

    streamer = Collect()
    tokens = greedy(model, input_ids[:1], streamer=streamer)
    assert streamer.tokens == tuple(tokens[0].tolist())
    assert streamer.ended


def test_stopping_criteria(model, input_ids):
    class FifteenTokens(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            return torch.full((input_ids.shape[0],), input_ids.shape[1] >= 15)

    tokens = greedy(model, input_ids, stopping_criteria=[FifteenTokens()])
    assert torch.equal(tokens, by_argmax(model, input_ids, new_tokens=3))


def test_any_of_several_eos_tokens_stops_a_row(model, input_ids):
    expected = by_argmax(model, input_ids)
    stops = [expected[0, 14].item(), expected[1, 17].item()]
    tokens = greedy(model, input_ids, eos_token_id=stops, pad_token_id=0)
    for row in range(2):
        first = next(i for i in range(12, 24) if expected[row, i] in stops)
        assert torch.equal(tokens[row, : first + 1], expected[row, : first + 1])
        assert not tokens[row, first + 1 :].any()
    assert tokens.shape[1] <= 18


def test_eos_of_the_config_stops(input_ids):
    model = tiny_model()
    end = by_argmax(model, input_ids[:1])[0, 14].item()
    model = tiny_model(eos_token_id=[191, end])
    assert model.generation_config.eos_token_id == [191, end]
    tokens = greedy(model, input_ids[:1])
    assert tokens[0, -1] == end
    assert tokens.shape[1] <= 15


def test_repetition_penalty(model, input_ids):
    tokens, penalty = input_ids[:1], 1.8
    with torch.no_grad():
        for _ in range(12):
            logits = model(tokens).logits[0, -1]
            seen = torch.zeros(192, dtype=torch.bool).index_fill(0, tokens[0], True)
            logits = torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)
            tokens = torch.cat([tokens, logits.argmax().view(1, 1)], dim=1)
    assert torch.equal(greedy(model, input_ids[:1], repetition_penalty=penalty), tokens)
    assert not torch.equal(by_argmax(model, input_ids[:1]), tokens)


def test_generate_returns_scores_and_cache(model, input_ids):
    outputs = greedy(model, input_ids, return_dict_in_generate=True, output_scores=True)
    assert torch.equal(outputs.sequences, by_argmax(model, input_ids))
    with torch.no_grad():
        logits = model(outputs.sequences).logits[:, 11:-1]
    assert_close(torch.stack(outputs.scores, dim=1), logits, rtol=0, atol=2e-5)
    assert getattr(outputs, CACHE).get_seq_length() == 23  # the last token has not been through the model


def test_static_cache_equals_dynamic_on_a_padded_batch(model):
    batch = left_padded(prompts((4, 9, 13)))
    dynamic = model.generate(**batch, do_sample=False, max_new_tokens=12)
    static = model.generate(**batch, do_sample=False, max_new_tokens=12, cache_implementation="static")
    assert torch.equal(static, dynamic)


@both_kinds
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_left_padded_batch_equals_single_prompts(kind, attention):
    model = endless(tiny_model(attn_implementation=attention, **kind))
    rows = prompts(range(3, 18))
    tokens = model.generate(**left_padded(rows), do_sample=False, max_new_tokens=6)[:, 17:]
    for row, new_tokens in zip(rows, tokens, strict=True):
        assert torch.equal(by_argmax(model, row, new_tokens=6)[0, row.shape[1] :], new_tokens)


@both_kinds
@pytest.mark.parametrize(
    ("backend", "axis"), [("quanto", 0), ("hqq", 1)], ids=lambda value: value if isinstance(value, str) else ""
)
def test_quantized_cache_equals_that_of_the_stock_class(kind, input_ids, backend, axis):
    model = endless(tiny_model(**kind))
    pytest.importorskip({"quanto": "optimum.quanto", "hqq": "hqq"}[backend])
    settings = {"backend": backend, "nbits": 4, "q_group_size": 16, "residual_length": 4}
    settings |= {"axis_key": axis, "axis_value": axis}
    ours, theirs = (
        greedy(each, input_ids, max_new_tokens=16, cache_implementation="quantized", cache_config=dict(settings))
        for each in (model, stock_twin(model))
    )
    assert torch.equal(ours, theirs)
    assert not torch.equal(ours, by_argmax(model, input_ids, new_tokens=16))  # 4 bits are coarse


@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="an offloaded cache moves between an accelerator and the CPU"
)
@pytest.mark.parametrize("cache", ["offloaded", "offloaded_static"])
def test_offloaded_cache_equals_dynamic(model, input_ids, cache):
    model, input_ids = model.cuda(), input_ids.cuda()
    assert torch.equal(greedy(model, input_ids, cache_implementation=cache), greedy(model, input_ids))


def test_beams_with_a_static_cache(model, input_ids):
    static = greedy(model, input_ids, num_beams=4, cache_implementation="static")
    assert torch.equal(static, greedy(model, input_ids, num_beams=4))


def test_generate_with_a_compile_config(model, input_ids):
    """A static cache and one graph without breaks, as transformers compiles by itself on a GPU."""
    torch.compiler.reset()
    counters.clear()
    compile_config = CompileConfig(backend="eager", fullgraph=True, mode=None)
    compile_config._compile_all_devices = True  # the CPU too
    tokens = greedy(model, input_ids, cache_implementation="static", compile_config=compile_config)
    assert torch.equal(tokens, by_argmax(model, input_ids))
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("cache_type", ["static", "dynamic"])
@torch.no_grad()
def test_compiled_forward_recompiles_at_most_once_in_20_steps(model, input_ids, cache_type):
    torch.compiler.reset()
    counter = CompileCounter()
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    static = cache_type == "static"
    cache = StaticCache(config=model.config, max_cache_len=32) if static else DynamicCache(config=model.config)
    logits, tokens = model(input_ids, **{CACHE: cache}).logits, [input_ids]
    for _ in range(20):
        tokens.append(logits[:, -1:].argmax(-1))
        logits = compiled(tokens[-1], **{CACHE: cache}).logits
    assert torch.equal(torch.cat(tokens, dim=1), by_argmax(model, input_ids, new_tokens=20))
    assert 1 <= counter.frame_count <= (1 if static else 2)


@pytest.mark.parametrize("size", [1, 5, 12, 100])
def test_chunked_prefill(model, input_ids, size):
    assert torch.equal(greedy(model, input_ids, prefill_chunk_size=size), by_argmax(model, input_ids))


def test_chunked_prefill_of_a_padded_batch(model):
    batch = left_padded(prompts((4, 9, 13)))
    tokens = greedy(model, **batch, prefill_chunk_size=5)
    assert torch.equal(tokens, greedy(model, **batch))


def test_generate_from_embeddings(model, input_ids):
    embeds = model.get_input_embeddings()(input_ids)
    tokens = model.generate(inputs_embeds=embeds, do_sample=False, max_new_tokens=12)
    assert torch.equal(tokens, by_argmax(model, input_ids)[:, 12:])
    beams = model.generate(inputs_embeds=embeds, do_sample=False, max_new_tokens=12, num_beams=4)
    assert torch.equal(beams, greedy(model, input_ids, num_beams=4)[:, 12:])


@pytest.mark.parametrize("cache_type", ["dynamic", "static"])
def test_three_turns_with_one_cache(model, input_ids, cache_type):
    static = cache_type == "static"
    cache = StaticCache(config=model.config, max_cache_len=64) if static else DynamicCache(config=model.config)
    tokens = input_ids
    for turn in (0, 5, 2):
        tokens = torch.cat([tokens, input_ids[:, :turn]], dim=1)
        expected = by_argmax(model, tokens, new_tokens=6)
        tokens = greedy(model, tokens, max_new_tokens=6, **{CACHE: cache})
        assert torch.equal(tokens, expected)
        assert cache.get_seq_length() == tokens.shape[1] - 1  # the last token has not been through the model


@pytest.mark.parametrize("beams", [1, 3])
def test_allowed_tokens(model, input_ids, beams):
    """A grammar in miniature: after an even token an odd one, and the reverse."""

    def other_parity(row, tokens):
        return list(range(3 + int(tokens[-1]) % 2, 192, 2))

    tokens = greedy(model, input_ids, num_beams=beams, prefix_allowed_tokens_fn=other_parity)
    assert tokens.shape == (2, 24)
    assert ((tokens[:, 11:-1] + tokens[:, 12:]) % 2 == 1).all()
    assert not torch.equal(tokens, greedy(model, input_ids, num_beams=beams))


def test_logits_processor_of_the_caller(model, input_ids):
    class Mirror(LogitsProcessor):
        """The unlikeliest token becomes the likeliest."""

        def __call__(self, input_ids, scores):
            return -scores

    tokens = input_ids
    with torch.no_grad():
        for _ in range(12):
            tokens = torch.cat([tokens, model(tokens).logits[:, -1:].argmin(-1)], dim=1)
    assert torch.equal(greedy(model, input_ids, logits_processor=[Mirror()]), tokens)


@pytest.mark.parametrize(
    "changes", [{}, {"cache_implementation": "static"}, {"num_beams": 3}, {"use_cache": False}], ids=str
)
def test_generation_ends_with_an_error_where_positions_end(input_ids, changes):
    model = endless(tiny_model(max_position_embeddings=16))
    assert greedy(model, input_ids, max_new_tokens=5, **changes).shape == (2, 17)  # the last token needs no position
    with pytest.raises(ValueError, match="position 16 is too far: max_position_embeddings=16"):
        greedy(model, input_ids, max_new_tokens=6, **changes)


def test_generate_from_a_cache_made_by_hand(model, input_ids):
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids[:, :8], **{CACHE: cache})
    assert torch.equal(greedy(model, input_ids, **{CACHE: cache}), by_argmax(model, input_ids))


@both_kinds
def test_assisted_generation_equals_greedy(kind):
    """The assistant is the model without its last block: a quarter of its guesses are right."""
    model, assistant = endless(tiny_model(**kind)), tiny_model(num_hidden_layers=1, **kind)
    assert not assistant.load_state_dict(model.state_dict(), strict=False).missing_keys
    for prompt in prompts(range(3, 13)):
        tokens = greedy(model, prompt, max_new_tokens=32, assistant_model=assistant)
        assert torch.equal(tokens, by_argmax(model, prompt, new_tokens=32))


def test_a_model_assisted_by_itself_equals_greedy(model, input_ids):
    """Every guess is right, so that the accepted stretch is long; a random assistant's guesses are all wrong."""
    tokens = greedy(model, input_ids[:1], max_new_tokens=32, assistant_model=model)
    assert torch.equal(tokens, by_argmax(model, input_ids[:1], new_tokens=32))


def test_prompt_lookup_equals_greedy(model):
    for prompt in prompts(range(3, 13)):
        repeated = prompt.repeat(1, 3)
        tokens = greedy(model, repeated, max_new_tokens=32, prompt_lookup_num_tokens=4)
        assert torch.equal(tokens, by_argmax(model, repeated, new_tokens=32))


@both_kinds
def test_continuous_batching_equals_greedy(kind):
    model = endless(tiny_model(**kind))
    rows = prompts((3, 9, 5, 14))
    results = model.generate_batch(
        [row[0].tolist() for row in rows],
        generation_config=GenerationConfig(do_sample=False, max_new_tokens=8, eos_token_id=-1, pad_token_id=0),
        continuous_batching_config=ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=16),
        progress_bar=False,
        warmup=False,
    )
    given = {tuple(result.prompt_ids): result.generated_tokens for result in results.values()}
    for row in rows:
        assert given[tuple(row[0].tolist())] == by_argmax(model, row, new_tokens=8)[0, row.shape[1] :].tolist()


def test_nothing_of_generation_mixin_is_overridden():
    def names(classes):
        return {name for cls in classes if cls is not object for name in vars(cls) if not name.startswith("__")}

    mixin = inspect.getmro(GenerationMixin)
    own = [cls for cls in inspect.getmro(MiniMindForCausalLM) if cls.__module__.startswith("minimind_hf.")]
    assert {"generate", "prepare_inputs_for_generation", "generate_batch"} <= names(mixin)
    assert MiniMindForCausalLM in own
    assert names(own) & names(mixin) == set()
