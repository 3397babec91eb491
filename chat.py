"""What a MiniMind chat model says, in parts: reasoning, answer, tool calls.

`RESPONSE_TEMPLATE` is data for transformers' own parser. After `tokenizer.response_template = RESPONSE_TEMPLATE`,
`tokenizer.parse_response(reply, prefix=prompt)` returns the message that the chat template would render as that reply;
chat pipelines do it by themselves, and `tokenizer.save_pretrained` keeps it.

Nothing that a model says is an error: what is no well-formed tool call stays in the content as it stands. A reply that
breaks off inside <think> is all reasoning; of several <think> in one reply, the last counts.

Converted folders do not have it set: pipelines would then show the marks <|im_end|> and <|endoftext|> in what they
return for plain strings, which they never parse.
"""

# JSON as a pattern of the `regex` library, in which (?&name) stands for the group of that name. Whitespace and digits
# are never given back (`*+`), so that damaged JSON is dismissed in one go.
JSON = (
    r"(?(DEFINE)"
    r'(?P<string>"(?:[^"\\<\x00-\x1f]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})|<(?!/tool_call>))*+")'
    r"(?P<number>-?(?:0|[1-9]\d*+)(?:\.\d++)?+(?:[eE][+-]?\d++)?+)"
    r"(?P<array>\[\s*+(?:(?&value)(?:\s*+,\s*+(?&value))*+)?+\s*+\])"
    r"(?P<pair>(?&string)\s*+:\s*+(?&value))"
    r"(?P<object>\{\s*+(?:(?&pair)(?:\s*+,\s*+(?&pair))*+)?+\s*+\})"
    r"(?P<value>(?&object)|(?&array)|(?&string)|(?&number)|true|false|null)"
    r")"
)
CALL = r'\s*+\{\s*+"name"\s*+:\s*+(?&string)\s*+,\s*+"arguments"\s*+:\s*+(?&object)\s*+\}\s*+'

RESPONSE_TEMPLATE = {
    "start_anchor": "<|im_start|>assistant\n",
    "defaults": {"role": "assistant"},
    "fields": {
        "reasoning_content": {"open_pattern": r"\s*<think>", "close": ["</think>", "<|im_end|>"]},
        "tool_calls": {
            "open_pattern": rf"{JSON}\s*<tool_call>(?={CALL}</tool_call>)",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        # The field without an opening mark takes everything else; text on both sides of a tool call is joined.
        "content": {"close_pattern": r"\s*(?:<\|im_end\|>|<\|endoftext\|>)", "repeats": True, "join": "\n\n"},
    },
}
