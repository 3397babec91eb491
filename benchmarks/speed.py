"""How fast MiniMind generates, reads and trains, beside its peers: python benchmarks/speed.py

Every contender computes with the same random weights, exported for it, in a process of its own. One process after the
other does the same work, round by round, forwards and backwards in turns: what slows the machine down slows all of
them, and the ratios of a round stay fair. Rates and ratios are medians over the rounds; warm-up and compilation come
before. Peers that are not installed are left out, and the last lines say so. Memory is measured on Linux.
"""

import json
import os
import platform
import subprocess
import sys
import tempfile
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Annotated

import typer

HERE = Path(__file__).parent
GIB = 2**30
SIZES = {"hidden_size": 768, "num_hidden_layers": 8, "vocab_size": 6400}  # MiniMind-3's
QUICK_SIZES = {"hidden_size": 256, "num_hidden_layers": 2, "vocab_size": 6400}


@dataclass(frozen=True)
class Entry:
    """A contender: its class in `contenders.py`, and what it takes part in."""

    kind: str
    format: str  # of its files, see Exports
    tasks: str
    stored: dict[str, str]  # the dtype of its file, for each dtype that it computes in
    options: dict = field(default_factory=dict)


HALVES = {"float32": "float32", "bfloat16": "bfloat16"}
AND_INT8 = {**HALVES, "int8": "bfloat16"}  # quantized on loading
EVERYTHING = "decode prefill train load"
ENTRIES = {
    "minimind": Entry("MiniMind", "minimind", EVERYTHING + " convert", AND_INT8),
    "minimind-compiled": Entry("MiniMind", "minimind", "decode train", AND_INT8, {"compiled": True}),
    "reference": Entry("Reference", "pth", EVERYTHING, HALVES),
    "qwen3": Entry("Transformers", "qwen3", EVERYTHING, HALVES),
    "qwen3-compiled": Entry("Transformers", "qwen3", "decode train", HALVES, {"compiled": True}),
    "llama.cpp": Entry("LlamaCpp", "gguf", "decode prefill load", {**HALVES, "int8": "int8"}),
    "llama.cpp-f16": Entry("LlamaCpp", "gguf", "decode prefill load", {"bfloat16": "float16"}),
    "vllm": Entry("VLLM", "qwen3", "decode prefill", HALVES),
}
GGUF_TYPES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16", "int8": "q8_0"}


@dataclass(frozen=True)
class Workload:
    """Something to do: `amount` units of work a call, and whom to compare with, the first that takes part."""

    name: str
    task: str
    model: str
    arguments: dict
    amount: float
    peers: tuple[str, ...] = ()
    unit: str = "tokens/s"


def list_workloads(quick: bool, new_tokens: int) -> list[Workload]:
    short, long, rows, length = (16, 64, 2, 64) if quick else (16, 1024, 4, 256)
    usual = ("reference", "qwen3")

    def decode(model, batch, context, *peers):
        arguments = {"batch": batch, "context": context, "new_tokens": new_tokens}
        name = f"decode, batch {batch}, {context} tokens before"
        return Workload(name, "decode", model, arguments, batch * new_tokens, peers + usual)

    def train(model):
        arguments = {"batch": rows, "length": length}
        return Workload(f"training step, {rows} x {length} tokens", "train", model, arguments, rows * length, usual)

    return [
        decode("dense", 1, short, "llama.cpp"),
        decode("dense", 1, long, "llama.cpp"),
        decode("dense", 8, short, "vllm"),
        decode("dense", 8, long, "vllm"),
        Workload(f"prefill, {long} tokens", "prefill", "dense", {"batch": 1, "length": long}, long, usual),
        train("dense"),
        decode("experts", 8, short),
        train("experts"),
        Workload("load a model", "load", "dense", {}, 1, ("qwen3", "reference"), "s"),
        Workload("convert a .pth, verified", "convert", "dense", {}, 1, (), "s"),
    ]


GROUPS = (("decode", "prefill"), ("train",), ("load", "convert"))  # tasks that share their processes


class Exports:
    """The same random weights for everyone; a file is written when it is first asked for.

    Nothing is verified here: the tests do that for every export, and the report compares the tokens.
    """

    def __init__(self, folder: Path, sizes: dict):
        from minimind_hf import MiniMindConfig

        self.folder = folder
        self.configs = {"dense": MiniMindConfig(**sizes), "experts": MiniMindConfig(**sizes, use_moe=True)}

    def path(self, format: str, model: str, dtype: str) -> Path:
        import torch

        from minimind_hf import MiniMindForCausalLM
        from minimind_hf.cli import TINY_MODEL
        from minimind_hf.convert import to_gguf, to_qwen3, to_torch

        path = self.folder / f"{model}-{dtype}.{format}"
        if path.exists():
            return path
        if format == "minimind":
            torch.manual_seed(0)
            MiniMindForCausalLM(self.configs[model]).to(getattr(torch, dtype)).save_pretrained(path)
        else:
            source = self.path("minimind", model, "bfloat16" if dtype == "int8" else dtype)
            if format == "pth":
                to_torch(source, path, verify=False)
            elif format == "qwen3":
                to_qwen3(source, path, verify=False)
            else:  # any tokenizer will do: no text is split
                to_gguf(source, path, outtype=GGUF_TYPES[dtype], tokenizer=TINY_MODEL, verify=False)
        return path


class Weights:
    """How much a model computes and reads, from its config."""

    def __init__(self, config):
        from accelerate import init_empty_weights

        from minimind_hf import MiniMindForCausalLM

        with init_empty_weights():
            total = MiniMindForCausalLM(config).num_parameters()
        self.config = config
        self.expert = 3 * config.hidden_size * config.moe_intermediate_size * config.num_hidden_layers
        self.experts = config.num_experts if config.use_moe else 0
        self.others = total - self.experts * self.expert

    def flop(self, task: str) -> int:
        """Floating-point operations a token: two for each weight it meets, thrice that with the backward pass."""
        active = self.others + (self.config.num_experts_per_tok * self.expert if self.experts else 0)
        return (6 if task == "train" else 2) * active

    def bytes_read(self, dtype: str, batch: int, context: int, new_tokens: int) -> float:
        """Bytes that one step must read: weights, and the keys and values of what came before, of every row.

        Of the experts, those that `batch` tokens reach if each chooses freely.
        """
        config, size = self.config, {"float32": 4, "bfloat16": 2, "int8": 1}[dtype]
        share = config.num_experts_per_tok / config.num_experts
        reached = self.experts * (1 - (1 - share) ** batch)
        positions = batch * (context + new_tokens / 2)
        cached = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * positions
        return (self.others + reached * self.expert) * size + cached * max(size, 2)


class Worker:
    """A contender in its process."""

    def __init__(self, name: str, python: Path, specification: dict, folder: Path):
        self.name = name
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": str(specification["threads"]),
            "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),  # so that compiling is not skipped
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        }
        command = [str(python), str(HERE / "contenders.py"), json.dumps(specification)]
        self.log = (folder / f"{name}.log").open("w+")
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self.log, "text": True}
        self.process = subprocess.Popen(command, env=environment, **pipes)

    def ask(self, task: str, **arguments) -> dict:
        """Have a task done. An answer with `error` is one, too."""
        try:
            print(json.dumps({"task": task, **arguments}), file=self.process.stdin, flush=True)
            return json.loads(self.process.stdout.readline())
        except (BrokenPipeError, json.JSONDecodeError):
            self.log.seek(0)
            last = self.log.read().strip().rpartition("\n")[2]
            return {"error": f"its process ended with {self.process.wait()}: {last}"}

    def __enter__(self):
        return self

    def __exit__(self, *_):
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
        self.log.close()


@dataclass
class Row:
    """What a contender did in a workload: one entry of `rates` for each round, None where it took no part."""

    workload: str
    model: str
    dtype: str
    contender: str
    unit: str
    rates: list[float]
    peer: str | None = None
    ratios: list[float] = field(default_factory=list)
    share: float | None = None  # of what the machine could do
    compile_seconds: float | None = None
    peak_bytes: int | None = None
    same_tokens: float | None = None  # share of the first row's tokens that are those of "minimind"

    @property
    def rate(self) -> float:
        return median(self.rates)

    @property
    def ratio(self) -> float | None:
        return median(self.ratios) if self.ratios else None


def measure(workers: dict[str, Worker], tasks: dict[str, dict], rounds: int, plan: list, notes: list) -> dict:
    """Warm everything up, then do all tasks of the plan [(worker, task)] in rounds; return answers for each entry.

    The first answer is that of the very first call, when things compile. Whatever fails is left out from then on.
    """
    answers, failed = {entry: [] for entry in plan}, set()

    def do(entry):
        name, key = entry
        if entry in failed or name in failed:
            return
        result = workers[name].ask(**tasks[key])
        if "error" in result:
            failed.add(entry if workers[name].process.poll() is None else name)
            notes.append(f"{name}, {key}: {result['error']}")
        else:
            answers[entry].append(result)

    for entry in plan:
        do(entry)
        do(entry)
    for number in range(rounds):
        print(f"  round {number + 1} of {rounds}", file=sys.stderr)
        for entry in plan if number % 2 else plan[::-1]:
            do(entry)
    return {entry: results for entry, results in answers.items() if entry not in failed and entry[0] not in failed}


class Bench:
    """Runs workloads group by group, and collects the rows of the report.

    Args:
        folder: for exports, logs and compiled code; `folder / "exports"` is kept when it is kept.
        names: the contenders that take part.
        pythons: the interpreter of each contender, where it is not this one.
        options: further arguments of a contender's class, such as the checkout of "reference".
    """

    def __init__(self, folder: Path, sizes: dict, names: list[str], pythons: dict, options: dict, threads: int):
        self.folder, self.names, self.pythons, self.options, self.threads = folder, names, pythons, options, threads
        self.sizes = sizes
        self.exports = Exports(folder, sizes)
        self.weights = {model: Weights(config) for model, config in self.exports.configs.items()}
        self.rows: list[Row] = []
        self.machine: dict[str, list[float]] = {"bytes/s": [], "float32 flop/s": [], "bfloat16 flop/s": []}
        self.notes: list[str] = []

    def specification(self, name: str, model: str, dtype: str, training: bool) -> dict:
        """What a worker is told. Training keeps float32 weights, and computes in bfloat16 by autocast."""
        entry, dtype = ENTRIES[name], "float32" if training else dtype
        options = {**entry.options, **self.options.get(name, {})}
        if name == "reference":
            options["sizes"] = {**self.sizes, "use_moe": model == "experts"}
        path = self.exports.path(entry.format, model, entry.stored[dtype])
        common = {"path": str(path), "dtype": dtype, "threads": self.threads, "vocab_size": self.sizes["vocab_size"]}
        return {"class": entry.kind, **common, **options}

    def run_group(self, workloads: list[Workload], model: str, dtype: str, rounds: int):
        """Workloads of one model in one precision, with a process for each contender that has part in any."""
        task_of = {workload.name: {"task": workload.task, **workload.arguments} for workload in workloads}
        training = workloads[0].task == "train"
        for workload in workloads:
            if training:
                task_of[workload.name]["autocast"] = dtype == "bfloat16"
            if workload.task == "convert":
                source, result = self.exports.path("pth", model, dtype), self.folder / "converted"
                task_of[workload.name] |= {"source": str(source), "destination": str(result)}
        plan = [
            (name, workload.name)
            for workload in workloads
            for name in self.names
            if workload.task in ENTRIES[name].tasks.split() and dtype in ENTRIES[name].stored
        ]
        machine = {"class": "Machine", "path": "", "dtype": dtype, "threads": self.threads, "vocab_size": 0}
        specifications = {"machine": machine | {"read_bytes": GIB, "product_size": 2048}}
        for name in dict(plan):
            specifications[name] = self.specification(name, model, dtype, training)
        task_of |= {"bytes/s": {"task": "read"}}
        task_of |= {f"{kind} flop/s": {"task": "product", "dtype": kind} for kind in ("float32", "bfloat16")}
        plan += [("machine", key) for key in self.machine]
        with ExitStack() as stack:
            workers = {
                name: stack.enter_context(
                    Worker(name, self.pythons.get(name, Path(sys.executable)), spec, self.folder)
                )
                for name, spec in specifications.items()
            }
            answers = measure(workers, task_of, rounds, plan, self.notes)
        limits = {}
        for key, amount in zip(self.machine, (GIB, 2 * 2048**3, 2 * 2048**3), strict=True):
            rates = [amount / answer["seconds"] for answer in answers["machine", key][2:]]
            self.machine[key] += rates
            limits[key] = median(rates)
        for workload in workloads:
            self.add_rows(
                workload,
                dtype,
                {name: answers[name, workload.name] for name in self.names if (name, workload.name) in answers},
                limits,
            )

    def add_rows(self, workload: Workload, dtype: str, answers: dict[str, list[dict]], limits: dict[str, float]):
        """Rows for what everyone did in a workload, and their ratios to the first peer that took part."""
        seconds = {name: [answer["seconds"] for answer in results[2:]] for name, results in answers.items()}
        peer = next((peer for peer in workload.peers if peer in seconds), None)
        best = self.limit(workload, dtype, limits)
        for name, results in answers.items():
            row = Row(workload.name, workload.model, dtype, name, workload.unit, seconds[name])
            if workload.unit != "s":
                row.rates = [workload.amount / value for value in seconds[name]]
            if peer and name != peer:
                row.peer = peer
                row.ratios = [theirs / own for own, theirs in zip(seconds[name], seconds[peer], strict=True)]
            row.share = best / median(seconds[name]) if best else None
            row.compile_seconds = results[0]["whole_seconds"] - results[1]["whole_seconds"]
            row.peak_bytes = max(result["peak_bytes"] for result in results[2:])
            if "tokens" in results[0] and "minimind" in answers:
                own, theirs = results[-1]["tokens"], answers["minimind"][-1]["tokens"]
                row.same_tokens = sum(a == b for a, b in zip(own, theirs, strict=True)) / len(own)
            self.rows.append(row)

    def limit(self, workload: Workload, dtype: str, limits: dict[str, float]) -> float | None:
        """Seconds that the machine needs at least: to read all that must be read, or to compute."""
        weights, arguments = self.weights[workload.model], workload.arguments
        flop_rate = limits["float32 flop/s" if dtype == "float32" else "bfloat16 flop/s"]
        if workload.task in ("train", "prefill"):
            tokens = arguments["batch"] * arguments["length"]
            return tokens * weights.flop(workload.task) / flop_rate
        if workload.task == "decode":
            read = weights.bytes_read(dtype, **arguments) / limits["bytes/s"]
            return arguments["new_tokens"] * max(read, arguments["batch"] * weights.flop("decode") / flop_rate)
        return None


def number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def markdown(rows: list[Row], machine: dict[str, list[float]], notes: list[str]) -> str:
    """The report as a table for each workload."""
    lines = [
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores; streaming read "
        f"{median(machine['bytes/s']) / 1e9:.0f} GB/s, matrix products in float32 "
        f"{median(machine['float32 flop/s']) / 1e9:.0f} and in bfloat16 "
        f"{median(machine['bfloat16 flop/s']) / 1e9:.0f} GFLOP/s (medians; from "
        f"{min(machine['bytes/s']) / 1e9:.0f} to {max(machine['bytes/s']) / 1e9:.0f} GB/s)."
    ]
    for workload, model in dict.fromkeys((row.workload, row.model) for row in rows):
        lines += ["", f"**{workload}{', mixture of experts' if model == 'experts' else ''}**", ""]
        lines += ["| | | rate | compared | of the limit | first call | peak memory | same tokens |"]
        lines += ["|---|---|---|---|---|---|---|---|"]
        for row in rows:
            if (row.workload, row.model) == (workload, model):
                compared = f"{row.ratio:.2f} x {row.peer}" if row.ratio else ""
                share = f"{row.share:.0%}" if row.share else ""
                first = f"+{row.compile_seconds:.1f} s" if row.compile_seconds > 1 else ""
                same = f"{row.same_tokens:.0%}" if row.same_tokens is not None else ""
                cells = [row.contender, row.dtype, f"{number(row.rate)} {row.unit}", compared, share, first]
                lines.append(f"| {' | '.join([*cells, f'{row.peak_bytes / 2**20:.0f} MiB', same])} |")
    return "\n".join([*lines, *(f"\n{note}" for note in notes)]) + "\n"


def chart(rows: list[Row], path: Path):
    """Bars for every contender and precision, a panel for each workload that has a rate."""
    from matplotlib import pyplot

    panels = list(dict.fromkeys((row.workload, row.model) for row in rows if row.unit != "s"))
    colors = {"float32": "#4c72b0", "bfloat16": "#55a868", "int8": "#c44e52"}
    columns = 2
    height = -(-len(panels) // columns)
    figure, axes = pyplot.subplots(height, columns, figsize=(12, 3.2 * height), squeeze=False, layout="constrained")
    for axis, panel in zip(axes.flat, panels, strict=False):
        shown = sorted(
            (row for row in rows if (row.workload, row.model) == panel),
            key=lambda row: (list(colors).index(row.dtype), row.rate),
        )
        labels = [f"{row.contender}, {row.dtype}" for row in shown]
        bars = axis.barh(labels, [row.rate for row in shown], color=[colors[row.dtype] for row in shown])
        axis.bar_label(bars, [number(row.rate) for row in shown], padding=3, fontsize=8)
        for label, row in zip(axis.get_yticklabels(), shown, strict=True):
            label.set(fontsize=8, fontweight="bold" if row.contender.startswith("minimind") else "normal")
        axis.set(title=panel[0] + (", mixture of experts" if panel[1] == "experts" else ""), xlabel=shown[0].unit)
        axis.spines[["top", "right"]].set_visible(False)
        axis.margins(x=0.12)
    for axis in axes.flat[len(panels) :]:
        axis.remove()
    pyplot.rcParams["svg.hashsalt"] = "speed"  # the same picture for the same figures
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def main(
    rounds: Annotated[int, typer.Option(min=1)] = 5,
    dtypes: Annotated[str, typer.Option(help="Separated by commas.")] = "float32,bfloat16,int8",
    contenders: Annotated[str, typer.Option(help="Separated by commas; all of them by default.")] = ",".join(ENTRIES),
    only: Annotated[str, typer.Option(help="Workloads whose name has this in it.")] = "",
    reference: Annotated[Path | None, typer.Option(help="A checkout of the reference implementation.")] = None,
    vllm_python: Annotated[Path | None, typer.Option(help="The interpreter of an environment with vLLM.")] = None,
    threads: Annotated[int, typer.Option(min=1)] = os.cpu_count() or 1,
    new_tokens: Annotated[int, typer.Option(min=2, help="Steps of decoding.")] = 64,
    quick: Annotated[bool, typer.Option(help="A tiny model: shows that everything runs, and nothing else.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all figures here.")] = None,
    chart_file: Annotated[Path | None, typer.Option("--chart", help="Draw them here, as .svg or .png.")] = None,
):
    """Measure decoding, prefill, training, loading and conversion, side by side."""
    names = [name for name in contenders.split(",") if name != "reference" or reference]
    if unknown := [name for name in names if name not in ENTRIES]:
        raise typer.BadParameter(f"{', '.join(unknown)}: expected {', '.join(ENTRIES)}")
    if "vllm" in names and not vllm_python:
        names.remove("vllm")
    workloads = [
        workload for workload in list_workloads(quick, new_tokens) if only in f"{workload.name} {workload.model}"
    ]
    with tempfile.TemporaryDirectory() as folder:
        options = {"reference": {"checkout": str(reference)}}
        pythons = {"vllm": vllm_python} if vllm_python else {}
        bench = Bench(Path(folder), QUICK_SIZES if quick else SIZES, names, pythons, options, threads)
        for model in bench.exports.configs:
            for group in GROUPS:
                if chosen := [
                    workload for workload in workloads if workload.task in group and workload.model == model
                ]:
                    for dtype in dtypes.split(","):
                        print(f"{model}, {dtype}: {', '.join(workload.name for workload in chosen)}", file=sys.stderr)
                        bench.run_group(chosen, model, dtype, rounds)
    print(markdown(bench.rows, bench.machine, bench.notes))
    if json_file:
        rows = [{**asdict(row), "rate": row.rate, "ratio": row.ratio} for row in bench.rows]
        result = {"machine": bench.machine, "threads": threads, "rows": rows, "notes": bench.notes}
        json_file.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if chart_file:
        chart(bench.rows, chart_file)


if __name__ == "__main__":
    typer.run(main)
