"""The run's evaluation on one rank: its part of the test set, split by speed as training is."""

import threading

from uneven.config import Evaluation
from uneven.data.feed import Feed, make_feed
from uneven.hardware.device import needs_ranks
from uneven.policy.exact import Fixed
from uneven.step.evaluation import evaluate
from uneven.train.engine import Engine


class Evaluator:
    """Made with the worker; the feed of the test set is kept from one evaluation to the next."""

    def __init__(self, engine: Engine, stop: threading.Event) -> None:
        self._engine = engine
        self._config = engine.config
        self._stop = stop
        self._feed: Feed | None = None

    def run(self, evaluation: Evaluation, ratio: tuple[int, ...]) -> dict[str, float]:
        """Metrics over the whole test set, the same on all ranks; a collective. `ratio`: of the ranks' speeds."""
        engine, info = self._engine, self._engine.rank_info
        batch_size = evaluation.batch_size or self._config.batch_size
        if self._feed is None:
            self._feed = make_feed(
                evaluation.dataset,
                engine.device,
                self._config.seed,
                batch_size,
                evaluation.num_workers,
                is_rank=needs_ranks(info.devices),
                loading=evaluation.loading,
            )
        model, precision = engine.model, engine.eager.precision
        if self._config.is_model_parallel:
            return evaluate(model, evaluation.eval_step, self._feed, precision, info.group)
        # Split by speed, as in training; a rank may have no samples.
        shares = Fixed(tuple(max(1.0, float(share)) for share in ratio)).shares(0, len(evaluation.dataset))
        first = sum(shares[: info.rank])
        own = (first, first + shares[info.rank])
        # FSDP's forward is a collective: all ranks run equally many batches.
        batches = -(-max(shares) // batch_size) if self._config.strategy == "fsdp" else 0
        return evaluate(model, evaluation.eval_step, self._feed, precision, info.group, own, self._stop, batches)

    def close(self) -> None:
        """End the loader processes that the feed kept."""
        self._feed = None
