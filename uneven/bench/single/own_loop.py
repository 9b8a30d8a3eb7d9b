"""A benchmark run as a user would write it: one `Ddp.setup` call and a training loop of the user's own.

Started once per device, as `uneven run` starts scripts: `python -m uneven.bench.single.own_loop ORDER`, with the order
as JSON. Rank 0 measures the trained state and completes the run folder. See modes.OWN_LOOP.
"""

import json
import sys
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from uneven import Ddp
from uneven.bench.single.modes import resolve_mode
from uneven.bench.single.run import Order, finish_run, make_config, make_task


def train(order: Order) -> None:
    task, config = make_task(order), make_config(order, resolve_mode(order.mode, order.devices))
    torch.manual_seed(config.seed)  # the start of every other mode
    settings: Any = config.to_json()
    ddp = Ddp.setup(
        task.make_model(),
        task.make_optimizer,
        dataset=task.dataset,
        scheduler=task.make_scheduler,
        **settings,
    )
    model = cast("nn.Module", ddp)  # called as the model is, in the run's precision
    for epoch in range(config.epochs):
        for batch in ddp.batches(epoch):
            ddp.step(task.train_step(model, batch))
    state = ddp.finish()
    if ddp.rank == 0:
        worker = ddp.worker
        finish_run(order, task, worker.config, [str(device) for device in worker.rank_info.devices], state)


def read_order(text: str) -> Order:
    given: dict[str, Any] = json.loads(text)
    return Order(**{**given, "out": Path(given["out"])})


if __name__ == "__main__":
    train(read_order(sys.argv[1]))
