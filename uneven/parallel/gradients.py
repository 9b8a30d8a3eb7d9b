"""The gradient road: gradients summed over all ranks in buckets, while backward is still computing.

Gradients are views into flat buckets, filled from the last layer to the first as backward goes; a full bucket
is sent at once. Buckets leave in one fixed order on every rank, whatever order gradients arrive in, and those
that backward never reached (an unused layer, a rank without samples) leave as zeros. The last bucket carries
one row of numbers per rank beside the gradients, so telling each other speeds costs no collective, and one flag
per param: a param that no rank used has no gradient, as in a single process (weight decay must not touch it).
"""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from uneven.comm.group import Group
from uneven.parallel.bucket_sums import BucketSums
from uneven.parallel.buckets import BUCKET_BYTES


class GradientRoad:
    """Life cycle per step: `start()`, backward of the micro-batches (`open()` before the last), `finish()`.

    Between `start` and `finish` every trainable param's `.grad` is a view of a bucket; replacing it
    (`zero_grad(set_to_none=True)`) would cut the road, so nobody else may touch gradients.
    """

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        group: Group,
        columns: int,
        bucket_bytes: int = BUCKET_BYTES,
        *,
        overlaps: bool = True,  # False: nothing is sent before finish()
    ) -> None:
        trained = [p for p in params if p.requires_grad]
        self.overlaps = overlaps
        self._rank = group.rank
        self._columns = columns
        self._num_rows = group.world_size * columns
        # A flag per param stands beside the rows.
        self._sums = BucketSums(trained, group, bucket_bytes, self._num_rows + len(trained), overlaps=overlaps)
        self._is_open = False
        self._place = {p: place for place, p in enumerate(self._sums.views)}
        self._used: set[int] = set()
        self._hooks = [p.register_post_accumulate_grad_hook(self._arrived) for p in trained]

    def start(self) -> None:
        """Zero all gradients and attach them to their buckets."""
        self._used.clear()
        self._sums.begin()
        for bucket in self._sums.buckets:
            bucket.buffer.zero_()
        for param, view in self._sums.views.items():
            param.grad = view

    def open(self) -> None:
        """From now on a full bucket is sent: called before the last micro-batch's backward."""
        self._is_open = self.overlaps

    @property
    def used(self) -> frozenset[int]:
        """The params that have had a gradient since `start`, by their places."""
        return frozenset(self._used)

    def mark(self, used: Iterable[int]) -> None:
        """These have had one too: backward ran where no hook is called, in the replay of a graph."""
        self._used.update(used)

    def finish(self, row: Callable[[], Sequence[float]], last: Tensor | None = None) -> list[list[float]]:
        """Send what is left, wait for all; `.grad` then holds the sums. Returns every rank's row.

        `row` is asked as late as possible, just before the last bucket leaves. `last` stands above its last number: a
        number of the device's that need not be read for it. To and from a device go one copy each.
        """
        self._is_open = False
        self._sums.send_all_but_last()
        extra, columns = self._sums.extra, self._columns
        own = [0.0] * len(extra)
        start = self._rank * columns
        own[start : start + columns] = row()
        for place in self._used:
            own[self._num_rows + place] = 1.0
        extra.copy_(torch.tensor(own, dtype=extra.dtype))
        if last is not None:
            extra[start + columns - 1] = last
        self._sums.finish()
        numbers: list[float] = extra.tolist()
        for param, flag in zip(self._place, numbers[self._num_rows :], strict=True):
            if flag == 0.0:
                param.grad = None
        return [numbers[place : place + columns] for place in range(0, self._num_rows, columns)]

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _arrived(self, param: nn.Parameter) -> None:
        self._used.add(self._place[param])
        if self._is_open:
            self._sums.arrived(param)
