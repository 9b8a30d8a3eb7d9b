"""Hugging Face's Trainer, with samples by speed: the two lines that uneven adds are marked.

uneven run examples/hf_trainer.py --devices cpu,cpu@0.4
torchrun --nproc-per-node 2 examples/hf_trainer.py
"""

import argparse

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

from uneven.integrations.transformers import attach  # uneven

parser = argparse.ArgumentParser()
parser.add_argument("--output-dir", default="runs/hf-trainer")
parser.add_argument("--epochs", type=float, default=2)
parser.add_argument("--samples", type=int, default=2000)
parser.add_argument("--resume", action="store_true", help="from the last checkpoint")
args = parser.parse_args()

# Sums to learn, as characters: "12+34=46". Nothing is downloaded.
CHARACTERS = "0123456789+= "
set_seed(0)
numbers = torch.randint(0, 100, (args.samples, 2)).tolist()
lines = [f"{one}+{two}={one + two}".ljust(10) for one, two in numbers]
train_set = [{"input_ids": ids, "labels": ids} for ids in ([CHARACTERS.index(c) for c in line] for line in lines)]

config = GPT2Config(
    vocab_size=len(CHARACTERS), n_positions=16, n_embd=128, n_layer=4, n_head=4, bos_token_id=None, eos_token_id=None
)
training_args = TrainingArguments(
    output_dir=args.output_dir,
    num_train_epochs=args.epochs,
    per_device_train_batch_size=32,
    learning_rate=1e-3,
    logging_steps=10,
    save_steps=50,
    report_to="none",
    use_cpu=not torch.cuda.is_available(),
)
trainer = Trainer(model=GPT2LMHeadModel(config), args=training_args, train_dataset=train_set)
attach(trainer)  # uneven
trainer.train(resume_from_checkpoint=args.resume)
