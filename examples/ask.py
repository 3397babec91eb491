"""Load a converted folder as anyone would, and ask it three questions: python examples/ask.py FOLDER"""

import sys

from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

import minimind_hf  # noqa: F401, registers MiniMind with the Auto classes

QUESTIONS = {"12 + 30 = ?": "42", "法国的首都是哪里？": "巴黎", "What is 7 times 8?": "56"}


def main():
    folder = sys.argv[1]
    model = AutoModelForCausalLM.from_pretrained(folder)
    generator = pipeline("text-generation", model=model, tokenizer=AutoTokenizer.from_pretrained(folder))
    for question, expected in QUESTIONS.items():
        reply = generator([{"role": "user", "content": question}])
        answer = reply[0]["generated_text"][-1]["content"]
        print(f"{question}  ->  {answer}")
        if expected not in answer:
            sys.exit(f"expected {expected} in the answer")


if __name__ == "__main__":
    main()
