"""Every rank holds the whole model and sums its gradients with the others': what all DDPs have in common."""

from contextlib import AbstractContextManager

from torch import Tensor, nn

from uneven.comm.group import Group
from uneven.parallel.reducer import Reducer
from uneven.parallel.strategy import FullState, MakeOptimizer, gradients_of, on_host, scale_all, start_alike


class Replicated:
    """Starts all ranks from rank 0's params and buffers. The optimizer may be a ShardedOptimizer."""

    def __init__(
        self, model: nn.Module, make_optimizer: MakeOptimizer, group: Group, bucket_bytes: int, *, overlaps: bool
    ) -> None:
        start_alike(model, group)
        self.module = model
        self.optimizer = make_optimizer(model.parameters())
        self._reducer = Reducer(model.parameters(), group, bucket_bytes, overlaps=overlaps)

    def no_sync(self) -> AbstractContextManager[None]:
        return self._reducer.no_sync()

    def sit_out(self) -> None:
        self._reducer.sit_out()

    def scale(self, factor: Tensor) -> None:
        scale_all(gradients_of(self.module), factor)

    def clip(self, max_norm: float) -> Tensor:
        return nn.utils.clip_grad_norm_(self.module.parameters(), max_norm)

    def full_state(self) -> FullState:
        return FullState(on_host(dict(self.module.state_dict())), on_host(self.optimizer.state_dict()))

    def load_full_state(self, state: FullState) -> None:
        self.module.load_state_dict(state.model)
        self.optimizer.load_state_dict(on_host(state.optimizer))  # PyTorch takes tensors that fit without a copy

    def close(self) -> None:
        self._reducer.close()
