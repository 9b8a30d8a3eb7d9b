import pytest
from hypothesis import given
from hypothesis import strategies as st

from uneven.errors import InputError
from uneven.hardware.device import Device, is_lesser_copy, parse_device, parse_devices, takes_turns

speeds = st.floats(min_value=1e-6, max_value=1.0)
devices = st.one_of(
    st.builds(Device, st.just("cpu"), st.none(), speeds),
    st.builds(Device, st.just("cuda"), st.integers(0, 99), speeds),
    st.builds(Device, st.just("cuda"), st.integers(0, 99), st.just(1.0), st.integers(1, 100)),
)


@given(st.lists(devices, min_size=1, max_size=8))
def test_text_and_device_round_trip(some: list[Device]) -> None:
    assert parse_devices(",".join(map(str, some))) == tuple(some)


@pytest.mark.parametrize(
    ("text", "device", "canonical", "torch_name"),
    [
        ("cpu", Device("cpu"), "cpu", "cpu"),
        ("cuda", Device("cuda", 0), "cuda:0", "cuda:0"),
        (" cuda:1 ", Device("cuda", 1), "cuda:1", "cuda:1"),
        ("cpu@0.4", Device("cpu", speed=0.4), "cpu@0.4", "cpu"),
        ("cpu@1", Device("cpu"), "cpu", "cpu"),
        ("cuda:0@.25", Device("cuda", 0, 0.25), "cuda:0@0.25", "cuda:0"),
        ("cuda%60", Device("cuda", 0, percent=60), "cuda:0%60", "cuda:0"),
    ],
)
def test_accepted(text: str, device: Device, canonical: str, torch_name: str) -> None:
    found = parse_device(text)
    assert found == device
    assert str(found) == canonical
    assert found.torch_name == torch_name


@pytest.mark.parametrize(
    ("text", "allowed"),
    [
        ("", "allowed is cpu, cuda"),
        ("gpu", "allowed is cpu, cuda"),
        ("CPU", "allowed is cpu, cuda"),
        ("cuda:-1", "allowed is cpu, cuda"),
        ("cuda:x", "allowed is cpu, cuda"),
        ("cpu@", "0 < SPEED <= 1"),
        ("cpu@nan", "0 < SPEED <= 1"),
        ("cpu@-1", "0 < SPEED <= 1"),
        ("cpu@0", "above 0 and at most 1"),
        ("cpu@1.5", "above 0 and at most 1"),
        ("cpu@1e999", "above 0 and at most 1"),
        ("cpu:1", "a cpu has no index"),
        ("cpu%50", "a slower cpu is cpu@SPEED, as in cpu@0.5"),
        ("cuda%0", "1 to 100"),
        ("cuda%101", "1 to 100"),
        ("cuda%1.5", "%PERCENT (1 to 100)"),
        ("cuda:0%60@0.4", "cannot be combined"),
        ("cuda:0@0.4%60", "cannot be combined"),
        ("cpu\nx", "allowed is cpu, cuda"),
    ],
)
def test_refused_with_value_allowed_and_next_command(text: str, allowed: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_device(text)
    message = str(caught.value)
    assert repr(text) in message
    assert allowed in message
    assert "run 'uneven devices'" in message
    assert "\n" not in message


@pytest.mark.parametrize("text", ["cpu,,cpu", "", ",", "cpu,"])
def test_an_empty_place_in_a_list_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="empty; allowed is cpu, cuda") as caught:
        parse_devices(text)
    assert repr(text) in str(caught.value)


def test_a_list_of_nothing_is_refused() -> None:
    with pytest.raises(InputError, match="one or more"):
        parse_devices([])


def test_the_same_gpu_twice_parses() -> None:
    assert parse_devices(["cuda:0", Device("cuda", 0)]) == (Device("cuda", 0), Device("cuda", 0))


def test_a_device_made_by_hand_is_checked_too() -> None:
    with pytest.raises(InputError, match="above 0 and at most 1"):
        Device("cpu", speed=0.0)
    with pytest.raises(InputError, match="0 or above"):
        Device("cuda", None)


@pytest.mark.parametrize(
    ("names", "lesser"),
    [
        ("cpu,cpu@0.4", [False, True]),
        ("cpu@0.5,cpu@0.4", [False, False]),  # neither repeats a full device
        ("cuda:0%60,cuda:0%24", [False, True]),
        ("cuda:0%40,cuda:0%40", [False, False]),
        ("cuda:0%60,cuda:1%24", [False, False]),  # two GPUs, which may differ
        ("cuda:0%60,cpu", [False, False]),
    ],
)
def test_a_device_that_repeats_a_fuller_one(names: str, lesser: list[bool]) -> None:
    some = parse_devices(names)
    assert [is_lesser_copy(device, some) for device in some] == lesser


@pytest.mark.parametrize(
    ("devices", "is_so"),
    [
        ("cuda:0,cuda:0", True),
        ("cuda:0,cuda:1,cuda:0@0.4", True),
        ("cuda:0%60,cuda:0%24", False),
        ("cuda:0,cuda:1", False),
        ("cpu,cpu", False),
        ("cuda:0", False),
    ],
)
def test_ranks_that_share_a_whole_gpu_take_turns(devices: str, is_so: bool) -> None:
    assert takes_turns(parse_devices(devices)) == is_so
