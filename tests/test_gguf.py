"""GGUF export: the file as the gguf package reads it, and as llama.cpp runs it."""

import json
import shutil
import sys

import numpy as np
import pytest
import torch
from conftest import CASES_OF, FACTS, FIXTURES, MOE, case_name, needs_facts, tiny_model
from safetensors.torch import load_file
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from minimind_hf.convert import ConversionError, gguf_export
from minimind_hf.convert.gguf_export import to_gguf

gguf = pytest.importorskip("gguf", reason="the gguf package is not installed")
try:
    import llama_cpp
except ImportError:
    llama_cpp = None
else:
    say_nothing = llama_cpp.llama_log_callback(lambda *_: None)  # a reference, which llama.cpp does not hold
    llama_cpp.llama_log_set(say_nothing, None)
needs_llama_cpp = pytest.mark.skipif(llama_cpp is None, reason="llama-cpp-python is not installed")

TOKENIZER = FIXTURES / "tokenizer"
DENSE = FIXTURES / "minimind3" / "dense"
CHECKPOINTS = {"dense": "full_sft_256.pth", "moe": "full_sft_192_moe.pth"}

# Cases without a twin in llama.cpp: shared experts, or weights of the chosen experts that do not sum to one.
REFUSED = {
    "minimind3-moe-unnormalized": "norm_topk_prob",
    "minimind2-moe": r"shared experts \(1 per block\)",
    "minimind2-early-moe": r"shared experts \(1 per block\)",
    "minimind1-moe": r"shared experts \(1 per block\)",
}
CASES = [case for cases in CASES_OF.values() for case in cases]
YARN = {"rope_type": "yarn", "factor": 16, "original_max_position_embeddings": 2048}
EXPORTED = [case for case in CASES if case_name(case) not in REFUSED]


class LlamaCpp:
    """A GGUF file in llama.cpp, on one thread; `context` is the room of each sequence, in tokens."""

    def __init__(self, path, context=512, sequences=1):
        options = llama_cpp.llama_model_default_params()
        options.use_extra_bufts = False  # some builds crash where they repack 8-bit weights for AMX
        self.model = llama_cpp.llama_model_load_from_file(str(path).encode(), options)
        assert self.model, f"llama.cpp does not load {path}"
        self.vocabulary = llama_cpp.llama_model_get_vocab(self.model)
        options = llama_cpp.llama_context_default_params()
        options.n_ctx = options.n_batch = options.n_ubatch = context * sequences
        options.n_seq_max = sequences
        options.n_threads = options.n_threads_batch = 1
        options.type_k = options.type_v = llama_cpp.GGML_TYPE_F32
        options.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
        self.context = llama_cpp.llama_init_from_model(self.model, options)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        llama_cpp.llama_free(self.context)
        llama_cpp.llama_model_free(self.model)

    def forget(self):
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.context), True)

    def logits(self, texts: dict[int, list[int]], start: dict | None = None, last: bool = False) -> dict:
        """Run some tokens of each sequence, behind the `start` tokens that it has seen; return logits [tokens, V]."""
        entries = [
            (token, (start or {}).get(sequence, 0) + offset, sequence, not last or offset == len(tokens) - 1)
            for sequence, tokens in texts.items()
            for offset, token in enumerate(tokens)
        ]
        batch = llama_cpp.llama_batch_init(len(entries), 0, 1)
        batch.n_tokens = len(entries)
        for index, (token, position, sequence, is_wanted) in enumerate(entries):
            batch.token[index], batch.pos[index], batch.logits[index] = token, position, is_wanted
            batch.n_seq_id[index], batch.seq_id[index][0] = 1, sequence
        assert llama_cpp.llama_decode(self.context, batch) == 0
        llama_cpp.llama_batch_free(batch)
        owners = np.array([sequence for _, _, sequence, is_wanted in entries if is_wanted])
        size = llama_cpp.llama_vocab_n_tokens(self.vocabulary)
        values = np.ctypeslib.as_array(llama_cpp.llama_get_logits(self.context), shape=(len(owners), size)).copy()
        return {sequence: values[owners == sequence] for sequence in texts}

    def answer(self, prompts: list[list[int]], limit: int = 64) -> list[list[int]]:
        """Answer every prompt greedily, until llama.cpp itself says that the answer has ended."""
        self.forget()
        answers, running = [[] for _ in prompts], dict(enumerate(prompts))
        start = dict.fromkeys(running, 0)
        while running:
            logits = self.logits(running, start, last=True)
            for number, tokens in list(running.items()):
                start[number] += len(tokens)
                token = int(logits[number][-1].argmax())
                if llama_cpp.llama_vocab_is_eog(self.vocabulary, token):
                    del running[number]
                    continue
                answers[number].append(token)
                assert len(answers[number]) < limit, "the answer does not end"
                running[number] = [token]
        return answers

    def tokenize(self, text: str) -> list[int]:
        encoded = text.encode()
        room = len(encoded) + 8
        ids = (llama_cpp.llama_token * room)()
        count = llama_cpp.llama_tokenize(self.vocabulary, encoded, len(encoded), ids, room, True, True)
        return ids[:count]


def byte_level(merges=(("t", "h"), ("th", "e")), **options) -> Tokenizer:
    """A tokenizer of the 256 bytes as ids 3 to 258 and a few merges, besides the special tokens 0 to 2."""
    tokens = ["<pad>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet()), *map("".join, merges)]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=list(merges), **options))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder):
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<pad>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def small_tokenizer(tmp_path_factory):
    return save_tokenizer(byte_level(), tmp_path_factory.mktemp("tokenizer"))


def enlarged(case, folder, rows=100):
    """Copy a tiny checkpoint, its vocabulary enlarged by zeros so that it has room for a byte-level tokenizer.

    The logits of its own tokens do not change.
    """
    tensors = torch.load(case / "weights.pth", weights_only=True)
    for name in ("model.embed_tokens", "lm_head", "tok_embeddings", "output"):
        if f"{name}.weight" in tensors:
            weight = tensors[f"{name}.weight"]
            tensors[f"{name}.weight"] = torch.cat([weight, weight.new_zeros(rows, weight.shape[1])])
    config = json.loads((case / "hf_config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": config["vocab_size"] + rows}))
    torch.save(tensors, folder / "weights.pth")
    return {"source": folder / "weights.pth", "config": folder / "config.json"}


def saved(model, folder):
    model.save_pretrained(folder)
    return folder


def assert_runs_alike(path, model, length):
    """Check that llama.cpp gives the logits of a model for random tokens."""
    ids = torch.randint(model.config.vocab_size, (1, length), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        expected = model(ids).logits[0].numpy()
    with LlamaCpp(path, length) as llama:
        found = llama.logits({0: ids[0].tolist()})[0]
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)


# Run by llama.cpp.


@needs_llama_cpp
@pytest.mark.parametrize("case", EXPORTED, ids=case_name)
def test_llama_cpp_computes_the_logits_of_the_reference(case, tmp_path, small_tokenizer):
    to_gguf(destination=tmp_path / "x.gguf", outtype="f32", tokenizer=small_tokenizer, **enlarged(case, tmp_path))
    golden = load_file(case / "golden.safetensors")
    with LlamaCpp(tmp_path / "x.gguf", context=3072 if "long_input_ids" in golden else 128, sequences=2) as llama:
        found = llama.logits(dict(enumerate(golden["input_ids"].tolist())))
        for number, expected in enumerate(golden["logits"]):
            np.testing.assert_allclose(found[number][:, :192], expected, rtol=0, atol=2e-5)
        if "long_input_ids" in golden:
            llama.forget()
            found = llama.logits({0: golden["long_input_ids"][0].tolist()})[0]
            np.testing.assert_allclose(found[-8:, :192], golden["long_logits_last8"][0], rtol=0, atol=2e-5)


@needs_llama_cpp
@pytest.mark.parametrize(
    "sizes",
    [
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e12}},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}},
        {"rope_parameters": {**YARN, "original_max_position_embeddings": 64}},
        {"rope_parameters": {**YARN, "attention_factor": 0.3}},
        {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 20, "hidden_size": 48, "hidden_act": "swish"},
        {"use_qk_norm": False, "num_key_value_heads": 4, "tie_word_embeddings": False},
        {**MOE, "norm_topk_prob": False, "num_experts_per_tok": 4},
        {**MOE, "num_experts": 1, "num_experts_per_tok": 1},
    ],
    ids="theta linear yarn yarn-scaling one-kv-head no-qk-norm-untied all-experts one-expert".split(),
)
def test_llama_cpp_computes_the_same_logits(sizes, tmp_path, small_tokenizer):
    model = tiny_model(vocab_size=270, **sizes)
    to_gguf(saved(model, tmp_path / "model"), tmp_path / "x.gguf", "f32", tokenizer=small_tokenizer)
    assert_runs_alike(tmp_path / "x.gguf", model, length=200)


@needs_facts
@needs_llama_cpp
@pytest.mark.parametrize("outtype", ["f32", "bf16", "q8_0"])
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_llama_cpp_answers_every_question_as_recorded(name, outtype, tmp_path):
    to_gguf(FACTS / name / CHECKPOINTS[name], tmp_path / "x.gguf", outtype, tokenizer=TOKENIZER)
    answers = json.loads((FACTS / name / "answers.json").read_text(encoding="utf-8"))
    assert len(answers) == 230
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    chats = [[{"role": "user", "content": question}] for question in answers]
    prompts = tokenizer.apply_chat_template(chats, add_generation_prompt=True)["input_ids"]
    given = []
    with LlamaCpp(tmp_path / "x.gguf", context=64, sequences=46) as llama:
        for first in range(0, 230, 46):
            given += llama.answer(prompts[first : first + 46])
    assert [tokenizer.decode(answer).strip() for answer in given] == list(answers.values())


@needs_facts
@needs_llama_cpp
def test_chat_in_llama_cpp_stops_without_extra_arguments(tmp_path):
    to_gguf(FACTS / "dense" / CHECKPOINTS["dense"], tmp_path / "x.gguf", "f32", tokenizer=TOKENIZER)
    llama = llama_cpp.Llama(str(tmp_path / "x.gguf"), n_ctx=256, n_threads=1, n_threads_batch=1, verbose=False)
    answers = json.loads((FACTS / "dense" / "answers.json").read_text(encoding="utf-8"))
    for question in list(answers)[::60]:
        chat = [{"role": "user", "content": question}]
        choice = llama.create_chat_completion(chat, temperature=0, max_tokens=128)["choices"][0]
        assert (choice["message"]["content"].strip(), choice["finish_reason"]) == (answers[question], "stop")
    llama.close()


def texts_of_every_kind() -> dict[str, list[str]]:
    golden = json.loads((TOKENIZER / "golden.json").read_text(encoding="utf-8"))
    rendered = [rendering["rendered"] for rendering in golden["chat_template"].values()]
    spaces = [" ", "\n", "\t", "\r\n", "\xa0", "\u3000"]
    special = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<think>", "</think>", "<tool_call>", "<|buffer3|>"]
    return {
        "digits": [str(7**power) for power in range(0, 40, 2)]
        + ["3.14159", "1,000,000", "0x7f", "１２３", "٣٤", "Ⅻ ½ ²"],
        "dates": [f"20{year:02}-{year % 12 + 1:02}-28T{year:02}:59:0{year % 9}Z" for year in range(20)],
        "code": [
            f"def f_{n}(x, *y):\n{indent * n}return x**{n} if x != {n} else [y[-1]]  # {{}}\n\n"
            for n in range(1, 9)
            for indent in ("\t", "    ")
        ],
        "Chinese": [
            text[start:] for text in ["你好，世界！今天天气很好。", "《红楼梦》：一百二十回……"] for start in range(10)
        ],
        "blank lines": [
            f"one{line * count}two{line * count}" for line in ("\n", "\r\n", " \n") for count in range(1, 9)
        ],
        "spaces": [
            f"{space * count}a{space * count}b{space * count}" for space in spaces for count in (1, 2, 3, 17, 64)
        ],
        "edges": [f"{left}word{right}" for left in ("", " ", "  ", "\n") for right in ("", " ", "  ", "\n\n")],
        "contractions": [
            f"{word}{mark}{tail}"
            for word in ("I", "they")
            for mark in "'’"
            for tail in "s t re ve m ll d S LL x".split()
        ],
        "emoji": ["😀", "👍🏽", "👨\u200d👩\u200d👧", "🇨🇳🇫🇷", "a😀b 😀 c", "❤️", "1️⃣2️⃣", "🏴\U000e0067\U000e0062"],
        "accents": [
            "café",
            "cafe\u0301",
            "Zürich",
            "Ångström",
            "naïve coöperation",
            "e\u0301\u0302",
            "ﬁ ﬂ",
            "İstanbul",
        ],
        "scripts": [
            "Привет, мир",
            "γειά σου",
            "שלום",
            "مرحبا",
            "नमस्ते",
            "สวัสดี",
            "안녕하세요",
            "こんにちは",
            "mixed 混合 смесь",
        ],
        "special": [f"{token}user{space}{token}" for token in special for space in ("", " ", "\n")]
        + ["<|im_start", "<|im_end|", "<<think>>", "<think></think>", "< think>", "<|IM_END|>"],
        "symbols": [
            "!?…—",
            "$€¥",
            "a+b=c",
            "“quoted”",
            "\\n\\t",
            "\x00\x01\x7f",
            "\u200b\ufeff\u2028",
            "\u0378 \U000e1000",
        ],
        "templates": [*rendered, ""],
    }


@needs_llama_cpp
def test_llama_cpp_splits_text_as_the_tokenizer_does(tmp_path):
    model = saved(tiny_model(vocab_size=6400, hidden_size=32, num_hidden_layers=1), tmp_path / "model")
    to_gguf(model, tmp_path / "x.gguf", tokenizer=TOKENIZER)
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    texts = texts_of_every_kind()
    assert sum(len(set(of_kind)) for of_kind in texts.values()) >= 200
    with LlamaCpp(tmp_path / "x.gguf") as llama:
        for example in json.loads((TOKENIZER / "golden.json").read_text(encoding="utf-8"))["encodings"]:
            assert llama.tokenize(example["text"]) == example["ids"]
        for kind, of_kind in texts.items():
            differing = [text for text in of_kind if llama.tokenize(text) != tokenizer(text)["input_ids"]]
            assert not differing, kind


@needs_llama_cpp
def test_llama_cpp_adds_bos_and_eos_where_the_tokenizer_does(tmp_path):
    tokenizer = byte_level()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)])
    folder = save_tokenizer(tokenizer, tmp_path / "tokenizer")
    to_gguf(saved(tiny_model(vocab_size=261), tmp_path / "model"), tmp_path / "x.gguf", tokenizer=folder)
    with LlamaCpp(tmp_path / "x.gguf") as llama:
        assert llama.tokenize("the") == AutoTokenizer.from_pretrained(folder)("the")["input_ids"] == [1, 260, 2]


# Read by the gguf package.


def contents(path) -> dict:
    return {key: field.contents() for key, field in gguf.GGUFReader(path).fields.items()}


def stored_tensors(path) -> dict:
    return {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}


def test_metadata_of_a_mixture_of_experts(tmp_path):
    model = tiny_model(vocab_size=6404, head_dim=24, eos_token_id=[0, 2], **MOE)
    to_gguf(saved(model, tmp_path / "my model"), tmp_path / "x.gguf", "bf16", tokenizer=TOKENIZER)
    found = contents(tmp_path / "x.gguf")
    expected = {
        "general.architecture": "qwen3moe",
        "general.type": "model",
        "general.name": "my model",
        "general.file_type": 32,  # mostly bf16
        "general.quantization_version": 2,
        "qwen3moe.vocab_size": 6404,
        "qwen3moe.context_length": 256,
        "qwen3moe.embedding_length": 64,
        "qwen3moe.block_count": 2,
        "qwen3moe.feed_forward_length": 256,
        "qwen3moe.expert_count": 4,
        "qwen3moe.expert_used_count": 2,
        "qwen3moe.expert_feed_forward_length": 96,
        "qwen3moe.attention.head_count": 4,
        "qwen3moe.attention.head_count_kv": 2,
        "qwen3moe.attention.key_length": 24,
        "qwen3moe.attention.value_length": 24,
        "qwen3moe.attention.layer_norm_rms_epsilon": pytest.approx(1e-6),
        "qwen3moe.rope.dimension_count": 24,
        "qwen3moe.rope.freq_base": 1e6,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,  # the tokenizer's, although the config names it last
        "tokenizer.ggml.eot_token_id": 0,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.ggml.add_eos_token": False,
        "tokenizer.chat_template": AutoTokenizer.from_pretrained(TOKENIZER).chat_template,
    }
    long = {"tokenizer.ggml.tokens", "tokenizer.ggml.token_type", "tokenizer.ggml.merges"}
    assert {key: value for key, value in found.items() if key not in long and not key.startswith("GGUF.")} == expected

    file = json.loads((TOKENIZER / "tokenizer.json").read_text(encoding="utf-8"))
    tokens, types = found["tokenizer.ggml.tokens"], found["tokenizer.ggml.token_type"]
    assert {token: number for number, token in enumerate(tokens[:6400])} == file["model"]["vocab"]
    assert types == [3] * 21 + [4] * 15 + [1] * 6364 + [5] * 4  # control, user-defined, normal, unused
    assert [merge.split(" ") for merge in found["tokenizer.ggml.merges"]] == file["model"]["merges"]


def test_metadata_of_yarn_with_attention_factor_one(tmp_path, small_tokenizer):
    case = enlarged(FIXTURES / "minimind3" / "yarn", tmp_path)
    to_gguf(destination=tmp_path / "x.gguf", tokenizer=small_tokenizer, **case)
    scaling = {key: value for key, value in contents(tmp_path / "x.gguf").items() if ".rope.scaling." in key}
    assert scaling == {
        "qwen3.rope.scaling.type": "yarn",
        "qwen3.rope.scaling.factor": 16,
        "qwen3.rope.scaling.original_context_length": 2048,
        # 1 / (1 + ln(16) / 10), since llama.cpp itself multiplies by 1 + ln(16) / 10
        "qwen3.rope.scaling.attn_factor": pytest.approx(0.7829266),
    }


@pytest.mark.parametrize("outtype, dtype", [("f32", "<f4"), ("f16", "<f2"), ("bf16", "<u2")])
def test_tensors_are_those_of_the_checkpoint(outtype, dtype, tmp_path, small_tokenizer):
    case = enlarged(FIXTURES / "minimind3" / "moe-top2", tmp_path)
    to_gguf(destination=tmp_path / "x.gguf", outtype=outtype, tokenizer=small_tokenizer, **case)
    source = torch.load(case["source"], weights_only=True)
    found = stored_tensors(tmp_path / "x.gguf")
    assert len(found) == 2 + 2 * 12  # 8 of attention and norms, the router, 3 of the experts

    def expected(tensor):  # bfloat16 as NumPy knows it: the upper half of a float32, rounded to even
        values = tensor.float().numpy()
        if outtype != "bf16":
            return values.astype(dtype)
        bits = values.view(np.uint32)
        return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(dtype)

    pairs = {"token_embd": "model.embed_tokens", "blk.1.attn_k": "model.layers.1.self_attn.k_proj"}
    for name, original in pairs.items():
        np.testing.assert_array_equal(found[f"{name}.weight"].data.view(dtype), expected(source[f"{original}.weight"]))
    for part in ("gate", "up", "down"):
        experts = [source[f"model.layers.0.mlp.experts.{expert}.{part}_proj.weight"] for expert in range(5)]
        stacked = found[f"blk.0.ffn_{part}_exps.weight"].data.view(dtype)
        np.testing.assert_array_equal(stacked, expected(torch.stack(experts)))
    for name, original in {"attn_q_norm": "self_attn.q_norm", "ffn_gate_inp": "mlp.gate"}.items():
        values = found[f"blk.1.{name}.weight"].data
        np.testing.assert_array_equal(values, source[f"model.layers.1.{original}.weight"].float().numpy())
        assert values.dtype == np.float32


def test_eight_bits_are_half_a_step_off_at_most(tmp_path, small_tokenizer):
    model = saved(tiny_model(vocab_size=270, intermediate_size=80), tmp_path / "model")
    line = to_gguf(model, tmp_path / "x.gguf", "q8_0", tokenizer=small_tokenizer)
    assert "nats from the source (at most 0.02)" in line and "same greedy token at" in line
    source, found = load_file(model / "model.safetensors"), stored_tensors(tmp_path / "x.gguf")
    blocks = source["model.layers.0.self_attn.q_proj.weight"].numpy().reshape(-1, 32)
    stored = found["blk.0.attn_q.weight"].data.reshape(-1, 34)
    scales, steps = stored[:, :2].copy().view(np.float16).astype(np.float32), stored[:, 2:].view(np.int8)
    np.testing.assert_allclose(scales[:, 0], np.abs(blocks).max(axis=1) / 127, rtol=2**-11)
    assert (np.abs(scales * steps - blocks) <= 0.57 * scales).all()
    # 80 columns are no multiple of 32
    down = found["blk.0.ffn_down.weight"].data
    np.testing.assert_array_equal(down, source["model.layers.0.mlp.down_proj.weight"].numpy().astype(np.float16))
    assert found["blk.0.ffn_up.weight"].tensor_type.name == "Q8_0"


def test_queries_and_keys_of_llama_stand_in_neighbouring_pairs(tmp_path, small_tokenizer):
    case = enlarged(FIXTURES / "minimind2" / "dense", tmp_path)
    to_gguf(destination=tmp_path / "x.gguf", tokenizer=small_tokenizer, **case)
    source, found = torch.load(case["source"], weights_only=True), stored_tensors(tmp_path / "x.gguf")
    assert contents(tmp_path / "x.gguf")["general.architecture"] == "llama"
    order = [head * 16 + pair + half for head in range(2) for pair in range(8) for half in (0, 8)]
    key = source["model.layers.1.self_attn.k_proj.weight"].numpy()
    np.testing.assert_array_equal(found["blk.1.attn_k.weight"].data, key[order])
    value = source["model.layers.1.self_attn.v_proj.weight"].numpy()
    np.testing.assert_array_equal(found["blk.1.attn_v.weight"].data, value)


def test_early_generation_keeps_its_own_order_of_rows(tmp_path, small_tokenizer):
    case = enlarged(FIXTURES / "minimind1" / "dense", tmp_path)  # which pairs neighbours, as llama.cpp does
    to_gguf(destination=tmp_path / "x.gguf", tokenizer=small_tokenizer, **case)
    source, found = torch.load(case["source"], weights_only=True), stored_tensors(tmp_path / "x.gguf")
    query = source["layers.0.attention.wq.weight"].numpy()
    np.testing.assert_array_equal(found["blk.0.attn_q.weight"].data, query)


def test_tokenizer_of_the_source_folder_is_the_default(tmp_path):
    model = tiny_model(vocab_size=6400, hidden_size=32, num_hidden_layers=1)
    folder = saved(model, tmp_path / "model")
    with pytest.raises(ConversionError, match="--tokenizer"):
        to_gguf(folder, tmp_path / "x.gguf")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(TOKENIZER / name, folder / name)
    line = to_gguf(folder, tmp_path / "x.gguf")
    assert line.startswith("verified: 13 tensors with ") and "bit for bit equal to the source in f16" in line
    with pytest.raises(ConversionError, match="--overwrite"):
        to_gguf(folder, tmp_path / "x.gguf")
    assert to_gguf(folder, tmp_path / "x.gguf", overwrite=True, verify=False) == "not verified"


def test_named_chat_templates_are_kept(tmp_path):
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_level(), eos_token="</s>")
    tokenizer.chat_template = {"default": "{{ messages }}", "tool_use": "{{ tools }}"}
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    folder = saved(tiny_model(vocab_size=261), tmp_path / "model")
    to_gguf(folder, tmp_path / "x.gguf", tokenizer=tmp_path / "tokenizer")
    found = contents(tmp_path / "x.gguf")
    assert found["tokenizer.chat_template"] == "{{ messages }}"
    assert found["tokenizer.chat_template.tool_use"] == "{{ tools }}"


# Refused, with nothing written.


def assert_refused(match, source, tmp_path, **options):
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(ConversionError, match=match):
        to_gguf(source, tmp_path / "refused.gguf", **options)
    assert sorted(path.name for path in tmp_path.iterdir()) == before


@pytest.mark.parametrize("case", [case for case in CASES if case_name(case) in REFUSED], ids=case_name)
def test_model_without_a_twin_is_refused(case, tmp_path, small_tokenizer):
    assert_refused(REFUSED[case_name(case)], tmp_path=tmp_path, tokenizer=small_tokenizer, **enlarged(case, tmp_path))


@pytest.mark.parametrize(
    "changes, match",
    [
        ({"hidden_act": "gelu"}, "hidden_act is gelu"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type is dynamic"),
        ({"use_qk_norm": False, **MOE}, "norms queries and keys"),
        ({"max_position_embeddings": 2**32}, "qwen3.context_length is 4294967296"),
        ({"rope_parameters": {**YARN, "beta_fast": 8}}, "other frequencies"),
        ({"rope_parameters": {**YARN, "beta_slow": 4}}, "other frequencies"),
        ({"rope_parameters": {**YARN, "truncate": False}}, "other frequencies"),
        ({"rope_parameters": {**YARN, "original_max_position_embeddings": 0.5}}, "other frequencies"),
    ],
    ids="gelu dynamic no-qk-norm-moe context beta_fast beta_slow truncate less-than-one-position".split(),
)
def test_what_llama_cpp_would_compute_otherwise_is_refused(changes, match, tmp_path, small_tokenizer):
    model = tiny_model(vocab_size=270, num_hidden_layers=1, head_dim=32, **changes)
    assert_refused(match, saved(model, tmp_path / "model"), tmp_path, tokenizer=small_tokenizer)


def with_prefix_space():
    tokenizer = byte_level()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    return tokenizer


def with_digits_apart():
    tokenizer = byte_level()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(True), tokenizer.pre_tokenizer])
    return tokenizer


def with_normalizer():
    tokenizer = byte_level()
    tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def with_added(*tokens):
    tokenizer = byte_level()
    tokenizer.add_tokens([AddedToken(token, **options) for token, options in tokens])
    return tokenizer


def with_prompt():
    tokenizer = byte_level()
    tokenizer.post_processor = processors.TemplateProcessing("<pad> $A", special_tokens=[("<pad>", 0)])
    return tokenizer


@pytest.mark.parametrize(
    "make, match",
    [
        (with_prefix_space, "add_prefix_space is True instead of False"),
        (with_digits_apart, "pre_tokenizer.type is 'Sequence'"),
        (with_normalizer, r"normalizer \(NFC\)"),
        (lambda: byte_level(dropout=0.1), "model.dropout is 0.1"),
        (lambda: byte_level(ignore_merges=True), "model.ignore_merges is True"),
        (lambda: byte_level(merges=()), "no merges"),
        (lambda: with_added(("<x>", {"lstrip": True})), "lstrip, rstrip or single_word is set on <x>"),
        (lambda: with_added(("<x>", {}), ("x>y", {})), "begin within another: <x>"),
        (with_prompt, "bos and eos only"),
        (lambda: with_added(*((f"<{number}>", {}) for number in range(10))), "ids up to 270, but the model only 270"),
        (lambda: Tokenizer(models.WordLevel({"<pad>": 0, "<s>": 1, "</s>": 2})), "model.type is 'WordLevel'"),
    ],
    ids="prefix-space digits normalizer dropout ignore-merges no-merges lstrip overlap prompt large words".split(),
)
def test_tokenizer_that_llama_cpp_does_not_have_is_refused(make, match, tmp_path):
    model = saved(tiny_model(vocab_size=270, num_hidden_layers=1), tmp_path / "model")
    assert_refused(match, model, tmp_path, tokenizer=save_tokenizer(make(), tmp_path / "tokenizer"))


@pytest.mark.parametrize("template", [5, "\ud800", {"default": "{{ messages }}", "other": ["a"]}])
def test_chat_template_that_is_no_text_is_refused(template, tmp_path, small_tokenizer):
    folder = shutil.copytree(small_tokenizer, tmp_path / "tokenizer")
    config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    if isinstance(template, dict):
        template = [{"name": name, "template": text} for name, text in template.items()]
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": template}))
    model = saved(tiny_model(vocab_size=270, num_hidden_layers=1), tmp_path / "model")
    assert_refused("is not a text", model, tmp_path, tokenizer=folder)


def test_end_tokens_are_needed_and_no_more_than_three(tmp_path, small_tokenizer):
    model = tiny_model(vocab_size=270, num_hidden_layers=1, eos_token_id=[2, 5, 6, 7])
    assert_refused(r"\[2, 5, 6, 7\]", saved(model, tmp_path / "four"), tmp_path, tokenizer=small_tokenizer)
    model = tiny_model(vocab_size=270, num_hidden_layers=1, eos_token_id=[])
    PreTrainedTokenizerFast(tokenizer_object=byte_level()).save_pretrained(tmp_path / "tokenizer")
    assert_refused("eos token", saved(model, tmp_path / "none"), tmp_path, tokenizer=tmp_path / "tokenizer")


@pytest.mark.parametrize("outtype, largest", [("f16", 7e4), ("q8_0", 1e7)])
def test_value_beyond_the_range_is_named(outtype, largest, tmp_path, small_tokenizer):
    model = tiny_model(vocab_size=270, num_hidden_layers=1)
    with torch.no_grad():
        model.model.layers[0].self_attn.o_proj.weight[3, 5] = largest
    folder = saved(model, tmp_path / "model")
    match = r"model\.layers\.0\.self_attn\.o_proj\.weight .* bf16 or f32"
    assert_refused(match, folder, tmp_path, outtype=outtype, tokenizer=small_tokenizer)
    assert to_gguf(folder, tmp_path / "x.gguf", "bf16", tokenizer=small_tokenizer).startswith("verified")


def test_wrong_arguments_are_refused(tmp_path, small_tokenizer, monkeypatch):
    folder = saved(tiny_model(vocab_size=270, num_hidden_layers=1), tmp_path / "model")
    assert_refused("--outtype q4_0: expected one of f32, f16, bf16, q8_0", folder, tmp_path, outtype="q4_0")
    assert_refused("holds no tokenizer", folder, tmp_path, tokenizer=tmp_path)
    assert_refused(
        "--num-attention-heads is 8", folder, tmp_path, tokenizer=small_tokenizer, **{"num_attention_heads": 8}
    )
    copied = shutil.copytree(small_tokenizer, tmp_path / "tokenizer")
    before = (copied / "tokenizer.json").read_bytes()
    with pytest.raises(ConversionError, match="part of the source"):
        to_gguf(folder, copied / "tokenizer.json", tokenizer=copied, overwrite=True)
    assert (copied / "tokenizer.json").read_bytes() == before
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert_refused(r"pip install 'minimind-hf\[gguf\]'", folder, tmp_path, tokenizer=small_tokenizer)


# Verification finds what it is there to find.


@pytest.mark.parametrize("outtype", ["f32", "f16", "bf16", "q8_0"])
@pytest.mark.parametrize("fault", ["value", "metadata", "swap"])
def test_verification_finds_a_fault_in_the_file(fault, outtype, tmp_path, small_tokenizer, monkeypatch):
    folder = saved(tiny_model(vocab_size=270, num_hidden_layers=1), tmp_path / "model")
    write = gguf_export.write_gguf

    def write_wrongly(path, metadata, stored, tensors):
        if fault == "swap":
            first, second = (f"model.layers.0.mlp.{part}_proj.weight" for part in ("gate", "up"))
            tensors = {**tensors, first: tensors[second], second: tensors[first]}
        write(path, metadata, stored, tensors)
        content = bytearray(path.read_bytes())
        if fault == "value":
            last = gguf.GGUFReader(path).tensors[-2]  # the last projection
            content[last.data_offset + last.n_bytes - 1] ^= 0x40
        elif fault == "metadata":
            content = content.replace(b"<|unused_265|>", b"<|unused_365|>")
        path.write_bytes(content)

    monkeypatch.setattr(gguf_export, "write_gguf", write_wrongly)
    match = "tokenizer.ggml.tokens" if fault == "metadata" else "differs from the source"
    assert_refused(match, folder, tmp_path, outtype=outtype, tokenizer=small_tokenizer)


def test_model_that_eight_bits_spoil_is_refused(tmp_path, small_tokenizer):
    model = tiny_model(vocab_size=270, num_hidden_layers=1)
    with torch.no_grad():  # one large value in each block leaves no bits to the others
        model.model.embed_tokens.weight[:, ::32] = 300.0
    folder = saved(model, tmp_path / "model")
    assert_refused("--outtype bf16 or f16", folder, tmp_path, outtype="q8_0", tokenizer=small_tokenizer)
