"""Load exported folders with nothing but transformers, of whichever version runs this, and write down what they do.

    python load_export.py JOB.json RESULTS

`JOB.json` names folders of models with their input ids, of tokenizers with texts and conversations, and of chat models
with questions; see `main`. The folder `RESULTS` receives the logits, the models saved again, and `results.json`.
"""

import json
import sys
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

torch.set_num_threads(1)


def run_model(name: str, folder: str, inputs: str, results: Path) -> dict:
    """Run the inputs through a model, and save it again in shards."""
    model, report = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    inputs, outputs = load_file(inputs), {}
    with torch.no_grad():
        outputs["logits"] = model(inputs["input_ids"]).logits
        if "long_input_ids" in inputs:
            outputs["long_logits_last8"] = model(inputs["long_input_ids"]).logits[:, -8:].contiguous()
    prompt = inputs["greedy_prompt"]
    generated = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=20, eos_token_id=None
    )
    outputs["greedy_tokens"] = generated[:, prompt.shape[1] :].contiguous()
    save_file(outputs, results / f"{name}.safetensors")
    saved = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    saved.save_pretrained(results / name, max_shard_size="50KB")
    return {
        "class": f"{type(model).__module__}.{type(model).__name__}",
        "faults": {kind: str(entries) for kind, entries in report.items() if entries},
        "dtype": str(saved.dtype),
    }


def run_tokenizer(folder: str, texts: list[str], chats: list[dict]) -> dict:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return {
        "ids": [tokenizer(text)["input_ids"] for text in texts],
        "inputs": sorted(tokenizer("x")),
        "rendered": [tokenizer.apply_chat_template(**arguments, tokenize=False) for arguments in chats],
        "special": [tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id],
    }


def answer(folder: str, questions: list[str]) -> list[str]:
    """Answer questions with a pipeline that is told nothing but the most tokens that it may write."""
    generator = pipeline("text-generation", folder, dtype=torch.float32)
    chats = [[{"role": "user", "content": question}] for question in questions]
    replies = generator(chats, batch_size=46, do_sample=False, max_new_tokens=64)
    return [reply[0]["generated_text"][-1]["content"] for reply in replies]


def main():
    job, results = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")), Path(sys.argv[2])
    written = {
        "version": transformers.__version__,
        "models": {name: run_model(name, *files, results) for name, files in job.get("models", {}).items()},
        "tokenizers": {name: run_tokenizer(**task) for name, task in job.get("tokenizers", {}).items()},
        "answers": {name: answer(**task) for name, task in job.get("chats", {}).items()},
        "ran_code": [name for name in sys.modules if name.startswith(("minimind_hf", "transformers_modules"))],
    }
    (results / "results.json").write_text(json.dumps(written), encoding="utf-8")


if __name__ == "__main__":
    main()
