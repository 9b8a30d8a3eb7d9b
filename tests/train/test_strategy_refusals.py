"""Models and train steps that a strategy would train silently wrong: refused, or right."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.train.exact_runs import OPTIMIZERS, Net, assert_exact, mean_loss, params, train
from tests.train.strategy_tasks import WORDS, Reader, next_token
from uneven.data.tensors import TensorData
from uneven.errors import InputError


@pytest.mark.parametrize("name", ["first", "second"])  # freed after forward; kept for backward, but absent before it
def test_fsdp_refuses_a_train_step_that_reads_params_by_itself(name: str) -> None:
    """It would read freed memory, which ends the process or gives any number."""

    def penalised(model: Net, batch: Any) -> Tensor:
        penalty = getattr(model, name).weight.square().sum()
        return mean_loss(model, batch) + penalty

    with pytest.raises(InputError, match=rf"reads {name}.weight outside of its block's forward.*weight_decay"):
        train(2, strategy="fsdp", policy="sync", step=penalised)


def test_fsdp_lets_a_train_step_read_shapes() -> None:
    def asking(model: Net, batch: Any) -> Tensor:
        assert sum(param.numel() for param in model.parameters()) == 99
        return mean_loss(model, batch) + torch.zeros_like(model.first.weight).sum()

    dense = train(1, global_batch_size=24)[0]
    assert_exact(
        train(2, strategy="fsdp", policy="sync", global_batch_size=24, step=asking), dense, "sgd", torch.float64
    )


@pytest.mark.parametrize("name", ["zero1", "fsdp"])  # where the updated params are sent, nothing showed the difference
def test_an_embedding_that_scales_its_rows_in_forward_is_refused(name: str) -> None:
    class Scaling(nn.Module):
        def __init__(self, dtype: torch.dtype) -> None:
            super().__init__()
            self.table, self.last = nn.Embedding(3, 2, max_norm=0.1, dtype=dtype), nn.Linear(2, 3, dtype=dtype)

        def forward(self, labels: Tensor) -> Tensor:
            scores: Tensor = self.last(self.table(labels))
            return scores

    def step(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[1]), batch[1])

    with pytest.raises(InputError, match=r"^table has max_norm=0.1: its forward changes weights by the samples of one"):
        train(2, make_model=Scaling, step=step, strategy=name)


@pytest.mark.parametrize("name", ["ddp-bucketed", "zero1", "zero2"])
def test_an_optimizer_of_sparse_gradients_alone_is_refused_by_the_ranks_too(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under `uneven run` and in a loop of the user's own no launcher tries the optimizer beforehand."""

    def step(model: nn.Embedding, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[1]), batch[1])

    monkeypatch.setitem(OPTIMIZERS, "sparse", torch.optim.SparseAdam)
    with pytest.raises(InputError, match=r"SparseAdam takes sparse gradients alone.*sums dense ones.*cadence"):
        train(
            2,
            make_model=lambda dtype: nn.Embedding(3, 3, sparse=True, dtype=dtype),
            optimizer="sparse",
            step=step,
            strategy=name,
        )


def test_sequence_refuses_a_train_step_that_reads_whole_params_by_itself() -> None:
    """Gradients of whole params are summed over the ranks: such a penalty would count once for each of them."""

    def penalised(model: nn.Module, tokens: Any) -> Tensor:
        assert isinstance(model, Reader)
        return next_token(model, tokens) + model.norm.weight.square().sum()

    data = TensorData(torch.randint(0, WORDS, (40, 7), generator=torch.Generator().manual_seed(1)))
    with pytest.raises(InputError, match=r"reads norm.weight outside of the model's forward.*once for every device"):
        train(2, strategy="sequence", dataset=data, step=penalised, make_model=Reader)


@pytest.mark.parametrize("name", ["tensor", "sequence"])
def test_a_whole_param_between_columns_and_rows(name: str) -> None:
    """Each rank has a part of its gradient, by its own columns: sequence adds them up, tensor refuses it."""

    class Sloped(Reader):
        def __init__(self, dtype: torch.dtype) -> None:
            super().__init__(dtype)
            self.slope = nn.PReLU(dtype=dtype)

        def forward(self, tokens: Tensor) -> Tensor:
            x = self.words(tokens) + self.places(torch.arange(tokens.shape[1]))
            scores: Tensor = self.head(x + self.narrow(self.slope(self.wide(self.norm(x)))))
            return scores

    data = TensorData(torch.randint(0, WORDS, (40, 7), generator=torch.Generator().manual_seed(1)))
    common: dict[str, Any] = {"dataset": data, "step": next_token, "make_model": Sloped, "global_batch_size": 12}
    if name == "tensor":
        with pytest.raises(
            InputError, match=r"slope.weight is whole, but each device has another gradient.*'sequence'"
        ):
            train(2, strategy=name, memory_shares=(5, 2), **common)
        return
    dense = train(1, **common)[0]
    for result in train(2, strategy=name, memory_shares=(5, 2), **common):
        torch.testing.assert_close(params(result), params(dense), rtol=1e-10, atol=1e-10)
