"""The dialogues of one draw, as the requests that an engine is fed: each reply is answered or
scored, and asks for the next one.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from retrain.data.chat import ChatRenderer
from retrain.environments.base import Observation
from retrain.environments.episodes import EpisodeHost, could_not_judge
from retrain.errors import ConfigurationError
from retrain.inference_engine.base import WHOLE_VOCABULARY, NoiseKey, SampleRequest, Truncation
from retrain.noise import Stream, philox
from retrain.run.dialogue import Dialogue, DialogueKey, Exchange
from retrain.types import Completion, Int32Array, Score, Scored

_LEFT_OPEN = 8
"""Replies that may wait for the environment while others decode; the next one waits for the oldest
of them."""
_POLL_S = 0.01


@dataclass(frozen=True)
class SamplingPlan:
    """The settings that all groups of a step share."""

    group_size: int
    max_tokens: int
    temperature: float
    seed: int
    stream: int
    redraws: int = 0
    """Dynamic sampling: how often a group whose rewards are all equal may be drawn again."""
    truncation: Truncation = WHOLE_VOCABULARY


@dataclass(frozen=True)
class Watcher:
    """Functions that are called from inside a long step."""

    check: Callable[[], None]
    """Raises when the run was asked to stop."""
    completion: Callable[[Completion], None]


@dataclass(frozen=True)
class Stage:
    """The environment, chat template and limits of dialogues of several turns."""

    host: EpisodeHost
    renderer: ChatRenderer
    decode: Callable[[Int32Array], str]
    """Token ids to text, special tokens by their names."""
    context: int
    """Positions that the model has; 0 if it names no limit."""


class Dialogues:
    """A `RequestFeed`: the dialogues of one draw, from their opening to their verdict.

    Where the engine's noise is counted, so that a run can be repeated, which requests join when
    depends on the tokens alone: the next reply of a dialogue is asked for when `_LEFT_OPEN` others
    have ended theirs after it, or when nothing decodes any more. Other engines are asked as soon as
    the environment has answered.
    """

    def __init__(
        self,
        exchanges: Mapping[DialogueKey, Exchange],
        dialogues: Sequence[Dialogue],
        step: int,
        plan: SamplingPlan,
        *,
        text: Callable[[Int32Array], str],
        stage: Stage | None,
        repeatable: bool,
        watcher: Watcher,
        clock: Callable[[], float],
    ) -> None:
        """`exchanges` by the keys of `dialogues`; `text` decodes the token ids of a reply;
        `repeatable`: the engine's noise is counted.
        """
        self._exchanges, self._step, self._plan = exchanges, step, plan
        self._text, self._stage, self._repeatable, self._watcher, self._clock = (
            text,
            stage,
            repeatable,
            watcher,
            clock,
        )
        self._open = deque(dialogues)
        """Dialogues that wait for what is said to them, in the order in which they were opened or
        had their reply."""
        self._asked: dict[tuple[int, int], Dialogue] = {}
        self._requests = 0
        self.scored: dict[DialogueKey, Scored] = {}
        self.seconds_waited = 0.0
        """Seconds spent waiting for environments and scores."""

    def more(self, idle: bool) -> list[SampleRequest]:
        """Return the next replies to sample; see `RequestFeed`. Samples that follow the same tokens
        share a request.
        """
        started = self._clock()
        requests: list[SampleRequest] = []
        while not requests and (due := self._due(idle)):
            for dialogue in [dialogue for dialogue in due if self._goes_on(dialogue)]:
                request = self._request(dialogue)
                if requests and (merged := _merged(requests[-1], request)):
                    requests[-1] = merged
                else:
                    requests.append(request)
                self._asked[self._requests + len(requests) - 1, dialogue.sample] = dialogue
        self._requests += len(requests)
        self.seconds_waited += self._clock() - started
        return requests

    def hear(self, completion: Completion) -> None:
        """A reply is there: pass it on."""
        self._watcher.check()
        dialogue = self._asked.pop((completion.request, completion.sample))
        dialogue.add(completion, self._written(completion))
        self._exchanges[dialogue.key].reply(dialogue.reply, last=dialogue.ended_by_length)
        self._open.append(dialogue)
        if dialogue.replies == 1:  # progress is counted in trajectories
            self._watcher.completion(completion)

    def _due(self, idle: bool) -> list[Dialogue]:
        """Take the dialogues whose answers are wanted now out of the open ones."""
        if idle and (self._repeatable or not self._requests):
            due = sorted(
                self._open, key=lambda dialogue: dialogue.key
            )  # workers end in an order that does not repeat
        elif self._stage is None and not idle:
            due = []  # a score asks for nothing more, and is waited for at the end
        elif self._repeatable:
            due = [*self._open][: max(0, len(self._open) - _LEFT_OPEN)]
        else:
            while True:
                self._watcher.check()
                due = [dialogue for dialogue in self._open if self._exchanges[dialogue.key].ready]
                if (
                    due or not self._open or not idle
                ):  # where nothing decodes, one answer is waited for
                    break
                time.sleep(_POLL_S)
        for dialogue in due:
            self._open.remove(dialogue)
        return due

    def _goes_on(self, dialogue: Dialogue) -> bool:
        """Wait for what is said to a dialogue. False if it has ended, with its verdict then in
        `scored`.
        """
        stage, exchange = self._stage, self._exchanges[dialogue.key]
        answer = exchange.answer(self._watcher.check)
        if isinstance(answer, Observation):
            if stage is None:
                return True
            try:
                dialogue.hear(answer, stage.renderer)
            except ConfigurationError as error:  # the chat template refuses the conversation
                answer = could_not_judge(str(error))
            else:
                fits = len(dialogue.context_ids) < stage.context
                if fits and dialogue.used < self._plan.max_tokens:
                    return True
                dialogue.cut = True  # no token is left for another reply
                exchange.end()
                answer = exchange.answer(self._watcher.check)
        assert isinstance(answer, Score)  # the end of an exchange is a verdict
        trajectory = dialogue.trajectory
        alone = len(trajectory.turns) == 1 and not trajectory.turns[0].restarts
        text = (
            self._written(trajectory.turns[0].completion)
            if alone or stage is None
            else stage.decode(dialogue.said)
        )
        self.scored[dialogue.key] = Scored(trajectory, text, answer)
        return False

    def _written(self, completion: Completion) -> str:
        return self._text(completion.token_ids) if completion.text is None else completion.text

    def _request(self, dialogue: Dialogue) -> SampleRequest:
        plan = self._plan
        return SampleRequest(
            prompt_ids=dialogue.context_ids,
            count=1,
            max_tokens=plan.max_tokens - dialogue.used,
            temperature=plan.temperature,
            noise=NoiseKey(plan.seed, plan.stream, self._step, dialogue.slot),
            first_sample=dialogue.sample,
            first_position=dialogue.used,
            truncation=plan.truncation,
            extends=dialogue.extends,
            may_go_on=self._stage is not None,
            messages=dialogue.prompt.messages if self._stage is None else (),
        )


def _merged(first: SampleRequest, second: SampleRequest) -> SampleRequest | None:
    """Return one request for the samples of both, where they follow the same tokens; else None."""
    follows = (
        first.noise == second.noise and second.first_sample == first.first_sample + first.count
    )
    same = first.prompt_ids is second.prompt_ids and first.first_position == second.first_position
    return replace(first, count=first.count + second.count) if follows and same else None


def environment_seed(plan: SamplingPlan, step: int, slot: int) -> int:
    """Return a seed that is the same for all samples of a group."""
    return int(philox(plan.seed, Stream.ENVIRONMENT, (step, slot, plan.stream, 0))[0])
