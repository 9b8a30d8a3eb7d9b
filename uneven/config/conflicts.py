"""Settings that are right by themselves and do not go together, each in one line, with the fix.

RunConfig, which imports this module, raises the first of them whenever one is made; `uneven config check` tells all.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from uneven.config.names import MODEL_PARALLEL, SHARDED
from uneven.config.setting import Setting


def conflicts(config: Any, known: Mapping[str, Setting]) -> Iterator[str]:
    """Which settings of this RunConfig cannot be had together, and why, with the fix; each begins with one of them."""
    for name, one in known.items():
        if (message := one.policy_conflict(getattr(config, name), config.policy)) is not None:
            yield message
    if config.overwrite and config.out is None and config.resume is None:  # which it does not go with, see below
        yield "overwrite=True without out=...: nothing is written; add out='runs/my-run', or leave it out"
    if config.replay is not None and config.shares is not None:
        yield "replay=... with shares=...: a replay takes its shares from the log; leave shares out"
    if config.max_anchor is not None and config.anchor is not None and config.anchor > config.max_anchor:
        yield f"anchor={config.anchor} is above max_anchor={config.max_anchor}, which bounds it"
    if config.on_fault == "end" and config.min_ranks > 1:
        yield f"min_ranks={config.min_ranks} with on_fault='end': the first loss ends the run; leave one of them out"
    yield from _global_batch(config)
    yield from _strategy(config)
    yield from _activations(config)
    yield from _saves(config)


def _global_batch(config: Any) -> Iterator[str]:
    """Where a global batch cannot be chosen by measured costs, or there is nothing to limit."""
    if config.global_batch_size != "auto":
        if config.max_global_batch_size is not None:
            yield (
                f"max_global_batch_size={config.max_global_batch_size} limits global_batch_size='auto', which was not "
                "given; add it, or leave the limit out"
            )
        return
    if config.policy not in ("balanced", "auto"):
        yield f"global_batch_size='auto' with policy={config.policy!r}: pass a number, or use 'balanced'"
    if config.shares is not None:
        yield "global_batch_size='auto' with shares=...: no cost is measured then; pass a number"
    if not config.is_replicated:
        yield (
            f"global_batch_size='auto' with strategy={config.strategy!r}: no device can run a step alone, so no cost "
            "is measured; pass a number, or use 'zero1'"
        )


def _strategy(config: Any) -> Iterator[str]:
    """Settings that do not go with what the strategy divides among devices."""
    name = config.strategy
    if config.memory_shares is not None and name not in SHARDED:
        yield (
            f"memory_shares={config.memory_shares!r} divides the bytes of a strategy, and strategy={name!r} has "
            f"nothing to divide; use one of {', '.join(SHARDED)}, or leave it out"
        )
    yield from _redundancy(config, name)
    if config.compile == "graph" and name in SHARDED:
        yield f"compile='graph' with strategy={name!r}: a captured step has whole params; use 'off'"
    if name is not None and not config.is_replicated:
        yield from _sharded_model(config, name)


def _redundancy(config: Any, name: str | None) -> Iterator[str]:
    """Where nothing can be kept for another device."""
    allowed = [one for one in SHARDED if one not in MODEL_PARALLEL]
    if config.redundancy and name not in allowed:
        what = "has layers that no other device can keep" if name in MODEL_PARALLEL else "shards nothing"
        yield (
            f"redundancy={config.redundancy} keeps copies of shards, and strategy={name!r} {what}; use one of "
            f"{', '.join(allowed)}, or leave it out"
        )


def _activations(config: Any) -> Iterator[str]:
    """Where activations cannot be recomputed or offloaded, or no gradient bucket is sent."""
    if config.bucket_mb is not None and config.strategy in ("ddp-flat", "zero1-flat", *MODEL_PARALLEL):
        yield f"bucket_mb={config.bucket_mb!r} with strategy={config.strategy!r}: it sends no buckets; leave it out"
    if config.activations == "keep":
        return
    given = f"activations={config.activations!r}"
    if config.compile != "off":
        yield f"{given} with compile={config.compile!r}: use compile='off', or activations='keep'"
    if config.sync_batchnorm and config.activations != "offload":
        yield (
            f"{given} with sync_batchnorm=True: a recomputed BatchNorm would wait for ranks that do not recompute; "
            "use 'keep' or 'offload'"
        )
    if config.activations == "auto" and config.is_model_parallel:
        yield f"{given} with strategy={config.strategy!r}: all devices must choose alike; use 'recompute'"


def _sharded_model(config: Any, name: str) -> Iterator[str]:
    """Settings that need the whole model on every device."""
    same_samples = "devices train the same samples together; leave it out"
    reasons = {
        "precision": (config.precision == "fp16", "the loss scaler needs whole gradients; use 'bf16'"),
        "sync_batchnorm": (config.sync_batchnorm, "use 'zero1', or a norm that sees single samples"),
        "max_grad_value": (
            config.max_grad_value is not None,
            "gradients are in shards; use max_grad_norm or 'zero1'",
        ),
        "compile": (config.compile != "off", "params are gathered and freed while the model computes; use 'off'"),
        "shares": (config.is_model_parallel and config.shares is not None, same_samples),
        "memory_cap": (config.is_model_parallel and config.memory_cap is not None, same_samples),
    }
    for setting, (is_given, reason) in reasons.items():
        if is_given:
            yield f"{setting}={getattr(config, setting)!r} with strategy={name!r}: {reason}"


def _saves(config: Any) -> Iterator[str]:
    """Where checkpoints have no folder, or would be kept or resumed by a rule that cannot be followed."""
    if config.save_every is not None and config.out is None and config.resume is None:
        yield "save_every needs a folder to write to: add out='runs/my-run'"
    for name in ("keep_last", "keep_best"):
        if getattr(config, name) is not None and config.save_every is None:
            yield f"{name}={getattr(config, name)} without checkpoints: add save_every='1 epoch'"
    if config.checkpoint_copies > 1 and config.save_every is None:
        given = f"checkpoint_copies={config.checkpoint_copies}"
        yield f"{given} without checkpoints: add save_every='1 epoch'"
    if config.monitor_mode != "auto" and config.keep_best is None:
        yield (
            f"monitor_mode={config.monitor_mode!r} without keep_best=...: leave it out; a ReduceLROnPlateau, "
            "EarlyStopping and KeepBest have a mode of their own"
        )
    if config.resumes_newest and config.out is None:
        yield "resume='auto' looks for checkpoints in the run's own folder: add out='runs/my-run'"
    if config.resume is not None and config.replay is not None:
        yield "resume=... with replay=...: a replay repeats a whole run; leave one of them out"
    if config.resume is not None and config.overwrite:
        yield "resume=... with overwrite=True: a resumed run goes on in its folder; leave overwrite out"
