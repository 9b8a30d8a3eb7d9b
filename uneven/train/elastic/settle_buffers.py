"""Settling where the ranks were about to average their buffers: it happened if any of those who are left has it.

At evaluations, checkpoints and the end of a run all ranks average their buffers in a collective of its own (of a local
policy only integer buffers: the others are in its rounds). A rank that could not get the result takes it over from the
furthest one, as params of a step that it missed. So the samples of a lost rank stay in the average that it was in.
Called by train/elastic/settler.py.
"""

from torch import Tensor

from uneven.train.elastic.settle import Settlement, Standing, share_tensors
from uneven.train.engine import Engine
from uneven.train.gradient_sync import GradientSync
from uneven.train.local_sgd import LocalSGD


def settle_buffers(
    engine: Engine, before: GradientSync | LocalSGD | None, own: Standing, settlement: Settlement
) -> None:
    """A collective. `before` was this rank's synchronizer; a newcomer, which has none, takes nothing here."""
    furthest = settlement.furthest
    if all(one.is_newcomer or one.averages == furthest.averages for one in settlement.standings):
        return
    buffers, sent = None if before is None else before.buffers, dict[str, Tensor]()
    if buffers is not None:
        sent = {f"integers.{place}": tensor for place, tensor in enumerate(buffers.agreed_integers)}
        sent |= {} if furthest.is_local else {"floats": buffers.agreed}
    found = share_tensors(engine.rank_info.group, settlement.source, sent)
    if buffers is None or before is None or own.averages == furthest.averages:
        return
    before.hooks.before_change()
    buffers.take_integers([found[f"integers.{place}"] for place in range(len(buffers.agreed_integers))])
    if isinstance(before, GradientSync):
        buffers.take(found["floats"])
        before.weight = 0
    buffers.averages = furthest.averages
