"""Synchronised BatchNorm: values, gradients and running statistics against torch's own on all samples at once."""

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.ranks import Silent, ThreadGroup, on_threads
from uneven import TrainedState, fit
from uneven.config import Task, resolve
from uneven.data.sample_order import permutation
from uneven.data.tensors import TensorData
from uneven.hardware.device import parse_devices
from uneven.parallel.batchnorm import BatchNormSync, describe_batchnorm, synced_buffers, synchronise
from uneven.train.rank_info import RankInfo, RankResult
from uneven.train.requests import Requests
from uneven.train.worker import Worker

EXACT = {"rtol": 1e-10, "atol": 1e-10}


def values(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def layer(kind: Any, **options: Any) -> Any:
    made = kind(4, **options).double()
    with torch.no_grad():
        for number, param in enumerate(made.parameters()):
            param.copy_(values(*param.shape, seed=10 + number))
    return made


def one_pass(module: nn.Module, x: Tensor, slope: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Output, gradient of the input, gradients of the params for the loss (output * slope).sum()."""
    x = x.clone().requires_grad_()
    out = module(x)
    (out * slope).sum().backward()
    assert x.grad is not None
    return out.detach(), x.grad, [p.grad for p in module.parameters() if p.grad is not None]


@pytest.mark.parametrize(
    ("kind", "shape", "options"),
    [
        (nn.BatchNorm1d, (4,), {}),
        (nn.BatchNorm1d, (4, 5), {"momentum": None}),
        (nn.BatchNorm2d, (4, 3, 2), {"eps": 0.1, "momentum": 0.3}),
        (nn.BatchNorm2d, (4, 3, 2), {"affine": False}),
        (nn.BatchNorm3d, (4, 2, 1, 2), {"track_running_stats": False}),
    ],
)
@pytest.mark.parametrize("shares", [(3, 4), (1, 5, 1), (0, 6, 2), (7, 0)])
def test_equals_torch_on_the_whole_batch(
    kind: Any, shape: tuple[int, ...], options: dict[str, Any], shares: tuple[int, ...]
) -> None:
    reference = layer(kind, **options)
    batches = [values(sum(shares), *shape, seed=s) * 3 + 50 for s in range(3)]
    slopes = [values(sum(shares), *shape, seed=20 + s) for s in range(3)]
    expected = [one_pass(reference, x, slope) for x, slope in zip(batches, slopes, strict=True)]

    def rank(group: ThreadGroup) -> tuple[nn.Module, list[Any]]:
        module = layer(kind, **options)
        batchnorm_sync = synchronise(module)
        batchnorm_sync.group = group
        own = slice(sum(shares[: group.rank]), sum(shares[: group.rank + 1]))
        passes = []
        for x, slope in zip(batches, slopes, strict=True):
            if shares[group.rank]:
                passes.append(one_pass(module, x[own], slope[own]))
            else:
                with batchnorm_sync.dummy_batch(
                    True
                ):  # whatever a dummy batch holds and whatever its loss, nothing may change
                    passes.append(one_pass(module, x[:1] * 100, slope[:1]))
        return module, passes

    results = on_threads(len(shares), rank)
    busy = [result for result, share in zip(results, shares, strict=True) if share]
    for step, (out, of_input, of_params) in enumerate(expected):
        torch.testing.assert_close(torch.cat([passes[step][0] for _, passes in busy]), out, **EXACT)
        torch.testing.assert_close(torch.cat([passes[step][1] for _, passes in busy]), of_input, **EXACT)
        for place, grad in enumerate(of_params):
            # Gradients accumulate over the passes in both, and ranks' own are summed by the reducer.
            torch.testing.assert_close(sum(passes[step][2][place] for _, passes in results), grad, **EXACT)
    for (module, passes), share in zip(results, shares, strict=True):
        if not share:
            assert not any(of_input.any() for _, of_input, _ in passes)
        assert module.state_dict().keys() == reference.state_dict().keys()
        for name, buffer in reference.named_buffers():
            torch.testing.assert_close(module.get_buffer(name), buffer, **EXACT)
            assert torch.equal(module.get_buffer(name), results[0][0].get_buffer(name))


def test_without_a_group_and_in_evaluation_it_is_torchs_own() -> None:
    plain, synced = layer(nn.BatchNorm1d), layer(nn.BatchNorm1d)
    batchnorm_sync = synchronise(synced)
    x, slope = values(6, 4), values(6, 4, seed=1)
    for ours, reference in zip(one_pass(synced, x, slope), one_pass(plain, x, slope), strict=True):
        torch.testing.assert_close(ours, reference, rtol=0, atol=0)
    assert torch.equal(synced.running_var, plain.running_var)

    def rank(group: ThreadGroup) -> Tensor:
        module = copy.deepcopy(synced).eval()
        module.batchnorm_sync.group = group
        assert module.batchnorm_sync is batchnorm_sync, "a copy stays in the circle"
        return module(x[group.rank :])

    for rank_number, out in enumerate(on_threads(2, rank)):
        assert torch.equal(out, plain.eval()(x[rank_number:]))


def test_layers_are_changed_in_place_and_keep_everything() -> None:
    shared = nn.BatchNorm2d(3)
    model = nn.Sequential(nn.Conv2d(1, 3, 1), shared, nn.ReLU(), nn.Sequential(shared, nn.BatchNorm2d(3)))
    params, keys = list(model.parameters()), list(model.state_dict())
    batchnorm_sync = synchronise(model)
    assert model[1] is shared
    assert batchnorm_sync.layers == [shared, model[3][1]]
    assert [id(p) for p in model.parameters()] == [id(p) for p in params]
    assert list(model.state_dict()) == keys
    assert isinstance(shared, nn.BatchNorm2d)
    assert synced_buffers(model) >= {"1.running_mean", "1.running_var", "1.num_batches_tracked", "3.1.running_mean"}
    assert all(name in dict(model.named_buffers(remove_duplicate=False)) for name in synced_buffers(model))
    with pytest.raises(ValueError, match="4D"):
        shared(torch.zeros(2, 3))


def test_one_value_per_channel_is_refused_on_all_ranks() -> None:
    def rank(group: ThreadGroup) -> str:
        module = layer(nn.BatchNorm1d)
        batchnorm_sync = synchronise(module)
        batchnorm_sync.group = group
        with (
            pytest.raises(ValueError, match="more than 1 value") as caught,
            batchnorm_sync.dummy_batch(group.rank == 0),
        ):
            module(values(1, 4))
        return str(caught.value)

    assert len(set(on_threads(2, rank))) == 1


class Net(nn.Module):
    """Filled from a generator of its own: threads share torch's global one."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 3, 2)
        self.first = nn.BatchNorm2d(3)
        self.linear = nn.Linear(12, 5)
        self.second = nn.BatchNorm1d(5, momentum=None)
        self.out = nn.Linear(5, 3)
        own = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for param in self.parameters():
                param.copy_(torch.randn(param.shape, generator=own) * 0.4)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(self.conv(x))).flatten(1)
        return self.out(torch.tanh(self.second(self.linear(x))))


def mean_loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def loss_and_count(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="sum"), len(batch[1])


def train(size: int, step: Any = mean_loss, make_model: Any = Net, **changes: Any) -> list[RankResult]:
    settings = {"batch_size": 64, "global_batch_size": 12, "epochs": 2, "seed": 3, "sync_batchnorm": True}
    config = resolve({**settings, **changes})
    targets = torch.randint(0, 3, (38,), generator=torch.Generator().manual_seed(1))
    data = TensorData(values(38, 1, 3, 3), targets)
    task = Task(make_model, lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9), step, data)
    devices = parse_devices(["cpu"] * size)

    def rank(group: ThreadGroup) -> RankResult:
        return Worker(task, config, RankInfo(group.rank, devices), lambda _: group, Requests(), Silent()).train()

    return on_threads(size, rank)


def assert_equal(ours: Sequence[RankResult], dense: RankResult) -> None:
    for result in ours:
        for mine, reference in ((result.state.params, dense.state.params), (result.state.buffers, dense.state.buffers)):
            assert mine.keys() == reference.keys()
            for name, value in reference.items():
                torch.testing.assert_close(mine[name], value, **EXACT, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize(
    ("size", "options"),
    [
        (2, {"policy": "sync"}),
        (2, {"policy": "balanced"}),
        (3, {"policy": "sync"}),  # the tail slot of 2 samples leaves one rank without any
        (3, {"shares": (7, 0, 2)}),
        (3, {"shares": (1, 10, 1), "max_grad_norm": 0.2}),
        (2, {"shares": (11, 1), "step": loss_and_count}),
        (3, {"shares": (1, 0, 0)}),
    ],
)
def test_training_equals_one_process(size: int, options: dict[str, Any]) -> None:
    step = options.get("step", mean_loss)
    dense = train(1, step=step, max_grad_norm=options.get("max_grad_norm"))[0]
    assert dense.state.buffers["second.num_batches_tracked"] == 8
    assert_equal(train(size, **options), dense)


@pytest.mark.parametrize("policy", ["sync", "balanced"])
def test_ranks_with_one_sample_each_are_measured_with_two(policy: str) -> None:
    """Alone, before the group has formed, a layer cannot train on one."""
    options: dict[str, Any] = {"global_batch_size": 2, "max_steps": 8}  # with two values a channel rounding grows fast
    assert_equal(train(2, policy=policy, **options), train(1, **options)[0])


class Gated(Net):
    """A param that one sample alone uses: the one that ranks without samples pass through the layers."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Parameter(torch.ones((), dtype=torch.float64))
        self.known = values(38, 1, 3, 3)[permutation(3, 0, 38)[0]]

    def forward(self, x: Tensor) -> Tensor:
        is_known = (x == self.known).flatten(1).all(1)
        out = super().forward(x)
        return out + self.extra * is_known[:, None] * values(3) if is_known.any() else out


@pytest.mark.parametrize("options", [{"shares": (2, 1, 0)}, {"shares": (1, 0), "strategy": "zero1"}])
def test_a_param_that_no_sample_of_a_step_uses_stays_as_it_is(options: dict[str, Any]) -> None:
    """Its momentum would move it on, had the rank without samples a gradient for it."""
    dense = train(1, make_model=Gated)[0]
    assert dense.state.params["extra"] != 1
    assert_equal(train(len(options["shares"]), make_model=Gated, **options), dense)


def test_unequal_micro_batches_neither_hang_nor_differ_between_ranks() -> None:
    """Shares of 10 and 2 in micro-batches of at most 5: rank 1 adds a dummy batch to run as many."""
    ours = train(2, shares=(5, 1), accumulate=2, batch_size=2)
    for name, value in {**ours[0].state.params, **ours[0].state.buffers}.items():
        assert torch.equal(value, {**ours[1].state.params, **ours[1].state.buffers}[name]), name
    assert ours[0].state.buffers["second.num_batches_tracked"] > 8


def test_without_it_the_ranks_see_their_own_samples() -> None:
    """The test above can fail: local statistics end elsewhere."""
    dense = train(1)[0]
    with pytest.raises(AssertionError):
        assert_equal(train(2, sync_batchnorm=False, shares=(2, 1)), dense)


def test_on_processes_two_ranks_equal_one() -> None:
    """Gloo keeps the order of what BatchNorm and the gradients send; shares and a tail leave a rank without samples."""

    def run(**settings: Any) -> TrainedState:
        def make() -> nn.Module:
            torch.manual_seed(1)
            return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3)).double()

        return fit(
            model=make,
            optimizer=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
            step=lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
            dataset=TensorData(values(38, 6), torch.arange(38) % 3),
            **{"batch_size": 6, "epochs": 3, "progress": "off", "sync_batchnorm": True, **settings},
        )

    dense = run(devices="cpu", batch_size=12)
    ours = run(devices="cpu,cpu", shares=(11, 1))
    assert any(samples == 0 for _, _, samples in ours.log[1])
    for name, value in {**dense.params, **dense.buffers}.items():
        torch.testing.assert_close({**ours.params, **ours.buffers}[name], value, **EXACT)


def test_the_way_out_is_named_only_where_it_is_one() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    lines = [describe_batchnorm(model, BatchNormSync(), False, can_ask, (11, 5))[0] for can_ask in (True, False)]
    assert "sync_batchnorm=True makes it see all 16" in lines[0]
    assert lines[1] == "  BatchNorm sees 11 and 5 samples"


def test_a_compiled_model_leaves_the_layers_that_wait_for_others_out_of_its_graphs() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(3)

        def forward(self, x: Tensor) -> Tensor:
            normalised: Tensor = self.norm(x.sin())
            return normalised

    model = Net()
    traced: list[str] = []

    def look(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> torch.fx.GraphModule:
        traced.extend(str(node.target) for node in graph.graph.nodes if node.op.startswith("call_"))
        return graph

    synchronise(model)
    torch.compile(model, backend=look)(torch.randn(5, 3))  # type: ignore[arg-type]
    assert traced in (["sin"], []), "torch 2.8 compiles nothing of a frame with such a layer"
