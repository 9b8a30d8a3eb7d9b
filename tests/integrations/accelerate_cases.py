"""A loop of accelerate on two ranks, and the same by one process: in the shape of accelerate's complete_nlp_example."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from tests.integrations.tiny_models import STEP, bert, class_batch, classes, params_of
from tests.integrations.trainer_cases import RANKS, script_times
from uneven.comm.group import Group
from uneven.errors import InputError

SAVED_AT = 10  # steps: inside of the second epoch of 7


@dataclass(frozen=True)
class Case:
    shares: tuple[float, ...] | None = None  # None: measured
    accumulation: int = 1
    epochs: int = 3
    workers: int = 0
    is_seedable: bool = True


CASES = {
    "measured": Case(),
    "measured, accumulation": Case(accumulation=2),
    "11:5": Case((11, 5), epochs=2),
    "11:5, accumulation": Case((11, 5), accumulation=2, epochs=2),
    "a rank without samples": Case((1, 0), epochs=2),
    "workers": Case(workers=2, epochs=5),
}


def train(case: Case, folder: Path, *, is_shared: bool, save: bool = False, resume: Path | None = None) -> Any:
    """What the script has at its end; `resume` a state that was saved after SAVED_AT steps."""
    from accelerate import Accelerator, skip_first_batches
    from accelerate.utils import DataLoaderConfiguration, set_seed
    from transformers import get_constant_schedule_with_warmup

    pieces = case.accumulation if is_shared else 1
    batch = STEP // RANKS // pieces if is_shared else STEP
    config = DataLoaderConfiguration(use_seedable_sampler=case.is_seedable)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=pieces, dataloader_config=config)
    set_seed(42)
    loader = DataLoader(
        classes(), shuffle=True, collate_fn=class_batch, batch_size=batch, num_workers=case.workers if is_shared else 0
    )
    eval_loader = DataLoader(classes(33, seed=1), collate_fn=class_batch, batch_size=8)
    model = bert()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = get_constant_schedule_with_warmup(optimizer, 0)
    model, optimizer, loader, eval_loader, scheduler = accelerator.prepare(
        model, optimizer, loader, eval_loader, scheduler
    )
    divisions: list[Any] = []
    if is_shared:
        from uneven.integrations.accelerate import attach

        loader = attach(accelerator, model, loader, shares=case.shares)
        divisions = script_times(loader.batch_sampler.shares)
    first = skip = 0
    if resume is not None:
        accelerator.load_state(str(resume))
        first, skip = divmod(SAVED_AT * pieces, len(loader))
    step = SAVED_AT if resume is not None else 0
    right: list[int] = []
    for epoch in range(first, case.epochs):
        model.train()
        active = skip_first_batches(loader, skip) if skip and epoch == first else loader
        for batch in active:
            with accelerator.accumulate(model):
                outputs = model(**batch)
                accelerator.backward(outputs.loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.1)
                    step += 1
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if save and accelerator.sync_gradients and step == SAVED_AT:
                accelerator.save_state(str(folder / "state"), safe_serialization=False)
        model.eval()
        found = []
        for batch in eval_loader:
            with torch.no_grad():
                guesses = model(**batch).logits.argmax(-1)
            found.append(accelerator.gather_for_metrics((guesses, batch["labels"])))
        counted = sum(len(labels) for _, labels in found)
        right.append(sum(int((guesses == labels).sum()) for guesses, labels in found))
        assert counted == 33
    params = params_of(accelerator.unwrap_model(model))
    return {"params": params, "divisions": divisions, "right": right, "steps": step}


def all_cases(group: Group) -> dict[str, Any]:
    """On a rank process, with the variables that torchrun sets."""
    folder = Path(os.environ["ACCELERATE_CASES"])
    os.environ.update({"RANK": str(group.rank), "LOCAL_RANK": str(group.rank), "WORLD_SIZE": str(group.world_size)})
    os.environ.update({"LOCAL_WORLD_SIZE": str(group.world_size), "MASTER_ADDR": "127.0.0.1"})
    found = {name: train(case, folder, is_shared=True) for name, case in CASES.items()}
    case = CASES["measured, accumulation"]
    found["saved"] = train(case, folder, is_shared=True, save=True)
    found["resumed"] = train(case, folder, is_shared=True, resume=folder / "state")
    train(Case(is_seedable=False), folder, is_shared=True)  # accelerate's default: rank 0's generator is sent
    found["gathered"] = gathered()
    check_foreign_batches()
    return found


def prepared(**options: Any) -> tuple[Any, Any, Any]:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, **options)
    loader = DataLoader(classes(), collate_fn=class_batch, batch_size=STEP // RANKS)
    return (accelerator, *accelerator.prepare(bert(), loader))


def gathered() -> list[int]:
    """Inside of a step, where ranks have different numbers of samples."""
    from uneven.integrations.accelerate import attach

    accelerator, model, loader = prepared()
    for batch in attach(accelerator, model, loader, shares=(11, 5)):
        loss = model(**batch).loss
        labels: list[int] = accelerator.gather(batch["labels"]).tolist()
        accelerator.backward(loss)
        return labels
    raise AssertionError


def check_foreign_batches() -> None:
    """On every rank, so that none of them waits for another."""
    from uneven.integrations.accelerate import attach

    accelerator, model, loader = prepared()
    with pytest.raises(InputError, match="DistributedDataParallel"):
        attach(accelerator, accelerator.unwrap_model(model), loader)
    attach(accelerator, model, loader)
    for batch in loader:  # the one that was given up
        with pytest.raises(InputError, match="attach has returned"):
            accelerator.backward(model(**batch).loss)
        break
