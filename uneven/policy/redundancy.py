"""Who keeps a copy of whose shard, and how much each rank then owns: redundancy=1 of the sharded strategies.

The ranks stand in a ring, and each keeps, beside its own shard, a copy of the next one's. What a rank holds is both
together, and that goes by its memory as nearly as the ring allows. Every rank computes the same numbers: only
operations that all machines round alike are used.
"""

from collections.abc import Sequence

Copies = tuple[int | None, ...]  # by rank: whose shard it keeps a copy of

MOST_MOVES = 5000  # of shares between two ranks; a dozen ranks need a few hundred
CLOSE = 1e-12


def copy_ring(memory: Sequence[float], machines: Sequence[int] | None = None) -> Copies:
    """Whose shard each rank keeps; None on ranks without memory, and for all where only one rank has any.

    Neighbours are on different machines wherever no machine has more than half of the ranks: then the loss of a
    machine loses no shard. Otherwise they go by memory, which lets shares meet it best.

    >>> copy_ring((1, 1, 1))
    (1, 2, 0)
    >>> copy_ring((1, 1, 1, 1), machines=(0, 0, 1, 1))
    (2, 3, 1, 0)
    """
    ranks = sorted((rank for rank, own in enumerate(memory) if own > 0), key=lambda rank: (-memory[rank], rank))
    places = [0] * len(memory) if machines is None else list(machines)
    if len({places[rank] for rank in ranks}) > 1:
        sizes = {place: sum(places[rank] == place for rank in ranks) for place in places}
        ranks.sort(key=lambda rank: (-sizes[places[rank]], places[rank]))
        apart = [0] * len(ranks)
        apart[::2], apart[1::2] = ranks[: (len(ranks) + 1) // 2], ranks[(len(ranks) + 1) // 2 :]
        ranks = apart
    copies: list[int | None] = [None] * len(memory)
    if len(ranks) > 1:
        for place, rank in enumerate(ranks):
            copies[rank] = ranks[(place + 1) % len(ranks)]
    return tuple(copies)


def shares_with_copies(memory: Sequence[float], copies: Copies) -> list[float]:
    """The shares to own, so that own and kept bytes together go by memory; their sum is 1.

    Minimises the sum of held^2 / memory, which is least where all hold the same part of their memory. Two ranks hold
    everything, each, whatever their memory.

    >>> [round(share, 3) for share in shares_with_copies((2, 2, 1), (1, 2, 0))]
    [0.2, 0.6, 0.2]
    """
    total = sum(memory)
    own = [value / total for value in memory]
    keeper = {kept: rank for rank, kept in enumerate(copies) if kept is not None}
    ranks = sorted(keeper)
    for _ in range(MOST_MOVES if ranks else 0):
        holds = held(own, copies)
        # By how much each rank's share costs: what it fills of the two memories that hold it.
        costs = {r: holds[r] / memory[r] + holds[keeper[r]] / memory[keeper[r]] for r in ranks}
        giver = max((rank for rank in ranks if own[rank] > 0), key=lambda rank: (costs[rank], -rank))
        taker = min(ranks, key=lambda rank: (costs[rank], rank))
        if costs[giver] - costs[taker] <= CLOSE * costs[giver]:
            break
        changed = {giver, keeper[giver]} ^ {taker, keeper[taker]}
        moved = (costs[giver] - costs[taker]) / sum(1 / memory[rank] for rank in sorted(changed))
        moved = min(moved, own[giver])
        own[giver], own[taker] = own[giver] - moved, own[taker] + moved
    return own


def held(own: Sequence[float], copies: Copies) -> list[float]:
    """What each rank holds: its own share and the one that it keeps a copy of."""
    return [share + (0.0 if kept is None else own[kept]) for share, kept in zip(own, copies, strict=True)]


def holders(survivors: Sequence[int], world_size: int, copies: Copies | None) -> list[int | None]:
    """By old rank: the survivor that hands in its shard, itself or its keeper; None where neither is left."""
    keeper = {} if copies is None else {kept: rank for rank, kept in enumerate(copies) if kept is not None}
    alive = set(survivors)
    found = ((rank, keeper.get(rank)) for rank in range(world_size))
    return [next((one for one in pair if one in alive), None) for pair in found]
