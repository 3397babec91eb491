"""A trace as text and as JSON."""

import json
from dataclasses import asdict

from minimind_hf.tracing.observe import CacheStep, Trace


def to_text(trace: Trace) -> str:
    """A table of all steps, and the rule that their shapes follow."""
    lines = ["  ".join(f"{name} {value}" for name, value in trace.sizes.items()), ""]
    lines.append(f"{'step':<28} {'shape':<20} RMS")
    block = None
    for step in trace.steps:
        if step.block is not None and step.block != block:
            lines.append(f"block {step.block}")
        block = step.block
        name = step.name if block is None else f"  {step.name}"
        lines.append(f"{name:<28} {step.shape!s:<20} {'' if step.rms is None else f'{step.rms:.4f}'}".rstrip())
    return "\n".join([*lines, "", trace.shape_rule()])


def cache_to_text(steps: list[CacheStep]) -> str:
    """A table of passes with a cache."""
    lines = [f"{'pass':<10} {'token ids':<12} {'keys in the cache':<20} {'cache':>10}  difference without cache"]
    for step in steps:
        lines.append(
            f"{step.name:<10} {step.input_shape!s:<12} {step.cache_shape!s:<20} {step.cache_bytes:>8} B"
            f"  {step.difference:.2g}"
        )
    return "\n".join(lines)


def to_json(trace: Trace, cache: list[CacheStep] = ()) -> str:
    content = {
        "sizes": trace.sizes,
        "steps": [asdict(step) for step in trace.steps],
        "shape_rule": trace.shape_rule(),
        **({"cache": [asdict(step) for step in cache]} if cache else {}),
    }
    return json.dumps(content, indent=2)
