"""A rank's own work in a step: neither what it waited for others nor what the user's code took is a part of it."""

from uneven.comm.group import SoloGroup
from uneven.hardware.device import Device
from uneven.train.gradient_sync import StepTimer
from uneven.train.rank_info import RankInfo


def test_waits_and_the_users_own_code_are_left_out_of_a_ranks_work() -> None:
    info = RankInfo(0, (Device("cpu"),))
    info.join(SoloGroup())
    timer = StepTimer(info)
    info.group.traffic.wait_s = 5.0  # before the step
    timer.start(1_000_000)
    timer.note_user_time(2_000_000)
    timer.leave_out(1_000_000)
    info.group.traffic.wait_s += 2**-7  # inside forward, for statistics of other ranks
    assert timer.began_ns == 4_000_000 + 7_812_500
    timer.stop(14_812_500)
    assert (timer.busy_ms, timer.stopped_ns) == (3.0, 14_812_500)
    assert [timer.take_user_ms(), timer.take_user_ms()] == [2.0, 0.0]
    timer.start(15_000_000)
    assert timer.began_ns == 15_000_000
