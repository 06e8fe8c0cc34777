"""The completions of one prompt, judged together: what waits for the whole group, the majority's
vote, and the normalization of a reward within its group.
"""

import threading
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from retrain.rewards.answers import Normalization, canonical_answer
from retrain.rewards.score import PartScore, ScoreRequest
from retrain.types import Score

if TYPE_CHECKING:
    from retrain.rewards.scoring import Scorer

_EPS = 1e-6


@dataclass
class Member:
    """A submitted completion, and its scores to come."""

    request: ScoreRequest
    parts: "list[Future[PartScore]]" = field(default_factory=list)
    score: "Future[Score]" = field(default_factory=Future)


class ScoreGroup:
    """Takes the completions of one prompt in any order, and gives each a score to come.

    A reward that looks at one completion begins at once. A reward that looks at several completions
    waits until the last of `size` completions is here. One thread submits.
    """

    def __init__(self, scorer: "Scorer", size: int) -> None:
        self._scorer, self._size = scorer, size
        self._members: list[Member] = []

    def submit(self, request: ScoreRequest) -> "Future[Score]":
        """Return the future score. Every failure is a could-not-judge with its reason; the future
        raises for a bug only.
        """
        member = Member(request, self._scorer.ask_alone(request))
        member.score.set_running_or_notify_cancel()  # nobody can cancel it now
        self._members.append(member)
        if len(self._members) == self._size:
            members = sorted(self._members, key=lambda one: one.request.sample)
            self._members = []
            self._scorer.ask_together(members)
            self._finish(members)
        return member.score

    def _finish(self, members: Sequence[Member]) -> None:
        """Set the members' scores once every part of every member is there."""
        # Each once: a reward of the whole group is the same future in every member.
        left, lock = set(chain.from_iterable(one.parts for one in members)), threading.Lock()

        def part_done(part: "Future[PartScore]") -> None:
            with lock:
                left.remove(part)
                if left:
                    return
            try:
                parts = [_results(member, index) for index, member in enumerate(members)]
                scores = self._scorer.combine(parts)
                for member, score in zip(members, scores, strict=True):
                    member.score.set_result(score)
            except BaseException as error:  # noqa: BLE001 - a bug: without this the run would wait for ever
                for member in members:
                    if not member.score.done():
                        member.score.set_exception(error)

        for part in tuple(left):
            part.add_done_callback(part_done)


def _results(member: Member, index: int) -> list[PartScore]:
    ended = PartScore(None, "the scorer closed before a verdict")
    done = [ended if part.cancelled() else part.result() for part in member.parts]
    return [score.members[index] if score.members else score for score in done]


def majority(boxes: Sequence[str | None], normalize: Normalization) -> list[float]:
    """Return 1 for the completions with the group's most frequent answer, else 0; TTRL, arXiv
    2504.16084. If several answers are equally frequent, the answer of the first sample counts.

    A completion without an answer has no vote.
    """
    answers = [canonical_answer(box or "", normalize) for box in boxes]
    votes = Counter(filter(None, answers)).most_common(1)
    return [float(bool(votes) and answer == votes[0][0]) for answer in answers]


def normalised(rewards: Sequence[float]) -> list[float]:
    """Return (r - mean) / (std + 1e-6) within the group, with n - 1 in the std's denominator. Equal
    rewards give exactly 0.
    """
    if len(set(rewards)) <= 1:
        return [0.0] * len(rewards)
    r = np.array(rewards, np.float64)
    scaled: list[float] = ((r - r.mean()) / (r.std(ddof=1) + _EPS)).tolist()
    return scaled
