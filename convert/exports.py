"""To model classes that transformers itself has, so that a checkpoint runs without this package, and back.

A dense MiniMind-3 is a Qwen3, its mixture of experts a Qwen3-MoE, a dense MiniMind2 a Llama: the same tensors under
the same names, and a config in other words. In float32 both sides compute the same. Three things differ:

- In half precision Qwen3 casts what it has normed before the norm's weight is applied, MiniMind-3 after; MiniMind2 and
  Llama both cast before.
- In training, Qwen3 and Llama drop attention weights alone, MiniMind's `dropout` the embeddings and outputs as well.
- In training, Qwen3-MoE balances its experts only where `output_router_logits` is set, over all blocks together; and
  the router of a normalised top-1 mixture gets its gradient from that loss alone.
"""

import copy
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING, PreTrainedConfig

from minimind_hf.configuration_minimind import NEUTRAL_VALUES, MiniMindConfig
from minimind_hf.convert.checkpoint import Checkpoint, cast_tensors, is_tied, load_checkpoint
from minimind_hf.convert.compare import compare_logits, compare_tensors
from minimind_hf.convert.conversions import assumed, write_folder, write_generation_config
from minimind_hf.convert.files import (
    MINIMIND_FOLDER,
    Output,
    check_destination,
    read_json,
    read_tensors,
    write_json,
    write_safetensors,
    written_whole,
)
from minimind_hf.convert.layout import ConversionError, check_tensors, expected_shapes
from minimind_hf.convert.loading import build_model, load_folder
from minimind_hf.convert.tokenizer import copy_tokenizer, find_tokenizer, load_tokenizer, take_special_tokens

SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")

# Config values that mean the same in MiniMind and in the stock classes.
SHARED = (
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim "
    "hidden_act max_position_embeddings initializer_range rms_norm_eps use_cache tie_word_embeddings"
).split()
SHARED_OF_EXPERTS = (
    "num_experts num_experts_per_tok moe_intermediate_size norm_topk_prob router_aux_loss_coef output_router_logits"
).split()


@dataclass(frozen=True)
class StockClass:
    """A model class of transformers that computes what a kind of MiniMind computes."""

    name: str
    fixed: dict  # its switches for what MiniMind lacks, switched off
    minimind: dict  # what its MiniMind twins have in their configs

    @property
    def shared(self) -> list[str]:
        return [*SHARED, *SPECIAL_TOKENS, *(SHARED_OF_EXPERTS if self.minimind["use_moe"] else [])]


QWEN3_FIXED = {"attention_bias": False, "use_sliding_window": False, "sliding_window": None}
STOCK_CLASSES = {
    "qwen3": StockClass("Qwen3ForCausalLM", QWEN3_FIXED, {"use_qk_norm": True, "use_moe": False}),
    "qwen3_moe": StockClass(
        "Qwen3MoeForCausalLM",
        {**QWEN3_FIXED, "decoder_sparse_step": 1, "mlp_only_layers": []},
        {"use_qk_norm": True, "use_moe": True},
    ),
    "llama": StockClass(
        "LlamaForCausalLM",
        {"attention_bias": False, "mlp_bias": False},
        {"use_qk_norm": False, "use_moe": False, "rms_norm_scale_in_float32": False},
    ),
}

TOLERANCE = 1e-5  # largest difference of two logits: both sides do the same float32 operations in the same order

# Keys of a tokenizer_config.json that name code, or that transformers 4 and 5 understand differently.
UNPORTABLE_KEYS = (
    "auto_map backend chat_template extra_special_tokens is_local local_files_only model_specific_special_tokens "
    "processor_class transformers_version"
).split()

SAMPLE_TEXT = "Hello,  world!\n\n\t2026-12-01 3.14 你好，世界。 don't 😀<|im_start|>x<|im_end|>\r\n<think>\n\n</think>"


def to_qwen3(
    source: Path,
    destination: Path,
    tokenizer: Path | None = None,
    config: Path | None = None,
    dtype: str | None = None,
    overwrite: bool = False,
    verify: bool = True,
    **flags,
) -> str:
    """Convert a MiniMind-3 to a folder of `Qwen3ForCausalLM`, or of `Qwen3MoeForCausalLM` for a mixture of experts.

    The folder holds no code, and loads in transformers 4.57 as in 5. See the top of this file for what differs in half
    precision and in training.

    Args:
        source: a MiniMind folder, or a .pth file of MiniMind's training.
        destination: the folder to write; it appears whole, or not at all.
        tokenizer: a folder whose tokenizer goes along; by default the source's own, if it has one. It pads on the left
            unless it says otherwise, so that batches of prompts are answered right.
        config: a config.json with what the tensors of a .pth file cannot tell.
        dtype: "float32", "float16" or "bfloat16"; by default that of the checkpoint.
        overwrite: replace an existing folder of the same kind.
        verify: read the result back, and compare tensors, logits and tokens with the source's.
        **flags: config values, such as num_attention_heads; each must agree with the tensors and with `config`.

    Returns:
        One line that says what was verified, and what could not be expressed.

    Raises:
        ConversionError: the checkpoint cannot be expressed exactly; nothing was written.
    """
    checkpoint = load_checkpoint(Path(source), config, flags)
    model_type = "qwen3_moe" if checkpoint.config.use_moe else "qwen3"
    return export(checkpoint, model_type, destination, tokenizer, config, dtype, overwrite, verify)


def to_llama(
    source: Path,
    destination: Path,
    tokenizer: Path | None = None,
    config: Path | None = None,
    dtype: str | None = None,
    overwrite: bool = False,
    verify: bool = True,
    **flags,
) -> str:
    """Convert a dense MiniMind2 or MiniMind v1 to a folder of `LlamaForCausalLM`; everything else as in `to_qwen3`."""
    checkpoint = load_checkpoint(Path(source), config, flags)
    return export(checkpoint, "llama", destination, tokenizer, config, dtype, overwrite, verify)


def from_qwen3(
    source: Path,
    destination: Path,
    tokenizer: Path | None = None,
    dtype: str | None = None,
    overwrite: bool = False,
    verify: bool = True,
) -> str:
    """Convert a folder of `Qwen3ForCausalLM` or `Qwen3MoeForCausalLM` to a MiniMind-3 folder.

    What Qwen3 does not know gets MiniMind's default: `dropout` 0, `flash_attn` true.

    Args:
        source: a folder that transformers 4.57 or 5 wrote, with one or several safetensors files.
        destination: the folder to write; it appears whole, or not at all.
        tokenizer: a folder whose tokenizer is copied along; by default the source's own, if it has one.
        dtype: "float32", "float16" or "bfloat16"; by default that of the source.
        overwrite: replace an existing MiniMind folder.
        verify: read the result back, and compare tensors and logits with the source's.

    Returns:
        One line that says what was verified.

    Raises:
        ConversionError: the model has something that MiniMind lacks, or is damaged; nothing was written.
    """
    return import_stock(source, ("qwen3", "qwen3_moe"), destination, tokenizer, dtype, overwrite, verify)


def from_llama(
    source: Path,
    destination: Path,
    tokenizer: Path | None = None,
    dtype: str | None = None,
    overwrite: bool = False,
    verify: bool = True,
) -> str:
    """Convert a folder of `LlamaForCausalLM` to one with the architecture of MiniMind2; else as in `from_qwen3`."""
    return import_stock(source, ("llama",), destination, tokenizer, dtype, overwrite, verify)


def export(checkpoint: Checkpoint, model_type: str, destination, tokenizer, config, dtype, overwrite, verify) -> str:
    """Write a checkpoint as a folder of a stock class; see `to_qwen3`."""
    source, destination, output = checkpoint.source, Path(destination), Output("config.json", model_type)
    refuse_losses(checkpoint, model_type)
    check_destination(destination, [source], overwrite, output)
    tokenizer = choose_tokenizer(checkpoint, tokenizer, config)
    checkpoint.tensors = cast_tensors(checkpoint.tensors, dtype)
    stock_config = describe_as_stock(checkpoint, model_type)
    parse_stock_config(copy.deepcopy(stock_config), source)
    with written_whole(destination, [source], overwrite, output) as draft:
        write_json(stock_config, draft / "config.json")
        write_generation_config(checkpoint, draft)
        write_safetensors(checkpoint.tensors, draft / "model.safetensors")
        if tokenizer is not None:
            write_tokenizer(tokenizer, draft)
        report = verify_export(checkpoint, model_type, draft, tokenizer) if verify else "not verified"
    if checkpoint.config.dropout:
        report += f"; the dropout {checkpoint.config.dropout} of embeddings and outputs, in training, is left out"
    return report + assumed(checkpoint)


def import_stock(source, model_types, destination, tokenizer, dtype, overwrite, verify) -> str:
    """Write a folder of a stock class as a MiniMind folder; see `from_qwen3`."""
    source, destination = Path(source), Path(destination)
    check_destination(destination, [source], overwrite, MINIMIND_FOLDER)
    checkpoint = load_stock_checkpoint(source, model_types)
    tokenizer = choose_tokenizer(checkpoint, tokenizer, source / "config.json")
    written = Checkpoint(source, cast_tensors(checkpoint.tensors, dtype), checkpoint.config)
    with written_whole(destination, [source], overwrite, MINIMIND_FOLDER) as draft:
        write_folder(written, draft)
        write_generation_config(checkpoint, draft)
        if tokenizer is not None:
            copy_tokenizer(tokenizer, draft)
        return verify_import(checkpoint, written.tensors, draft, tokenizer) if verify else "not verified"


def refuse_losses(checkpoint: Checkpoint, model_type: str):
    """Raise if the stock class cannot compute what the checkpoint does, and say what would be lost."""
    config, stock = checkpoint.config, STOCK_CLASSES[model_type]
    losses = []
    if config.use_moe and not stock.minimind["use_moe"]:
        losses.append(f"has no experts: those {config.num_experts} of every block would be lost")
    if config.use_moe and config.num_shared_experts:
        losses.append(f"has no shared experts: those {config.num_shared_experts} of every block would be lost")
    if config.use_qk_norm and not stock.minimind["use_qk_norm"]:
        losses.append("does not norm queries and keys: q_norm and k_norm of every block would be lost")
    if not config.use_qk_norm and stock.minimind["use_qk_norm"]:
        losses.append("norms queries and keys, as this model does not: all its attention would change")
    if losses:
        twin = next((twin.name for twin in STOCK_CLASSES.values() if computes(twin, config)), None)
        remedy = f"{twin} fits exactly" if twin else "no class of transformers fits exactly"
        raise ConversionError(
            f"{checkpoint.source} cannot become a {stock.name}, which {'; which '.join(losses)}; {remedy}"
        )


def computes(stock: StockClass, config: MiniMindConfig) -> bool:
    """Whether a stock class computes what a MiniMind model of this config does."""
    has_shared_experts = config.use_moe and config.num_shared_experts > 0
    same_parts = all(getattr(config, name) == stock.minimind[name] for name in ("use_qk_norm", "use_moe"))
    return same_parts and not has_shared_experts


def describe_as_stock(checkpoint: Checkpoint, model_type: str) -> dict:
    """Write the config of a checkpoint in the words of a stock class, as transformers 4.57 and 5 both read it."""
    config, stock = checkpoint.config, STOCK_CLASSES[model_type]
    values = {name: getattr(config, name) for name in stock.shared}
    if config.use_moe:
        values["router_aux_loss_coef"] = float(config.router_aux_loss_coef)
    if model_type == "qwen3":
        values["max_window_layers"] = config.num_hidden_layers
        values["layer_types"] = ["full_attention"] * config.num_hidden_layers
    rope = {  # 4.57 wants floats, and an integer for the number of positions
        name: float(value) if type(value) is int and name != "original_max_position_embeddings" else value
        for name, value in config.rope_parameters.items()
    }
    scaling = {name: value for name, value in rope.items() if name != "rope_theta"}
    dtype = str(next(iter(checkpoint.tensors.values())).dtype).removeprefix("torch.")
    return {
        "architectures": [stock.name],
        "model_type": model_type,
        **values,
        **stock.fixed,
        "attention_dropout": float(config.dropout if config.attention_dropout is None else config.attention_dropout),
        "dtype": dtype,
        "torch_dtype": dtype,  # the name before 4.56
        "rope_parameters": rope,  # for 5
        "rope_theta": rope["rope_theta"],  # for 4, as is the next one
        "rope_scaling": scaling if rope["rope_type"] != "default" else None,
    }


def parse_stock_config(values: dict, origin: Path) -> PreTrainedConfig:
    """Let the stock class complete and check a config."""
    try:
        return CONFIG_MAPPING[values["model_type"]].from_dict(values)
    except (ValueError, TypeError, AttributeError, ArithmeticError, LookupError, StrictDataclassError) as error:
        raise ConversionError(f"{origin} does not fit a {values['model_type']} model: {error}") from error


def load_stock_checkpoint(source: Path, model_types: tuple[str, ...]) -> Checkpoint:
    """Open a folder of a stock class as a MiniMind checkpoint."""
    if not source.is_dir():
        found = "is not a folder" if source.exists() else "does not exist"
        raise ConversionError(f"{source} {found}: expected a model folder with config.json and safetensors")
    values = read_json(source / "config.json")
    model_type = values.get("model_type")
    if model_type not in model_types:
        raise ConversionError(f"{source} holds a {model_type} model, expected {' or '.join(model_types)}")
    if values.get("quantization_config"):
        raise ConversionError(f"{source} is quantized: convert the model it was made from")
    tensors = read_tensors(source)
    refuse_contradictions(values, tensors, source)
    config = describe_as_minimind(parse_stock_config(values, source), source)
    if config.tie_word_embeddings and "model.embed_tokens.weight" in tensors:
        if not is_tied(tensors):
            raise ConversionError(
                f"{source} has an lm_head.weight of its own, but tie_word_embeddings is true in its config: set it "
                "to false to keep the head, or remove the tensor"
            )
        tensors.pop("lm_head.weight", None)
    check_tensors(tensors, expected_shapes(config), STOCK_CLASSES[model_type].name)
    return Checkpoint(source, tensors, config)


def refuse_contradictions(values: dict, tensors: dict, source: Path):
    """Raise where the file of a stock config contradicts itself, or counts more than the tensors can be."""
    for name in ("num_hidden_layers", "num_experts", "num_local_experts"):
        if type(values.get(name)) is int and values[name] > len(tensors):  # before anything is made for each of them
            raise ConversionError(f"{source} has {name}={values[name]} in its config, but only {len(tensors)} tensors")
    rope, theta = values.get("rope_parameters"), values.get("rope_theta")
    if isinstance(rope, dict) and theta not in (None, rope.get("rope_theta")):
        raise ConversionError(
            f"{source} has rope_theta={theta}, which transformers 4 reads, but rope_parameters={rope}, which 5 reads: "
            "make them the same"
        )


def describe_as_minimind(stock_config: PreTrainedConfig, source: Path) -> MiniMindConfig:
    """Write the config of a stock class in MiniMind's words, or raise if it asks for what MiniMind lacks."""
    stock = STOCK_CLASSES[stock_config.model_type]
    for name, neutral in {**NEUTRAL_VALUES, **stock.fixed}.items():
        value = vars(stock_config).get(name, neutral)
        if value != neutral:
            raise ConversionError(f"{source} has {name}={value}, which MiniMind lacks: expected {neutral}")
    layer_types = set(getattr(stock_config, "layer_types", None) or [])
    if layer_types - {"full_attention"}:
        raise ConversionError(f"{source} has layer_types {sorted(layer_types)}: MiniMind has only full_attention")
    try:
        return MiniMindConfig(
            **{name: getattr(stock_config, name, None) for name in stock.shared},
            **stock.minimind,
            rope_parameters=dict(stock_config.rope_parameters),
            attention_dropout=stock_config.attention_dropout or None,  # None: as MiniMind's dropout, which is 0
        )
    except (ValueError, TypeError, AttributeError, ArithmeticError, LookupError, StrictDataclassError) as error:
        raise ConversionError(f"{source} is beyond MiniMind: {error}") from error


def choose_tokenizer(checkpoint: Checkpoint, tokenizer: Path | None, config: Path | None) -> Path | None:
    """Say whose tokenizer goes along, and complete the special tokens of the config from it.

    A tokenizer that is named must agree with what a config.json says. That of the source itself may differ, for
    example in the token that pads: then the config tells what the model was trained with.
    """
    folder = find_tokenizer(checkpoint.source, tokenizer)
    if folder is None:
        return None
    if tokenizer is None:
        own = load_tokenizer(folder)
        known = {name: getattr(checkpoint.config, name) for name in SPECIAL_TOKENS}
        # Where the config has a token, the tokenizer's is accepted beside it, and changes nothing.
        given = {name: [token, getattr(own, name)] for name, token in known.items() if token is not None}
    else:
        path = Path(config or checkpoint.source / "config.json")
        given = read_json(path) if path.is_file() else {}
    take_special_tokens(checkpoint.config, folder, given)
    return folder


def write_tokenizer(source: Path, folder: Path):
    """Write a tokenizer as transformers 4.57 and 5 both read it: of the generic class, the chat template inside."""
    if not (source / "tokenizer.json").is_file():
        raise ConversionError(f"the tokenizer in {source} has no tokenizer.json: save it with transformers 5 first")
    tokenizer, given = load_tokenizer(source), read_json(source / "tokenizer_config.json")
    settings = {name: value for name, value in given.items() if name not in UNPORTABLE_KEYS}
    extra = given.get("extra_special_tokens")
    if isinstance(extra, list):  # what 5 calls so is additional_special_tokens in 4.57, which expects a dict here
        settings.setdefault("additional_special_tokens", extra)
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = [{"name": name, "template": text} for name, text in template.items()]
    if template:
        settings["chat_template"] = template
    settings |= {name: getattr(tokenizer, name) for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
    settings.setdefault("padding_side", "left")  # 4.57 would pad a batch of prompts on the right, and continue padding
    settings["clean_up_tokenization_spaces"] = tokenizer.clean_up_tokenization_spaces
    settings["model_input_names"] = ["input_ids", "attention_mask"]  # 4.57 adds token types, which no model here takes
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    write_json(settings, folder / "tokenizer_config.json")
    shutil.copyfile(source / "tokenizer.json", folder / "tokenizer.json")


def verify_export(checkpoint: Checkpoint, model_type: str, folder: Path, tokenizer: Path | None) -> str:
    """Check a written folder against the checkpoint and the tokenizer that it was made from."""
    counted = compare_tensors(read_tensors(folder), checkpoint.tensors)
    stock_model = load_folder(folder, torch.float32)
    found, expected = type(stock_model).__name__, STOCK_CLASSES[model_type].name
    if found != expected:
        raise ConversionError(f"verification failed: the folder loads as a {found}, expected {expected}")
    report = f"verified: {counted} read back bit for bit equal; "
    report += compare_with_stock(build_model(checkpoint), stock_model)
    return report + (compare_tokenizers(load_tokenizer(folder), load_tokenizer(tokenizer)) if tokenizer else "")


def verify_import(
    checkpoint: Checkpoint, tensors: dict[str, torch.Tensor], folder: Path, tokenizer: Path | None
) -> str:
    """Check a written MiniMind folder against the tensors written to it, and the stock folder that it came from."""
    counted = compare_tensors(load_checkpoint(folder).tensors, tensors)
    # With the tensors of the source, not yet cast, the logits show whether the two configs say the same.
    model = build_model(Checkpoint(folder, checkpoint.tensors, MiniMindConfig.from_pretrained(folder)))
    report = f"verified: {counted} read back bit for bit equal; "
    report += compare_with_stock(model, load_folder(checkpoint.source, torch.float32))
    return report + (compare_tokenizers(load_tokenizer(folder), load_tokenizer(tokenizer)) if tokenizer else "")


def compare_with_stock(model, stock_model) -> str:
    """Check that MiniMind and a stock class give the same logits in float32, and say how close they are."""
    stock_model.set_attn_implementation(model.config._attn_implementation)  # sdpa and eager differ by 3e-5
    result = compare_logits(model, stock_model)
    if result.max_difference > TOLERANCE:
        raise ConversionError(
            f"verification failed: the logits of {type(stock_model).__name__} differ from MiniMind's by "
            f"{result.max_difference:.3g}, expected at most {TOLERANCE:g}"
        )
    return (
        f"{type(stock_model).__name__} gives MiniMind's logits within {result.max_difference:.1g}, "
        f"and the same greedy token at {result.greedy_agreement:.2%} of {result.positions} positions"
    )


def compare_tokenizers(found, expected) -> str:
    """Check that two tokenizers have the same tokens, the same special ones, splitting and chat template."""
    for what, look in {
        "vocabulary": lambda tokenizer: tokenizer.get_vocab(),
        "special tokens": lambda tokenizer: [getattr(tokenizer, name) for name in SPECIAL_TOKENS],
        "splitting": lambda tokenizer: tokenizer(SAMPLE_TEXT)["input_ids"],
        "chat template": lambda tokenizer: tokenizer.chat_template,
    }.items():
        if look(found) != look(expected):
            raise ConversionError(f"verification failed: the {what} of the tokenizer differs from the source's")
    return "; the tokenizer is the same"
