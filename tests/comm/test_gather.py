"""Everyone's bytes and numbers reach everyone, in rank order."""

import pytest
import torch

from tests.ranks import ThreadGroup, on_threads
from uneven.comm.gather import broadcast_json, gather_bytes, gather_checksums, gather_json, gather_rows


def test_bytes_of_any_length_reach_everyone() -> None:
    data = [b"", b"\x00\xff" * 300, b"x"]
    assert on_threads(3, lambda group: gather_bytes(group, data[group.rank])) == [data] * 3
    assert on_threads(2, lambda group: gather_bytes(group, b"")) == [[b"", b""]] * 2


def test_values_reach_everyone_as_json_gives_them_back() -> None:
    found = on_threads(2, lambda group: gather_json(group, {group.rank: (group.rank, None)}))
    assert found == [[{"0": [0, None]}, {"1": [1, None]}]] * 2
    found = on_threads(3, lambda group: broadcast_json(group, [group.rank, "x"], owner=2))
    assert found == [[2, "x"]] * 3


def test_rows_reach_everyone_in_rank_order() -> None:
    found = on_threads(3, lambda group: gather_rows(group, [group.rank, 0.1]))
    assert found == [[[0.0, 0.1], [1.0, 0.1], [2.0, 0.1]]] * 3


@pytest.mark.parametrize("odd", [0, 2])
def test_a_checksum_tells_one_bit_on_one_rank(odd: int) -> None:
    def checksums(group: ThreadGroup) -> list[int]:
        value = 1.0 if group.rank != odd else 1.0 + 2**-23
        return gather_checksums(group, [torch.tensor(3), torch.zeros(0), torch.tensor([[1.0, value]])])

    for found in on_threads(3, checksums):
        assert len({one for rank, one in enumerate(found) if rank != odd}) == 1
        assert found[odd] != found[1]
