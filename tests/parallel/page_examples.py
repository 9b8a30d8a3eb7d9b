"""The examples of docs/parallel.md as programs of several ranks."""

import re
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

PAGE = Path(__file__).parents[2] / "docs" / "parallel.md"


BLOCKS = list(re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.M | re.S))


(SHARED,) = [block for block in BLOCKS if "init_process_group" in block]


EXAMPLES = {
    re.findall(r"from uneven\S* import (?:Columns, Rows, )?(\w+)", block)[0]: block
    for block in BLOCKS
    if "from uneven" in block
}


RUN = {name: block for name, block in EXAMPLES.items() if name != "MuonAdamW" or hasattr(torch.optim, "Muon")}


def run_examples(group: Any) -> dict[str, dict[str, Tensor]]:
    """The params that each example ends with, on the ranks of a torch process group."""
    found = {}
    for name, block in RUN.items():
        torch.manual_seed(3)  # the sequence example makes its own model
        space: dict[str, Any] = {}
        exec(SHARED.replace("dist.group.WORLD", "the_group"), space := {"the_group": group})
        exec(block, space)
        if name in ("ShardedOptimizer", "MuonAdamW"):
            found[name] = {key: param.detach().clone() for key, param in space["model"].named_parameters()}
        else:
            strategy = space.get("sequence", space.get("strategy"))
            found[name] = strategy.full_params()
            strategy.close()
    return found


def run_in_groups() -> dict[str, dict[str, dict[str, Tensor]]]:
    """Of three ranks, all, and then the first and the last, whose ranks are 0 and 1 in their group."""
    found = {"all": run_examples(dist.group.WORLD)}
    some = dist.new_group([0, 2])
    if dist.get_rank() != 1:
        found["some"] = run_examples(some)
    return found


def check_examples(found: dict[str, dict[str, dict[str, Tensor]]]) -> None:
    for by_name in found.values():
        assert by_name.keys() == RUN.keys()
        for name, params in by_name.items():
            expected = alone(name)
            assert params.keys() == expected.keys()
            tolerance = 1e-8 if name == "MuonAdamW" else 1e-10  # torch orthogonalises in bf16
            for key, value in expected.items():
                torch.testing.assert_close(params[key], value, rtol=tolerance, atol=tolerance)


def alone(name: str) -> dict[str, Tensor]:
    """The same training by plain PyTorch in one process."""
    torch.manual_seed(3)
    if name == "SequenceParallel":
        model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 8), nn.Linear(8, 4), nn.Linear(4, 9)).double()
        torch.manual_seed(2)
        tokens = torch.randint(0, 9, (3, 2, 7))
        batches = [(one[:, :-1], one[:, 1:]) for one in tokens]
        optimizers: list[torch.optim.Optimizer] = [torch.optim.SGD(model.parameters(), lr=0.1)]
    else:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
        torch.manual_seed(1)
        batches = [(torch.randn(12, 6).double(), torch.randint(0, 3, (12,))) for _ in range(3)]
        matrices = [model[0].weight] if name == "MuonAdamW" else []
        others = [param for param in model.parameters() if not any(param is one for one in matrices)]
        optimizers = [torch.optim.AdamW(others, lr=0.01)]
        if matrices:
            optimizers.append(torch.optim.Muon(matrices, lr=0.02))
    for x, y in batches:
        F.cross_entropy(model(x).flatten(0, -2), y.flatten()).backward()
        if name == "MuonAdamW":
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return {key: param.detach() for key, param in model.named_parameters()}
