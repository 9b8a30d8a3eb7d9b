"""ZeRO-2: gradients and optimizer state are cut among ranks, by bytes each can hold; params are whole everywhere."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor, nn
from torch.optim import Optimizer

from uneven.comm.group import Group
from uneven.parallel.buckets import BUCKET_BYTES
from uneven.parallel.owner_reducer import OwnerReducer
from uneven.parallel.sharded_optimizer import ShardedOptimizer
from uneven.parallel.strategy import FullState, MakeOptimizer, on_host, start_alike


class Zero2:
    """`shares` says how much of gradients and optimizer state each rank holds; None is the same for all."""

    def __init__(
        self,
        model: nn.Module,
        make_optimizer: MakeOptimizer,
        group: Group,
        *,
        shares: Sequence[float] | None = None,
        by_tensors: bool = False,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        start_alike(model, group)
        self.module = model
        optimizer = ShardedOptimizer(make_optimizer(model.parameters()), group, shares=shares, by_tensors=by_tensors)
        self._reducer = OwnerReducer(optimizer.pieces, group, bucket_bytes)
        optimizer.take_gradients_from(self._reducer)
        self.optimizer: Optimizer = optimizer

    def no_sync(self) -> AbstractContextManager[None]:
        """Nothing changes inside: to keep full gradients until the last micro-batch is what ZeRO-2 avoids."""
        return nullcontext()

    def sit_out(self) -> None:
        self._reducer.sit_out()

    def scale(self, factor: Tensor) -> None:
        self._reducer.scale(factor)

    def clip(self, max_norm: float) -> Tensor:
        return self._reducer.clip(max_norm)

    def full_state(self) -> FullState:
        return FullState(on_host(dict(self.module.state_dict())), self.optimizer.state_dict())

    def load_full_state(self, state: FullState) -> None:
        self.module.load_state_dict(state.model)
        self.optimizer.load_state_dict(state.optimizer)

    def close(self) -> None:
        self._reducer.close()
