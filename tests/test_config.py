import json
from typing import Any

import pytest
import torch
from torch import nn

from uneven import InputError
from uneven.config import LOCAL_POLICIES, RunConfig, Task, check_settings, check_task, resolve, settings_of
from uneven.train.policies import local_sgd_config


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"batch_size": 0}, ("batch_size=0", "at least 1")),
        ({"batch_size": 2.5}, ("batch_size=2.5", "whole number")),
        ({"batch_size": True}, ("batch_size=True",)),
        ({"epochs": -1}, ("epochs=-1", "at least 1")),
        ({"accumulate": 0}, ("accumulate=0",)),
        ({"num_workers": -1}, ("num_workers=-1", "at least 0")),
        ({"seed": -3}, ("seed=-3",)),
        ({"policy": "fast"}, ("policy='fast'", "sync, balanced, cadence, async")),
        ({"backend": "mpi"}, ("backend='mpi'", "auto, nccl, cpu, shm, gloo")),
        ({"precision": "int8"}, ("precision='int8'", "fp32, bf16, fp16, auto")),
        ({"compile": "yes"}, ("compile='yes'", "off, default, graph")),
        ({"progress": "loud"}, ("progress='loud'", "auto, bar, lines, off")),
        ({"max_grad_norm": 0}, ("max_grad_norm=0", "above 0")),
        ({"save_every": 1}, ("out=",)),
        ({"lr_scale": 0}, ("lr_scale=0", "above 0", "auto, linear, sqrt")),
        ({"lr_scale": -1.5}, ("lr_scale=-1.5",)),
        ({"lr_scale": True}, ("lr_scale=True",)),
        ({"lr_scale": "cubic"}, ("lr_scale='cubic'", "a number above 0 or one of auto, linear, sqrt")),
        ({"policy": "async", "anchor": 0}, ("anchor=0", "whole number of at least 1")),
        ({"policy": "async", "anchor": 2.5}, ("anchor=2.5", "whole number")),
        ({"policy": "cadence", "max_anchor": -1}, ("max_anchor=-1",)),
        ({"policy": "async", "max_staleness": 0}, ("max_staleness=0", "at least 1")),
        ({"policy": "async", "overhead_target": 0}, ("overhead_target=0", "above 0")),
        ({"policy": "async", "divergence_threshold": -0.1}, ("divergence_threshold=-0.1", "above 0")),
        ({"policy": "async", "optimizer_state": "sum"}, ("optimizer_state='sum'", "keep, average")),
        ({"memory_cap": 0}, ("memory_cap=0", "at least 1")),
        ({"memory_cap": 2.5}, ("memory_cap=2.5", "whole number")),
        ({"memory_cap": True}, ("memory_cap=True",)),
        ({"memory_cap": "many"}, ("memory_cap='many'", "whole number")),
        ({"memory_cap": ()}, ("memory_cap=()", "one such number per device")),
        ({"on_fault": "stop"}, ("on_fault='stop'", "go-on", "end")),
        ({"min_ranks": 0}, ("min_ranks=0", "at least 1")),
        ({"on_fault": "end", "min_ranks": 2}, ("min_ranks=2", "on_fault='end'", "leave one of them out")),
        ({"memory_cap": (8, 0)}, ("memory_cap=(8, 0)", "at least 1")),
        ({"shares": (-1, 2)}, ("shares=(-1.0, 2.0)", "at least 0", "one per device")),
        ({"shares": "52"}, ("shares='52'", "one per device")),
        ({"shares": ("fast", 2)}, ("shares=('fast', 2)", "one per device")),
        ({"shares": ()}, ("shares=()", "one per device")),
        ({"bucket_mb": 0}, ("bucket_mb=0", "a number above 0")),
        ({"bucket_mb": "25"}, ("bucket_mb='25'", "a number above 0")),
        ({"activations": "drop"}, ("activations='drop'", "keep, recompute, offload, auto")),
        ({"sync_batchnorm": "no"}, ("sync_batchnorm='no'", "True or False")),
        ({"devices": ["cpu"]}, ("devices=['cpu']", "text, as in 'cuda:0,cpu'")),
        ({"out": 3}, ("out=3", "a path")),
        ({"batchsize": 3}, ("'batchsize'", "did you mean 'batch_size'")),
        ({"zzz": 3}, ("'zzz'", "the settings are")),
    ],
)
def test_a_bad_setting_names_itself_and_what_is_allowed(settings: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(InputError) as caught:
        resolve({"batch_size": 1, "epochs": 1, **settings})
    assert all(word in str(caught.value) for word in words)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("missing", ["batch_size", "epochs"])
def test_what_has_no_default_must_be_given(missing: str) -> None:
    with pytest.raises(InputError, match=f"{missing} is missing"):
        resolve({name: 1 for name in ("batch_size", "epochs") if name != missing})


def test_num_epochs_is_another_name_for_epochs() -> None:
    assert resolve({"batch_size": 1, "num_epochs": 7}).epochs == 7


@pytest.mark.parametrize("value", [None, 1, 2.5, "auto", "linear", "sqrt"])
@pytest.mark.parametrize("policy", ["sync", "balanced", "cadence", "async"])
def test_every_policy_takes_a_learning_rate_scale(value: Any, policy: str) -> None:
    assert resolve({"batch_size": 1, "epochs": 1, "policy": policy, "lr_scale": value}).lr_scale == value


LOCAL = {
    "anchor": 5,
    "max_anchor": 50,
    "overhead_target": 0.1,
    "divergence_threshold": 0.2,
    "max_staleness": 3,
    "optimizer_state": "average",
    "verify": True,
}


@pytest.mark.parametrize("name", LOCAL)
@pytest.mark.parametrize("policy", ["sync", "balanced"])
def test_what_an_exact_policy_would_ignore_is_refused(policy: str, name: str) -> None:
    with pytest.raises(InputError) as caught:
        resolve({"batch_size": 1, "epochs": 1, "policy": policy, name: LOCAL[name]})
    owner = "policy='async'" if name == "max_staleness" else "the policies cadence and async"
    for word in (f"{name}={LOCAL[name]!r}", f"belongs to {owner}", f"policy={policy!r}", "leave it out"):
        assert word in str(caught.value)


def test_every_setting_of_the_local_policies_is_among_those_refused() -> None:
    known = settings_of(RunConfig).values()
    assert set(LOCAL) == {s.name for s in known if s.policies is not None and set(s.policies) <= set(LOCAL_POLICIES)}


@pytest.mark.parametrize("policy", ["cadence", "async"])
def test_the_local_policies_take_their_settings(policy: str) -> None:
    given = {name: value for name, value in LOCAL.items() if name != "max_staleness" or policy == "async"}
    config = resolve({"batch_size": 1, "epochs": 1, "policy": policy, **given})
    assert config.is_local
    assert {name: getattr(config, name) for name in given} == given


@pytest.mark.parametrize("policy", ["sync", "balanced"])
def test_settings_left_at_their_defaults_fit_every_policy(policy: str) -> None:
    config = resolve({"batch_size": 1, "epochs": 1, "policy": policy, **dict.fromkeys(LOCAL), "verify": False})
    assert not config.is_local


@pytest.mark.parametrize("policy", ["cadence", "async"])
def test_a_global_batch_is_refused_where_every_device_steps_by_itself(policy: str) -> None:
    with pytest.raises(InputError) as caught:
        resolve({"batch_size": 4, "epochs": 1, "policy": policy, "global_batch_size": 64})
    for word in ("global_batch_size=64", f"policy={policy!r}", "batch_size samples", "policy='balanced'"):
        assert word in str(caught.value)


@pytest.mark.parametrize("policy", ["cadence", "async"])
def test_a_memory_cap_is_refused_where_every_device_holds_batch_size_samples(policy: str) -> None:
    with pytest.raises(InputError) as caught:
        resolve({"batch_size": 4, "epochs": 1, "policy": policy, "memory_cap": 8})
    for word in ("memory_cap=8", f"policy={policy!r}", "ignored", "batch_size smaller"):
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("given", "caps"), [(None, (float("inf"),) * 2), (8, (8, 8)), ([8, 3], (8, 3)), ((8, 3), (8, 3))]
)
def test_a_memory_cap_is_one_for_all_or_one_per_device(given: Any, caps: tuple[float, ...]) -> None:
    config = resolve({"batch_size": 4, "epochs": 1, "memory_cap": given})
    assert config.caps(2) == caps
    # What is compared with a log's must be as it is read back from a file.
    assert json.loads(json.dumps(config.to_json()))["memory_cap"] == config.to_json()["memory_cap"]


def test_a_memory_cap_names_how_many_it_should_be() -> None:
    with pytest.raises(InputError, match=r"memory_cap=\(8, 3\) has 2 entries for 3 devices"):
        resolve({"batch_size": 4, "epochs": 1, "memory_cap": (8, 3)}).caps(3)


@pytest.mark.parametrize(
    ("settings", "samples"),
    [
        ({"policy": "sync"}, 8 * 3),
        ({"policy": "balanced", "accumulate": 2}, 8 * 2 * 3),
        ({"policy": "balanced", "global_batch_size": 50}, 50),
        ({"policy": "cadence"}, 8),
        ({"policy": "async", "accumulate": 2}, 8 * 2),
    ],
)
def test_a_slot_is_all_ranks_samples_or_in_the_local_policies_one_ranks(settings: dict[str, Any], samples: int) -> None:
    assert resolve({"batch_size": 8, "epochs": 1, **settings}).slot_size(3) == samples


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"policy": "cadence", "max_staleness": 5}, "belongs to policy='async'"),
        ({"policy": "async", "anchor": 30, "max_anchor": 20}, "anchor=30 is above max_anchor=20"),
        ({"policy": "async", "overhead_target": 1.5}, "overhead_target=1.5 must be a number above 0 and below 1"),
        ({"policy": "async", "lr_scale": float("inf")}, "lr_scale=inf must be a number above 0"),
    ],
)
def test_settings_of_windows_that_contradict_each_other(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        resolve({"batch_size": 8, "epochs": 1, **settings})


@pytest.mark.parametrize(
    ("settings", "anchors"),
    [({}, (10, 200)), ({"anchor": 300}, (300, 300)), ({"max_anchor": 5}, (5, 5)), ({"anchor": 3}, (3, 200))],
)
def test_an_anchor_moves_the_default_of_its_bound(settings: dict[str, Any], anchors: tuple[int, int]) -> None:
    terms = local_sgd_config(resolve({"batch_size": 8, "epochs": 1, "policy": "cadence", **settings}))
    assert (terms.anchor, terms.max_anchor) == anchors


@pytest.mark.parametrize("policy", ["cadence", "async"])
@pytest.mark.parametrize("given", [{"bucket_mb": 25.0}, {"strategy": "zero1"}, {"memory_shares": (1, 2)}])
def test_what_a_local_policy_would_ignore_is_refused(policy: str, given: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=rf"{next(iter(given))}=.* with policy='{policy}': .*leave"):
        resolve({"batch_size": 4, "epochs": 1, "policy": policy, **given})


@pytest.mark.parametrize("policy", ["sync", "balanced"])
def test_bucket_size_and_activations_are_settings(policy: str) -> None:
    config = resolve({"batch_size": 4, "epochs": 1, "policy": policy, "bucket_mb": 25, "activations": "recompute"})
    assert (config.bucket_mb, config.activations) == (25, "recompute")
    default = resolve({"batch_size": 4, "epochs": 1})
    assert (default.bucket_mb, default.activations) == (None, "keep")


def test_an_incomplete_set_of_settings_is_checked_for_itself() -> None:
    check_settings({"policy": "async", "shares": [5, 2], "num_epochs": 3})
    for wrong in ({"policy": "fast"}, {"epochs": 0}, {"shares": "5,2"}, {"sed": 1}):
        with pytest.raises(InputError):
            check_settings(wrong)


def task(**changes: Any) -> Task:
    parts = {"make_model": nn.Identity, "make_optimizer": torch.optim.Adam, "train_step": max, "dataset": [1]}
    return Task(**{**parts, **changes})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"make_model": nn.Identity()}, "function that makes the model"),
        ({"make_model": 3}, "function that makes the model, got int"),
        ({"make_optimizer": None}, "optimizer must be a function"),
        ({"train_step": "loss"}, "step must be a function"),
        ({"dataset": iter([1])}, "map-style"),
        ({"dataset": None}, "got NoneType"),
        ({"dataset": []}, "dataset is empty"),
    ],
)
def test_a_task_that_cannot_be_trained_is_refused(changes: dict[str, Any], words: str) -> None:
    check_task(task())
    with pytest.raises(InputError, match=words):
        check_task(task(**changes))


def test_overrides_take_precedence_and_leave_no_trace() -> None:
    written, typed = {"batch_size": 8, "epochs": 2, "seed": 1}, {"seed": 5, "shares": [5, 2]}
    config = resolve(written, typed)
    assert (config.batch_size, config.epochs, config.seed, config.shares) == (8, 2, 5, (5.0, 2.0))
    assert resolve(written).seed == 1
    assert resolve({"num_epochs": 2}, {"batch_size": 4, "epochs": 7}).epochs == 7
    with pytest.raises(InputError, match="did you mean 'seed'"):
        resolve(written, {"sed": 5})
