"""One of several processes that load models together: run by test_parallel.py under torchrun.

For every folder in the given directory, with `tensor` or `expert` in its name, it writes the logits and greedy tokens
that the processes arrive at together, and what the model saves; or the error that every one of them meets.
"""

import sys
from dataclasses import fields
from pathlib import Path

import torch
import torch.distributed
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig
from transformers.utils import logging

import minimind_hf  # noqa: F401 (registers MiniMind with the Auto classes)

logging.disable_progress_bar()
EXPERT_PARALLEL = (
    {"ep_size": 2}
    if "ep_size" in {field.name for field in fields(DistributedConfig)}
    else {"enable_expert_parallel": True}
)


def run(folder, input_ids):
    options = EXPERT_PARALLEL if "expert" in folder.name else {}
    model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(tp_size=2, **options))
    with torch.no_grad():
        logits = model(input_ids).logits
        tokens = model.generate(input_ids, max_new_tokens=8, do_sample=False, eos_token_id=None)
    model.save_pretrained(folder / "saved")
    weights = {
        name: tuple(parameter.to_local().shape)
        for name, parameter in model.named_parameters()
        if hasattr(parameter, "to_local")
    }
    return {"logits": logits, "tokens": tokens, "local_shapes": weights}


directory = Path(sys.argv[1])
input_ids = torch.load(directory / "input_ids.pt")
for folder in sorted(path for path in directory.iterdir() if path.is_dir()):
    try:
        outcome = run(folder, input_ids)
    except ValueError as error:
        outcome = {"error": str(error)}
    if torch.distributed.get_rank() == 0:
        torch.save(outcome, folder / "outcome.pt")
torch.distributed.destroy_process_group()
