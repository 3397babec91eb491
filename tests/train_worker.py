"""A short training by Trainer, run by test_scaling.py in one process or in several.

    train_worker.py FOLDER OUTPUT STEPS [CHECKPOINT]

FOLDER holds a model and `rows.pt`; OUTPUT gets the trained model, checkpoints, and the losses. The global batch is 8.
"""

import json
import os
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
from transformers.utils import logging

import minimind_hf  # noqa: F401 (registers MiniMind with the Auto classes)

logging.disable_progress_bar()
folder, output, steps, checkpoint = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), (sys.argv[4:] or [None])[0]
processes = int(os.environ.get("WORLD_SIZE", 1))
arguments = TrainingArguments(
    output_dir=output,
    max_steps=steps,
    per_device_train_batch_size=8 // processes,
    learning_rate=1e-2,
    lr_scheduler_type="constant",
    logging_steps=1,
    save_steps=2,
    report_to="none",
    disable_tqdm=True,
    use_cpu=True,
)
rows = torch.load(folder / "rows.pt")
dataset = [{"input_ids": row, "labels": labels} for row, labels in zip(*rows, strict=True)]
trainer = Trainer(AutoModelForCausalLM.from_pretrained(folder), arguments, train_dataset=dataset)
trainer.train(resume_from_checkpoint=checkpoint)
trainer.save_model(output / "model")
if trainer.is_world_process_zero():
    logged = [(entry["loss"], entry["grad_norm"]) for entry in trainer.state.log_history if "loss" in entry]
    (output / "losses.json").write_text(json.dumps({"processes": arguments.world_size, "steps": logged}))
