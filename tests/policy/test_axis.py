import pytest
from hypothesis import given
from hypothesis import strategies as st

from uneven.policy.axis import Axis

axes = st.builds(Axis, samples=st.integers(1, 300), slot_size=st.integers(1, 70), epochs=st.integers(1, 4))


@given(axes)
def test_every_sample_of_every_epoch_lies_in_exactly_one_slot(axis: Axis) -> None:
    seen = [(slot.epoch, place) for slot in axis.slots() for place in range(slot.first, slot.stop)]
    assert seen == [(epoch, place) for epoch in range(axis.epochs) for place in range(axis.samples)]


@given(axes)
def test_progress_counts_the_samples_of_all_slots_before(axis: Axis) -> None:
    done = 0
    for slot in axis.slots():
        assert axis.samples_before(slot.index) == done
        done += slot.samples
    assert axis.samples_before(axis.total) == done == axis.samples * axis.epochs


@given(axes)
def test_an_epoch_ends_after_its_last_slot(axis: Axis) -> None:
    for epoch in range(axis.epochs):
        assert axis.slot(axis.epoch_end(epoch) - 1).epoch == epoch
        assert axis.slot(axis.epoch_end(epoch) - 1).stop == axis.samples


limited = st.builds(
    Axis,
    samples=st.integers(1, 300),
    slot_size=st.integers(1, 70),
    epochs=st.integers(1, 4),
    max_slots=st.integers(1, 400),
)


@given(limited)
def test_a_limit_leaves_the_first_slots_of_the_axis_and_ends_its_last_epoch(axis: Axis) -> None:
    whole = Axis(axis.samples, axis.slot_size, 400)
    assert axis.total == min(axis.max_slots or 0, axis.epochs * axis.slots_per_epoch)
    assert list(axis.slots()) == list(whole.slots(0, axis.total))
    assert axis.total_samples == sum(slot.samples for slot in axis.slots())
    assert axis.slot(axis.total - 1).epoch == axis.epochs - 1
    assert axis.epoch_end(axis.epochs - 1) == axis.total
    assert axis.schedule_length == axis.total


@given(axes | limited)
def test_epochs_are_over_at_their_ends(axis: Axis) -> None:
    ends = [axis.epoch_end(epoch) for epoch in range(axis.epochs)]
    for index in range(axis.total + 1):
        assert axis.epochs_before(index) == sum(end <= index for end in ends)


def test_an_empty_axis_is_refused() -> None:
    with pytest.raises(ValueError, match="must be at least 1"):
        Axis(samples=0, slot_size=1, epochs=1)
