import inspect

import pytest
import torch
from conftest import DENSE, MOE, tiny_model
from torch.testing import assert_close
from transformers import (
    ContinuousBatchingConfig,
    DynamicCache,
    GenerationConfig,
    GenerationMixin,
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


def test_generate_from_embeddings(model, input_ids):
    embeds = model.get_input_embeddings()(input_ids)
    tokens = model.generate(inputs_embeds=embeds, do_sample=False, max_new_tokens=12)
    assert torch.equal(tokens, by_argmax(model, input_ids)[:, 12:])


def test_second_turn_continues_from_the_cache_of_the_first(model, input_ids):
    first = greedy(model, input_ids, return_dict_in_generate=True)
    second_prompt = torch.cat([first.sequences, input_ids[:, :5]], dim=1)
    tokens = greedy(model, second_prompt, **{CACHE: getattr(first, CACHE)})
    assert torch.equal(tokens, by_argmax(model, second_prompt))


def test_generate_from_a_cache_made_by_hand(model, input_ids):
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids[:, :8], **{CACHE: cache})
    assert torch.equal(greedy(model, input_ids, **{CACHE: cache}), by_argmax(model, input_ids))


def test_assisted_generation_equals_greedy(model):
    assistant = tiny_model(seed=1, num_hidden_layers=1)
    for prompt in prompts((3, 5, 8, 12)):
        expected = greedy(model, prompt, max_new_tokens=20)
        assert torch.equal(greedy(model, prompt, max_new_tokens=20, assistant_model=assistant), expected)


def test_a_model_assisted_by_itself_equals_greedy(model, input_ids):
    """Every guess is right, so that the accepted stretch is long; a random assistant's guesses are all wrong."""
    tokens = greedy(model, input_ids[:1], max_new_tokens=32, assistant_model=model)
    assert torch.equal(tokens, by_argmax(model, input_ids[:1], new_tokens=32))


def test_prompt_lookup_equals_greedy(model):
    for prompt in prompts((3, 5, 8, 12)):
        repeated = prompt.repeat(1, 3)
        expected = greedy(model, repeated, max_new_tokens=20)
        assert torch.equal(greedy(model, repeated, max_new_tokens=20, prompt_lookup_num_tokens=4), expected)


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
