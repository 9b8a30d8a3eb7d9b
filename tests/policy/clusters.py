"""Simulated clusters for tests of the policies."""

from hypothesis import strategies as st

from tests.policy.simulation import Cluster
from uneven.policy.windows import LocalSGDConfig

CADENCE, ASYNC = LocalSGDConfig(), LocalSGDConfig(is_async=True)


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    ranks = draw(st.integers(1, 6))
    total = draw(st.integers(1, 150))
    return Cluster(
        slot_ms=[draw(st.sampled_from([1.0, 2.5, 10.0])) * draw(st.floats(0.5, 1.5)) for _ in range(ranks)],
        total=total,
        seed=draw(st.integers(0, 99)),
        jitter=draw(st.sampled_from([0.0, 0.05, 0.3])),
        spikes=draw(st.sampled_from([0.0, 0.05])),
        stop=draw(st.sampled_from([None, (0, total // 2, 2000.0), (ranks - 1, 0, 2000.0)])),
        change=draw(
            st.sampled_from([None, (0, total // 2, 4.0), (ranks - 1, total // 2, 0.2), (0, total // 3, 100.0)])
        ),
        recovers=draw(st.sampled_from([None, 2 * total // 3])),
        transfer_ms=draw(st.sampled_from([0.01, 1.0, 100.0])),
        claim_ms=draw(st.sampled_from([0.0, 0.1, 3.0])),
        lookahead=draw(st.sampled_from([0, 0, 1, 2, 8])),
        epoch=draw(st.sampled_from([None, 1, 3, 10, 37])),
        short=draw(st.sampled_from([1, 64])),
    )
