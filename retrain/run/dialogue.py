"""One conversation as it is sampled: what the model sees, the turns so far, and what
answers a reply.
"""

from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Protocol

import numpy as np

from retrain.data.chat import ChatRenderer
from retrain.environments.base import Observation
from retrain.rewards import ScoreGroup, ScoreRequest
from retrain.types import (
    ChatMessage,
    Completion,
    FinishReason,
    Int32Array,
    Prompt,
    Score,
    Trajectory,
    Turn,
)

_NO_TOKENS = np.zeros(0, np.int32)


DialogueKey = tuple[int, int]
"""(slot, sample): names a dialogue within a draw."""
_PATIENCE_S = 0.5
"""How often a process that waits for a score looks for a signal."""


class Dialogue:
    """A prompt, and the replies to it under one sample index."""

    def __init__(self, prompt: Prompt, slot: int, sample: int) -> None:
        self.prompt, self.slot, self.sample = prompt, slot, sample
        self.context_ids: Int32Array = prompt.token_ids
        """[P] what the next reply follows."""
        self.extends = 0
        """Length of `context_ids` when the newest reply ended, if these tokens are unchanged; else
        0."""
        self.used = 0
        """Action tokens so far: the noise coordinate of the next one."""
        self.cut = False
        """It ended because there was no room for another reply."""
        self._turns: list[Turn] = []
        self._context, self._restarts = _NO_TOKENS, False
        self._text = prompt.text
        self._messages: list[ChatMessage] = _opening(prompt)

    @property
    def key(self) -> DialogueKey:
        return self.slot, self.sample

    @property
    def replies(self) -> int:
        return len(self._turns)

    @property
    def reply(self) -> str:
        """The newest reply's text."""
        return self._messages[-1]["content"]

    @property
    def ended_by_length(self) -> bool:
        """No token is left after the newest reply."""
        return self._turns[-1].completion.finish_reason is FinishReason.LENGTH

    @property
    def said(self) -> Int32Array:
        """The tokens of all turns; those of a rewritten history as each turn had them."""
        return np.concatenate(
            [tokens for turn in self._turns for tokens in (turn.context, turn.completion.token_ids)]
        )

    @property
    def trajectory(self) -> Trajectory:
        """The turns so far; one without tokens where the first reply was never asked for."""
        nothing = Completion(
            0, self.sample, _NO_TOKENS, np.zeros(0, np.float32), None, FinishReason.STOP
        )
        return Trajectory(tuple(self._turns) or (Turn(nothing),), cut=self.cut)

    def add(self, completion: Completion, reply: str) -> None:
        """The model has replied."""
        self._turns.append(Turn(completion, self._context, self._restarts))
        self._messages.append(ChatMessage(role="assistant", content=reply))
        self.context_ids = np.concatenate([self.context_ids, completion.token_ids])
        self.extends = len(self.context_ids)
        self.used += len(completion.token_ids)

    def hear(self, said: Observation, renderer: ChatRenderer) -> None:
        """The environment has answered the newest reply, or opened the conversation with messages
        of its own.
        """
        known = self._messages
        if not self._turns and not said.tools and (not said.messages or said.messages == known):
            return
        if said.rewrites and not (self._turns and said.messages[: len(known)] == known):
            self._messages = list(said.messages)
            following = renderer.opening(said.messages, said.tools)
        else:
            new = said.messages[len(known) :] if said.rewrites else said.messages
            last = int(self._turns[-1].completion.token_ids[-1])
            following = renderer.continued(self._text, known, new, last, said.tools)
            self._messages = [*known, *new]
        self._text, self._context, self._restarts = (
            following.text,
            following.token_ids,
            following.restarts,
        )
        if following.restarts:
            self.context_ids, self.extends = following.token_ids, 0
        else:
            self.context_ids = np.concatenate([self.context_ids, following.token_ids])


def _opening(prompt: Prompt) -> list[ChatMessage]:
    opening = prompt.example.prompt
    return (
        [ChatMessage(role="user", content=opening)] if isinstance(opening, str) else list(opening)
    )


# -- what answers a reply --------------------------------------------------------------------------


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
        """Wait for what came of the newest call, first of all for the opening; `check` raises to
        stop the run.
        """


class ScoredReply:
    """A problem of the data: nothing is said before the reply, and its score is all that
    follows.
    """

    def __init__(self, group: ScoreGroup, dialogue: Dialogue, step: int) -> None:
        """`group` waits for the other replies to the same prompt, where a reward needs them."""
        self._group, self._dialogue, self._step = group, dialogue, step
        self._score: Future[Score] | None = None

    def reply(self, text: str, *, last: bool) -> None:
        prompt = self._dialogue.prompt
        self._score = self._group.submit(
            ScoreRequest(
                response=text,
                reference=prompt.example.reference,
                prompt=prompt.text,
                example=prompt.example,
                step=self._step,
                slot=self._dialogue.slot,
                sample=self._dialogue.sample,
                token_count=self._dialogue.used,
                finish_reason=self._dialogue.trajectory.finish_reason,
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
        while not wait(
            [self._score], _PATIENCE_S
        ).done:  # a judge may take minutes, and a signal should not
            check()
        return self._score.result()
