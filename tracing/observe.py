"""Watch a model's own modules while they run: nothing is computed a second time, and nothing in them is changed."""

import sys
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from unittest.mock import patch

import torch
from transformers import DynamicCache


@dataclass(frozen=True)
class Step:
    """One tensor on its way through the model."""

    name: str  # what it is, or the attribute of the module that made it: "input_layernorm"
    shape: tuple[int, ...]
    rms: float | None  # root mean square of all its values; None for token ids
    block: int | None  # the number of its block; None before the first and behind the last
    note: str  # what happened, in one sentence

    @property
    def is_residual(self) -> bool:
        """Whether this is the residual stream itself, which every block reads and adds to."""
        return self.name in ("block input", "residual add", "block output")


@dataclass(frozen=True)
class Trace:
    """What a forward pass did, in order."""

    steps: list[Step]
    sizes: dict[str, int] = field(default_factory=dict)  # of the config, by their names there

    def of_block(self, block: int | None) -> list[Step]:
        return [step for step in self.steps if step.block == block]

    def shape_rule(self) -> str:
        """Say which shape the trunk kept, as observed.

        Raises:
            ValueError: it kept none, so that what was traced is no residual stream.
        """
        embedded, logits = self.steps[1].shape, self.steps[-1].shape
        others = {step.shape for step in self.steps if step.is_residual} - {embedded}
        if others:
            raise ValueError(f"the residual stream begins as {embedded}, but becomes {sorted(others)}")
        batch, length, hidden = embedded
        blocks = len({step.block for step in self.steps} - {None})
        return (
            f"The embedding makes (batch, seq) = {(batch, length)} into (batch, seq, hidden) = {embedded}. "
            f"Each block ({blocks}) keeps that shape, since it adds what it computes to what it was given. "
            f"lm_head exchanges the last dimension, {hidden}, for the vocabulary: {logits}."
        )


@dataclass(frozen=True)
class CacheStep:
    """One forward pass with a cache."""

    name: str  # "prefill" or "decode"
    input_shape: tuple[int, int]  # token ids given to the model: [B, S]
    cache_shape: tuple[int, ...]  # keys of the first block afterwards: [B, K, L, D]; the values have the same
    cache_bytes: int  # keys and values of all blocks
    difference: float  # largest absolute difference of its logits from those of a pass over everything without cache


NOTES = {
    "input_ids": "Token ids: whole numbers, one for each piece of text.",
    "embed_tokens": "Each id picks a row of the embedding table: a vector.",
    "block input": "The residual stream as this block finds it.",
    "input_layernorm": "Every vector is divided by its root mean square and scaled, by itself: the shape stays.",
    "q heads": "Queries: what each position looks for, for each of the N query heads.",
    "k heads": "Keys: what each position offers, for each of the K key/value heads.",
    "v heads": "Values: what each position hands over, for each of the K key/value heads.",
    "q rotary": "Queries, heads first now, turned by an angle that grows with the position.",
    "k rotary": "Keys, turned likewise: only the distance of two positions matters to their product.",
    "attention output": "For each position a mixture of the values before it, back in the width of the stream.",
    "residual add": "Stream plus attention output: the shapes must be equal.",
    "post_attention_layernorm": "The sum, normed again for the feed-forward.",
    "router": "Scores of the experts, for each token; the best ones serve it.",
    "mlp": "Feed-forward: each position by itself, wider inside, back in the width of the stream.",
    "block output": "Stream plus feed-forward: what the next block finds.",
    "norm": "The final norm.",
    "logits": "Scores of all tokens of the vocabulary as the next one, for each position.",
}


def trace(model, input_ids: torch.Tensor, **inputs) -> Trace:
    """Run a causal language model once, and record every step.

    Args:
        model: a MiniMindForCausalLM.
        input_ids: token ids [B, S].
        **inputs: more for the model's forward, such as `attention_mask`.

    Raises:
        ValueError: the model is no causal MiniMind.
    """
    if getattr(model.config, "model_type", None) != "minimind" or not hasattr(model, "lm_head"):
        raise ValueError(f"{type(model).__name__} cannot be traced: expected a MiniMindForCausalLM")
    steps, block = [], None

    def record(name: str, tensor: torch.Tensor):
        rms = None if name == "input_ids" else tensor.detach().float().square().mean().sqrt().item()
        steps.append(Step(name, tuple(tensor.shape), rms, block, NOTES[name]))

    def enter_block(number):
        def hook(layer, arguments):
            nonlocal block
            block = number
            record("block input", arguments[0])

        return hook

    def leave_block(layer, arguments, output):
        nonlocal block
        record("block output", output)
        block = None

    config, trunk = model.config, model.model
    hooks = [after(trunk.embed_tokens, lambda output: record("embed_tokens", output))]
    for number, layer in enumerate(trunk.layers):
        attention = layer.self_attn
        hooks += [
            layer.register_forward_pre_hook(enter_block(number)),
            after(layer.input_layernorm, lambda output: record("input_layernorm", output)),
            after(attention.q_norm, lambda output: record("q heads", output)),
            after(attention.k_norm, lambda output: record("k heads", output)),
            after(attention.v_proj, lambda output: record("v heads", output.unflatten(-1, (-1, config.head_dim)))),
            after(attention, lambda output: record("attention output", output[0])),
            layer.post_attention_layernorm.register_forward_pre_hook(
                lambda module, arguments: record("residual add", arguments[0])
            ),
            after(layer.post_attention_layernorm, lambda output: record("post_attention_layernorm", output)),
            after(layer.mlp, lambda output: record("mlp", output)),
            layer.register_forward_hook(leave_block),
        ]
        if config.use_moe:
            hooks.append(after(layer.mlp.gate, lambda output: record("router", output[0])))
    hooks += [
        after(trunk.norm, lambda output: record("norm", output)),
        after(model.lm_head, lambda output: record("logits", output)),
    ]
    with ExitStack() as stack, evaluating(model):
        for hook in hooks:
            stack.callback(hook.remove)
        stack.enter_context(watch_rotation(model, record))
        record("input_ids", input_ids)
        model(input_ids, **inputs)
    names = "hidden_size num_hidden_layers num_attention_heads num_key_value_heads head_dim vocab_size".split()
    names += ["num_experts", "num_experts_per_tok"] if config.use_moe else []
    return Trace(steps, {name: getattr(config, name) for name in names})


def after(module, record):
    """Call `record` with each output of a module."""
    return module.register_forward_hook(lambda module, arguments, output: record(output))


@contextmanager
def watch_rotation(model, record):
    """Record what the rotary embedding makes of queries and keys; a function does it, which has no hooks."""
    source = sys.modules[type(model).__module__]
    rotate = source.apply_rotary_pos_emb

    def rotate_and_record(query, key, cos, sin):
        query, key = rotate(query, key, cos, sin)
        record("q rotary", query)
        record("k rotary", key)
        return query, key

    with patch.object(source, "apply_rotary_pos_emb", rotate_and_record):
        yield


@contextmanager
def evaluating(model):
    """Without dropout and gradients, and as it was afterwards."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(training)


def trace_cache(model, input_ids: torch.Tensor, decode_steps: int = 3) -> list[CacheStep]:
    """Fill a cache with a prompt [B, S], add the likeliest token step by step, compare with passes without a cache."""
    steps, cache, given = [], DynamicCache(config=model.config), input_ids
    with evaluating(model):
        for number in range(decode_steps + 1):
            output = model(given, cache=cache)
            whole = model(input_ids, use_cache=False).logits[:, -given.shape[1] :]
            keys = [layer.keys for layer in cache.layers]
            steps.append(
                CacheStep(
                    "decode" if number else "prefill",
                    tuple(given.shape),
                    tuple(keys[0].shape),
                    sum(2 * key.numel() * key.element_size() for key in keys),
                    (output.logits - whole).abs().max().item(),
                )
            )
            given = output.logits[:, -1:].argmax(-1)
            input_ids = torch.cat((input_ids, given), dim=1)
    return steps
