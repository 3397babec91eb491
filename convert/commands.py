"""The `minimind convert` commands: one function each, whose arguments are the options."""

from pathlib import Path
from typing import Annotated

import typer

convert_app = typer.Typer(
    no_args_is_help=True, help="Convert checkpoints, LoRA files and training files; every result is verified."
)

Source = Annotated[Path, typer.Argument(metavar="SRC", help="A .pth file of MiniMind's training, or a model folder.")]
Folder = Annotated[Path, typer.Argument(metavar="DST", help="The folder to write.")]
File = Annotated[Path, typer.Argument(metavar="DST", help="The file to write.")]
Tokenizer = Annotated[
    Path | None, typer.Option(help="A folder whose tokenizer is copied along; by default the source, if it has one.")
]
Config = Annotated[
    Path | None, typer.Option(help="A config.json of any MiniMind generation, for what the tensors cannot tell.")
]
Dtype = Annotated[str | None, typer.Option(help="float32, float16 or bfloat16; default: as in the source.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace what an earlier conversion wrote there.")]
SkipVerify = Annotated[bool, typer.Option("--skip-verify", help="Do not compare the result with the source.")]

# What the tensors cannot tell, and no config says.
GenerationName = Annotated[
    str | None,
    typer.Option(
        "--generation", help="minimind3, minimind2, minimind2-early or minimind1: only the last two look alike."
    ),
]
Heads = Annotated[int | None, typer.Option("--num-attention-heads", help="Query heads, for files without q/k norms.")]
Theta = Annotated[float | None, typer.Option("--rope-theta", help="Base of the rotary frequencies.")]
Epsilon = Annotated[float | None, typer.Option("--rms-norm-eps", help="Added inside every RMSNorm.")]
TopK = Annotated[int | None, typer.Option("--num-experts-per-tok", help="Experts that each token is sent to.")]


@convert_app.command("to-hf")
def convert_to_hf(
    source: Source,
    destination: Folder,
    tokenizer: Tokenizer = None,
    config: Config = None,
    dtype: Dtype = None,
    generation: GenerationName = None,
    num_attention_heads: Heads = None,
    rope_theta: Theta = None,
    rms_norm_eps: Epsilon = None,
    num_experts_per_tok: TopK = None,
    push_to_hub: Annotated[str | None, typer.Option(metavar="REPO", help="Upload the folder there as well.")] = None,
    public: Annotated[bool, typer.Option("--public", help="Make a new repository public, not private.")] = False,
    overwrite: Overwrite = False,
    skip_verify: SkipVerify = False,
):
    """A checkpoint of any MiniMind generation -> a Hugging Face folder."""
    from minimind_hf.convert.conversions import to_hf
    from minimind_hf.convert.hub import check_repository, push_folder

    if push_to_hub is not None:
        check_repository(push_to_hub)
    elif public:
        raise ValueError("--public belongs to --push-to-hub REPO, which was not given")
    flags = collect_flags(generation, num_attention_heads, rope_theta, rms_norm_eps, num_experts_per_tok)
    report = to_hf(source, destination, tokenizer, config, dtype, overwrite, not skip_verify, **flags)
    report_folder(destination, report)
    if push_to_hub is not None:
        typer.echo(f"pushed to {push_folder(destination, push_to_hub, private=not public)}")


@convert_app.command("to-torch")
def convert_to_torch(
    source: Source,
    destination: File,
    layout: Annotated[
        str | None,
        typer.Option(
            help="minimind3, minimind2, minimind2-early or minimind1: whose code shall load the file. By default the "
            "one that the model comes from."
        ),
    ] = None,
    config: Config = None,
    generation: GenerationName = None,
    num_attention_heads: Heads = None,
    rope_theta: Theta = None,
    rms_norm_eps: Epsilon = None,
    num_experts_per_tok: TopK = None,
    overwrite: Overwrite = False,
    skip_verify: SkipVerify = False,
):
    """A MiniMind checkpoint -> the .pth file that MiniMind's own scripts load."""
    from minimind_hf.convert.conversions import to_torch

    flags = collect_flags(generation, num_attention_heads, rope_theta, rms_norm_eps, num_experts_per_tok)
    report = to_torch(source, destination, layout, config, overwrite, not skip_verify, **flags)
    typer.echo(f"{destination}: {report}")


@convert_app.command("to-qwen3")
def convert_to_qwen3(
    source: Source,
    destination: Folder,
    tokenizer: Tokenizer = None,
    config: Config = None,
    dtype: Dtype = None,
    rope_theta: Theta = None,
    rms_norm_eps: Epsilon = None,
    num_experts_per_tok: TopK = None,
    overwrite: Overwrite = False,
    skip_verify: SkipVerify = False,
):
    """A MiniMind-3 -> Qwen3 or Qwen3-MoE, which transformers 4.57 and 5 load without this package."""
    from minimind_hf.convert.exports import to_qwen3

    flags = collect_flags(None, None, rope_theta, rms_norm_eps, num_experts_per_tok)
    report = to_qwen3(source, destination, tokenizer, config, dtype, overwrite, not skip_verify, **flags)
    report_folder(destination, report)


@convert_app.command("to-llama")
def convert_to_llama(
    source: Source,
    destination: Folder,
    tokenizer: Tokenizer = None,
    config: Config = None,
    dtype: Dtype = None,
    generation: GenerationName = None,
    num_attention_heads: Heads = None,
    rope_theta: Theta = None,
    rms_norm_eps: Epsilon = None,
    overwrite: Overwrite = False,
    skip_verify: SkipVerify = False,
):
    """A dense MiniMind2 or MiniMind v1 -> Llama, which transformers 4.57 and 5 load without this package."""
    from minimind_hf.convert.exports import to_llama

    flags = collect_flags(generation, num_attention_heads, rope_theta, rms_norm_eps, None)
    report = to_llama(source, destination, tokenizer, config, dtype, overwrite, not skip_verify, **flags)
    report_folder(destination, report)


StockFolder = Annotated[Path, typer.Argument(metavar="SRC", help="A folder that transformers saved.")]


@convert_app.command("from-qwen3")
def convert_from_qwen3(
    source: StockFolder,
    destination: Folder,
    tokenizer: Tokenizer = None,
    dtype: Dtype = None,
    overwrite: Overwrite = False,
    skip_verify: SkipVerify = False,
):
    """Qwen3 or Qwen3-MoE -> a MiniMind folder."""
    from minimind_hf.convert.exports import from_qwen3

    report_folder(destination, from_qwen3(source, destination, tokenizer, dtype, overwrite, not skip_verify))


@convert_app.command("from-llama")
def convert_from_llama(
    source: StockFolder,
    destination: Folder,
    tokenizer: Tokenizer = None,
    dtype: Dtype = None,
    overwrite: Overwrite = False,
    skip_verify: SkipVerify = False,
):
    """Llama -> a MiniMind folder without q/k norms, as MiniMind2 has none."""
    from minimind_hf.convert.exports import from_llama

    report_folder(destination, from_llama(source, destination, tokenizer, dtype, overwrite, not skip_verify))


@convert_app.command("to-gguf")
def convert_to_gguf(
    source: Source,
    destination: Annotated[Path, typer.Argument(metavar="DST.gguf", help="The file to write.")],
    outtype: Annotated[str, typer.Option(help="f32, f16, bf16, or q8_0: 8-bit blocks of 32 values.")] = "f16",
    tokenizer: Annotated[
        Path | None, typer.Option(help="The folder of the tokenizer that goes into the file; default: the source.")
    ] = None,
    config: Config = None,
    generation: GenerationName = None,
    num_attention_heads: Heads = None,
    rope_theta: Theta = None,
    rms_norm_eps: Epsilon = None,
    num_experts_per_tok: TopK = None,
    modelfile: Annotated[bool, typer.Option("--modelfile", help="Write Ollama's Modelfile beside it, too.")] = False,
    overwrite: Overwrite = False,
    skip_verify: SkipVerify = False,
):
    """Any MiniMind that llama.cpp can compute -> one GGUF file, with its tokenizer."""
    from minimind_hf.convert.gguf_export import to_gguf

    flags = collect_flags(generation, num_attention_heads, rope_theta, rms_norm_eps, num_experts_per_tok)
    report = to_gguf(source, destination, outtype, tokenizer, config, modelfile, overwrite, not skip_verify, **flags)
    typer.echo(f"{destination}: {report}")


@convert_app.command("lora-to-peft")
def convert_lora_to_peft(
    source: Annotated[Path, typer.Argument(metavar="LORA.pth", help="A LoRA of MiniMind's training.")],
    destination: Folder,
    base: Annotated[
        str | None, typer.Option(help="The model it belongs to, a folder or a repository, for PEFT to find it.")
    ] = None,
    overwrite: Overwrite = False,
    skip_verify: SkipVerify = False,
):
    """A LoRA of MiniMind's training -> a PEFT adapter folder."""
    from minimind_hf.convert.lora import lora_to_peft

    typer.echo(f"{destination}: {lora_to_peft(source, destination, base, overwrite, not skip_verify)}")


@convert_app.command("peft-to-lora")
def convert_peft_to_lora(
    source: Annotated[Path, typer.Argument(metavar="ADAPTER", help="A PEFT adapter folder.")],
    destination: Annotated[Path, typer.Argument(metavar="DST.pth", help="The file to write.")],
    overwrite: Overwrite = False,
    skip_verify: SkipVerify = False,
):
    """A PEFT adapter folder -> the LoRA file that MiniMind's own scripts load."""
    from minimind_hf.convert.lora import peft_to_lora

    typer.echo(f"{destination}: {peft_to_lora(source, destination, overwrite, not skip_verify)}")


@convert_app.command("merge-lora")
def convert_merge_lora(
    base: Annotated[Path, typer.Argument(metavar="BASE", help="The model: a MiniMind folder or a .pth file.")],
    adapter: Annotated[Path, typer.Argument(metavar="ADAPTER", help="A LoRA .pth file, or a PEFT adapter folder.")],
    destination: Annotated[
        Path, typer.Argument(metavar="DST", help="The folder to write, or a .pth file for MiniMind's own scripts.")
    ],
    tokenizer: Tokenizer = None,
    config: Config = None,
    dtype: Dtype = None,
    generation: GenerationName = None,
    num_attention_heads: Heads = None,
    rope_theta: Theta = None,
    rms_norm_eps: Epsilon = None,
    num_experts_per_tok: TopK = None,
    overwrite: Overwrite = False,
    skip_verify: SkipVerify = False,
):
    """A model and its LoRA -> one model, merged in float32 and cast once."""
    from minimind_hf.convert.lora import merge_lora

    flags = collect_flags(generation, num_attention_heads, rope_theta, rms_norm_eps, num_experts_per_tok)
    report = merge_lora(base, adapter, destination, tokenizer, dtype, overwrite, not skip_verify, config, **flags)
    typer.echo(f"{destination}: {report}")


@convert_app.command("dataset")
def convert_dataset_file(
    source: Annotated[Path, typer.Argument(metavar="SRC.jsonl", help="A training file of MiniMind.")],
    destination: Folder,
    kind: Annotated[
        str | None,
        typer.Option(help="pretrain, sft, preference or rl; by default what the first line shows, which is never rl."),
    ] = None,
    skip_bad_lines: Annotated[
        bool, typer.Option("--skip-bad-lines", help="Leave bad lines out, and say which, instead of refusing.")
    ] = False,
    overwrite: Overwrite = False,
    skip_verify: SkipVerify = False,
):
    """A training file of MiniMind -> a datasets folder with the columns that TRL expects."""
    from minimind_hf.convert.dataset import convert_dataset

    on_error = "skip" if skip_bad_lines else "stop"
    report = convert_dataset(source, destination, kind, on_error, overwrite, not skip_verify)
    typer.echo(f"{destination}: {report}")


def report_folder(destination: Path, report: str):
    typer.echo(f"{destination}: {report}")
    if not (destination / "tokenizer_config.json").exists():
        typer.echo("no tokenizer was added: --tokenizer DIR copies one, for generate and pipeline", err=True)


def collect_flags(generation, num_attention_heads, rope_theta, rms_norm_eps, num_experts_per_tok) -> dict:
    """Name the flags that stand in for config values; those that were not given stay None."""
    return {
        "generation": generation,
        "num_attention_heads": num_attention_heads,
        "rope_theta": rope_theta,
        "rms_norm_eps": rms_norm_eps,
        "num_experts_per_tok": num_experts_per_tok,
    }
