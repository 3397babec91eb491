"""Convert MiniMind's JSON-lines training files to the columns that TRL's trainers take."""

import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from tqdm import tqdm

from minimind_hf.convert.files import Output, check_destination, unique_keys, written_whole
from minimind_hf.convert.layout import ConversionError

DATASET_FOLDER = Output("state.json")  # as Dataset.save_to_disk writes it
LONGEST_LINE = 64 * 1024**2  # bytes; what is longer is no sample
BATCH_ROWS, BATCH_CHARACTERS = 10_000, 8 * 1024**2  # whichever is reached first; they bound the memory
REPORTED_LINES = 10
ENCODER = json.JSONEncoder(ensure_ascii=False)
ROLES = ("system", "user", "assistant", "tool")


def convert_dataset(
    source: Path,
    destination: Path,
    kind: str | None = None,
    on_error: str = "stop",
    overwrite: bool = False,
    verify: bool = True,
) -> str:
    """Convert a JSON-lines file of MiniMind's training to a folder that `datasets.load_from_disk` opens.

    The kinds, and the columns that TRL's trainers take:

    - pretrain: `{"text": …}` becomes `text`, for SFTTrainer. That one appends eos; MiniMind also puts bos in front.
    - sft: `{"conversations": [message, …]}` becomes `messages` and `tools`, for SFTTrainer. That one learns all turns;
      MiniMind learns those of the assistant, which takes `assistant_only_loss` and a chat template that marks them.
    - preference: `{"chosen": [message, …], "rejected": [message, …]}` becomes `prompt`, `chosen`, `rejected` and
      `tools`, for DPOTrainer. The prompt is made explicit, as TRL recommends: it is what both conversations begin
      with. DPOTrainer scores all that follows it, so nothing but one assistant turn may be left on either side.
    - rl: as sft, but the last turn is a placeholder, which is dropped; the rest becomes `prompt` and `tools`, for
      GRPOTrainer. That one hands `tools` to the reward functions and takes those of the prompt from its own argument.

    Messages have datasets' Json type, so that each has the keys it had and no others. `tools` is a list of JSON
    schemas, taken from the system message, or None. Tools and tool calls that are JSON text are parsed. The Json type
    rounds a few numbers. Where it would change the arguments of a tool call, they stay JSON text, which the chat
    template prints as it stands; a line whose tools it would change is bad.

    The file is streamed and may be larger than the memory; while it is converted, the disk holds the result twice.
    Blank lines, a byte order mark and CRLF are accepted.

    Args:
        source: the file, in UTF-8.
        destination: the folder to write; it appears whole, or not at all.
        kind: one of the above; by default the one that the keys of the first line show. It must be named for rl, whose
            lines look like those of sft.
        on_error: "stop" to write nothing if any line is bad, "skip" to leave bad lines out.
        overwrite: replace an existing dataset.
        verify: read the folder back and compare every row with its line.

    Returns:
        One line that says what was verified, and which lines were skipped.

    Raises:
        ConversionError: the file is missing, empty or of another kind, or lines of it are bad; the message tells how
            many there are, and the numbers of the first ones and why. Nothing was written.
    """
    source, destination = Path(source), Path(destination)
    if on_error not in ("stop", "skip"):
        raise ConversionError(f"on_error is {on_error!r}: expected 'stop' or 'skip'")
    check_datasets_library()
    check_destination(destination, [source], overwrite, DATASET_FOLDER)
    kind = recognise_kind(source, kind)
    with written_whole(destination, [source], overwrite, DATASET_FOLDER) as draft, quiet_unless_on_terminal():
        bad = BadLines()
        count = write_rows(read_rows(source, kind, "Converting", bad), kind, draft)
        if bad.count and on_error == "stop":
            raise ConversionError(f"{source} has {bad}: mend them, or pass --skip-bad-lines to leave them out")
        if not count:
            raise ConversionError(f"{source} has {bad}, and no good one")
        result = f"{count:,} {kind} rows ({', '.join(KINDS[kind].columns)})"
        if verify:
            compare_rows(draft, count, read_rows(source, kind, "Verifying", BadLines()))
            result = f"verified: {result} read back equal to the lines of {source.name}"
        else:
            result = f"not verified: {result}"
    return f"{result}; skipped {bad}" if bad.count else result


def check_datasets_library():
    """Raise a ConversionError unless the datasets library is there, and new enough to have the Json type."""
    try:
        from datasets import Json  # noqa: F401
    except ImportError as error:
        raise ConversionError("datasets 4.7 or newer is needed: pip install -U 'minimind-hf[train]'") from error


@contextmanager
def quiet_unless_on_terminal():
    """Keep the progress bars of datasets out of logs: they do not look where the output goes."""
    from datasets import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    hide = not sys.stderr.isatty() and not are_progress_bars_disabled()
    if hide:
        disable_progress_bars()
    try:
        yield
    finally:
        if hide:
            enable_progress_bars()


# From lines to JSON objects. What is wrong with a line is a ValueError, which becomes an entry of BadLines.


@dataclass
class BadLines:
    """How many lines were bad; and the first of them, with the reason."""

    count: int = 0
    first: list[str] = field(default_factory=list)

    def add(self, number: int, error: Exception):
        self.count += 1
        if len(self.first) < REPORTED_LINES:
            self.first.append(f"line {number}: {shorten(error, 160)}")

    def __str__(self):
        noun = "bad line" if self.count == 1 else "bad lines"
        more = "; …" if self.count > len(self.first) else ""
        return f"{self.count:,} {noun} ({'; '.join(self.first)}{more})"


def shorten(value, length: int = 40) -> str:
    """The start of a text that may be of any length and hold anything, on one line."""
    text = " ".join(str(value)[: 2 * length].split())
    return text if len(text) <= length else text[: length - 1] + "…"


def read_lines(source: Path, description: str) -> Iterator[tuple[int, bytes]]:
    """Yield the number, from 1, and the bytes of each line that is not blank; of too long a line, only the start."""
    if not source.is_file():
        raise ConversionError(f"{source} {'is not a regular file' if source.exists() else 'does not exist'}")
    size = source.stat().st_size
    bar = tqdm(total=size, desc=description, unit="B", unit_scale=True, disable=None, leave=False)
    number = 0
    with source.open("rb") as file, bar:
        while line := file.readline(LONGEST_LINE + 1):
            number += 1
            bar.update(len(line))
            part = line
            while not part.endswith(b"\n") and (part := file.readline(LONGEST_LINE)):
                bar.update(len(part))
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")  # byte order mark
            if line.strip():
                yield number, line


def parse_line(line: bytes) -> dict:
    """Return the JSON object on a line."""
    if len(line) > LONGEST_LINE:
        raise ValueError(f"longer than {LONGEST_LINE:,} bytes")
    try:
        sample = parse_json(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 at byte {error.start + 1}") from None
    return expect(sample, dict, "the line")


def parse_json(text: str):
    """Return the value of a JSON text, as strict as the standard: unique keys, finite numbers, whole characters."""
    try:
        value = json.loads(text, object_pairs_hook=unique_keys, parse_constant=refuse, parse_float=finite_float)
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        raise ValueError(f"broken or cut off: {error.msg.removesuffix(' at')} at character {error.pos + 1}") from None
    except UnicodeEncodeError:
        raise ValueError("half of a character: \\ud800 to \\udfff come in pairs") from None
    except RecursionError:
        raise ValueError("nested too deeply") from None
    return value


def refuse(constant: str):
    raise ValueError(f"{constant} is no JSON number")


def finite_float(text: str) -> float:
    if math.isinf(value := float(text)):
        raise ValueError(f"the number {shorten(text)} is too large")
    return value


def expect(value, kind: type, name: str):
    """Return the value if it is of the type that it should be."""
    if not isinstance(value, kind):
        names = {dict: "an object", list: "a list", str: "a string", type(None): "null", bool: "a boolean"}
        raise ValueError(f"{name} is {names.get(type(value), 'a number')}, expected {names[kind]}")
    return value


# From objects to rows.


def pretrain_row(sample: dict) -> dict:
    if not expect(sample["text"], str, "text"):
        raise ValueError("text is empty")
    return sample


def sft_row(sample: dict) -> dict:
    messages, tools = parse_conversation(sample, "conversations")
    if not any(message["role"] == "assistant" for message in messages):
        raise ValueError("conversations has no assistant turn to learn from")
    last = messages[-1]
    if last["role"] == "assistant" and not last["content"].strip() and "tool_calls" not in last:
        raise ValueError("the last answer is empty: prompts for reinforcement learning need --kind rl")
    return {"messages": messages, "tools": tools}


def preference_row(sample: dict) -> dict:
    (chosen, tools), (rejected, other_tools) = (parse_conversation(sample, key) for key in ("chosen", "rejected"))
    if as_text(tools) != as_text(other_tools):
        raise ValueError("chosen and rejected have different tools")
    if as_text(chosen) == as_text(rejected):
        raise ValueError("chosen and rejected are the same")
    shared = 0
    while as_text(chosen[shared : shared + 1]) == as_text(rejected[shared : shared + 1]):
        shared += 1
    if not shared:
        raise ValueError("chosen and rejected have no common prompt: their first turns differ")
    for key, answer in (("chosen", chosen[shared:]), ("rejected", rejected[shared:])):
        if [message["role"] for message in answer] != ["assistant"]:
            raise ValueError(f"{key} differs from turn {shared + 1} on, expected in one turn of an assistant")
    check_prompt(chosen[:shared])
    return {"prompt": chosen[:shared], "chosen": chosen[shared:], "rejected": rejected[shared:], "tools": tools}


def rl_row(sample: dict) -> dict:
    messages, tools = parse_conversation(sample, "conversations")
    if messages[-1]["role"] != "assistant":
        raise ValueError(f"the last turn is one of {messages[-1]['role']}, expected an assistant's, to be dropped")
    check_prompt(messages[:-1])
    return {"prompt": messages[:-1], "tools": tools}


def check_prompt(messages: list[dict]):
    if not messages or messages[-1]["role"] not in ("user", "tool"):
        raise ValueError("before the answer there is no turn of a user or a tool")


@dataclass(frozen=True)
class Kind:
    """A kind of training file: the keys of a line, the columns of a row, and how the one becomes the other."""

    keys: tuple[str, ...]
    columns: tuple[str, ...]
    row: Callable[[dict], dict]


KINDS = {
    "pretrain": Kind(("text",), ("text",), pretrain_row),
    "sft": Kind(("conversations",), ("messages", "tools"), sft_row),
    "preference": Kind(("chosen", "rejected"), ("prompt", "chosen", "rejected", "tools"), preference_row),
    "rl": Kind(("conversations",), ("prompt", "tools"), rl_row),
}


def recognise_kind(source: Path, kind: str | None) -> str:
    """Return the kind of a file by the keys of its first JSON object, which must not contradict the given kind.

    Raises:
        ConversionError: there is no line, or the first object has no key or mixed keys of the kinds above, or those
            of another kind than the given one.
    """
    if kind is not None and kind not in KINDS:
        raise ConversionError(f"--kind {kind}: expected one of {', '.join(KINDS)}")
    bad = BadLines()
    for number, line in read_lines(source, "Looking"):
        try:
            keys = parse_line(line).keys()
        except ValueError as error:
            bad.add(number, error)
            continue
        found = [name for name, candidate in KINDS.items() if keys & set(candidate.keys)]
        if kind in found or (kind and not found):
            return kind  # if it is not found, the line is merely bad
        if kind or found not in (["pretrain"], ["sft", "rl"], ["preference"]):
            wanted = " and ".join(KINDS[kind].keys) if kind else "text, or conversations, or chosen and rejected"
            given = f" for --kind {kind}" if kind else ""
            keys = shorten(", ".join(map(repr, keys)), 100) or "none"
            raise ConversionError(f"the keys on line {number} of {source} are {keys}; expected {wanted}{given}")
        return found[0]
    raise ConversionError(f"{source} has {bad}, and no good one" if bad.count else f"{source} is empty")


def read_rows(source: Path, kind: str, description: str, bad: BadLines) -> Iterator[tuple[int, dict]]:
    """Yield the number of each good line and its row, with objects as JSON text, and enter bad lines into `bad`."""
    for number, line in read_lines(source, description):
        try:
            sample = parse_line(line)
            check_keys(sample, required=KINDS[kind].keys)
            row = as_texts(KINDS[kind].row(sample))
        except (ValueError, RecursionError) as error:
            bad.add(number, error)
        else:
            yield number, row


def check_keys(found: dict, required: Iterable[str], optional: Iterable[str] = ()):
    missing = [key for key in required if key not in found]
    unexpected = [key for key in found if key not in required and key not in optional]
    if missing:
        raise ValueError(f"{missing[0]} is missing")
    if unexpected:
        raise ValueError(f"unexpected key {shorten(unexpected[0])!r}")


def parse_conversation(sample: dict, key: str) -> tuple[list[dict], list[dict] | None]:
    """Return the messages under a key of a sample, checked and parsed, and the tools that a system message brings."""
    messages, tools = [], None
    for number, message in enumerate(expect(sample[key], list, key), 1):
        try:
            message = parse_message(message)
            if "tools" in message and tools:
                raise ValueError("tools are there for a second time")
        except ValueError as error:
            raise ValueError(f"turn {number} of {key}: {error}") from None
        tools = message.pop("tools", tools)
        messages.append(message)
    if not messages:
        raise ValueError(f"{key} is empty")
    return messages, tools


def parse_message(message) -> dict:
    """Return a message with what is JSON text in it parsed, and without the keys that hold nothing."""
    check_keys(expect(message, dict, "it"), required=("role", "content"), optional=OPTIONAL_KEYS)
    role = expect(message["role"], str, "role")
    if role not in ROLES:
        raise ValueError(f"role is {shorten(role)!r}, expected one of {', '.join(ROLES)}")
    parsed = {"role": role, "content": expect(message["content"], str, "content")}
    for key, (reader, parse) in OPTIONAL_KEYS.items():
        value = parse(message[key]) if message.get(key) is not None else None
        if reader == role and value is not None:
            parsed[key] = value
        elif value:  # MiniMind would pass over it in silence
            raise ValueError(f"{key} in a turn of {role}: they belong into one of {reader}")
    return parsed


def parse_reasoning(value) -> str:
    return expect(value, str, "reasoning_content")


def parse_tools(value) -> list[dict] | None:
    tools = parse_objects(value, "tools")
    if not is_carried(tools):
        raise ValueError("tools hold a number that datasets' Json type would change")
    return tools or None


def parse_tool_calls(value) -> list[dict] | None:
    """Return the calls, each `{"name", "arguments"}` or, as OpenAI has it, with those two under "function"."""
    calls = parse_objects(value, "tool_calls")
    for call in calls:
        function = expect(call.get("function", call), dict, "function of tool_calls")
        expect(function.get("name"), str, "name in tool_calls")
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            continue
        if not is_carried(expect(arguments, dict, "arguments in tool_calls")):
            function["arguments"] = as_text(arguments)
    if not is_carried(calls):
        raise ValueError("tool_calls hold a number that datasets' Json type would change")
    return calls or None


# The optional keys of a message: the role with which MiniMind reads them, and how.
OPTIONAL_KEYS = {
    "tools": ("system", parse_tools),
    "reasoning_content": ("assistant", parse_reasoning),
    "tool_calls": ("assistant", parse_tool_calls),
}


def parse_objects(value, name: str) -> list[dict]:
    """Return a list of JSON objects, which may be given as JSON text."""
    if isinstance(value, str):
        try:
            value = parse_json(value) if value else []
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    for item in expect(value, list, name):
        if not expect(item, dict, f"an item of {name}"):
            raise ValueError(f"an item of {name} is empty")
    return value


def as_text(value) -> str:
    """JSON text as the chat template prints it. It also tells apart the orders of keys, and 1 from 1.0."""
    return ENCODER.encode(value)


def as_texts(row: dict) -> dict:
    """Make JSON text of every object in the lists of a row."""
    return {key: [as_text(item) for item in value] if isinstance(value, list) else value for key, value in row.items()}


def is_carried(value) -> bool:
    """Whether datasets' Json type gives the value back as it is, read from exact text and after a `map` re-wrote it.

    It rounds to 10 decimals when it writes, and may miss the nearest float when it reads.
    """
    from datasets import Json

    feature, wrapped = Json(), [value]  # a bare string would be taken for JSON
    try:
        return all(
            as_text(feature.decode_example(text)) == as_text(wrapped)
            for text in (as_text(wrapped), feature.encode_example(wrapped))
        )
    except (ValueError, OverflowError, RecursionError):  # beyond 64 bits, or too deep
        return False


# From rows to a folder, and back.


def write_rows(rows: Iterable[tuple[int, dict]], kind: str, folder: Path) -> int:
    """Write numbered rows to a dataset folder, and return how many there were.

    They go to one file first, which the library maps into memory to cut it into shards.
    """
    import pyarrow
    from datasets import Dataset, Features, Json, List, Value

    columns = KINDS[kind].columns
    schema = Features({name: Value("string") if name == "text" else List(Json()) for name in columns}).arrow_schema
    plain = pyarrow.string() if kind == "pretrain" else pyarrow.list_(pyarrow.string())
    count = 0
    with TemporaryDirectory(dir=folder.parent) as scratch:
        path = str(Path(scratch, "rows.arrow"))
        with pyarrow.OSFile(path, "wb") as file, pyarrow.ipc.new_stream(file, schema) as stream:
            for batch in in_batches(row for _, row in rows):
                texts = [pyarrow.array([row[name] for row in batch], plain) for name in columns]
                arrays = [array.cast(kept) for array, kept in zip(texts, schema.types, strict=True)]
                stream.write_batch(pyarrow.RecordBatch.from_arrays(arrays, schema=schema))
                count += len(batch)
        if count:
            Dataset.from_file(path, split="train").save_to_disk(folder)
    return count


def in_batches(rows: Iterable[dict]) -> Iterator[list[dict]]:
    """Group rows so that a batch takes little memory, however long the texts are."""
    batch, size = [], 0
    for row in rows:
        batch.append(row)
        size += sum(len(value) if isinstance(value, str) else sum(map(len, value or ())) for value in row.values())
        if len(batch) == BATCH_ROWS or size >= BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def compare_rows(folder: Path, count: int, rows: Iterator[tuple[int, dict]]):
    """Raise a ConversionError unless the dataset in the folder has exactly these rows, `count` in number."""
    from datasets import load_from_disk

    dataset = load_from_disk(folder)
    if len(dataset) != count:
        raise ConversionError(f"verification failed: {len(dataset):,} rows read back, {count:,} written")
    compared = 0
    for found, (number, expected) in zip(dataset, rows, strict=False):
        if as_texts(found) != expected:
            raise ConversionError(f"verification failed: the row of line {number} differs from what was read back")
        compared += 1
    if compared != count or next(rows, None):
        raise ConversionError("verification failed: the source has changed in the meantime")
