"""The captured step, against the eager one; on CUDA. What may be captured is checked everywhere."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.step.graph_runs import OPTIMIZERS, assert_same, make_data, train, train_step
from uneven import InputError, NotFiniteError
from uneven.comm.group import SoloGroup
from uneven.step.captured_optimizer import prepare_optimizer
from uneven.step.eager import EagerStep
from uneven.step.graph import GraphStep
from uneven.step.precision import Precision


def eager_step(optimizer: Any, precision: str, device: str = "cpu") -> EagerStep:
    model = nn.Linear(2, 2).to(device)
    on = torch.device(device)
    return EagerStep(
        model,
        optimizer(model.parameters()),
        lambda m, b: m(b).mean(),
        Precision(precision, on),
    )


@pytest.mark.parametrize(
    ("optimizer", "precision", "words"),
    [
        (lambda p: torch.optim.Adagrad(p), "fp32", "cannot capture Adagrad"),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5), "fp32", "SGD with dampening"),
        (lambda p: torch.optim.RMSprop(p), "fp16", "RMSprop"),
    ],
)
def test_an_optimizer_that_cannot_be_captured_is_refused(optimizer: Any, precision: str, words: str) -> None:
    with pytest.raises(InputError, match=words) as caught:
        prepare_optimizer(eager_step(optimizer, precision))
    assert "use " in str(caught.value)


@pytest.mark.cuda
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_captured_training_equals_eager_training(optimizer: str) -> None:
    """Params, buffers and optimizer state after 21 steps with a schedule and an eager tail in each epoch."""
    # Adam's captured form keeps its bias corrections in fp32 on the device.
    rtol, atol = (1e-5, 1e-6) if optimizer.startswith("adam") else (1e-9, 1e-10)
    assert_same(train("graph", optimizer), train("off", optimizer), rtol=rtol, atol=atol)


@pytest.mark.cuda
def test_captured_clipping_and_accumulation_equal_eager() -> None:
    options = {"max_grad_norm": 0.1, "batch_size": 8, "accumulate": 4}
    assert_same(train("graph", **options), train("off", **options), rtol=1e-9, atol=1e-10)


@pytest.mark.cuda
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_captured_step_that_is_not_finite_is_put_back_on_the_device(optimizer: str) -> None:
    """Against the eager step, which skips it on the host: the same samples dropped, the same bits of training."""
    data = make_data()
    data.tensors[0][77, 3] = float("nan")
    rtol, atol = (1e-4, 1e-5) if optimizer.startswith("adam") else (1e-9, 1e-10)
    graph, eager = (train(compile, optimizer, dataset=data) for compile in ("graph", "off"))
    assert graph.dropped == eager.dropped
    assert len(graph.dropped) == 3
    assert_same(graph, eager, rtol=rtol, atol=atol)
    for a, b in zip(graph.history, eager.history, strict=True):
        assert a["train_loss"] == pytest.approx(b["train_loss"], rel=max(rtol, 1e-8))
    with pytest.raises(NotFiniteError, match="3 steps in a row"):
        train("graph", optimizer, step=lambda model, batch: train_step(model, batch) * float("nan"))


@pytest.mark.cuda
def test_captured_loss_sums_equal_eager() -> None:
    def summed(model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        mask = batch[0][:, 0] > 0
        return (F.cross_entropy(model(batch[0]), batch[1], reduction="none") * mask).sum(), mask.sum()

    graph, eager = train("graph", step=summed), train("off", step=summed)
    assert_same(graph, eager, rtol=1e-9, atol=1e-10)
    for a, b in zip(graph.history, eager.history, strict=True):
        assert a["train_loss"] == pytest.approx(b["train_loss"], rel=1e-9)


@pytest.mark.cuda
def test_cpu_and_cuda_train_the_same_model() -> None:
    assert_same(train("off", devices="cpu"), train("off"), rtol=1e-8, atol=1e-9)


@pytest.mark.cuda
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("compile", ["off", "graph"])
def test_half_precisions_learn(precision: str, compile: str) -> None:
    state = train(compile, "adam", torch.float32, precision=precision, epochs=20)
    assert state.history[-1]["train_loss"] < 0.8 * state.history[0]["train_loss"]
    assert all(value.isfinite().all() for value in state.params.values())


@pytest.mark.cuda
def test_dropout_draws_anew_in_every_replay() -> None:
    losses = []
    model = nn.Sequential(nn.Dropout(0.5)).cuda()
    param = nn.Parameter(torch.zeros(1, device="cuda"))
    eager = EagerStep(
        model,
        torch.optim.SGD([param], lr=0.0),
        lambda m, b: m(b).mean() + param.sum(),
        Precision("fp32", torch.device("cuda")),
    )
    graph = GraphStep(eager, lambda inputs: inputs)
    ones = [(torch.ones(1000, device="cuda"), 1000)]
    graph.prepare(ones, 1000)
    for _ in range(5):
        graph.start_alone(ones, 1000)
        losses.append(eager.meter.take(SoloGroup()))
    assert len(set(losses)) == 5
    assert all(0.8 < loss < 1.2 for loss in losses)


@pytest.mark.cuda
def test_capture_leaves_no_trace() -> None:
    step = eager_step(OPTIMIZERS["momentum"], "fp32", "cuda:0")
    graph = GraphStep(step, lambda inputs: inputs)
    before = {name: value.clone() for name, value in step.model.state_dict().items()}
    batch = torch.rand(4, 2, device="cuda")
    random = torch.cuda.get_rng_state()
    graph.prepare([(batch, 4)], 4)
    assert all(torch.equal(value, before[name]) for name, value in step.model.state_dict().items())
    assert all(not buffer.any() for state in step.optimizer.state.values() for buffer in state.values())
    assert torch.equal(torch.cuda.get_rng_state(), random)
    assert not step.meter.totals.any()


@pytest.mark.cuda
def test_a_train_step_that_reads_the_host_is_refused_with_the_way_out() -> None:
    def reads(model: nn.Module, batch: Any) -> torch.Tensor:
        loss = train_step(model, batch)
        return loss if loss.item() < 1e9 else loss * 0

    with pytest.raises(InputError, match="use compile='off'"):
        train("graph", step=reads)
