"""`minimind serve`: transformers' own OpenAI-compatible server, which knows MiniMind and the parts of its replies."""

import signal
import sys
from importlib.util import find_spec
from pathlib import Path

import transformers

from minimind_hf import MiniMindForCausalLM
from minimind_hf.chat import RESPONSE_TEMPLATE


def serve(folder: Path, options: list[str]):
    """Serve a model folder until interrupted; `options` are those of `transformers serve`.

    Raises:
        ValueError: the folder holds no model, or what the server needs is not installed.
    """
    missing = [name for name in ("fastapi", "openai", "uvicorn") if find_spec(name) is None]
    if missing:
        raise ValueError(f"`minimind serve` needs {', '.join(missing)}: pip install 'minimind-hf[serve]'")
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} is not a model folder: `minimind convert to-hf` makes one of a .pth file")
    from transformers.cli import transformers as command_line
    from transformers.cli.serving import utils

    transformers.MiniMindForCausalLM = MiniMindForCausalLM  # where the server looks for an architecture
    # For tokenizers that do not say how their replies are read.
    utils._RESPONSE_TEMPLATE_FALLBACKS[("minimind",)] = RESPONSE_TEMPLATE
    for number in (signal.SIGTERM, signal.SIGHUP):  # the server handles them, and then ends as they say by default
        signal.signal(number, signal.SIG_DFL)
    sys.argv = ["transformers", "serve", str(folder), *options]
    command_line.app()
