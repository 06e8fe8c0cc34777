"""The interface to what answers a reply: a reward that scores it, or an environment's episode that may go on."""

from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Protocol

from retrain.environments.base import Observation
from retrain.rewards import Scorer, ScoreRequest
from retrain.run.dialogue import Dialogue
from retrain.types import Score

_PATIENCE_S = 0.5
"""How often a process that waits for a score looks for a signal."""


class Exchange(Protocol):
    """The other side of one dialogue. A `RunningEpisode` is one."""

    def reply(self, text: str, *, last: bool) -> None:
        """Pass on the model's reply, without waiting. `last`: the tokens have run out."""

    def end(self) -> None:
        """Ask for the verdict without a further reply."""

    @property
    def ready(self) -> bool:
        """True if `answer` would return at once."""
        ...

    def answer(self, check: Callable[[], None]) -> Observation | Score:
        """Wait for what came of the newest call, first of all for the opening; `check` raises to stop the run."""


class ScoredReply:
    """A problem of the data: nothing is said before the reply, and its score is all that follows."""

    def __init__(self, scorer: Scorer, dialogue: Dialogue, step: int) -> None:
        self._scorer, self._dialogue, self._step = scorer, dialogue, step
        self._score: Future[Score] | None = None

    def reply(self, text: str, *, last: bool) -> None:
        prompt = self._dialogue.prompt
        self._score = self._scorer.submit(
            ScoreRequest(
                response=text,
                reference=prompt.example.reference,
                prompt=prompt.text,
                example=prompt.example,
                step=self._step,
                slot=self._dialogue.slot,
                sample=self._dialogue.sample,
            )
        )

    def end(self) -> None:
        """One reply is the end already."""

    @property
    def ready(self) -> bool:
        return self._score is None or self._score.done()

    def answer(self, check: Callable[[], None]) -> Observation | Score:
        check()
        if self._score is None:
            return Observation([])
        while not wait([self._score], _PATIENCE_S).done:  # a judge may take minutes, and a signal should not
            check()
        return self._score.result()
