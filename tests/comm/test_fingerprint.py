"""Ranks with different models all raise alike, naming the rank and the first difference."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from uneven.comm.fingerprint import agree, describe_tensors, refuse_differences
from uneven.comm.store import get_text, open_store, reach_store
from uneven.errors import InputError, RefusedError


def outcomes(models: list[nn.Module]) -> list[str]:
    """Each rank's error text, '' if there was none."""
    store, port = open_store()

    def rank(number: int) -> str:
        own = reach_store("127.0.0.1", port)
        try:
            agree(own, number, len(models), describe_tensors(models[number].state_dict().items()))
        except InputError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(len(models)) as pool:
        errors = list(pool.map(rank, range(len(models))))
    del store
    return errors


def test_equal_models_agree() -> None:
    assert outcomes([nn.Linear(2, 3), nn.Linear(2, 3)]) == ["", ""]


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (nn.Linear(2, 4), "'weight (4, 2) float32' where rank 0 has 'weight (3, 2) float32'"),
        (nn.Linear(2, 3).to(torch.float64), "'weight (3, 2) float64' where"),
        (nn.Linear(2, 3, bias=False), "1 tensors where rank 0 has 2"),
        (nn.Sequential(nn.Linear(2, 3)), "'0.weight (3, 2) float32' where rank 0 has 'weight (3, 2) float32'"),
    ],
)
def test_all_ranks_raise_and_name_the_same(other: nn.Module, words: str) -> None:
    errors = outcomes([nn.Linear(2, 3), nn.Linear(2, 3), other])
    assert errors[0] == errors[1] == errors[2]
    assert errors[0].startswith("rank 2 built another model than rank 0: ")
    assert words in errors[0]


def test_on_several_machines_the_host_and_the_fix_are_named() -> None:
    hosts = ["node1", "node1", "node2"]
    with pytest.raises(RefusedError) as caught:
        refuse_differences([["w (3, 2)"], ["w (3, 2)"], ["w (4, 2)"]], hosts=hosts)
    assert str(caught.value).startswith(
        "node2: rank 2 built another model than rank 0 on node1: 'w (4, 2)' where rank 0 has 'w (3, 2)'; build it from"
    )


def test_get_text_never_waits() -> None:
    store, port = open_store()
    client = reach_store("127.0.0.1", port)
    assert get_text(client, "key") is None
    store.set("key", "a word")
    store.get("key")  # a set is not answered: only a later request on the same connection shows that it arrived
    assert get_text(client, "key") == "a word"
