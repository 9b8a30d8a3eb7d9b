"""The examples of docs/parallel.md, each as it is printed, on processes: in the default group and in a sub-group."""

from tests.parallel.page_examples import EXAMPLES

NAMES = {
    *("DDPFlat", "DDPBucketed", "Zero1", "ShardedOptimizer", "Zero2", "FSDP", "TensorParallel", "SequenceParallel"),
    "MuonAdamW",
}


def test_every_strategy_has_an_example_of_twelve_lines() -> None:
    assert EXAMPLES.keys() == NAMES
    for name, block in EXAMPLES.items():
        lines = [line for line in block.splitlines() if line.strip()]
        assert len(lines) <= 12, f"{name} has {len(lines)}"
