"""strategy='fsdp' with params that are made when they have been sharded: the run is that of one process."""

from typing import Any

import pytest
import torch
from torch import nn

from tests.train.exact_runs import Net, assert_exact, params, train
from uneven.errors import InputError


class Drawn(nn.Module):
    """From the default generator, which threads share; with a buffer that was drawn, too."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.first = nn.Linear(6, 9)
        self.register_buffer("noise", torch.rand(9))
        self.second = nn.Linear(9, 9).requires_grad_(False)
        self.last = nn.Linear(9, 3)
        self.to(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.last(torch.tanh(self.second(torch.tanh(self.first(x)) + self.noise)))
        return found

    def fsdp_units(self) -> list[nn.Module]:
        return [self.first, self.second, self.last]


@pytest.fixture
def _in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("uneven.parallel.sharded_init.KEPT_BYTES", 100)


@pytest.mark.usefixtures("_in_parts")
@pytest.mark.parametrize("model", [Net, Drawn])
@pytest.mark.parametrize(
    "options",
    [
        {"memory_shares": (3, 1), "shares": (1, 2)},
        {"optimizer": "adamw", "activations": "recompute", "shares": (1, 0)},
        {"redundancy": 1, "memory_shares": (3, 1), "shares": (1, 1)},
    ],
)
def test_a_run_of_made_shards_is_that_of_one_process(model: Any, options: dict[str, Any]) -> None:
    common = {"global_batch_size": 24, "make_model": model, "optimizer": options.get("optimizer", "sgd")}
    dense = train(1, **common)[0]
    ours = train(2, strategy="fsdp", **common, **{k: v for k, v in options.items() if k != "optimizer"})
    for result in ours:
        for name, value in params(dense).items():
            torch.testing.assert_close(params(result)[name], value, rtol=1e-10, atol=1e-10)
    if model is Net:
        assert_exact(ours, dense, common["optimizer"], torch.float64)


@pytest.mark.usefixtures("_in_parts")
def test_values_that_differ_between_ranks_are_refused_by_name() -> None:
    calls: list[int] = []

    class Unlike(Net):
        def __init__(self, dtype: torch.dtype) -> None:
            super().__init__(dtype)
            calls.append(1)
            with torch.no_grad():
                self.second.weight.add_(len(calls))

    with pytest.raises(InputError, match=r"second\.weight other values on rank 1"):
        train(2, strategy="fsdp", make_model=Unlike, shares=(1, 1))
