"""What Trainers of two ranks do, and the same by one process: scripts in the shape of the frameworks' own examples."""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integrations.tiny_models import (
    STEP,
    bert,
    class_batch,
    classes,
    gpt2,
    llama,
    params_of,
    text_batch,
    texts,
    tokenizer,
    words,
)
from uneven.comm.group import Group
from uneven.errors import InputError

RANKS = 2
SPEEDS = (2.9, 1.0)  # as the scripted times have them; no two divisions end at the same time


def language_model(folder: Path, **options: Any) -> Any:
    """As transformers' example of language modelling."""
    from transformers import Trainer

    return Trainer(model=gpt2(), args=arguments(folder, **options), train_dataset=texts(), data_collator=text_batch)


def classification(folder: Path, **options: Any) -> Any:
    """As transformers' example of text classification."""
    from transformers import Trainer

    return Trainer(
        model=bert(),
        args=arguments(folder, **options),
        train_dataset=classes(),
        eval_dataset=classes(32, seed=1),
        data_collator=class_batch,
        compute_metrics=lambda found: {"right": float((found.predictions.argmax(-1) == found.label_ids).mean())},
    )


def own_loss(folder: Path, **options: Any) -> Any:
    """A loss of the user's that does not look at the count."""
    from transformers import Trainer

    class Own(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):  # type: ignore
            labels = inputs.pop("labels")
            outputs = model(**inputs)
            loss = torch.nn.functional.cross_entropy(outputs.logits, labels, label_smoothing=0.1)
            return (loss, outputs) if return_outputs else loss

    return Own(model=bert(), args=arguments(folder, **options), train_dataset=classes(), data_collator=class_batch)


def loss_function(folder: Path, **options: Any) -> Any:
    """One that is divided by the count, given to a plain Trainer."""
    from transformers import Trainer

    def loss_of(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
        total = torch.nn.functional.cross_entropy(outputs.logits, labels, reduction="sum")
        return total / num_items_in_batch

    args = arguments(folder, **options)
    return Trainer(
        model=bert(), args=args, train_dataset=classes(), data_collator=class_batch, compute_loss_func=loss_of
    )


def lora() -> Any:
    from peft import LoraConfig

    return LoraConfig(r=4, lora_alpha=8, lora_dropout=0.0, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


def tuning(folder: Path, **options: Any) -> Any:
    """As TRL's example of supervised tuning, with LoRA."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    args = arguments(folder, SFTConfig, max_length=32, bf16=False, gradient_checkpointing=False, **options)
    model = llama()
    torch.manual_seed(1)  # of the adapters
    data = Dataset.from_list([{"text": text} for text in words()])
    return SFTTrainer(model=model, args=args, train_dataset=data, processing_class=tokenizer(), peft_config=lora())


def preferences(folder: Path, **options: Any) -> Any:
    """As TRL's example of preference tuning, with LoRA."""
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    args = arguments(folder, DPOConfig, max_length=64, bf16=False, gradient_checkpointing=False, **options)
    model = llama()
    torch.manual_seed(1)
    named = zip(words(seed=0), words(seed=1), words(seed=2), strict=True)
    data = Dataset.from_list(
        [{"prompt": one, "chosen": f" {two}", "rejected": f" {three}"} for one, two, three in named]
    )
    return DPOTrainer(model=model, args=args, train_dataset=data, processing_class=tokenizer(), peft_config=lora())


def arguments(folder: Path, kind: Any = None, *, batch: int = STEP // RANKS, epochs: int = 1, **options: Any) -> Any:
    from transformers import TrainingArguments

    return (kind or TrainingArguments)(
        output_dir=str(folder),
        per_device_train_batch_size=batch,
        num_train_epochs=epochs,
        **{
            "learning_rate": 1e-2,
            "use_cpu": True,
            "report_to": "none",
            "logging_steps": 2,
            "save_strategy": "no",
            "disable_tqdm": True,
            "remove_unused_columns": kind is not None,
            "seed": 3,
            **options,
        },
    )


@dataclass(frozen=True)
class Case:
    make: Callable[..., Any]
    options: dict[str, Any] = field(default_factory=dict)  # of the TrainingArguments
    shares: tuple[float, ...] | None = None  # None: measured
    accumulation: int = 1
    epochs: int = 1
    sharded: dict[str, Any] = field(default_factory=dict)  # what attach is told of a strategy


CASES = {
    "language model": Case(language_model, epochs=3),
    "language model, accumulation, 11:5": Case(language_model, shares=(11, 5), accumulation=2),
    "language model, clipping hard": Case(language_model, {"max_grad_norm": 0.01}, shares=(11, 5)),
    "language model, a rank without samples": Case(language_model, shares=(1, 0), accumulation=2),
    "language model, workers": Case(language_model, {"dataloader_num_workers": 2}, epochs=5),
    "language model, the short step dropped": Case(language_model, {"dataloader_drop_last": True}, shares=(3, 1)),
    "classification": Case(classification, epochs=3),
    "classification, accumulation": Case(classification, accumulation=2, epochs=3),
    "classification, 11:5": Case(classification, shares=(11, 5), accumulation=2),
    "classification, a rank without samples": Case(classification, shares=(0, 1)),
    "own loss": Case(own_loss, shares=(11, 5), accumulation=2),
    "loss function": Case(loss_function, shares=(11, 5), accumulation=2),
    "LoRA": Case(tuning, epochs=2),
    "LoRA, accumulation, 11:5": Case(tuning, shares=(11, 5), accumulation=2),
    "preferences": Case(preferences, shares=(11, 5), accumulation=2),
    "zero1": Case(language_model, epochs=3, sharded={"strategy": "zero1", "memory_shares": (3, 1)}),
    "zero1, accumulation": Case(classification, shares=(11, 5), accumulation=2, sharded={"strategy": "zero1"}),
    "zero2, accumulation": Case(
        language_model, shares=(11, 5), accumulation=2, sharded={"strategy": "zero2", "memory_shares": (3, 1)}
    ),
    "zero2": Case(classification, shares=(1, 0), epochs=2, sharded={"strategy": "zero2"}),
    "fsdp": Case(language_model, epochs=3, sharded={"strategy": "fsdp", "memory_shares": (3, 1)}),
    "fsdp, accumulation": Case(classification, shares=(11, 5), accumulation=2, sharded={"strategy": "fsdp"}),
    "fsdp, LoRA": Case(tuning, shares=(11, 5), sharded={"strategy": "fsdp", "memory_shares": (3, 1)}),
}


SAVED_AT = 10  # inside of the second epoch of 7 steps


def dense(case: Case, folder: Path, **options: Any) -> Any:
    """One process that trains whole steps."""
    trainer = case.make(folder, batch=STEP, epochs=case.epochs, **{**case.options, **options})
    trainer.train()
    return trainer


def shared(case: Case, folder: Path, resume: str | None = None, **options: Any) -> dict[str, Any]:
    """What this rank has after training, and how the steps were divided."""
    from uneven.integrations.transformers import attach

    batch = STEP // RANKS // case.accumulation
    options = {**case.options, "gradient_accumulation_steps": case.accumulation, **options}
    trainer = case.make(folder, batch=batch, epochs=case.epochs, **options)
    shares = attach(trainer, shares=case.shares, **case.sharded)
    divisions = script_times(shares)
    trainer.train(resume_from_checkpoint=resume)
    shares.close()
    params = trainer._sharded.strategy.full_params() if case.sharded else params_of(trainer.model)
    return {"params": params, "divisions": divisions, "log": trainer.state.log_history}


def script_times(shares: Any) -> list[tuple[int, ...]]:
    """Of what a step really takes nothing is felt beside these, so shares do not depend on the machine."""
    divisions: list[tuple[int, ...]] = []
    start = shares.start

    def scripted(before_s: float | None = None) -> None:
        divisions.append(shares.of(shares.step))
        start(1e3 * divisions[-1][shares.rank] / SPEEDS[shares.rank])

    shares.start = scripted
    return divisions


def all_cases(group: Group) -> dict[str, Any]:
    """On a rank process, with the variables that torchrun sets."""
    folder = Path(os.environ["TRAINER_CASES"])
    os.environ.update({"RANK": str(group.rank), "LOCAL_RANK": str(group.rank), "WORLD_SIZE": str(group.world_size)})
    os.environ.update({"LOCAL_WORLD_SIZE": str(group.world_size), "MASTER_ADDR": "127.0.0.1"})
    found = {name: shared(case, folder / "case") for name, case in CASES.items()}
    for name in ("zero1", "zero2", "fsdp"):
        case = Case(classification, epochs=3, sharded={"strategy": name, "memory_shares": (1, 2)})
        found[f"{name}, saved"] = shared(case, folder / name, **SAVES)
        found[f"{name}, resumed"] = shared(case, folder / "resumed", checkpoint(folder / name))
        found[f"{name}, from a plain one"] = shared(case, folder / "resumed", checkpoint(folder / "plain"))
    found["saved"] = shared(CASES["classification"], folder / "saved", **SAVES)
    found["resumed"] = shared(CASES["classification"], folder / "resumed", checkpoint(folder / "saved"))
    found["from a plain one"] = shared(
        CASES["classification"], folder / "again", checkpoint(folder / "plain"), **SAVES, dataloader_num_workers=2
    )
    evaluating = {"eval_strategy": "steps", "eval_steps": 5}
    found["evaluated"] = shared(CASES["classification"], folder / "case", **evaluating)
    check_mean_of_means(folder)
    return found


SAVES = {"save_strategy": "steps", "save_steps": SAVED_AT}


def checkpoint(folder: Path) -> str:
    return str(folder / f"checkpoint-{SAVED_AT}")


def check_mean_of_means(folder: Path) -> None:
    """On every rank, so that none of them waits for another."""
    with pytest.raises(InputError, match="average_tokens_across_devices"):
        shared(CASES["language model"], folder / "case", average_tokens_across_devices=False)
