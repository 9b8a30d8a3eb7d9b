"""PyTorch's own strategies with the methods of ours, for tests and benchmarks that compare ours with them.

They have equal shards only, and no rank may be without samples. PyTorch averages gradients; here they are summed, as in
our strategies. This is the only file outside comm/ that imports torch.distributed.
"""

import inspect
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from uneven.comm.group import Group
from uneven.config import TrainStep
from uneven.parallel.strategy import FullState, MakeOptimizer, Strategy, gradients_of, on_host, scale_all
from uneven.parallel.tensor_parallel import Columns, How, Places, Plan, Words
from uneven.parallel.units import blocks_of


class TorchDdp:
    """DistributedDataParallel with equal batches: gradients averaged over ranks, overlapped with backward.

    The process group must exist and the batches of all ranks must have one size.
    """

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, train_step: TrainStep, max_grad_norm: float | None
    ) -> None:
        self.model = DistributedDataParallel(model)
        self.optimizer = optimizer
        self.train_step = train_step
        self.max_grad_norm = max_grad_norm

    def step(self, batch: Any) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.train_step(self.model, batch)
        loss.backward()
        if self.max_grad_norm is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.max_grad_norm)
        self.optimizer.step()


class TorchStrategy(Strategy):
    """What PyTorch's have in common: params, gradients and state may be DTensors. All train from the start."""

    _model: nn.Module  # by whose names params go

    def backward_without_samples(self) -> None:
        raise RuntimeError(f"{type(self).__name__} has no way for a rank without samples")

    def load_full_state(self, state: FullState) -> None:
        raise NotImplementedError("a reference is trained from its start")

    def scale(self, factor: Tensor) -> None:
        scale_all(gradients_of(self._model), factor)

    def clip(self, max_norm: float) -> Tensor:
        norm: Tensor = _full_tensor(nn.utils.clip_grad_norm_(self._model.parameters(), max_norm))
        return norm

    def full_params(self) -> dict[str, Tensor]:
        return {name: _full_tensor(param.detach()).clone() for name, param in self._model.named_parameters()}

    def full_gradients(self) -> dict[str, Tensor | None]:
        params = self._model.named_parameters()
        return {name: None if param.grad is None else _full_tensor(param.grad).clone() for name, param in params}

    def full_state(self) -> FullState:
        state = self.optimizer.state_dict()
        full_state = {
            place: {key: _full_tensor(value) for key, value in values.items()}
            for place, values in state["state"].items()
        }
        model = {key: _full_tensor(value) for key, value in self._model.state_dict().items()}
        return FullState(on_host(model), on_host({"state": full_state, "param_groups": state["param_groups"]}))


class TorchReplicated(TorchStrategy):
    """DistributedDataParallel; `is_sharded` adds ZeroRedundancyOptimizer, which gives whole tensors to ranks."""

    def __init__(
        self, model: nn.Module, make_optimizer: MakeOptimizer, group: Group, *, is_sharded: bool = False
    ) -> None:
        del group  # PyTorch uses its default group of all ranks
        wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
        wrapped.register_comm_hook(None, _sum_bucket)
        self.module = wrapped
        self._model = model
        self._no_sync = wrapped.no_sync
        made = make_optimizer(model.parameters())
        self._sharded: Any = _zero_redundancy(made) if is_sharded else None
        self._optimizer = made if self._sharded is None else self._sharded

    def no_sync(self) -> AbstractContextManager[None]:
        return self._no_sync()

    def full_state(self) -> FullState:
        """A sharded optimizer's state is gathered on rank 0 only; other ranks return an empty one."""
        if self._sharded is None:
            return super().full_state()
        self._sharded.consolidate_state_dict(to=0)
        state = self._sharded.state_dict() if dist.get_rank() == 0 else {"state": {}, "param_groups": []}
        return FullState(on_host(dict(self._model.state_dict())), on_host(state))


class TorchFsdp(TorchStrategy):
    """fully_shard on every block and on the whole model."""

    def __init__(self, model: nn.Module, make_optimizer: MakeOptimizer, group: Group) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import FSDPModule, fully_shard  # its import takes a second

        # Without a mesh it moves a model that lies on the CPU to the machine's GPU, where there is one.
        mesh = init_device_mesh(next(model.parameters()).device.type, (group.world_size,))
        for block in blocks_of(model):
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)  # Gloo has no average
        self.module = self._model = model
        self._optimizer = make_optimizer(model.parameters())


class TorchTensor(TorchStrategy):
    """parallelize_module with our plan: linear layers by columns and rows, embeddings by words, in equal shards.

    A layer of several parts (q, k and v in one) cannot be sharded in this way. The optimizer numbers sharded params
    first, so the order of its full state is not the model's.
    """

    def __init__(self, model: nn.Module, make_optimizer: MakeOptimizer, group: Group, *, plan: Plan) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor
        from torch.distributed.tensor.parallel import parallelize_module

        device = next(model.parameters()).device
        mesh = init_device_mesh(device.type, (group.world_size,))
        styles = {pattern: _style(how) for pattern, how in plan.items() if not isinstance(how, Places)}
        self.module = self._model = parallelize_module(model, mesh, styles)
        # Two param groups: PyTorch updates a group's params together and refuses to mix DTensors with plain ones.
        sharded = [param for param in self.module.parameters() if isinstance(param, DTensor)]
        unsharded = [param for param in self.module.parameters() if not isinstance(param, DTensor)]
        groups: Any = [{"params": sharded}, {"params": unsharded}]
        self._optimizer = make_optimizer(groups)

    def scale(self, factor: Tensor) -> None:
        for grad in gradients_of(self.module):
            getattr(grad, "_local_tensor", grad).mul_(factor)

    @torch.no_grad()
    def clip(self, max_norm: float) -> Tensor:
        norms = [_full_tensor(grad.norm()) for grad in gradients_of(self.module)]
        norm: Tensor = torch.stack(norms).norm()
        self.scale(torch.clamp(max_norm / (norm + 1e-6), max=1.0))
        return norm


def _style(how: How) -> Any:
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    if isinstance(how, Columns):
        assert how.parts == 1, "PyTorch gives each rank one range of a layer"
        return ColwiseParallel(output_layouts=Replicate()) if how.gathers else ColwiseParallel()
    return RowwiseParallel(input_layouts=Replicate()) if isinstance(how, Words) else RowwiseParallel()


def _full_tensor(value: Any) -> Any:
    """The full tensor of a DTensor; any other value unchanged."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def _sum_bucket(_: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    assert work is not None
    future: torch.futures.Future[Tensor] = work.get_future().then(lambda done: done.value()[0])
    return future


def _zero_redundancy(made: Optimizer) -> Optimizer:
    """The ZeroRedundancyOptimizer of an optimizer with one param group; it takes the class and its settings."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    known = inspect.signature(type(made)).parameters
    settings = {key: value for key, value in made.defaults.items() if key in known}
    return ZeroRedundancyOptimizer(made.param_groups[0]["params"], type(made), **settings)
