"""SequenceParallel: tensor parallelism whose activations between the cut layers are cut, too, by rows of the sequence.

What tensor parallelism computes on every rank (norms, dropouts, residual sums) each rank then computes for its own rows
only. Params of these parts see some rows each, so their gradients are summed over ranks when backward ends.
"""

from collections.abc import Sequence

from torch import nn

from uneven.comm.group import Group
from uneven.parallel.buckets import UNLIMITED
from uneven.parallel.pieces import checked_shares
from uneven.parallel.reducer import Reducer
from uneven.parallel.sequence_functions import SharedRows
from uneven.parallel.strategy import MakeOptimizer
from uneven.parallel.tensor_parallel import Plan, TensorParallel


class SequenceParallel(TensorParallel):
    """The plan must cut the first and the last layer (`Words`, and `Columns` that gather): between them all is by rows.

    What adds something to the sequence, as a table of places does, is named as `Places`. `row_shares` says who has how
    many rows; by default as much as of the layers.
    """

    def __init__(
        self,
        model: nn.Module,
        make_optimizer: MakeOptimizer,
        group: Group,
        *,
        plan: Plan,
        shares: Sequence[float] | None = None,
        row_shares: Sequence[float] | None = None,
    ) -> None:
        self._rows = SharedRows(checked_shares(shares if row_shares is None else row_shares, group), group)
        super().__init__(model, make_optimizer, group, plan=plan, shares=shares)
        whole = [param for param in model.parameters() if param.requires_grad and param not in self._slicings]
        self._reducer = Reducer(whole, group, UNLIMITED, overlaps=False) if whole else None

    def close(self) -> None:
        super().close()
        if self._reducer is not None:
            self._reducer.close()
