"""What a loop of the user's own may do, against the plain PyTorch loop that does the same: every param, in fp64."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau

from tests.api.loops import (
    GAN_DATA,
    NOISE,
    SETTINGS,
    SLOT,
    Batch,
    Pair,
    assert_equal,
    assert_params,
    d_losses,
    g_loss,
    make_loop,
    on_ranks_catching,
    plain_batches,
    step_each,
)
from tests.ranks import ThreadGroup, on_threads
from tests.train.exact_runs import OPTIMIZERS, Net, X, train
from uneven import InputError, TrainedState
from uneven.api.loop import Loop
from uneven.data.sample_order import permutation

ACCUMULATED: dict[str, Any] = {"batch_size": 4, "accumulate": 3, "global_batch_size": SLOT}


def plain_loop(step: Callable[[nn.Module, Any, Batch], None], **options: Any) -> dict[str, Tensor]:
    model = options.pop("model", None) or Net(torch.float64)
    optimizer = options.pop("make", OPTIMIZERS["sgd"])(model.parameters())
    for epoch in range(2):
        for batch in plain_batches(epoch):
            step(model, optimizer, batch)
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def plain_accumulated(model: nn.Module, optimizer: Any, batch: Batch) -> None:
    optimizer.zero_grad()
    for x, y in zip(batch[0].split(8), batch[1].split(8), strict=True):
        (F.cross_entropy(model(x), y) * len(x) / len(batch[0])).backward()
    optimizer.step()


def run(size: int, body: Callable[[Loop, Any], None], **options: Any) -> list[TrainedState]:
    def rank(group: ThreadGroup) -> TrainedState:
        loop = make_loop(group, **options)
        for epoch in range(loop.epochs):
            for batch in loop.batches(epoch):
                body(loop, batch)
        return loop.finish()

    return on_threads(size, rank)


def backward_then_step(loop: Loop, batch: Any) -> None:
    loop.backward(F.cross_entropy(loop(batch[0]), batch[1]))
    loop.step()


def no_sync_until_the_last(loop: Loop, batch: Any) -> None:
    loss = F.cross_entropy(loop(batch[0]), batch[1])
    if loop.sync_gradients:
        loop.step(loss)
    else:
        with loop.no_sync():
            loop.backward(loss)


def two_losses(loop: Loop, batch: Any) -> None:
    loss = F.cross_entropy(loop(batch[0]), batch[1])
    loop.backward(loss * 0.25)
    loop.step(F.cross_entropy(loop(batch[0]), batch[1]) * 0.75)


def counted(loop: Loop, batch: Any) -> None:
    loop.step((F.cross_entropy(loop(batch[0]), batch[1], reduction="sum"), len(batch[1])))


@pytest.mark.parametrize("body", [step_each, backward_then_step, no_sync_until_the_last, two_losses, counted])
def test_accumulation_equals_a_plain_loop_that_accumulates(body: Callable[[Loop, Any], None]) -> None:
    expected = plain_loop(plain_accumulated)
    for size, options in [(1, {}), (2, {}), (3, {"shares": (2.0, 0.0, 1.0)}), (2, {"strategy": "zero1"})]:
        states = run(size, body, **ACCUMULATED, **options)
        assert_params(states, expected)
        assert states[0].history[0]["train_loss"] == pytest.approx(
            run(1, step_each, batch_size=SLOT)[0].history[0]["train_loss"]
        )


def test_accumulation_counts_steps_and_samples_along_the_axis() -> None:
    seen: list[list[tuple[int, int, int, bool]]] = [[], []]

    def body(loop: Loop, batch: Any) -> None:
        seen[loop.rank].append((len(batch[0]), loop.global_step, loop.samples, loop.sync_gradients))
        step_each(loop, batch)

    (state, _) = run(2, body, **ACCUMULATED, shares=(2.0, 1.0), epochs=1)
    assert seen[0] == [(6, 0, 0, False), (6, 0, 0, False), (4, 0, 0, True),
                       (6, 1, 24, False), (6, 1, 24, False), (4, 1, 24, True),
                       (5, 2, 48, False), (5, 2, 48, False), (5, 2, 48, True)]  # fmt: skip
    assert [entry[:2] for entry in seen[1][:3]] == [(4, 0), (4, 0), (4, 1)]
    assert (state.slot, state.samples) == (3, 70)


def test_accumulation_in_a_local_policy_is_that_of_one_device() -> None:
    """A rank that gets all slots of cadence trains as one device with batches of batch_size x accumulate."""
    options: Any = {"batch_size": 8, "accumulate": 3, "global_batch_size": None, "policy": "cadence", "lr_scale": 1.0}
    states = run(2, step_each, **options, shares=(1000.0, 1.0))
    assert_params(states, plain_loop(plain_accumulated))


def clip_and_shrink(model: nn.Module, optimizer: Any, batch: Batch) -> None:
    optimizer.zero_grad()
    F.cross_entropy(model(batch[0]), batch[1]).backward()
    model.first.weight.grad.mul_(0.5)  # type: ignore[union-attr]
    nn.utils.clip_grad_value_(model.parameters(), 0.02)
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()


def test_before_step_sees_the_sum_and_clipping_follows_it() -> None:
    expected = plain_loop(clip_and_shrink)
    calls: list[object] = []

    def halve(model: Any, optimizer: Any) -> None:
        calls.append(optimizer)
        model.first.weight.grad.mul_(0.5)

    for size, hook in [(1, halve), (2, halve), (3, lambda model: model.first.weight.grad.mul_(0.5))]:
        options = {"before_step": hook, "max_grad_value": 0.02, "max_grad_norm": 0.1}
        assert_params(run(size, step_each, **options), expected)
    assert len(calls) == 3 * 6


@pytest.mark.parametrize("size", [1, 2])
def test_instances_are_used_in_place(size: int) -> None:
    def plain(model: nn.Module, optimizer: Any, batch: Batch) -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(batch[0]), batch[1]).backward()
        optimizer.step()

    def make(params: Any) -> Adam:
        return Adam(params, lr=0.01)

    expected = plain_loop(plain, make=make)

    def rank(group: ThreadGroup) -> TrainedState:
        model = Net(torch.float64)
        optimizer = make(model.parameters())
        loop = make_loop(group, model=model, optimizer=optimizer, strategy="zero1" if size == 2 else None)
        for epoch in range(2):
            for batch in loop.batches(epoch):
                step_each(loop, batch)
        state = loop.finish()
        assert size == 2 or loop.optimizer is optimizer
        return state

    assert_params(on_threads(size, rank), expected)


def test_an_instance_of_other_params_is_refused() -> None:
    def rank(group: ThreadGroup) -> None:
        make_loop(group, optimizer=SGD(Net(torch.float64).parameters(), lr=0.1))

    (error,) = on_ranks_catching(1, rank)
    assert "holds 6 of 6 params that are not the model's" in str(error)
    assert "parameters() of the model" in str(error)


def plain_gan(every: int = 1, without: int | None = None) -> dict[str, Tensor]:
    g, d = Pair(6, 1), Pair(1, 2)
    opt_g, opt_d = Adam(g.parameters(), lr=0.01), SGD(d.parameters(), lr=0.1, momentum=0.5)
    steps = 0
    for epoch in range(2):
        order = torch.from_numpy(permutation(3, epoch, len(X)))
        for rows in order.split(SLOT):
            real, noise = X.double()[rows], NOISE[rows]
            if steps == without:
                steps += 1
                continue
            opt_d.zero_grad()
            for loss in d_losses(g, d, real, noise):
                loss.backward()
            opt_d.step()
            if steps % every == 0:
                opt_g.zero_grad()
                g_loss(g, d, noise).backward()
                opt_g.step()
            steps += 1
    named = [*((f"g.{name}", p) for name, p in g.named_parameters()),
             *((f"d.{name}", p) for name, p in d.named_parameters())]  # fmt: skip
    return {name: param.detach().clone() for name, param in named}


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize(
    ("size", "options"),
    [(1, {}), (2, {}), (3, {"shares": (2.0, 0.0, 1.0)}), (2, {"accumulate": 3, "batch_size": 4}),
     (2, {"policy": "cadence", "shares": (1000.0, 1.0), "batch_size": SLOT, "lr_scale": 1.0})],
)  # fmt: skip
def test_two_optimizers_equal_a_plain_gan(size: int, options: dict[str, Any], every: int) -> None:
    def rank(group: ThreadGroup) -> TrainedState:
        g, d = Pair(6, 1), Pair(1, 2)
        made: Any = {"g": lambda params: Adam(params, lr=0.01), "d": SGD(d.parameters(), lr=0.1, momentum=0.5)}
        is_local = options.get("policy") == "cadence"
        settings = {"global_batch_size": None if is_local else SLOT, **options}
        loop = make_loop(group, model={"g": g, "d": d}, optimizer=made, dataset=GAN_DATA, **settings)
        for epoch in range(2):
            for real, noise in loop.batches(epoch):
                for loss in d_losses(g, d, real, noise):
                    loop.backward(loss, optimizer="d")
                loop.step(optimizer=made["d"])
                if loop.global_step % every == 0:
                    loop.step(g_loss(g, d, noise), optimizer="g")
        assert loop.optimizers.keys() == made.keys()
        return loop.finish()

    states = on_threads(size, rank)
    if "accumulate" not in options:
        assert_params(states, plain_gan(every))
    assert all(torch.equal(value, states[0].params[name]) for name, value in states[-1].params.items())
    assert states[0].samples == 140


def test_ranks_that_step_different_optimizers_are_told() -> None:
    def rank(group: ThreadGroup) -> None:
        g, d = Pair(6, 1), Pair(1, 2)
        loop = make_loop(group, model=[g, d], optimizer=[SGD(g.parameters(), lr=0.1), SGD(d.parameters(), lr=0.1)],
                         dataset=GAN_DATA)  # fmt: skip
        for _, noise in loop.batches(0):
            loop.step(g_loss(g, d, noise), optimizer=group.rank)

    errors = on_ranks_catching(2, rank)
    assert all("rank 0 steps '0', rank 1 steps '1'" in str(error) for error in errors)


@pytest.mark.parametrize(
    ("use", "words"),
    [
        (lambda loop, loss: loop.step(loss), "say which one"),
        (lambda loop, loss: loop.step(loss, optimizer="x"), "pass one of 0, 1"),
        (lambda loop, loss: loop.step(optimizer=0), "without a loss"),
        (lambda loop, loss: loop.backward(loss, optimizer=0), "a batch was not trained"),
        (lambda loop, loss: loop.step(loss.detach(), optimizer=1), "without a graph"),
    ],
)
def test_wrong_uses_of_several_optimizers(use: Callable[[Loop, Tensor], None], words: str) -> None:
    def rank(group: ThreadGroup) -> None:
        g, d = Pair(6, 1), Pair(1, 2)
        made = [SGD(g.parameters(), lr=0.1), SGD(d.parameters(), lr=0.1)]
        loop = make_loop(group, model=[g, d], optimizer=made, dataset=GAN_DATA)
        for _, noise in loop.batches(0):
            use(loop, g_loss(g, d, noise))

    (error,) = on_ranks_catching(1, rank)
    assert isinstance(error, InputError)
    assert words in str(error)


@pytest.mark.parametrize("size", [1, 2])
def test_a_plateau_lowers_the_rate_on_all_ranks_by_the_same_metric(size: int) -> None:
    metrics = [1.0, 2.0, 2.0, 0.5]  # worse for two epochs: the rate is halved after the third

    def plain() -> tuple[dict[str, Tensor], list[float]]:
        model = Net(torch.float64)
        optimizer = OPTIMIZERS["sgd"](model.parameters())
        scheduler, rates = ReduceLROnPlateau(optimizer, factor=0.5, patience=1), []
        for epoch in range(4):
            rates.append(optimizer.param_groups[0]["lr"])
            for x, y in plain_batches(epoch):
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
            scheduler.step(metrics[epoch])
        return {name: param.detach() for name, param in model.named_parameters()}, rates

    def rank(group: ThreadGroup) -> TrainedState:
        loop = make_loop(group, lambda optimizer: ReduceLROnPlateau(optimizer, factor=0.5, patience=1), epochs=4)
        for epoch in range(4):
            for batch in loop.batches(epoch):
                step_each(loop, batch)
            assert loop.scheduler_step(metrics[epoch] if group.rank == 0 else None) == metrics[epoch]
        return loop.finish()

    expected, rates = plain()
    states = on_threads(size, rank)
    assert rates == [0.05, 0.05, 0.05, 0.025]
    assert [entry["lr"] for entry in states[0].history] == rates
    assert_params(states, expected)


def test_a_scheduler_that_was_made_already_is_moved_along_the_axis() -> None:
    from uneven.api.loop_inputs import scheduler_factory
    from uneven.config import resolve

    model = Net(torch.float64)
    optimizer = SGD(model.parameters(), lr=0.1)
    scheduler = LambdaLR(optimizer, lambda step: 1 / (1 + step))
    config = resolve({"batch_size": 4, "epochs": 1})
    make = scheduler_factory(scheduler, optimizer, config)
    assert make is not None
    assert make(optimizer) is scheduler
    with pytest.raises(InputError, match="steps another optimizer"):
        scheduler_factory(scheduler, SGD(model.parameters(), lr=0.1), config)


@pytest.mark.parametrize(("size", "shares"), [(1, None), (2, None), (3, (2.0, 0.0, 1.0))])
def test_a_slot_whose_loss_is_not_finite_is_dropped_with_all_its_updates(size: int, shares: Any) -> None:
    """As a plain GAN that leaves that global batch out, on ranks without samples, too."""

    def rank(group: ThreadGroup) -> TrainedState:
        g, d = Pair(6, 1), Pair(1, 2)
        made = {"g": Adam(g.parameters(), lr=0.01), "d": SGD(d.parameters(), lr=0.1, momentum=0.5)}
        loop = make_loop(group, model={"g": g, "d": d}, optimizer=made, dataset=GAN_DATA, shares=shares)
        for epoch in range(2):
            for real, noise in loop.batches(epoch):
                spoil = float("nan") if loop.global_step == 1 and group.rank == 0 else 1.0
                loop.step(sum(d_losses(g, d, real, noise)) * spoil, optimizer="d")
                loop.step(g_loss(g, d, noise), optimizer="g")
        return loop.finish()

    states = on_threads(size, rank)
    assert_params(states, plain_gan(without=1))
    assert {slot for slot, _, _, _ in states[0].dropped} == {1}
    assert states[0].samples == 140 - 24


def test_the_first_count_of_a_batch_is_that_of_all_its_losses() -> None:
    """As docs/settings.md says: two terms over the same samples, or a batch in pieces whose first one has its count."""

    def pieces(loop: Loop, batch: Any) -> None:
        losses = F.cross_entropy(loop(batch[0]), batch[1], reduction="none")
        loop.backward((losses[:3].sum(), len(losses)))
        loop.step((F.cross_entropy(loop(batch[0]), batch[1], reduction="none")[3:].sum(), len(losses) - 3))

    dense = train(1, **SETTINGS)[0].state

    def rank(group: ThreadGroup) -> TrainedState:
        loop = make_loop(group)
        for epoch in range(2):
            for batch in loop.batches(epoch):
                pieces(loop, batch)
        return loop.finish()

    assert_equal(on_threads(2, rank), dense)
