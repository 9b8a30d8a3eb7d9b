"""What a round of a local policy cost one rank: its times, for the controller, the timeline and the benchmarks."""

from uneven.average.background import RoundResult
from uneven.policy.round_report import RoundReport
from uneven.timeline.record import Recorder


class RoundCosts:
    """`entered` when the rank has sent its snapshot, `received` when it has merged the average."""

    def __init__(self, recorder: Recorder, is_async: bool) -> None:
        self._recorder, self._is_async = recorder, is_async
        self.report = RoundReport()  # the fields of the last round
        self.entered_ns = 0
        self.transfer_ms = self._wait_ms = self._entering_ms = 0.0
        self.delay = 0.0  # of the last merge, in steps of the slowest rank
        self._trip_ns = (0, 0, 0)  # last round: snapshot taken, all ranks entered, average back
        self._sent_bytes = (0, 0)  # sent for rounds: before the last one, and including it

    def entered(self, began_ns: int) -> None:
        self.entered_ns = began_ns
        self._entering_ms = (self._recorder.enter("other") - began_ns) / 1e6

    def record_wait(self, began_ns: int, joined_ns: int, user_ms: float) -> None:
        """Until all ranks had entered the round this was waiting; then transfer, then the merge.

        As far as another rank was held up by code of the user's own, the waiting is the user's time, too.
        """
        if user_ms:
            self._recorder.enter("user", began_ns)
            self._recorder.enter("wait", min(joined_ns, began_ns + int(user_ms * 1e6)))
        self._recorder.enter("communication", joined_ns)

    def received(
        self, arrived: RoundResult, began_ns: int, here_ns: int, user_ms: float, slowest: float, payload_bytes: int
    ) -> None:
        """Waiting began at `began_ns`, the average was there at `here_ns` and is merged now.

        `slowest`: slots per ms of the slowest rank; `payload_bytes`: sent by this rank for rounds, in all.
        """
        own_ms = self._entering_ms + (self._recorder.enter("other") - here_ns) / 1e6
        self._wait_ms = ((here_ns - began_ns) if self._is_async else (arrived.joined_ns - arrived.snapshot_ns)) / 1e6
        self.transfer_ms = own_ms + (0.0 if self._is_async else (arrived.done_ns - arrived.joined_ns) / 1e6)
        self.report = RoundReport(
            transfer_ms=own_ms,
            latency_ms=max(0.0, (arrived.done_ns - arrived.snapshot_ns) / 1e6 - user_ms),
            divergence=arrived.divergence,
        )
        self.delay = (here_ns - arrived.snapshot_ns) / 1e6 * slowest
        self._trip_ns = (arrived.snapshot_ns, arrived.joined_ns, arrived.done_ns)
        self._sent_bytes = (self._sent_bytes[1], payload_bytes)

    def fields(self) -> dict[str, float]:
        """Of the timeline's event; times in ms before now, because ranks' clocks are aligned only afterwards."""
        now_ns = self._recorder.clock()
        left, met, back = ((now_ns - ns) / 1e6 for ns in self._trip_ns)
        before, after = self._sent_bytes
        return {
            "delay": self.delay,
            "wait_ms": self._wait_ms,
            "transfer_ms": self.transfer_ms,
            "latency_ms": self.report.latency_ms,
            "divergence": self.report.divergence,
            "left_ms_ago": left,
            "met_ms_ago": met,
            "back_ms_ago": back,
            "bytes": after - before,
        }
