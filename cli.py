"""The `minimind` command: convert, inspect, verify, generate, trace, serve."""

import os
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer
from huggingface_hub.errors import StrictDataclassError
from transformers.utils import logging

from minimind_hf import __version__
from minimind_hf.convert.commands import Config, GenerationName, Heads, convert_app

TINY_MODEL = Path(__file__).parent / "assets" / "minimind-tiny"

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__)
app.add_typer(convert_app, name="convert")


@app.callback()
def options(
    version: Annotated[bool, typer.Option("--version", help="Say which version this is.", is_eager=True)] = False,
):
    if version:
        typer.echo(__version__)
        raise typer.Exit


@app.command("inspect")
def inspect_checkpoint(
    path: Annotated[Path, typer.Argument(metavar="FILE_OR_FOLDER", help="A .pth file, or a model folder.")],
    config: Config = None,
    generation: GenerationName = None,
    num_attention_heads: Heads = None,
):
    """Say what a checkpoint is: generation, sizes, parameters, dtype, and what had to be assumed."""
    from minimind_hf.convert.inspection import describe

    flags = {"generation": generation, "num_attention_heads": num_attention_heads}
    for name, value in describe(path, config, flags).items():
        typer.echo(f"{name:<24} {value}")


@app.command("verify")
def verify_models(
    first: Annotated[Path, typer.Argument(metavar="A", help="A model folder or a .pth file.")],
    second: Annotated[Path, typer.Argument(metavar="B", help="Another one.")],
    tolerance: Annotated[float, typer.Option(min=0, help="Largest difference of two logits that passes.")] = 1e-4,
    seed: Annotated[int, typer.Option(help="Of the random token ids.")] = 0,
    config: Config = None,
    generation: GenerationName = None,
    num_attention_heads: Heads = None,
):
    """Compare the logits of two models on random tokens, in float32; exit with 1 where they differ.

    A .pth file has no config: it takes the one of --config, else that of the other model. Then the comparison cannot
    show whether that config is right.
    """
    from minimind_hf.convert.compare import compare_logits, load_for_comparison

    flags = {"generation": generation, "num_attention_heads": num_attention_heads}
    pairs = ((first, second), (second, first))
    models, origins = zip(*(load_for_comparison(*pair, config, flags) for pair in pairs), strict=True)
    result = compare_logits(*models, seed=seed)
    for path, origin in zip((first, second), origins, strict=True):
        typer.echo(f"config of {path}: {origin}")
    typer.echo(f"max difference    {result.max_difference:.3g}")
    typer.echo(f"greedy agreement  {result.greedy_agreement:.2%} of {result.positions} positions")
    typer.echo(f"KL divergence     {result.kl_divergence:.3g} nats")
    if result.max_difference > tolerance:
        typer.echo(f"the logits differ by more than {tolerance:g}", err=True)
        raise typer.Exit(1)


@app.command("generate")
def generate_text(
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="What to answer, or to continue.")],
    model: Annotated[Path, typer.Option(help="A model folder.", show_default="the package's tiny model")] = TINY_MODEL,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Stop after so many tokens at the latest.")] = 256,
    temperature: Annotated[float, typer.Option(min=0, help="0 always takes the likeliest token.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Of the random choices, where the temperature is above 0.")] = 0,
):
    """Answer a prompt, token by token. Where the tokenizer has a chat template, the prompt is a user's message."""
    stream_answer(model, prompt, max_new_tokens, temperature, seed)


@app.command("trace")
def trace_model(
    folder: Annotated[
        Path | None, typer.Argument(metavar="[FOLDER]", help="A model folder; without one, a tiny random model.")
    ] = None,
    hidden_size: Annotated[int | None, typer.Option(help="Of the random model: 64 without this.")] = None,
    num_hidden_layers: Annotated[int | None, typer.Option(help="Of the random model: 2 without this.")] = None,
    vocab_size: Annotated[int | None, typer.Option(help="Of the random model: 6400 without this.")] = None,
    moe: Annotated[bool, typer.Option("--moe", help="Make the random model a mixture of 4 experts.")] = False,
    batch_size: Annotated[int, typer.Option(min=1, help="Sequences.")] = 2,
    seq_len: Annotated[int, typer.Option(min=1, help="Tokens of each.")] = 6,
    cache: Annotated[bool, typer.Option("--cache", help="Show a cache growing: a prefill and three steps.")] = False,
    output_format: Annotated[str, typer.Option("--format", help="text, json, svg or html.")] = "text",
    output: Annotated[Path | None, typer.Option(help="Write to this file.", show_default="the terminal")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace that file.")] = False,
    seed: Annotated[int, typer.Option(help="Of the random weights and token ids.")] = 0,
):
    """Show every step of a forward pass with its shape and its root mean square."""
    from minimind_hf.tracing.command import trace_to

    sizes = {"hidden_size": hidden_size, "num_hidden_layers": num_hidden_layers, "vocab_size": vocab_size}
    trace_to(output, overwrite, output_format, folder, sizes, moe, batch_size, seq_len, cache, seed)


@app.command("serve", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def serve_folder(
    context: typer.Context,
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A model folder.")],
):
    """Serve a model over HTTP as OpenAI's API does; takes every option of `transformers serve`, such as --port."""
    from minimind_hf.serving import serve

    serve(folder, context.args)


def stream_answer(folder: Path, prompt: str, max_new_tokens: int, temperature: float, seed: int):
    """Print the answer of a model folder while it is generated.

    Raises:
        ValueError: the folder holds no model or no tokenizer, or the prompt leaves no room for an answer.
    """
    from transformers import TextStreamer, set_seed

    from minimind_hf.convert.loading import load_folder
    from minimind_hf.convert.tokenizer import load_tokenizer

    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} is not a model folder: `minimind convert to-hf` makes one of a .pth file")
    model, tokenizer = load_folder(folder), load_tokenizer(folder)
    if tokenizer.chat_template:
        chat = [{"role": "user", "content": prompt}]
        inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    else:
        inputs = tokenizer(prompt, return_tensors="pt")
    length, room = inputs["input_ids"].shape[1], model.config.max_position_embeddings
    if not 0 < length < room:
        raise ValueError(f"the prompt has {length} tokens: expected at least 1, and fewer than the model's {room}")

    set_seed(seed)
    sampling = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    model.generate(**inputs, **sampling, streamer=streamer, max_new_tokens=min(max_new_tokens, room - length))


def main():
    """Run the command; whatever is wrong with the input becomes one line and exit status 1."""
    for number in (signal.SIGTERM, signal.SIGHUP):  # so that an interrupted conversion cleans up
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup
            signal.signal(number, lambda number, _: sys.exit(128 + number))
    if not sys.stderr.isatty():
        logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        app()
    except (ValueError, OSError, StrictDataclassError) as error:
        typer.echo(f"minimind: {' '.join(str(error).split())}", err=True)
        raise SystemExit(1) from None
    except Exception as error:
        if os.environ.get("MINIMIND_TRACEBACK"):
            raise
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        typer.echo(f"minimind: {reason} (MINIMIND_TRACEBACK=1 shows where)", err=True)
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
