"""Look inside a forward pass: every step with its shape, as text, JSON, a diagram or a page.

`print(to_text(trace(model, input_ids)))` is what `minimind trace` prints.
"""

from minimind_hf.tracing.html import to_html
from minimind_hf.tracing.observe import CacheStep, Step, Trace, trace, trace_cache
from minimind_hf.tracing.svg import to_svg
from minimind_hf.tracing.text import cache_to_text, to_json, to_text

__all__ = [
    "CacheStep",
    "Step",
    "Trace",
    "cache_to_text",
    "to_html",
    "to_json",
    "to_svg",
    "to_text",
    "trace",
    "trace_cache",
]
