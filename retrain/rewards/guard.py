"""The guard that stops a run whose completions cannot be judged. Failures are counted and shown;
they never become zeros.
"""

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from retrain.errors import ResumableFailure
from retrain.types import Outcome, Score

WINDOW_STEPS = 20
_MIN_COMPLETIONS = 8
"""Fewer completions than this may all fail by accident, so the run is not stopped for it."""


@dataclass(frozen=True)
class _StepFailures:
    total: int
    reasons: dict[str, int]
    """Number of completions that could not be judged, by reason."""


class FailureGuard:
    """Watches the rate of could-not-judge over the last `window` steps. The trainer calls `observe`
    once per step.

    The run stops when the failures exceed what `max_failure_rate` allows in a whole window (the
    first steps are scaled up to one, so that one failure in the first step does not count as 6%),
    or when nothing at all could be judged. A rate of 1 switches it off.
    """

    def __init__(self, max_failure_rate: float, window: int = WINDOW_STEPS) -> None:
        self._max_failure_rate = max_failure_rate
        self._window = window
        self._steps: deque[_StepFailures] = deque(maxlen=window)

    def observe(self, scores: Iterable[Score]) -> None:
        """Count the scores of one step. Raises ResumableFailure, which names the most
        frequent reason.

        The window then begins anew: the run is resumed with a mended reward, and old failures would
        stop it again at once.
        """
        outcomes = list(scores)
        reasons = Counter(
            score.reason or "no reason given"
            for score in outcomes
            if score.outcome is Outcome.COULD_NOT_JUDGE
        )
        self._steps.append(_StepFailures(len(outcomes), dict(reasons)))
        total, failed = (
            sum(step.total for step in self._steps),
            sum(sum(step.reasons.values()) for step in self._steps),
        )
        allowed = self._max_failure_rate * total * self._window / len(self._steps)
        if self._max_failure_rate < 1 and (
            failed > allowed or (failed == total and total >= _MIN_COMPLETIONS)
        ):
            sentence = self._sentence(total, failed)
            self._steps.clear()
            raise ResumableFailure(sentence)

    def _sentence(self, total: int, failed: int) -> str:
        reasons: Counter[str] = Counter()
        for step in self._steps:
            reasons.update(step.reasons)
        reason, count = reasons.most_common(1)[0]
        if len(self._steps) > 1:
            steps = f"{len(self._steps)} steps"
        else:
            steps = "step"
        return (
            f"{failed} of {total} completions of the last {steps} could not be judged ({count}"
            f" times: {reason.rstrip('.')}), more than [reward] max_failure_rate ="
            f" {self._max_failure_rate:g} allows; fix the reward."
        )

    def state_dict(self) -> dict[str, Any]:
        """Return [total, {reason: count}] for each step in the window, oldest first, as JSON."""
        return {"steps": [[step.total, step.reasons] for step in self._steps]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._steps = deque(
            (_StepFailures(total, dict(reasons)) for total, reasons in state.get("steps", [])),
            maxlen=self._window,
        )


def check_held_out(scores: Iterable[Score], max_failure_rate: float) -> None:
    """Raise ResumableFailure if more of an evaluation's answers could not be judged than the rate
    allows; a single one is always allowed.
    """
    outcomes = list(scores)
    reasons = Counter(
        score.reason or "no reason given"
        for score in outcomes
        if score.outcome is Outcome.COULD_NOT_JUDGE
    )
    failed = sum(reasons.values())
    if max_failure_rate < 1 and failed > max(1.0, max_failure_rate * len(outcomes)):
        reason, count = reasons.most_common(1)[0]
        raise ResumableFailure(
            f"{failed} of {len(outcomes)} held-out answers could not be judged ({count} times:"
            f" {reason.rstrip('.')}), more than [reward] max_failure_rate = {max_failure_rate:g}"
            " allows; fix the reward."
        )
