"""The benchmark's mode `sync`: a training script as a user would write it, with `Ddp.setup` and its own loop.

Started by run.py once per device, as `uneven run` starts scripts; its argument is the Order as JSON. Rank 0 evaluates
the trained state and writes the run folder.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from uneven import Ddp
from uneven.bench.modes import resolve_mode
from uneven.bench.orders import Order
from uneven.bench.single.run import finish_run, make_config, make_task


def train(order: Order) -> None:
    task, config = make_task(order), make_config(order, resolve_mode(order.mode, order.devices))
    torch.manual_seed(config.seed)  # the same initial params as in every other mode
    settings: Any = config.to_json()
    ddp = Ddp.setup(
        task.make_model(),
        task.make_optimizer,
        dataset=task.dataset,
        scheduler=task.make_scheduler,
        **settings,
    )
    model = cast("nn.Module", ddp)  # calling it runs the model in the run's precision
    for epoch in range(config.epochs):
        for batch in ddp.batches(epoch):
            ddp.step(task.train_step(model, batch))
    state = ddp.finish()
    if ddp.rank == 0:
        worker = ddp.worker
        finish_run(order, task, worker.config, [str(device) for device in worker.rank_info.devices], state)


def read_order(text: str) -> Order:
    order: dict[str, Any] = json.loads(text)
    return Order(**{**order, "out": Path(order["out"])})


if __name__ == "__main__":
    os.environ |= {"UNEVEN_PAGES": "0", "UNEVEN_LOGS": "0"}  # its page is the benchmark's own
    train(read_order(sys.argv[1]))
