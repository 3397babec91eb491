"""Write an Ollama Modelfile for a GGUF file: its chat template, its context, how tokens are chosen."""

from pathlib import Path

from minimind_hf.configuration_minimind import MiniMindConfig
from minimind_hf.convert.files import read_json
from minimind_hf.convert.layout import ConversionError, first_line
from minimind_hf.convert.tokenizer import load_tokenizer

ASSETS = Path(__file__).parent.parent / "assets"
HEADER = "# For Ollama, written by minimind. In this folder: ollama create NAME"
MOST_CONTEXT = 8192  # tokens. Ollama allocates the cache of all of them: 100 MB for the published MiniMind-3

# The chat formats there are, in Jinja and in Go. A tokenizer has the format whose Jinja renders the PROBES as its own.
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant{{ '\n' }}"
)
CALLS = [{"type": "function", "function": {"name": "f", "arguments": {"x": x}}} for x in (1, 2)]
SYSTEM, USER, REPLY = [{"role": role, "content": f"the {role}"} for role in ("system", "user", "assistant")]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
PROBES = [
    ([USER], {}),
    ([SYSTEM, USER, REPLY, USER, REPLY, USER], {}),
    (
        [USER, {**REPLY, "reasoning_content": "thought"}, SYSTEM, USER],
        {"open_thinking": True, "enable_thinking": True},
    ),
    ([SYSTEM, USER, {**REPLY, "tool_calls": CALLS}, *[{"role": "tool", "content": "1"}] * 2, USER], {"tools": TOOLS}),
]

# Ollama's sampling parameters: transformers' default where do_sample is true, the least and the largest value.
SAMPLING = {"temperature": (1, 0, 1e4), "top_k": (50, 0, 1e6), "top_p": (1, 0, 1), "min_p": (0, 0, 1)}


def make_modelfile(gguf: Path, source: Path, tokenizer: Path, config: MiniMindConfig) -> str:
    """Make the text of a Modelfile.

    Args:
        gguf: the GGUF file, in the folder of the Modelfile.
        source: what it was made from; the generation_config.json of a folder says how tokens are chosen.
        tokenizer: the folder of the tokenizer, whose chat template Ollama is to render.
        config: the model's.

    Raises:
        ConversionError: the chat template is none that is known, so that Ollama would make other prompts of a chat.
    """
    template, system = find_template(tokenizer)
    parameters = {"num_ctx": min(config.max_position_embeddings, MOST_CONTEXT), **sampling_parameters(source)}
    lines = [HEADER, f"FROM ./{gguf.name}"]
    lines += [f"PARAMETER {name} {value}" for name, value in parameters.items()]
    lines += [f'SYSTEM """{system}"""'] if system else []
    lines += [f'TEMPLATE """{template}"""']
    return "\n".join(lines) + "\n"


def is_modelfile(path: Path) -> bool:
    """Whether a file is one that `make_modelfile` made."""
    with path.open("rb") as file:
        return file.read(len(HEADER)) == HEADER.encode()


def find_template(folder: Path) -> tuple[str, str]:
    """Return the Go template that renders what a tokenizer's chat template does, and the system message it adds.

    Raises:
        ConversionError: there is none.
    """
    tokenizer = load_tokenizer(folder)
    if not tokenizer.chat_template:
        raise ConversionError(f"the tokenizer in {folder} has no chat template: leave --modelfile out")

    def render(template, messages, options):
        return tokenizer.apply_chat_template(
            messages, chat_template=template, tokenize=False, add_generation_prompt=True, **options
        )

    def renders_as(template, system=""):
        return all(
            render(None, messages, options) == render(template, with_system(messages, system), options)
            for messages, options in PROBES
        )

    reason = ""
    try:
        if renders_as((ASSETS / "training_chat_template.jinja").read_text(encoding="utf-8")):
            return read_template("minimind3"), ""
        # Where no system message is given, a template may add its own.
        added, _, _ = render(None, [USER], {}).partition("<|im_start|>user\n")
        system = added.removeprefix("<|im_start|>system\n").removesuffix("<|im_end|>\n")
        # Ollama drops what Go does not call printable; three quotes would end the message.
        is_kept = all(letter.isprintable() or letter in "\n\t" for letter in system) and '"""' not in system
        if is_kept and renders_as(CHATML, system):
            return read_template("chatml"), system
    except Exception as error:  # whatever somebody's template raises
        reason = f" ({first_line(error)})"
    raise ConversionError(
        f"the chat template in {folder} is neither MiniMind-3's nor plain ChatML{reason}, and no other is known in "
        "Ollama's language: leave --modelfile out, and write a Modelfile with your own TEMPLATE"
    )


def with_system(messages: list[dict], system: str) -> list[dict]:
    """Return the messages with a system message before them, unless there is one or none is to be added."""
    if not system or messages[0]["role"] == "system":
        return messages
    return [{"role": "system", "content": system}, *messages]


def read_template(name: str) -> str:
    return (ASSETS / f"ollama_{name}.gotmpl").read_text(encoding="utf-8").removesuffix("\n")


def sampling_parameters(source: Path) -> dict[str, float]:
    """Return Ollama's parameters for what a folder's generation_config.json says; without one, Ollama's own hold."""
    file = source / "generation_config.json"
    if not file.is_file():
        return {}
    given = read_json(file)
    samples, penalty = given.get("do_sample") or False, given.get("repetition_penalty")
    if not isinstance(samples, bool):
        raise ConversionError(f"do_sample is {samples!r} in {file}: expected true or false")
    chosen = {"temperature": 0}
    for name, (default, least, most) in SAMPLING.items() if samples else ():
        chosen[name] = checked(name, default if given.get(name) is None else given[name], least, most, file)
    if penalty is None or penalty == 1:
        return {**chosen, "repeat_penalty": 1}
    # By default, Ollama looks back on 64 tokens only.
    return {**chosen, "repeat_penalty": checked("repetition_penalty", penalty, 1e-3, 1e3, file), "repeat_last_n": -1}


def checked(name: str, value, least: float, most: float, file: Path) -> float:
    """Return a setting if it is a number within bounds, and a whole one where Ollama takes no other."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not least <= value <= most or (name == "top_k" and value != int(value)):
        kind = "a whole number" if name == "top_k" else "a number"
        raise ConversionError(f"{name} is {value!r} in {file}: expected {kind} from {least:g} to {most:g}")
    return int(value) if name == "top_k" else value
