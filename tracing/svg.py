"""A trace as a diagram: the residual stream runs down the middle, with the shape of what flows beside each arrow."""

from xml.sax.saxutils import escape

from minimind_hf.tracing.observe import Trace

WIDTH, MIDDLE = 640, 320
COLUMNS = {"q": 175, "k": 320, "v": 465}  # of the three kinds of heads
BYPASS = 75  # where the residual stream goes round attention and feed-forward
MOST_BLOCKS = 4  # of more blocks, the first and the last are drawn

STYLE = """
svg { background: #ffffff; font-family: 'Segoe UI', 'Noto Sans', 'DejaVu Sans', sans-serif; }
.block { fill: #f6f8fb; stroke: #d4dce8; }
.title { font-size: 13px; font-weight: 600; fill: #51617a; text-anchor: end; }
.box { stroke-width: 1.3; }
.name { font-size: 13px; fill: #1d2838; text-anchor: middle; dominant-baseline: central; }
.shape { font-size: 11.5px; font-family: ui-monospace, 'DejaVu Sans Mono', monospace; fill: #51617a; }
.flow { stroke: #51617a; stroke-width: 1.4; fill: none; }
.residual { stroke: #d9822b; stroke-width: 2; fill: none; }
.token { fill: #e8edf4; stroke: #8b9bb3; }
.norm { fill: #fff4d6; stroke: #d9a92b; }
.heads { fill: #e2f0ff; stroke: #4b91d6; }
.rotary { fill: #e9e4fb; stroke: #7d6bc7; }
.attention { fill: #d5e8fb; stroke: #2f7fc9; }
.mlp { fill: #def3e4; stroke: #3f9d5f; }
.add { fill: #ffffff; stroke: #d9822b; stroke-width: 2; }
"""


class Canvas:
    """Shapes at given places; `y` is how far down the drawing has come."""

    def __init__(self):
        self.parts, self.y = [], 24

    def box(self, x: int, name: str, kind: str, width: int = 210, height: int = 32):
        self.parts.append(
            f'<rect class="box {kind}" x="{x - width / 2:g}" y="{self.y}" width="{width}" height="{height}" rx="7"/>'
            f'<text class="name" x="{x}" y="{self.y + height / 2:g}">{escape(name)}</text>'
        )

    def arrow(self, x: int, shape: tuple, length: int = 36):
        """An arrow down from here, with a shape beside it."""
        self.parts.append(
            f'<path class="flow" marker-end="url(#tip)" d="M{x} {self.y}V{self.y + length - 1}"/>'
            f'<text class="shape" x="{x + 9}" y="{self.y + min(length / 2 + 3, 28):g}">{shape}</text>'
        )

    def add(self, start: int):
        """The sum of what comes from above and what left the stream at height `start`."""
        middle = self.y + 13
        self.parts.append(
            f'<path class="residual" marker-end="url(#residual-tip)" '
            f'd="M{MIDDLE} {start}H{BYPASS + 10}Q{BYPASS} {start} {BYPASS} {start + 10}V{middle - 10}'
            f'Q{BYPASS} {middle} {BYPASS + 10} {middle}H{MIDDLE - 15}"/>'
            f'<circle class="add" cx="{MIDDLE}" cy="{middle}" r="13"/>'
            f'<path class="residual" d="M{MIDDLE - 6} {middle}h12m-6 -6v12"/>'
        )
        self.y += 26

    def text(self, x: int, text: str, kind: str):
        self.parts.append(f'<text class="{kind}" x="{x}" y="{self.y}">{escape(text)}</text>')


def to_svg(trace: Trace) -> str:
    """Draw a trace as an SVG image."""
    canvas = Canvas()
    outside = {step.name: step.shape for step in trace.of_block(None)}
    blocks = sorted({step.block for step in trace.steps} - {None})

    canvas.box(MIDDLE, "input_ids", "token")
    canvas.y += 32
    canvas.arrow(MIDDLE, outside["input_ids"])
    canvas.y += 36
    canvas.box(MIDDLE, "embed_tokens", "token")
    canvas.y += 32
    shown = blocks if len(blocks) <= MOST_BLOCKS else [blocks[0], blocks[-1]]
    for block in shown:
        if block > 0 and block - 1 not in shown:
            canvas.arrow(MIDDLE, outside["embed_tokens"], 50)
            canvas.y += 50
            canvas.box(MIDDLE, f"blocks 1 to {block - 1}: the same", "token")
            canvas.y += 32
        draw_block(canvas, block, {step.name: step.shape for step in trace.of_block(block)})
    canvas.arrow(MIDDLE, trace.steps[-3].shape, 50)  # of the last block's output
    canvas.y += 50
    for name, kind in (("norm", "norm"), ("lm_head", "token")):
        canvas.box(MIDDLE, name, kind)
        canvas.y += 32
        canvas.arrow(MIDDLE, outside["norm" if name == "norm" else "logits"])
        canvas.y += 36
    canvas.box(MIDDLE, "logits", "token")
    canvas.y += 32
    height = canvas.y + 24
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}">'
        f"<title>MiniMind, traced</title><style>{STYLE}</style><defs>"
        + "".join(
            f'<marker id="{name}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" '
            f'markerUnits="userSpaceOnUse" orient="auto"><path d="M0 0L8 4L0 8z" fill="{color}"/></marker>'
            for name, color in (("tip", "#51617a"), ("residual-tip", "#d9822b"))
        )
        + "</defs>"
        + "\n".join(canvas.parts)
        + "</svg>\n"
    )


def draw_block(canvas: Canvas, number: int, shapes: dict[str, tuple]):
    """Draw one block; `shapes` are those of its steps by name."""
    top, frame = canvas.y + 40, len(canvas.parts)
    start = top + 16  # the residual stream leaves the middle here
    canvas.arrow(MIDDLE, shapes["block input"], 84)
    canvas.y = top + 22
    canvas.text(WIDTH - 40, f"block {number}", "title")
    canvas.y = top + 44
    canvas.box(MIDDLE, "input_layernorm", "norm")
    canvas.y += 32
    spread(canvas, shapes["input_layernorm"])
    for kind, x in COLUMNS.items():
        canvas.box(x, f"{kind} heads", "heads", 112)
    canvas.y += 32
    for kind, x in COLUMNS.items():
        canvas.arrow(x, shapes[f"{kind} heads"], 36 if kind != "v" else 104)
    canvas.y += 36
    for kind in "qk":
        canvas.box(COLUMNS[kind], "rotary", "rotary", 112)
    canvas.y += 32
    for kind in "qk":
        canvas.arrow(COLUMNS[kind], shapes[f"{kind} rotary"])
    canvas.y += 36
    canvas.box(MIDDLE, "attention, o_proj", "attention", 402)
    canvas.y += 32
    canvas.arrow(MIDDLE, shapes["attention output"])
    canvas.y += 36
    canvas.add(start)
    second = canvas.y + 12
    canvas.arrow(MIDDLE, shapes["residual add"], 44)
    canvas.y += 44
    canvas.box(MIDDLE, "post_attention_layernorm", "norm")
    canvas.y += 32
    canvas.arrow(MIDDLE, shapes["post_attention_layernorm"])
    canvas.y += 36
    canvas.box(MIDDLE, "router, experts" if "router" in shapes else "mlp", "mlp")
    if "router" in shapes:
        canvas.y += 20
        canvas.text(MIDDLE + 115, f"router {shapes['router']}", "shape")
        canvas.y -= 20
    canvas.y += 32
    canvas.arrow(MIDDLE, shapes["mlp"])
    canvas.y += 36
    canvas.add(second)
    bottom = canvas.y + 14
    canvas.parts.insert(
        frame, f'<rect class="block" x="24" y="{top}" width="{WIDTH - 48}" height="{bottom - top}" rx="12"/>'
    )


def spread(canvas: Canvas, shape: tuple):
    """Lines from the middle to the three kinds of heads."""
    for x in COLUMNS.values():
        bend = "" if x == MIDDLE else f"V{canvas.y + 14}H{x}"
        canvas.parts.append(
            f'<path class="flow" marker-end="url(#tip)" d="M{MIDDLE} {canvas.y}{bend}V{canvas.y + 39}"/>'
        )
    canvas.parts.append(f'<text class="shape" x="{MIDDLE + 9}" y="{canvas.y + 32}">{shape}</text>')
    canvas.y += 40
