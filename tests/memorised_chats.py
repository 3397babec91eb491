"""A tiny chat model that has learnt three conversations by heart, for tests of what serves it."""

import torch
from conftest import FIXTURES, tiny_model
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoTokenizer

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
ANSWER = ("你是谁？", {"content": "我是小小的模型。"})
REASONED = ("What is 12 plus 30?", {"reasoning_content": "Ten and thirty are forty.", "content": "12 + 30 = 42"})
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
CALLED = ("How is Oslo?", {"content": "", "tool_calls": [CALL]})


def save_chat_model(folder):
    """Write a model that answers ANSWER, REASONED (with open_thinking) and CALLED (with the tool WEATHER) greedily."""
    tokenizer = AutoTokenizer.from_pretrained(FIXTURES / "tokenizer")
    rows = []
    for (question, reply), options in ((ANSWER, {}), (REASONED, {}), (CALLED, {"tools": [WEATHER]})):
        messages = [{"role": "user", "content": question}, {"role": "assistant", **reply}]
        rows.append(tokenizer.apply_chat_template(messages, return_tensors="pt", return_dict=True, **options))
    input_ids = pad_sequence([row["input_ids"][0] for row in rows], True)  # on the right, where nothing looks
    labels = pad_sequence([row["input_ids"][0] for row in rows], True, padding_value=-100)

    model = tiny_model(vocab_size=len(tokenizer), head_dim=32, max_position_embeddings=512).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(100):
        model(input_ids, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
