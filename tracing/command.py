"""`minimind trace`: make or load a model, trace it, show or write what was seen."""

import sys
from pathlib import Path

import torch

from minimind_hf.configuration_minimind import MiniMindConfig
from minimind_hf.convert.loading import load_folder
from minimind_hf.modeling_minimind import MiniMindForCausalLM
from minimind_hf.tracing import cache_to_text, to_html, to_json, to_svg, to_text, trace, trace_cache

RANDOM_MODEL = {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 6400}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
EXPERTS = {"use_moe": True, "num_experts": 4, "num_experts_per_tok": 2}
DECODE_STEPS = 3
FORMATS = ("text", "json", "svg", "html")


def trace_to(
    output: Path | None,
    overwrite: bool,
    output_format: str,
    folder: Path | None,
    sizes: dict[str, int | None],
    moe: bool,
    batch_size: int,
    seq_len: int,
    with_cache: bool,
    seed: int,
):
    """Trace the model of a folder, or a random one of these sizes, and print the result or write it to a file.

    Raises:
        ValueError: an option contradicts another one or the model; the file exists.
    """
    if output_format not in FORMATS:
        raise ValueError(f"--format {output_format}: expected one of {', '.join(FORMATS)}")
    if with_cache and output_format == "svg":
        raise ValueError("--cache is a table, which has no place in the diagram: use --format text, json or html")
    if output is not None and output.exists() and not overwrite:
        raise ValueError(f"{output} exists: pass --overwrite to replace it")
    given = [
        f"--{name.replace('_', '-')}" for name, value in {**sizes, "moe": moe or None}.items() if value is not None
    ]
    if folder is not None and given:
        raise ValueError(f"{', '.join(given)}: these are for the random model, and {folder} has its own sizes")

    torch.manual_seed(seed)
    if folder is None:
        chosen = {name: RANDOM_MODEL[name] if value is None else value for name, value in sizes.items()}
        config = MiniMindConfig(**chosen, **HEADS, **(EXPERTS if moe else {}), bos_token_id=None, eos_token_id=None)
        model = MiniMindForCausalLM(config)
    else:
        model = load_folder(folder)
    longest = model.config.max_position_embeddings - (DECODE_STEPS if with_cache else 0)
    if seq_len > longest:
        raise ValueError(f"--seq-len {seq_len}: this model has room for {longest} tokens")
    input_ids = torch.randint(model.config.vocab_size, (batch_size, seq_len))

    seen = trace(model, input_ids)
    cache = trace_cache(model, input_ids, DECODE_STEPS) if with_cache else []
    if output_format == "text":
        shown = to_text(seen) + (f"\n\n{cache_to_text(cache)}" if cache else "") + "\n"
    else:
        shown = {"json": to_json, "svg": lambda seen, _: to_svg(seen), "html": to_html}[output_format](seen, cache)
    if output is None:
        sys.stdout.write(shown)
        return
    draft = output.with_name(f".{output.name}.part")
    draft.write_text(shown, encoding="utf-8")
    draft.replace(output)
