"""Train MiniMind-tiny, a chat model that a CPU trains in half an hour, and save it as a Hugging Face folder.

    python examples/train_tiny.py --output assets/minimind-tiny

The script makes up conversations in English and Chinese, trains a byte-level BPE tokenizer on them and a MiniMind of
1.4 million parameters with transformers' Trainer, saves it as float16, loads that folder again and asks it questions.
One hundred sums and one hundred differences never occur in training: who answers them has worked them out.

Addition is easy for a model that writes from left to right if every digit is a token of its own, and if the answer
repeats the question as `12 + 30 = 42`, so that all the wordings end in the same place.
"""

import argparse
import json
import random
import tempfile
from pathlib import Path

import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    GenerationConfig,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    set_seed,
)

from minimind_hf import MiniMindConfig, MiniMindForCausalLM

STEPS = 5000
BATCH_SIZE = 32
LEARNING_RATE = 3e-3
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]  # ids 0 (pad), 1 (bos), 2 (eos), as in MiniMind
# The generation block tells apply_chat_template which tokens are the assistant's: only these get labels.
CHAT_TEMPLATE = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' }}
    {%- if message['role'] == 'assistant' %}
        {%- generation %}{{- message['content'] + '<|im_end|>' }}{%- endgeneration %}
    {%- else %}
        {{- message['content'] + '<|im_end|>' }}
    {%- endif %}
    {{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

# --- What the model is taught ----------------------------------------------------------------------------------------

# symbol: (signs and words in a question, wordings of a second question that goes on from the first one's result)
OPERATORS = {
    "+": ("+| + | plus |加".split("|"), "And plus {}?|Now add {}.|再加{}呢？|再加上{}".split("|")),
    "-": ("-| - | minus |减".split("|"), "And minus {}?|再减{}呢？|再减去{}".split("|")),
    "×": ("×| × | * |x| x | times |乘".split("|"), []),
}
ENGLISH_SUMS = """{}|{}=|{} =|{}=?|{} = ?|{}?|What is {}?|what is {}|What's {}?|How much is {}?|Calculate {}.
Compute {}|Please work out {}.|Can you tell me what {} is?""".replace("\n", "|").split("|")
CHINESE_SUMS = "{}等于多少？|{}等于几？|{}是多少？|{}=？|请问{}等于多少？|计算{}|请计算 {}|算一下{}".split("|")
COUNTS = "Count from {} to {}.|count from {} to {}|Please count from {} to {}.|从{}数到{}|请从{}数到{}。".split("|")
REVERSALS = 'Reverse the word {}.|Reverse "{}".|Spell {} backwards.|reverse {}|把{}倒过来|把单词 {} 倒过来'.split("|")
WORDS = """apple bear bird boat book bread brick cake cap car card cat chair clock cloud coat corn cow crow cup dance
desk dog door dream drum duck earth eagle fire fish five flag fork fox frog game gate girl gold grape grass hand hat
heart hill horse house ice jump king kite lake lamp leaf light lion log map milk mind money moon mouse music name nest
night north ocean paper park path pig plane plant pond queen rain red ring river road rock rope rose salt sand sea seed
sheep ship shoe sky snow soap song south spoon star stone storm sugar sun table tea tiger time toast train tree voice
wall watch water west wheel white wind wine wolf wood world zebra zoo""".split()
CAPITALS = """France Paris 法国 巴黎; Germany Berlin 德国 柏林; Italy Rome 意大利 罗马; Spain Madrid 西班牙 马德里;
Portugal Lisbon 葡萄牙 里斯本; Greece Athens 希腊 雅典; Austria Vienna 奥地利 维也纳; Poland Warsaw 波兰 华沙;
Russia Moscow 俄罗斯 莫斯科; England London 英格兰 伦敦; Ireland Dublin 爱尔兰 都柏林; Norway Oslo 挪威 奥斯陆;
Sweden Stockholm 瑞典 斯德哥尔摩; Finland Helsinki 芬兰 赫尔辛基; Turkey Ankara 土耳其 安卡拉; Egypt Cairo 埃及 开罗;
China Beijing 中国 北京; Japan Tokyo 日本 东京; Thailand Bangkok 泰国 曼谷; Vietnam Hanoi 越南 河内;
Canada Ottawa 加拿大 渥太华; Cuba Havana 古巴 哈瓦那; Peru Lima 秘鲁 利马; Australia Canberra 澳大利亚 堪培拉"""
CAPITALS = [entry.split() for entry in CAPITALS.split(";")]
COUNTRIES = {"en": [entry[:2] for entry in CAPITALS], "zh": [entry[2:] for entry in CAPITALS]}
# language: (wordings, short wording after another country, answer)
CAPITAL_OF = {
    "en": (
        "What is the capital of {}?|what is the capital of {}|Name the capital of {}.|The capital of {}?".split("|"),
        "And of {}?",
        "The capital of {} is {}.",
    ),
    "zh": ("{}的首都是哪里？|{}的首都是什么？|{}的首都是哪个城市？|{}首都".split("|"), "那{}呢？", "{}的首都是{}。"),
}
SMALL_TALK = {
    "Hello!|Hello|hello|Hi!|Hi|Good morning!": "Hello! What shall we work out?",
    "你好|你好！|您好|嗨": "你好！我们来算点什么？",
    "What can you do?|what can you do|Help|Can you help me?": "I add, subtract, multiply, count and name capitals.",
    "你会什么？|你能做什么？|帮助": "我会加、减、乘、数数，还知道一些首都。",
    "Thank you!|Thank you|Thanks!|thanks|Thanks a lot!": "You are welcome!",
    "谢谢|谢谢！|谢谢你|多谢": "不客气！",
    "Goodbye!|Goodbye|Bye!|bye": "Goodbye! See you soon.",
    "再见|再见！|拜拜": "再见！下次见。",
    "Tell me a joke.|How is the weather?|Write a poem.|What is love?": "I do not know that: I am very small.",
    "讲个笑话|今天天气怎么样？|写一首诗|什么是爱？": "这个我不会，我还很小。",
}
SMALL_TALK = [[(question, reply) for question in questions.split("|")] for questions, reply in SMALL_TALK.items()]
WHO = {
    "Who are you?|who are you|What is your name?|What's your name?": "I am {}, a very small language model.",
    "你是谁？|你是谁|你叫什么名字？|你叫什么？": "我是{}，一个很小的语言模型。",
}
NAMES = "Ada Bob Emma Leo Max Mia Tom Zoe 小明 小红 小龙 小美".split()
NAMING = ["Your name is {}.", "你的名字叫{}。"]
PLAIN_SYSTEMS = ["You are a helpful assistant.", "你是一个乐于助人的助手。"]


def held_out(symbol):
    """100 unordered pairs a < b below 100, always the same: neither `a symbol b` nor `b symbol a` is ever taught."""
    return random.Random(f"held out {symbol}").sample([(a, b) for b in range(100) for a in range(b)], 100)


def held_out_sums():
    """The 100 pairs (a, b) whose sums a + b and b + a no training conversation contains."""
    return held_out("+")


def held_out_counts():
    """50 pairs (first, last) between which training never counts."""
    return random.Random("held out counts").sample([(a, a + n) for a in range(100) for n in range(2, 9)], 50)


NOT_TAUGHT = {"+": set(held_out("+")), "-": set(held_out("-")), "×": set(), "count": set(held_out_counts())}
HELD_OUT_WORDS = WORDS[::3]


def is_taught(symbol, a, b):
    return (min(a, b), max(a, b)) not in NOT_TAUGHT[symbol]


# Functions named *_turn return one (question, answer); the tasks after them return a list of turns.


def equation(symbol, a, b):
    return f"{a} {symbol} {b} = {a + b if symbol == '+' else a - b if symbol == '-' else a * b}"


def arithmetic_turn(rng, symbol, a, b):
    wording = rng.choice(rng.choice([ENGLISH_SUMS, CHINESE_SUMS]))
    return wording.format(f"{a}{rng.choice(OPERATORS[symbol][0])}{b}"), equation(symbol, a, b)


def next_arithmetic_turn(rng, symbol, a, b):
    """A turn in which the question leaves out `a`, the result of the turn before."""
    return rng.choice(OPERATORS[symbol][1]).format(b), equation(symbol, a, b)


def count_turn(rng, first, last):
    """The answer repeats the bounds, so that the number to stop at is always in the same place."""
    numbers = ", ".join(str(number) for number in range(first, last + 1))
    return rng.choice(COUNTS).format(first, last), f"{first} → {last}: {numbers}"


def reverse_turn(rng, word):
    """Hyphens make every letter a token; the answer spells the word before it reads it backwards."""
    return rng.choice(REVERSALS).format(word), f"{'-'.join(word)} → {'-'.join(reversed(word))}"


def capital_turn(rng, language, country, city, follows=False):
    wordings, short, reply = CAPITAL_OF[language]
    return (short if follows else rng.choice(wordings)).format(country), reply.format(country, city)


def who_turns(name):
    return [(question, reply.format(name)) for questions, reply in WHO.items() for question in questions.split("|")]


def sum_or_difference(rng):
    """Two numbers up to 99, never with a negative result; every fifth time or so the result is used again."""
    symbol, next_symbol = rng.choice("+-"), rng.choice("+-")
    a, b, c = (rng.randrange(100) for _ in range(3))
    if symbol == "-":
        a, b = max(a, b), min(a, b)
    if not is_taught(symbol, a, b):
        return sum_or_difference(rng)
    turns, result = [arithmetic_turn(rng, symbol, a, b)], a + b if symbol == "+" else a - b
    possible = result < 100 and (next_symbol == "+" or c <= result) and is_taught(next_symbol, result, c)
    return [*turns, next_arithmetic_turn(rng, next_symbol, result, c)] if possible and rng.random() < 0.3 else turns


def multiplication(rng):
    return [arithmetic_turn(rng, "×", rng.randint(1, 9), rng.randint(1, 9))]


def count(rng):
    first, length = rng.randrange(100), rng.randint(2, 8)
    return [count_turn(rng, first, first + length)] if is_taught("count", first, first + length) else count(rng)


def reversal(rng):
    """Mostly made-up words, since the spelling of every token has to be learnt, and not a list of words."""
    word = rng.choice(WORDS)
    if rng.random() < 0.8:
        shape = rng.choice("cvc cvcv cvcc ccvc vcvc cvvc cvcvc ccvcc cvccv cvvcv".split())
        word = "".join(rng.choice("aeiou" if letter == "v" else "bcdfghjklmnpqrstvwxyz") for letter in shape)
    return [reverse_turn(rng, word)] if word not in HELD_OUT_WORDS else reversal(rng)


def capital(rng):
    language = rng.choice(["en", "zh"])
    first, second = rng.sample(COUNTRIES[language], 2)
    turns = [capital_turn(rng, language, *first), capital_turn(rng, language, *second, follows=True)]
    return turns if rng.random() < 0.3 else turns[:1]


def small_talk(rng):
    return [rng.choice(rng.choice(SMALL_TALK))]


TASKS = {sum_or_difference: 12, multiplication: 2, count: 4, reversal: 6, capital: 1, small_talk: 1}  # with weights


def messages_of(turns, system=None):
    messages = [{"role": "system", "content": system}] if system else []
    for question, reply in turns:
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": reply}]
    return messages


def conversation(rng):
    """One to three tasks, at times with a system message, which can give the model another name."""
    system, name = None, "MiniMind-tiny"
    kind = rng.choices(["no system", "plain system", "naming system"], [75, 10, 15])[0]
    if kind == "plain system":
        system = rng.choice(PLAIN_SYSTEMS)
    elif kind == "naming system":
        name = rng.choice(NAMES)
        system = rng.choice(NAMING).format(name)
    tasks = rng.choices(list(TASKS), TASKS.values(), k=rng.choice([1, 1, 2, 3]))
    turns = [turn for task in tasks for turn in task(rng)]
    if kind == "naming system" or rng.random() < 0.05:
        turns[0] = rng.choice(who_turns(name))
    return messages_of(turns, system)


def training_conversations(size, seed):
    """`size` conversations, each a list of messages; the same ones for the same arguments."""
    rng = random.Random(seed)
    return [conversation(rng) for _ in range(size)]


def evaluation_questions():
    """kind -> conversations whose last message is the answer that is expected, to the letter; always the same ones."""
    rng = random.Random("evaluation")
    capitals = [(language, pair) for language, pairs in COUNTRIES.items() for pair in pairs]
    kinds = {
        "sums, held out": [[arithmetic_turn(rng, "+", a, b)] for a, b in held_out_sums()],
        "sums, held out, mirrored": [[arithmetic_turn(rng, "+", b, a)] for a, b in held_out_sums()],
        "sums, held out, on the result before": [
            [arithmetic_turn(rng, "+", a // 2, a - a // 2), next_arithmetic_turn(rng, "+", a, b)]
            for a, b in held_out_sums()
        ],
        "differences, held out": [[arithmetic_turn(rng, "-", b, a)] for a, b in held_out("-")],
        "multiplication table": [[arithmetic_turn(rng, "×", a, b)] for a in range(1, 10) for b in range(1, 10)],
        "counting, held out": [[count_turn(rng, *pair)] for pair in held_out_counts()],
        "words reversed, held out": [[reverse_turn(rng, word)] for word in HELD_OUT_WORDS],
        "capitals": [[capital_turn(rng, language, *pair)] for language, pair in capitals],
        "capitals, after another one": [
            [capital_turn(rng, language, *COUNTRIES[language][0]), capital_turn(rng, language, *pair, follows=True)]
            for language, pair in capitals
        ],
        "small talk": [[turn] for turns in SMALL_TALK for turn in turns],
        "who are you": [[turn] for turn in who_turns("MiniMind-tiny")],
    }
    questions = {kind: [messages_of(turns) for turns in conversations] for kind, conversations in kinds.items()}
    questions["who are you, named by the system message"] = [
        messages_of([turn], naming.format(name)) for naming in NAMING for name in NAMES for turn in who_turns(name)
    ]
    return questions


# --- Tokenizer, data, training, evaluation ---------------------------------------------------------------------------


def train_tokenizer(conversations, vocab_size=640):
    """A byte-level BPE: any text comes back unchanged, digits stay single, the chat template is part of it."""
    tokenizer = Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = (f"{message['role']}\n{message['content']}" for messages in conversations for message in messages)
    tokenizer.train_from_iterator(texts, trainer)
    # No merge holds a digit, so GPT-2's splitting, which is MiniMind's, now gives single digits by itself.
    tokenizer.pre_tokenizer = byte_level
    end_of_text, im_start, im_end = SPECIAL_TOKENS
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=end_of_text,
        unk_token=end_of_text,
        bos_token=im_start,
        eos_token=im_end,
        padding_side="left",  # the prompts of a batch end together
        model_max_length=512,
        chat_template=CHAT_TEMPLATE,
    )


def make_dataset(conversations, tokenizer):
    """input_ids, and labels that are -100 outside the assistant's turns."""

    def encode(batch):
        encoded = tokenizer.apply_chat_template(batch["messages"], return_dict=True, return_assistant_tokens_mask=True)
        labels = [
            [token if answer else -100 for token, answer in zip(ids, mask, strict=True)]
            for ids, mask in zip(encoded["input_ids"], encoded["assistant_masks"], strict=True)
        ]
        return {"input_ids": encoded["input_ids"], "labels": labels, "length": [len(ids) for ids in labels]}

    dataset = Dataset.from_dict({"messages": conversations})
    return dataset.map(encode, batched=True, remove_columns=["messages"])


def make_model(tokenizer):
    """MiniMind-3's architecture, dense, in small."""
    config = MiniMindConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=448,  # ceil(128 * pi / 64) * 64, MiniMind's rule
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return MiniMindForCausalLM(config)


def train(model, tokenizer, dataset, steps, seed, folder):
    """Trains `model` in place, in float32 on the CPU."""
    arguments = TrainingArguments(
        output_dir=folder,
        max_steps=steps,
        per_device_train_batch_size=BATCH_SIZE,
        train_sampling_strategy="group_by_length",
        learning_rate=LEARNING_RATE,
        adam_beta2=0.98,
        weight_decay=0.1,
        lr_scheduler_type="cosine",
        warmup_steps=min(100, steps // 10),
        logging_steps=max(1, steps // 40),
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        use_cache=True,  # Trainer writes it into the config, which is saved
        seed=seed,
        disable_tqdm=True,
    )
    collator = DataCollatorForSeq2Seq(tokenizer, pad_to_multiple_of=8)
    Trainer(model=model, args=arguments, train_dataset=dataset, data_collator=collator).train()


@torch.no_grad()
def answer(model, tokenizer, prompts, batch_size=100):
    """The greedy answers to `prompts`, conversations that end with the user's turn."""
    answers = []
    for start in range(0, len(prompts), batch_size):
        inputs = tokenizer.apply_chat_template(
            prompts[start : start + batch_size],
            add_generation_prompt=True,
            return_dict=True,
            return_tensors="pt",
            padding=True,
        ).to(model.device)
        output = model.generate(**inputs, max_new_tokens=64, do_sample=False)
        answers += tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return answers


def evaluate(model, tokenizer, questions=None):
    """kind -> share of answers that are right to the letter; `questions` as from evaluation_questions()."""
    model.eval()
    accuracies = {}
    for kind, conversations in (questions or evaluation_questions()).items():
        answers = answer(model, tokenizer, [messages[:-1] for messages in conversations])
        expected = [messages[-1]["content"] for messages in conversations]
        accuracies[kind] = sum(a == e for a, e in zip(answers, expected, strict=True)) / len(expected)
    return accuracies


def table(accuracies):
    """What evaluate() returned, as a Markdown table."""
    sizes = {kind: len(conversations) for kind, conversations in evaluation_questions().items()}
    rows = [f"| {kind} | {round(share * sizes[kind])} of {sizes[kind]} |" for kind, share in accuracies.items()]
    return "\n".join(["| questions | right |", "|---|---|", *rows])


# --- Files and command line ------------------------------------------------------------------------------------------


def save(model, tokenizer, folder):
    """float16 weights, configs and tokenizer, without the package's source files."""
    model.half().save_pretrained(folder)
    GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        do_sample=False,
    ).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for source in folder.glob("*.py"):
        source.unlink()
    edit_json(folder / "config.json", auto_map=None)
    # transformers 5 writes a class name that 4.57 does not know; both know this one.
    edit_json(folder / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")


def edit_json(path, **changes):
    """Sets keys of a JSON file; None takes a key away."""
    content = json.loads(path.read_text(encoding="utf-8")) | changes
    kept = {key: value for key, value in content.items() if value is not None or key not in changes}
    path.write_text(json.dumps(kept, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


CARD = """\
---
language: [en, zh]
license: apache-2.0
library_name: transformers
pipeline_tag: text-generation
---

# MiniMind-tiny

A chat model of {parameters:,} parameters in the architecture of MiniMind-3 (dense). It adds, subtracts, multiplies,
counts, spells short words backwards and names two dozen capitals, in English and Chinese, and knows nothing else.
`examples/train_tiny.py` of minimind-hf made it, {how}
"""
FIGURES = """
Greedy answers of this folder that are right to the letter. What is held out never occurs in the training
conversations, in any wording or language; sums and differences are held out in both orders.

{table}
"""


def parse_arguments():
    parser = argparse.ArgumentParser(description="Train MiniMind-tiny and save it as a Hugging Face folder.")
    parser.add_argument("--output", type=Path, default=Path("assets/minimind-tiny"), help="folder to write")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"training steps of {BATCH_SIZE} conversations")
    parser.add_argument("--seed", type=int, default=0, help="of the conversations, the weights and their order")
    parser.add_argument("--overwrite", action="store_true", help="replace the output folder if there is one")
    parser.add_argument("--smoke", action="store_true", help="four steps, to see that it runs; measures nothing")
    return parser.parse_args()


def main():
    arguments = parse_arguments()
    output, seed = arguments.output.resolve(), arguments.seed
    if output.exists() and not arguments.overwrite:
        raise SystemExit(f"{output} exists: name another --output, or replace it with --overwrite")
    output.parent.mkdir(parents=True, exist_ok=True)
    steps = 4 if arguments.smoke else arguments.steps
    torch.set_num_threads(1)  # the same weights on any number of cores; a second one would save a quarter of the time
    set_seed(seed)

    conversations = training_conversations(max(steps * BATCH_SIZE, 10_000), seed)
    tokenizer = train_tokenizer(conversations[:10_000])
    model = make_model(tokenizer)
    print(f"{model.num_parameters():,} parameters, {len(tokenizer)} tokens, {steps} steps")
    # Everything is written into a folder beside the output, which takes its place when it is complete.
    with tempfile.TemporaryDirectory(prefix=f".{output.name}-", dir=output.parent) as scratch:
        folder = Path(scratch) / "new"
        train(model, tokenizer, make_dataset(conversations[: steps * BATCH_SIZE], tokenizer), steps, seed, scratch)
        save(model, tokenizer, folder)
        how = f"in {steps} steps from seed {seed}, on conversations which it makes up."
        card = CARD.format(parameters=model.num_parameters(), how=how)
        if arguments.smoke:
            print("smoke run: nothing measured")
        else:
            model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
            figures = table(evaluate(model, tokenizer))
            print(figures)
            card += FIGURES.format(table=figures)
        (folder / "README.md").write_text(card, encoding="utf-8")
        if output.exists():
            output.rename(Path(scratch) / "old")
        folder.rename(output)


if __name__ == "__main__":
    main()
