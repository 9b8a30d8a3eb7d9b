"""A rank that leaves on purpose: it hands in what it has trained, and is not in the next generation.

It says so with its next exchange (Wish.LEAVE): the sum of a step or, in a local policy, a round that carries all it has
trained since the last one. So all ranks know after the same step or round, and part there
(Settler.between_steps): nobody is in the middle of a sum, the leaver has nothing that the others have not got,
and nothing is trained again. The leader publishes the generation without it once it has said that all is handed in.
"""

from uneven.train.elastic.settle import why_not
from uneven.train.engine import Engine
from uneven.train.local_sgd import LocalSGD
from uneven.train.synchronizer import Synchronizer
from uneven.train.wishes import Wish

PARTING = "a rank leaves"


def is_parting(synchronizer: Synchronizer, engine: Engine) -> bool:
    """Whether a rank leaves after the last exchange; the same on all ranks. One that is alone stays."""
    return Wish.LEAVE in synchronizer.wished and engine.rank_info.world_size > 1


def has_handed_in(synchronizer: Synchronizer, engine: Engine) -> bool:
    """Whether all that this rank has trained is in a sum that the others have, or are about to have."""
    if not is_parting(synchronizer, engine):
        return False  # another rank was lost: whether the last sum counts is not known before they have settled
    if isinstance(synchronizer, LocalSGD):
        tally = synchronizer.tally
        return tally.entered is None and tally.parts == len(engine.log)
    return True


def why_nobody_goes(engine: Engine, has_membership: bool) -> dict[str, str | None]:
    """For the launcher: why the loss of a rank ends this run, or why none can leave though its end would say so."""
    if has_membership:
        return {"ends_because": why_not(engine)}
    fixed = "it has on_fault='end'" if engine.config.on_fault == "end" else "it has one rank, or trains by hand"
    return {"stays_because": fixed}
