"""Write a MiniMind model as one GGUF file, the format of llama.cpp, with its tokenizer inside."""

import itertools
import json
import math
import re
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from minimind_hf.configuration_minimind import MiniMindConfig
from minimind_hf.convert.checkpoint import ROTARY_PROJECTIONS, Checkpoint, load_checkpoint
from minimind_hf.convert.compare import compare_logits
from minimind_hf.convert.conversions import assumed
from minimind_hf.convert.files import (
    GGUF_FILE,
    TOKENIZER_FILES,
    Output,
    check_destination,
    progress,
    read_json,
    written_whole,
)
from minimind_hf.convert.layout import ConversionError, expected_shapes, pair_halves, pair_neighbours, some_names
from minimind_hf.convert.loading import build_model
from minimind_hf.convert.modelfile import is_modelfile, make_modelfile
from minimind_hf.convert.tokenizer import find_tokenizer, load_tokenizer, take_special_tokens
from minimind_hf.modeling_minimind import MiniMindRotaryEmbedding

MODELFILE = Output(recognise=is_modelfile)

# What GGUF's general.file_type calls each outtype; the upper-case outtype is the name of the tensor type.
FILE_TYPES = {"f32": "ALL_F32", "f16": "MOSTLY_F16", "bf16": "MOSTLY_BF16", "q8_0": "MOSTLY_Q8_0"}
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}  # tensor types that torch has, too

# How far the logits of an 8-bit model may be from its source: the largest KL divergence in nats, and the smallest
# share of equal greedy tokens. Measured at the worst, on random weights: dense models 0.0034 and 91 %; mixtures of
# experts, where rounding sends some tokens to another expert, 0.14 and 79 %. With the rows of one projection in the
# wrong order: a trained dense model 0.039 and 83 %, a trained mixture 0.31 and 61 %.
LIMITS_OF_DENSE, LIMITS_OF_EXPERTS = (0.02, 0.8), (0.25, 0.7)

# What a tokenizer.json must say for llama.cpp to split text into the same tokens. False, None and "" mean the same.
REQUIRED_OF_TOKENIZER = {
    "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True},  # GPT-2's splitting
    "decoder": {"type": "ByteLevel"},
    "model": {
        "type": "BPE",
        "dropout": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "byte_fallback": False,
        "ignore_merges": False,
    },
}
SURROGATE = re.compile("[\ud800-\udfff]")  # what JSON can hold, and no file in UTF-8

# llama.cpp knows three tokens that end an answer: of the sequence, of the turn, of the message.
END_KEYS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of the file, and how it comes from the checkpoint."""

    name: str
    parts: tuple[str, ...]  # names in the checkpoint; those of all experts of a block for a stacked tensor
    stacked: bool  # the file holds the experts of a block as one tensor [E, rows, columns]
    interleaved: int  # head_dim, where the file has the rows of a head in RoPE pairs (2i, 2i + 1); 0: as they are
    type: str  # "F32", "F16", "BF16" or "Q8_0"
    shape: tuple[int, ...]


def to_gguf(
    source: Path,
    destination: Path,
    outtype: str = "f16",
    tokenizer: Path | None = None,
    config: Path | None = None,
    modelfile: bool = False,
    overwrite: bool = False,
    verify: bool = True,
    **flags,
) -> str:
    """Write a MiniMind checkpoint as a GGUF file, which llama.cpp and what is built on it run.

    Writing goes tensor by tensor from the memory-mapped source. Norms and the router stay float32; under q8_0 a tensor
    whose rows are no multiple of 32 is kept in f16.

    Args:
        source: a .pth file, or a folder or file with safetensors.
        destination: the file to write; it appears whole, or not at all.
        outtype: "f32", "f16", "bf16" or "q8_0" (8-bit blocks of 32 values).
        tokenizer: the folder of the tokenizer that goes into the file; by default the source, if it is a folder.
        config: a config.json with what the tensors cannot tell.
        modelfile: write a `Modelfile` for Ollama into the folder of the destination, too.
        overwrite: replace existing files.
        verify: read the file back and compare it with the source: bit by bit, and for q8_0 by the logits, for which
            both models are held in float32.
        **flags: config values, such as num_attention_heads; each must agree with the tensors and with `config`.

    Returns:
        One line that says what was verified.

    Raises:
        ConversionError: the model or its tokenizer would not be the same in llama.cpp; nothing was written.
    """
    require_gguf()
    if outtype not in FILE_TYPES:
        raise ConversionError(f"--outtype {outtype}: expected one of {', '.join(FILE_TYPES)}")
    source, destination = Path(source), Path(destination)
    folder = find_tokenizer(source, tokenizer)
    if folder is None:
        raise ConversionError(f"{source} holds no tokenizer, and a GGUF file needs one: pass --tokenizer DIR")
    own_config = source / "config.json"
    config = Path(config) if config is not None else own_config if own_config.is_file() else None
    inputs = [source, *(folder / name for name in TOKENIZER_FILES), *([config] if config else [])]
    check_destination(destination, inputs, overwrite, GGUF_FILE)
    ollama = destination.parent / "Modelfile"
    if modelfile:
        if destination.suffix != ".gguf":
            raise ConversionError(f"{str(destination)!r}: a Modelfile can name a file only if it ends in .gguf")
        check_destination(ollama, inputs, overwrite, MODELFILE)

    checkpoint = load_checkpoint(source, config, flags)
    take_special_tokens(checkpoint.config, folder, given=read_json(config) if config else {})
    metadata = {
        **model_metadata(checkpoint.config, outtype),
        **tokenizer_metadata(folder, checkpoint.config),
        "general.name": (source.resolve().name if source.is_dir() else source.stem).encode(errors="replace").decode(),
    }
    stored = plan_tensors(checkpoint.config, outtype)
    text = make_modelfile(destination, source, folder, checkpoint.config) if modelfile else None
    with written_whole(destination, inputs, overwrite, GGUF_FILE) as draft:
        write_gguf(draft, metadata, stored, checkpoint.tensors)
        done = verify_gguf(draft, metadata, stored, checkpoint, outtype) if verify else "not verified"
    if text:
        with written_whole(ollama, inputs, overwrite, MODELFILE) as draft:
            draft.write_text(text, encoding="utf-8")
    return done + assumed(checkpoint)


def require_gguf():
    try:
        import gguf  # noqa: F401
    except ImportError as error:
        raise ConversionError("GGUF files need the gguf package: pip install 'minimind-hf[gguf]'") from error


# The model: which architecture of llama.cpp computes the same, and under which keys and tensor names.


def choose_architecture(config: MiniMindConfig) -> str:
    """Name llama.cpp's architecture that computes what this model computes.

    Raises:
        ConversionError: there is none; the message says what would be lost.
    """
    if config.hidden_act not in ("silu", "swish"):  # two names of one function
        raise ConversionError(f"hidden_act is {config.hidden_act}: llama.cpp's Qwen3 and Llama compute silu only")
    if not config.use_moe:
        return "qwen3" if config.use_qk_norm else "llama"
    if config.num_shared_experts:
        raise ConversionError(
            f"the shared experts ({config.num_shared_experts} per block) have no place in llama.cpp's qwen3moe and "
            "would be lost: this mixture of experts cannot become a GGUF file"
        )
    if not config.use_qk_norm:
        raise ConversionError(
            "llama.cpp's qwen3moe norms queries and keys, which this model does not: this mixture of experts cannot "
            "become a GGUF file"
        )
    if not config.norm_topk_prob and config.num_experts_per_tok < config.num_experts:
        raise ConversionError(
            "norm_topk_prob is false, but llama.cpp's qwen3moe always scales the weights of the chosen experts to sum "
            "to one: the feed-forward of every block would be wrong"
        )
    return "qwen3moe"


def model_metadata(config: MiniMindConfig, outtype: str) -> dict[str, object]:
    """Make the keys of a GGUF file that describe the model."""
    import gguf

    general, model, attention = gguf.Keys.General, gguf.Keys.LLM, gguf.Keys.Attention
    architecture = choose_architecture(config)
    values = {
        general.ARCHITECTURE: architecture,
        general.TYPE: gguf.GGUFType.MODEL,
        general.FILE_TYPE: int(gguf.LlamaFileType[FILE_TYPES[outtype]]),
        general.QUANTIZATION_VERSION: gguf.GGML_QUANT_VERSION,
        model.VOCAB_SIZE: config.vocab_size,
        model.CONTEXT_LENGTH: config.max_position_embeddings,
        model.EMBEDDING_LENGTH: config.hidden_size,
        model.BLOCK_COUNT: config.num_hidden_layers,
        model.FEED_FORWARD_LENGTH: config.intermediate_size,
        attention.HEAD_COUNT: config.num_attention_heads,
        attention.HEAD_COUNT_KV: config.num_key_value_heads,
        attention.KEY_LENGTH: config.head_dim,
        attention.VALUE_LENGTH: config.head_dim,
        attention.LAYERNORM_RMS_EPS: float(config.rms_norm_eps),
        **rope_metadata(config),
    }
    if config.use_moe:
        values[model.EXPERT_COUNT] = config.num_experts
        values[model.EXPERT_USED_COUNT] = config.num_experts_per_tok
        values[model.EXPERT_FEED_FORWARD_LENGTH] = config.moe_intermediate_size
    values = {key.format(arch=architecture): value for key, value in values.items()}
    for key, value in values.items():
        most = {int: 2**32 - 1, float: float(np.finfo(np.float32).max)}.get(type(value))
        if most is not None and value > most:
            raise ConversionError(f"{key} is {value}: a GGUF file has 32 bits for it, which hold {most:.6g} at most")
    return values


def rope_metadata(config: MiniMindConfig) -> dict[str, object]:
    """Make the keys that describe the rotary embedding, after checking that llama.cpp computes the same one.

    Raises:
        ConversionError: llama.cpp has no such rotary embedding.
    """
    import gguf

    rope_type = config.rope_parameters["rope_type"]
    if rope_type not in ("default", "linear", "yarn"):
        raise ConversionError(
            f"rope_type is {rope_type}, which llama.cpp does not have: its output would differ. It has default, "
            "linear and yarn"
        )
    rotary = MiniMindRotaryEmbedding(config)
    rope = config.rope_parameters
    expected = torch.from_numpy(llama_cpp_frequencies(rope, config.head_dim))
    if not torch.allclose(rotary.inv_freq.double(), expected, rtol=1e-5, atol=0):
        raise ConversionError(
            f"llama.cpp computes other frequencies from the rope parameters {rope}: its yarn always has beta_fast 32, "
            "beta_slow 1, truncated bounds and a whole number of original positions"
        )
    values = {gguf.Keys.Rope.DIMENSION_COUNT: config.head_dim, gguf.Keys.Rope.FREQ_BASE: float(rope["rope_theta"])}
    if rope_type != "default":
        values[gguf.Keys.Rope.SCALING_TYPE] = rope_type
        values[gguf.Keys.Rope.SCALING_FACTOR] = float(rope["factor"])
    if rope_type == "yarn":
        # llama.cpp multiplies cos and sin by 1 + ln(factor) / 10, and by this.
        own_scaling = 1 + 0.1 * math.log(max(rope["factor"], 1))
        values[gguf.Keys.Rope.SCALING_ATTN_FACTOR] = rotary.attention_scaling / own_scaling
        values[gguf.Keys.Rope.SCALING_ORIG_CTX_LEN] = int(rope["original_max_position_embeddings"])
    return values


def llama_cpp_frequencies(rope: dict, head_dim: int) -> np.ndarray:
    """Return the frequencies [D / 2] that llama.cpp computes for rope parameters, in radians per position.

    Source: `ggml_rope_yarn_corr_dims` and `rope_yarn` of ggml, with the constants 32 and 1 of its Qwen3 and Llama.
    """
    pairs = np.arange(head_dim // 2)
    frequencies = rope["rope_theta"] ** (-2 * pairs / head_dim)
    if rope["rope_type"] != "yarn":
        return frequencies / rope.get("factor", 1)

    def pair_that_turns(times: int) -> float:
        positions = max(1, int(rope["original_max_position_embeddings"]))
        return head_dim * math.log(positions / (times * 2 * math.pi)) / (2 * math.log(rope["rope_theta"]))

    low, high = max(0, math.floor(pair_that_turns(32))), min(head_dim - 1, math.ceil(pair_that_turns(1)))
    slowed = np.clip((pairs - low) / max(0.001, high - low), 0, 1)  # 0: as trained, 1: slower by the factor
    return frequencies * (1 - slowed) + frequencies / rope["factor"] * slowed


def plan_tensors(config: MiniMindConfig, outtype: str) -> list[StoredTensor]:
    """List the tensors of the file in order, with their names and types."""
    import gguf

    architecture = gguf.MODEL_ARCH[choose_architecture(config).upper()]
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    shapes = expected_shapes(config)
    parts = {}
    for name in shapes:
        parts.setdefault(re.sub(r"\.experts\.\d+\.", ".experts.", name), []).append(name)

    stored = []
    for name, members in parts.items():
        stacked = members != [name]
        shape = (len(members),) * stacked + shapes[members[0]]
        tensor_type = outtype.upper()
        if len(shape) == 1 or name.endswith(".mlp.gate.weight"):
            tensor_type = "F32"  # llama.cpp multiplies norms in float32, and chooses experts in it
        elif tensor_type == "Q8_0" and shape[-1] % 32:
            tensor_type = "F16"
        is_interleaved = architecture == gguf.MODEL_ARCH.LLAMA and name.endswith(ROTARY_PROJECTIONS)
        new_name = names.get_name(name, try_suffixes=(".weight",))
        interleaved = config.head_dim if is_interleaved else 0
        stored.append(StoredTensor(new_name, tuple(members), stacked, interleaved, tensor_type, shape))
    return stored


# The tokenizer.


def tokenizer_metadata(folder: Path, config: MiniMindConfig) -> dict[str, object]:
    """Make the keys of a GGUF file that hold the tokenizer of a folder.

    Raises:
        ConversionError: llama.cpp would split text into other tokens.
    """
    import gguf

    tokenizer = load_tokenizer(folder)
    if not hasattr(tokenizer, "backend_tokenizer"):
        raise ConversionError(f"the tokenizer in {folder} has no tokenizer.json, which a GGUF file is made from")
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    check_tokenizer(state, folder)
    tokens, types = list_tokens(state, config.vocab_size, folder)
    add_bos, add_eos = added_around_text(tokenizer, folder)
    keys = gguf.Keys.Tokenizer
    values = {
        keys.MODEL: "gpt2",
        keys.PRE: "gpt-2",
        keys.LIST: tokens,
        keys.TOKEN_TYPE: types,
        keys.MERGES: [merge if isinstance(merge, str) else " ".join(merge) for merge in state["model"]["merges"]],
        keys.BOS_ID: config.bos_token_id,
        keys.PAD_ID: config.pad_token_id,
        keys.UNK_ID: tokenizer.unk_token_id,
        keys.ADD_BOS: add_bos,
        keys.ADD_EOS: add_eos,
        **dict(zip(END_KEYS, end_tokens(config, tokenizer.eos_token_id), strict=False)),
    }
    templates = tokenizer.chat_template or {}
    for name, template in (templates if isinstance(templates, dict) else {"default": templates}).items():
        if not isinstance(template, str) or SURROGATE.search(template):
            raise ConversionError(f"the chat template in {folder} is not a text: {template!r:.80}")
        values[keys.CHAT_TEMPLATE if name == "default" else keys.CHAT_TEMPLATE_N.format(name=name)] = template
    return {key: value for key, value in values.items() if value is not None}


def check_tokenizer(state: dict, folder: Path):
    """Raise unless a tokenizer.json is byte-level BPE with GPT-2's splitting, as llama.cpp's "gpt-2" is."""
    from tokenizers.pre_tokenizers import ByteLevel

    faults = []
    for section, required in REQUIRED_OF_TOKENIZER.items():
        found = state[section] or {}
        faults += [
            f"{section}.{key} is {found.get(key)!r} instead of {value!r}"
            for key, value in required.items()
            if (found.get(key) or None) != (value or None)
        ]
    if state["normalizer"]:
        faults.append(f"it has a normalizer ({state['normalizer'].get('type')})")
    if not faults and not set(ByteLevel.alphabet()) <= state["model"]["vocab"].keys():
        faults.append("some of the 256 bytes are no token")
    if not faults and not state["model"]["merges"]:
        faults.append("it has no merges")
    added = state["added_tokens"]
    choosy = [token["content"] for token in added if token["lstrip"] or token["rstrip"] or token["single_word"]]
    if choosy:
        faults.append(f"lstrip, rstrip or single_word is set on {some_names(choosy)}")
    overlapping = find_overlaps([token["content"] for token in added])
    if overlapping:
        faults.append(f"one added token can begin within another: {some_names(overlapping)}")
    if faults:
        raise ConversionError(
            f"llama.cpp would split text otherwise than the tokenizer in {folder}: {'; '.join(faults)}"
        )


def find_overlaps(texts: list[str]) -> list[str]:
    """Return the texts whose end begins another one: llama.cpp splits off the longer first, a tokenizer the first."""
    starts = {}
    for text in texts:
        for length in range(1, len(text)):
            starts.setdefault(text[:length], set()).add(text)
    return [
        text for text in texts if any(starts.get(text[-length:], set()) - {text} for length in range(1, len(text)))
    ]


def list_tokens(state: dict, vocab_size: int, folder: Path) -> tuple[list[str], list[int]]:
    """Return the text and the type of every token id of the model; ids without a token become unused tokens."""
    from gguf import TokenType

    tokens = {number: (text, TokenType.NORMAL) for text, number in state["model"]["vocab"].items()}
    for token in state["added_tokens"]:
        token_type = TokenType.CONTROL if token["special"] else TokenType.USER_DEFINED
        tokens[token["id"]] = token["content"], token_type
    if max(tokens) >= vocab_size:
        raise ConversionError(
            f"the tokenizer in {folder} has a token {max(tokens)}, but the model only {vocab_size} embeddings"
        )
    listed = [tokens.get(number, (f"<|unused_{number}|>", TokenType.UNUSED)) for number in range(vocab_size)]
    texts = [text for text, _ in listed]
    if len(set(texts)) < len(texts):
        repeated = {text for text in texts if texts.count(text) > 1}
        raise ConversionError(f"the tokenizer in {folder} has several tokens of the same text: {some_names(repeated)}")
    return texts, [int(token_type) for _, token_type in listed]


def added_around_text(tokenizer, folder: Path) -> tuple[bool, bool]:
    """Say whether the tokenizer puts bos before a text, and eos behind it."""
    plain, whole = tokenizer("a", add_special_tokens=False)["input_ids"], tokenizer("a")["input_ids"]
    for add_bos, add_eos in itertools.product([False, True], repeat=2):
        if [tokenizer.bos_token_id] * add_bos + plain + [tokenizer.eos_token_id] * add_eos == whole:
            return add_bos, add_eos
    raise ConversionError(
        f"the tokenizer in {folder} makes {whole} of a text whose tokens are {plain}: llama.cpp can add "
        "bos and eos only"
    )


def end_tokens(config: MiniMindConfig, tokenizer_eos: int | None) -> list[int]:
    """Return the token ids that end an answer, that of the tokenizer first.

    Raises:
        ConversionError: there is none, or there are more than a GGUF file can name.
    """
    ids = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    ids = [number for number in dict.fromkeys(ids) if number is not None]
    ids.sort(key=lambda number: number != tokenizer_eos)
    if not ids:
        raise ConversionError("neither the config nor the tokenizer has an eos token: llama.cpp would stop anywhere")
    if len(ids) > len(END_KEYS):
        raise ConversionError(f"eos_token_id is {ids}: a GGUF file can name {len(END_KEYS)} tokens that end an answer")
    return ids


# The file.


def write_gguf(path: Path, metadata: dict, stored: list[StoredTensor], tensors: dict[str, torch.Tensor]):
    """Write a GGUF file, one tensor in memory at a time."""
    import gguf

    kinds = gguf.GGUFValueType
    kinds = {bool: kinds.BOOL, int: kinds.UINT32, float: kinds.FLOAT32, str: kinds.STRING, list: kinds.ARRAY}
    with closing(gguf.GGUFWriter(path, metadata[gguf.Keys.General.ARCHITECTURE])) as writer:
        for key, value in metadata.items():
            if key != gguf.Keys.General.ARCHITECTURE:  # the writer's own
                writer.add_key_value(key, value, kinds[type(value)])
        for tensor in stored:
            kind = gguf.GGMLQuantizationType[tensor.type]
            size = math.prod(gguf.quant_shape_to_byte_shape(tensor.shape, kind))
            writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), size, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for tensor in progress(stored, "Writing"):
            writer.write_tensor_data(encode(tensor, tensors))


def encode(stored: StoredTensor, tensors: dict[str, torch.Tensor]) -> np.ndarray:
    """Return the bytes of a tensor of the file.

    Raises:
        ConversionError: a value is beyond the range of the type.
    """
    import gguf

    parts = [tensors[name] for name in stored.parts]
    values = torch.stack(parts) if stored.stacked else parts[0].contiguous()
    if stored.interleaved:
        values = pair_neighbours(values, stored.interleaved)
    if stored.type == "Q8_0":
        with np.errstate(over="ignore"):  # reported below
            encoded = gguf.quants.quantize(values.float().numpy(), gguf.GGMLQuantizationType.Q8_0)
        scales = np.ascontiguousarray(encoded.reshape(-1, 34)[:, :2]).view(np.float16)  # of each block of 32 values
        in_range = np.isfinite(scales).all()
    else:
        cast = values.to(DTYPES[stored.type])
        in_range = torch.isfinite(cast).all()
        encoded = cast.contiguous().view(torch.uint8).numpy()
    if not in_range:
        wider = "f32" if stored.type in ("F32", "BF16") else "bf16 or f32"
        raise ConversionError(
            f"{stored.parts[0]} holds values up to {values.abs().max():.6g}, beyond the range of {stored.type}: use "
            f"--outtype {wider}"
        )
    return encoded


def verify_gguf(path: Path, metadata: dict, stored: list[StoredTensor], checkpoint: Checkpoint, outtype: str) -> str:
    """Read a GGUF file back, check its metadata and every tensor against the checkpoint, and say what was checked.

    Raises:
        ConversionError: something in the file is not what it should be.
    """
    import gguf

    reader = gguf.GGUFReader(path)
    check_contents(reader, metadata, stored)
    restored, count = {}, 0
    for tensor, data in zip(progress(stored, "Verifying"), reader.tensors, strict=True):
        for name, values in decode(tensor, data).items():
            if not (is_rounded if tensor.type == "Q8_0" else is_cast)(values, checkpoint.tensors[name]):
                raise ConversionError(f"verification failed: {name} differs from the source")
            count += values.numel()
            if outtype == "q8_0":
                restored[name] = values
    read_back = f"{len(stored)} tensors with {count:,} values and {len(metadata)} entries read back"
    if outtype != "q8_0":
        return f"verified: {read_back}, bit for bit equal to the source in {outtype}"
    return f"verified: {read_back}, {compare_quantized(checkpoint, restored)}"


def is_cast(values: torch.Tensor, source: torch.Tensor) -> bool:
    """Whether values are bitwise those of the source in their own dtype."""
    return torch.equal(values, source.to(values.dtype))


def is_rounded(values: torch.Tensor, source: torch.Tensor) -> bool:
    """Whether 8-bit values are those of the source, to half a step of each block of 32, and the error of its scale."""
    source, values = source.reshape(-1, 32).float(), values.reshape(-1, 32)
    largest = source.abs().amax(dim=1, keepdim=True)
    scale_error = 2**-11 * largest + 127 * 2**-25  # of a float16: relative, or absolute for the smallest
    return bool(((values - source).abs() <= 0.501 / 127 * largest + scale_error).all())


def check_contents(reader, metadata: dict, stored: list[StoredTensor]):
    """Raise unless a file read back has these metadata, and tensors of these names, types and shapes in this order."""
    found = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    expected = {key: float(np.float32(v)) if isinstance(v, float) else v for key, v in metadata.items()}
    wrong = {key for key in found.keys() | expected.keys() if found.get(key) != expected.get(key)}
    tensors = [(tensor.name, tensor.tensor_type.name, (*tensor.shape[::-1].tolist(),)) for tensor in reader.tensors]
    if tensors != [(tensor.name, tensor.type, tensor.shape) for tensor in stored]:
        wrong.add("the list of tensors")
    if wrong:
        raise ConversionError(f"verification failed: read back otherwise than written: {some_names(wrong)}")


def decode(stored: StoredTensor, tensor) -> dict[str, torch.Tensor]:
    """Return the checkpoint tensors that a tensor of the file holds, in the dtype of the file; 8-bit as float32."""
    import gguf

    if stored.type == "Q8_0":
        values = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type))
    else:
        values = torch.from_numpy(np.array(tensor.data)).view(DTYPES[stored.type])
    values = values.reshape(stored.shape)
    if stored.interleaved:
        values = pair_halves(values, stored.interleaved)
    return dict(zip(stored.parts, values.unbind() if stored.stacked else [values], strict=True))


def compare_quantized(checkpoint: Checkpoint, restored: dict[str, torch.Tensor]) -> str:
    """Compare the logits of the 8-bit model with those of its source, and say how near they are.

    Raises:
        ConversionError: they are too far apart.
    """
    result = compare_logits(
        build_model(checkpoint), build_model(Checkpoint(checkpoint.source, restored, checkpoint.config))
    )
    most, least = LIMITS_OF_EXPERTS if checkpoint.config.use_moe else LIMITS_OF_DENSE
    found = (
        f"logits {result.kl_divergence:.2g} nats from the source (at most {most}), with the same greedy token at "
        f"{result.greedy_agreement:.1%} of {result.positions} positions (at least {least:.0%})"
    )
    if result.kl_divergence > most or result.greedy_agreement < least:
        raise ConversionError(f"eight bits change this model too much: {found}. Use --outtype bf16 or f16")
    return found
