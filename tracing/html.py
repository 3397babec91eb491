"""A trace as a page by itself: the diagram, and every block to open."""

from html import escape

from minimind_hf.tracing.observe import CacheStep, Step, Trace
from minimind_hf.tracing.svg import to_svg

# The diagram's own style holds in the whole page: none of its class names (shape, name, note, …) occurs in the tables.
STYLE = """
body { max-width: 78rem; margin: 2rem auto; padding: 0 1rem; color: #1d2838; background: #fff;
  font-family: 'Segoe UI', 'Noto Sans', 'DejaVu Sans', sans-serif; line-height: 1.45; }
main { display: flex; flex-wrap: wrap; gap: 2rem; align-items: flex-start; }
figure { margin: 0; flex: 1 1 20rem; } figure svg { width: 100%; height: auto; }
section { flex: 1.4 1 26rem; min-width: 0; }
details, .outside { border: 1px solid #d4dce8; border-radius: .6rem; margin: .5rem 0; padding: .5rem .8rem; }
summary { cursor: pointer; font-weight: 600; }
summary code { font-weight: 400; color: #51617a; margin-left: .5rem; }
details[open] summary { margin-bottom: .4rem; }
.head { position: sticky; top: 0; background: #fff; padding: .3rem calc(.8rem + 1px); }
table { border-collapse: collapse; table-layout: fixed; width: 100%; font-size: .9rem; }
th { text-align: left; color: #51617a; font-weight: 600; }
td, th { padding: .2rem .5rem; vertical-align: top; overflow-wrap: anywhere; }
tbody + tbody { border-top: 1px solid #e6ebf2; }
.steps th:nth-child(2) { width: 9.5rem; } .steps th:nth-child(3) { width: 4rem; }
.number { white-space: nowrap; font-family: 'DejaVu Sans Mono', Consolas, monospace; font-size: .8rem; }
.meaning { color: #51617a; padding: 0 .5rem .3rem; font-size: .85rem; }
.sum td { border-left: 3px solid #d9822b; } .sum td + td { border-left: 0; }
.rule { background: #fff4d6; border-left: 4px solid #d9a92b; padding: .8rem 1rem; border-radius: .3rem; }
"""


def to_html(trace: Trace, cache: list[CacheStep] = ()) -> str:
    """Make a page that needs nothing else."""
    sizes = " · ".join(f"{escape(name)} <b>{value}</b>" for name, value in trace.sizes.items())
    sections, block = [], None
    for step in trace.steps:
        if step.block is None:
            sections.append(f'<div class="outside">{table([step])}</div>')
        elif step.block != block:
            steps = trace.of_block(step.block)
            flow = f"{steps[0].shape} → {steps[-1].shape}"
            sections.append(
                f"<details{'' if step.block else ' open'}><summary>block {step.block}<code>{flow}</code></summary>"
                f"{table(steps)}</details>"
            )
        block = step.block
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>MiniMind, traced</title><style>{STYLE}</style></head>
<body><h1>MiniMind, step by step</h1>
<p>{sizes}</p>
<main><figure>{to_svg(trace)}</figure>
<section>
{"".join(sections)}
<p class="rule">{escape(trace.shape_rule())}</p>
{cache_table(cache) if cache else ""}
</section></main></body></html>
"""


def table(steps: list[Step]) -> str:
    rows = "".join(
        f"<tr{' class=residual' if step.is_residual else ''}><td>{escape(step.name)}</td>"
        f'<td class="shape">{step.shape}</td><td class="rms">{"" if step.rms is None else f"{step.rms:.4f}"}</td>'
        f'<td class="note">{escape(step.note)}</td></tr>'
        for step in steps
    )
    return f"<table><tr><th>step</th><th>shape</th><th>RMS</th><th></th></tr>{rows}</table>"


def cache_table(steps: list[CacheStep]) -> str:
    rows = "".join(
        f'<tr><td>{step.name}</td><td class="shape">{step.input_shape}</td><td class="shape">{step.cache_shape}</td>'
        f'<td class="rms">{step.cache_bytes}</td><td class="rms">{step.difference:.2g}</td></tr>'
        for step in steps
    )
    return (
        "<h2>With a cache</h2><table><tr><th>pass</th><th>token ids</th><th>keys in the cache</th><th>bytes</th>"
        f"<th>difference without cache</th></tr>{rows}</table>"
    )
