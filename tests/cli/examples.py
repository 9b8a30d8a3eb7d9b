"""The commands of the pages, and what they start."""

from collections.abc import Iterator
from typing import Any

from typer.main import get_command

from uneven.cli.app import app

Verb = tuple[str, ...]


SCRIPT = """
import sys
import torch
from uneven import fit

x = torch.linspace(-1, 1, 64).unsqueeze(1)
if __name__ == "__main__":
    fit(
        model=lambda: torch.nn.Linear(1, 1),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        step=lambda model, batch: torch.nn.functional.mse_loss(model(batch[0]), batch[1]),
        dataset=torch.utils.data.TensorDataset(x, 3 * x),
        batch_size=16,
        epochs=2,
    )
"""


def commands(command: Any, name: Verb = ()) -> Iterator[tuple[Verb, Any]]:
    yield name, command
    for child_name, child in getattr(command, "commands", {}).items():
        if not child.hidden:
            yield from commands(child, (*name, child_name))


COMMANDS = {name: command for name, command in commands(get_command(app)) if name}
