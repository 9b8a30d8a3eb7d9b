"""SyncBatchNorm that works on CPUs too: every rank normalises by the statistics of all ranks' samples.

torch's SyncBatchNorm refuses CPU tensors. Here each rank sends (count, mean, sum of squared deviations) per channel,
each in its own row of one all-reduced tensor, and all ranks merge the rows in rank order: exact for unequal batches,
as stable as one process, and the same bits everywhere. Backward sums two numbers per channel.

All ranks must run the same layers in the same order. A rank without samples runs a dummy batch: one sample that is
normalised but enters neither statistics nor gradients.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from uneven.comm.group import Group
from uneven.timeline.record import State


class BatchNormSync:
    """What the synchronised layers of one model share. Without a group they are plain BatchNorm.

    `enter` is called with the rank's state: "wait" while a layer waits for the other ranks, then "compute" again.
    """

    def __init__(self) -> None:
        self.group: Group | None = None
        self.enter: Callable[[State], Any] = lambda _: None
        self.is_dummy = False
        self.layers: list[nn.Module] = []

    def connect(self, group: Group, enter: Callable[[State], Any]) -> None:
        """Sum over the ranks of this group from now on."""
        self.group, self.enter = group, enter

    def __deepcopy__(self, memo: dict[int, Any]) -> "BatchNormSync":
        return self  # a copied model (a teacher, a moving average) is synchronised with the same ranks

    @property
    def is_open(self) -> bool:
        return self.group is not None and self.group.world_size > 1

    @contextmanager
    def dummy_batch(self, is_dummy: bool) -> Iterator[None]:
        """Inside, forward runs a dummy batch if `is_dummy`: its values must not count."""
        self.is_dummy = is_dummy
        try:
            yield
        finally:
            self.is_dummy = False

    def all_reduce(self, tensor: Tensor) -> Tensor:
        assert self.group is not None, "called only with a group"
        self.enter("wait")
        total = self.group.all_reduce(tensor).wait()
        self.enter("compute")
        return total


def synchronise(model: nn.Module) -> BatchNormSync:
    """Turn the model's BatchNorm layers into synchronised ones, in place: same objects, params and names."""
    _keep_out_of_graphs()
    batchnorm_sync = BatchNormSync()
    for module in model.modules():
        kind = _KINDS.get(type(module))
        if kind is not None:
            # Changing the class keeps the object, so that other references to it (hooks, lists) stay valid.
            module.__class__ = kind
            module.batchnorm_sync = batchnorm_sync  # type: ignore[assignment]
            batchnorm_sync.layers.append(module)
    return batchnorm_sync


@cache
def _keep_out_of_graphs() -> None:
    """Keep torch.compile from tracing the collectives. Called late, since it imports the compiler: two seconds."""
    _Synced.forward = torch.compiler.disable(_Synced.forward)  # type: ignore[method-assign]


def synced_buffers(model: nn.Module) -> set[str]:
    """Names of the buffers that synchronised layers keep equal on all ranks."""
    layers = [(name, module) for name, module in model.named_modules() if isinstance(module, _Synced)]
    return {f"{name}.{buffer}".lstrip(".") for name, module in layers for buffer, _ in module.named_buffers()}


def has_batchnorm(model: nn.Module) -> bool:
    return any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())


def describe_batchnorm(
    model: nn.Module, batchnorm_sync: BatchNormSync, is_asked: bool, can_ask: bool, samples: Sequence[int]
) -> list[str]:
    """Lines to print about BatchNorm, given each rank's samples per step; often none."""
    if is_asked and not batchnorm_sync.layers:
        return ["  sync_batchnorm=True changes nothing: the model has no BatchNorm layer"]
    if batchnorm_sync.layers or not has_batchnorm(model):
        return []
    seen = " and ".join(str(count) for count in samples)
    way_out = f"; sync_batchnorm=True makes it see all {sum(samples)}" if can_ask else ""
    return [f"  BatchNorm sees {seen} samples{way_out}"]


class _Synced(nn.modules.batchnorm._BatchNorm):
    """BatchNorm over all ranks while training, once there is a group; otherwise plain BatchNorm."""

    batchnorm_sync: BatchNormSync

    def forward(self, input: Tensor) -> Tensor:
        if not (self.batchnorm_sync.is_open and (self.training or self.running_mean is None)):
            return super().forward(input)
        self._check_input_dim(input)  # type: ignore[no-untyped-call]
        count, mean, variance = _statistics(input, self.batchnorm_sync)
        if count <= 1:
            raise ValueError(f"BatchNorm needs more than 1 value per channel in training, got {count:g} over all ranks")
        if self.training and self.track_running_stats:
            self._update_running_stats(count, mean, variance)
        is_dummy = self.batchnorm_sync.is_dummy
        normalised: Tensor = _Normalise.apply(  # type: ignore[no-untyped-call]
            input, self.weight, self.bias, mean, variance, self.eps, count, is_dummy, self.batchnorm_sync
        )
        return normalised

    @torch.no_grad()
    def _update_running_stats(self, count: float, mean: Tensor, variance: Tensor) -> None:
        """As one process would: with the unbiased variance of all samples."""
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        if self.running_mean is None or self.running_var is None:
            return
        factor = self.momentum
        if factor is None:
            assert self.num_batches_tracked is not None
            factor = 1.0 / float(self.num_batches_tracked)
        for running, value in ((self.running_mean, mean), (self.running_var, variance * (count / (count - 1)))):
            running.mul_(1 - factor).add_(value.to(running.dtype), alpha=factor)


class SyncedBatchNorm1d(_Synced, nn.BatchNorm1d): ...


class SyncedBatchNorm2d(_Synced, nn.BatchNorm2d): ...


class SyncedBatchNorm3d(_Synced, nn.BatchNorm3d): ...


_KINDS: dict[type[nn.Module], type[_Synced]] = {
    nn.BatchNorm1d: SyncedBatchNorm1d,
    nn.BatchNorm2d: SyncedBatchNorm2d,
    nn.BatchNorm3d: SyncedBatchNorm3d,
}


@torch.no_grad()
def _statistics(input: Tensor, batchnorm_sync: BatchNormSync) -> tuple[float, Tensor, Tensor]:
    """Count, mean and biased variance per channel over all ranks, in double precision."""
    assert batchnorm_sync.group is not None
    channels = input.shape[1]
    rows = torch.zeros(batchnorm_sync.group.world_size, 1 + 2 * channels, dtype=torch.float64, device=input.device)
    count = 0 if batchnorm_sync.is_dummy else input.numel() // channels
    if count:
        variance, mean = torch.var_mean(_wide(input), _all_but_channels(input), correction=0)
        own = rows[batchnorm_sync.group.rank]
        own[0] = count
        own[1 : 1 + channels] = mean
        own[1 + channels :] = variance.double() * count
    batchnorm_sync.all_reduce(rows)
    counts, means, squares = rows.split((1, channels, channels), dim=1)
    total = float(counts.sum())
    if total == 0:
        return 0.0, means.sum(0), squares.sum(0)
    mean = (counts * means).sum(0) / total
    # Deviations from the common mean: those within each rank, and of each rank's mean from it.
    return total, mean, (squares + counts * (means - mean) ** 2).sum(0) / total


class _Normalise(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor,
        variance: Tensor,
        eps: float,
        count: float,
        is_dummy: bool,
        batchnorm_sync: BatchNormSync,
    ) -> Tensor:
        wide = _wide(input)
        shape = _channel_shape(input)
        scale = torch.rsqrt(variance + eps).to(wide.dtype).view(shape)
        normal = (wide - mean.to(wide.dtype).view(shape)) * scale
        ctx.save_for_backward(normal, scale, weight)
        ctx.count = count
        ctx.is_dummy = is_dummy
        ctx.batchnorm_sync = batchnorm_sync
        ctx.has_bias, ctx.dtype = bias is not None, input.dtype
        if weight is not None:
            normal = normal * weight.view(shape)
        if bias is not None:
            normal = normal + bias.view(shape)
        return normal.to(input.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        normal, scale, weight = ctx.saved_tensors
        grad = _wide(grads[0])
        if ctx.is_dummy:
            grad = torch.zeros_like(grad)
        dims, shape = _all_but_channels(grad), _channel_shape(grad)
        by_bias, by_weight = grad.sum(dims), (grad * normal).sum(dims)
        sums = ctx.batchnorm_sync.all_reduce(torch.stack([by_bias, by_weight]).double())
        # Through mean and variance every sample acts on every other one; a dummy batch does not.
        shift, stretch = (sums / ctx.count).to(grad.dtype)
        of_input = (grad - shift.view(shape) - normal * stretch.view(shape)) * scale
        if weight is not None:
            of_input = of_input * weight.view(shape)
        if ctx.is_dummy:
            of_input = torch.zeros_like(of_input)
        of_weight = by_weight.to(weight.dtype) if weight is not None else None
        of_bias = by_bias if ctx.has_bias else None
        return of_input.to(ctx.dtype), of_weight, of_bias, None, None, None, None, None, None


def _wide(tensor: Tensor) -> Tensor:
    """Half precision is computed in fp32."""
    return tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()


def _all_but_channels(tensor: Tensor) -> list[int]:
    return [dim for dim in range(tensor.dim()) if dim != 1]


def _channel_shape(tensor: Tensor) -> list[int]:
    return [1, -1, *[1] * (tensor.dim() - 2)]
