"""lm-evaluation-harness scores a saved folder, by its command and from Python, on tasks that are made here."""

import json
import os
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from minimind_hf.cli import TINY_MODEL

lm_eval = pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed: pip install lm_eval[hf]")
HFLM = pytest.importorskip("lm_eval.models.huggingface").HFLM
TaskManager = pytest.importorskip("lm_eval.tasks").TaskManager

# Questions, right answers and wrong ones of different lengths, so that batches are padded.
SUMS = [
    ("12 + 30 = ?", "12 + 30 = 42", "12 + 30 = 41"),
    ("What is 21 plus 9?", "21 + 9 = 30", "30"),
    ("7 + 5 = ?", "7 + 5 = 12", "7 + 5 = 12 - 1"),
    ("3 + 4 = ?", "3 + 4 = 7", "3 + 4 = 8"),
    ("What is 40 plus 8?", "40 + 8 = 48", "84"),
]
DOCUMENTS = [
    {"prompt": f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n", "answers": [right, wrong]}
    for question, right, wrong in SUMS
]
CHOICE = """
output_type: multiple_choice
target_delimiter: ""
doc_to_choice: "{{answers}}"
doc_to_target: 0
metric_list: [{metric: acc}]
"""
GENERATE = """
output_type: generate_until
doc_to_target: "{{answers[0]}}"
generation_kwargs: {until: ["UNTIL"], do_sample: false, max_gen_toks: 64}
metric_list: [{metric: exact_match}]
"""
TASKS = {
    "sums_choice": CHOICE,
    "sums_to_the_end": GENERATE.replace("UNTIL", "<|im_end|>"),
    "sums_to_a_word": GENERATE.replace("UNTIL", " ="),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A model saved with its code and its tokenizer, and the tasks."""
    model, tasks = tmp_path_factory.mktemp("model"), tmp_path_factory.mktemp("tasks")
    AutoModelForCausalLM.from_pretrained(TINY_MODEL, dtype=torch.float32).save_pretrained(model)
    AutoTokenizer.from_pretrained(TINY_MODEL).save_pretrained(model)
    lines = "".join(json.dumps(document) + "\n" for document in DOCUMENTS)
    (tasks / "sums.jsonl").write_text(lines, encoding="utf-8")
    for name, text in TASKS.items():
        data = {"data_files": {"test": str(tasks / "sums.jsonl")}, "cache_dir": str(tasks / "cache")}
        head = f'task: {name}\ndataset_path: json\ndataset_kwargs: {json.dumps(data)}\ndoc_to_text: "{{{{prompt}}}}"\n'
        (tasks / f"{name}.yaml").write_text(f"{head}test_split: test\n{text}", encoding="utf-8")
    return model, tasks


@pytest.fixture(scope="module")
def evaluations(folders):
    """For each batch size: results, the replies by task, and how many tokens each call of `generate` made."""
    evaluations = {}
    for batch_size in (1, 8):
        lm = HFLM(str(folders[0]), device="cpu", dtype="float32", batch_size=batch_size)
        new_tokens, generate = [], lm.model.generate

        def counted(input_ids, generate=generate, new_tokens=new_tokens, **arguments):
            tokens = generate(input_ids, **arguments)
            new_tokens.append(tokens.shape[1] - input_ids.shape[1])
            return tokens

        lm.model.generate = counted
        manager = TaskManager(include_path=str(folders[1]), include_defaults=False)
        evaluated = lm_eval.simple_evaluate(lm, tasks=list(TASKS), task_manager=manager, bootstrap_iters=0)
        replies = {
            task: [sample["filtered_resps"] for sample in sorted(samples, key=lambda sample: sample["doc_id"])]
            for task, samples in evaluated["samples"].items()
        }
        evaluations[batch_size] = evaluated["results"], replies, new_tokens
    return evaluations


def log_likelihoods(folder):
    """Of every answer, and of the line break before it, which the harness takes for a part of the answer."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    for document in DOCUMENTS:
        for answer in document["answers"]:
            ids = tokenizer(document["prompt"] + answer, return_tensors="pt")["input_ids"]
            first = len(tokenizer(document["prompt"].rstrip())["input_ids"])
            with torch.no_grad():
                scores = model(ids).logits[0, first - 1 : -1].log_softmax(-1)
            yield scores.gather(1, ids[0, first:, None]).sum().item()


def test_log_likelihoods_do_not_depend_on_the_batch_size(folders, evaluations):
    expected = list(log_likelihoods(folders[0]))
    for results, replies, _ in evaluations.values():
        scores = [score for choices in replies["sums_choice"] for score, _ in choices]
        assert scores == pytest.approx(expected, abs=1e-4)
        assert results["sums_choice"]["acc,none"] == 1


def test_generate_until_stops(evaluations):
    for results, replies, new_tokens in evaluations.values():
        assert replies["sums_to_the_end"] == [[right] for _, right, _ in SUMS]
        assert replies["sums_to_a_word"] == [[right.split(" =")[0]] for _, right, _ in SUMS]
        assert results["sums_to_the_end"]["exact_match,none"] == 1
        assert max(new_tokens) <= len("12 + 30 = 42") + 1  # of the 64 allowed


def test_command_scores_a_saved_folder(folders, evaluations, tmp_path):
    """As a user runs it: the package is not imported, so that the folder's own code is loaded."""
    model, tasks = folders
    command = [sys.executable, "-m", "lm_eval", "run", "--model", "hf", "--device", "cpu", "--batch_size", "8"]
    command += ["--model_args", f"pretrained={model},dtype=float32,trust_remote_code=True"]
    command += ["--tasks", ",".join(TASKS), "--include_path", str(tasks), "--output_path", str(tmp_path / "out")]
    environment = os.environ | {"HF_HOME": str(tmp_path / "cache")}
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    [file] = (tmp_path / "out").rglob("results*.json")
    results = json.loads(file.read_text(encoding="utf-8"))["results"]
    assert results["sums_choice"]["acc,none"] == results["sums_to_the_end"]["exact_match,none"] == 1
