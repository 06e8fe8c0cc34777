"""Feed the dialogues of one draw to an engine, as requests. A `Dialogue` holds the context that the
model sees and the turns so far. An `Exchange` answers or scores its replies. `Dialogues` asks the
engine for the next replies.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from itertools import chain, count
from typing import Protocol

import numpy as np

from retrain.data.chat import ChatRenderer
from retrain.environments.base import Observation
from retrain.environments.episodes import EpisodeHost, could_not_judge
from retrain.errors import ConfigurationError
from retrain.inference_engine.base import WHOLE_VOCABULARY, NoiseKey, SampleRequest, Truncation
from retrain.noise import Stream, philox
from retrain.rewards import ScoreGroup, ScoreRequest
from retrain.types import (
    ChatMessage,
    Completion,
    Doing,
    FinishReason,
    Int32Array,
    Prompt,
    Score,
    Scored,
    Trajectory,
    Turn,
)

_NO_TOKENS = np.zeros(0, np.int32)

_LEFT_OPEN = 8
"""Replies that may wait for the environment while others decode; the next reply waits for the
oldest of them.
"""
_POLL_S = 0.01
DialogueKey = tuple[int, int]
"""(slot, sample): names a dialogue within a draw."""
_SCORE_POLL_S = 0.5
"""Interval at which a process that waits for a score looks for a signal."""


@dataclass(frozen=True)
class SamplingPlan:
    """The settings that all groups of a step share."""

    group_size: int
    max_tokens: int
    temperature: float
    seed: int
    stream: int
    redraws: int = 0
    """Dynamic sampling: maximum number of new draws of a group whose rewards are all equal."""
    truncation: Truncation = WHOLE_VOCABULARY


@dataclass(frozen=True)
class Watcher:
    """Functions that a long step calls from inside."""

    check: Callable[[], None]
    """Raises if somebody asked the run to stop."""
    completion: Callable[[Completion], object]


def counting(label: str, total: int, log: Callable[[str], object]) -> Callable[[object], object]:
    """Return a function that logs one more of `total` at each call."""
    done = count(1)
    return lambda _: log(Doing(f"{label} {next(done):,}/{total:,}"))


@dataclass(frozen=True)
class Stage:
    """The environment, chat template and limits of dialogues of several turns."""

    host: EpisodeHost
    renderer: ChatRenderer
    decode: Callable[[Int32Array], str]
    """Token ids to text, special tokens by their names."""
    context: int
    """Positions of the model; 0 if it names no limit."""


# -- one dialogue ----------------------------------------------------------------------------------


class Dialogue:
    """A prompt, and the replies to it under one sample index."""

    def __init__(self, prompt: Prompt, slot: int, sample: int, stage: Stage | None = None) -> None:
        """`stage` is the environment that answers; None for a problem of the data."""
        self.prompt, self.slot, self.sample, self.stage = prompt, slot, sample, stage
        self.context_ids: Int32Array = prompt.token_ids
        """[P] tokens before the next reply."""
        self.extends = 0
        """Length of `context_ids` when the newest reply ended, if these tokens are still the same;
        else 0.
        """
        self.used = 0
        """Action tokens so far: the noise coordinate of the next one."""
        self.cut = False
        """True if the dialogue ended because another reply had no room."""
        self._turns: list[Turn] = []
        self._context, self._restarts = _NO_TOKENS, False
        self._text = prompt.text
        opening = prompt.example.prompt
        if isinstance(opening, str):
            opening = [ChatMessage(role="user", content=opening)]
        self._messages = list(opening)

    @property
    def key(self) -> DialogueKey:
        return self.slot, self.sample

    @property
    def replies(self) -> int:
        return len(self._turns)

    @property
    def token_ids(self) -> Int32Array:
        """Tokens of all turns; after a rewrite of the history, the tokens at the time of each
        turn.
        """
        pieces = ((turn.context, turn.completion.token_ids) for turn in self._turns)
        return np.concatenate(list(chain.from_iterable(pieces)))

    @property
    def trajectory(self) -> Trajectory:
        """The turns so far; one turn without tokens if the engine never got the first request."""
        numbers = np.zeros(0, np.float32)
        # The arrays are empty: None would remove the entropies and kept counts of the whole step.
        nothing = Completion(
            0, self.sample, _NO_TOKENS, numbers, numbers, FinishReason.STOP, _NO_TOKENS
        )
        return Trajectory(tuple(self._turns) or (Turn(nothing),), cut=self.cut)

    def add(self, completion: Completion, reply: str) -> None:
        """Add a reply of the model."""
        self._turns.append(Turn(completion, self._context, self._restarts))
        self._messages.append(ChatMessage(role="assistant", content=reply))
        self.context_ids = np.concatenate([self.context_ids, completion.token_ids])
        self.extends = len(self.context_ids)
        self.used += len(completion.token_ids)

    def add_observation(self, heard: Observation, renderer: ChatRenderer) -> None:
        """Add the environment's answer to the newest reply, or the messages that open the
        conversation.
        """
        known = self._messages
        # An opening that is the prompt itself: its tokens stand already.
        if not self._turns and not heard.tools and (not heard.messages or heard.messages == known):
            return
        # Whole conversations mostly extend the known one by new messages: this is not a rewrite.
        if heard.rewrites and not (self._turns and heard.messages[: len(known)] == known):
            self._messages = list(heard.messages or known)  # an opening may bring tools alone
            following = renderer.opening(self._messages, heard.tools)
        else:
            new = heard.messages
            if heard.rewrites:
                new = new[len(known) :]
            last = int(self._turns[-1].completion.token_ids[-1])
            following = renderer.continued(self._text, known, new, last, heard.tools)
            self._messages = [*known, *new]
        self._text, self._context = following.text, following.token_ids
        self._restarts = following.restarts
        if following.restarts:
            self.context_ids, self.extends = following.token_ids, 0
        else:
            self.context_ids = np.concatenate([self.context_ids, following.token_ids])


# -- what answers a reply --------------------------------------------------------------------------


class Exchange(Protocol):
    """The other side of one dialogue. A `RunningEpisode` is one."""

    def reply(self, text: str, *, last: bool) -> None:
        """Pass on the model's reply, without waiting. `last` means that the dialogue has no tokens
        left.
        """

    def end(self) -> None:
        """Ask for the verdict without a further reply."""

    @property
    def ready(self) -> bool:
        """True if `answer` would return at once."""
        ...

    def answer(self, check: Callable[[], None]) -> Observation | Score:
        """Wait for the answer to the newest call, or first for the opening. `check` raises to stop
        the run.
        """


class ScoredReply:
    """The exchange of a problem of the data: no opening, one reply, and its score."""

    def __init__(self, group: ScoreGroup, dialogue: Dialogue, step: int) -> None:
        """`group` waits for the other replies to the same prompt, if a reward needs them."""
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
        """Do nothing, since one reply is the end already."""

    @property
    def ready(self) -> bool:
        return self._score is None or self._score.done()

    def answer(self, check: Callable[[], None]) -> Observation | Score:
        check()
        if self._score is None:
            return Observation([])
        while not wait([self._score], _SCORE_POLL_S).done:
            check()  # A judge may take minutes, and a signal should not.
        return self._score.result()


# -- the dialogues of a draw -----------------------------------------------------------------------


@dataclass
class Dialogues:
    """A `RequestFeed`: the dialogues of one draw, from their opening to their verdict.

    If the engine counts its noise, so that a run can repeat, the tokens alone decide which requests
    join when. The next reply of a dialogue then joins when `_LEFT_OPEN` others have ended theirs
    after it, or when the engine decodes no other row. Other engines get the next request as soon as
    the environment has answered.
    """

    exchanges: Mapping[DialogueKey, Exchange]
    dialogues: Sequence[Dialogue]
    step: int
    plan: SamplingPlan
    text: Callable[[Int32Array], str]
    """Decodes the token ids of a reply."""
    repeatable: bool
    """True if the engine draws the same noise again for the same request."""
    watcher: Watcher
    scored: dict[DialogueKey, Scored] = field(default_factory=dict)
    seconds_waited: float = 0.0
    """Seconds spent waiting for environments and scores."""

    def __post_init__(self) -> None:
        self._open = deque(self.dialogues)
        """Dialogues that wait for an answer, in the order in which they began or had their
        reply.
        """
        self._asked: dict[tuple[int, int], Dialogue] = {}
        self._requests = 0

    def more(self, idle: bool) -> list[SampleRequest]:
        """Return the next replies to sample; see `RequestFeed`. Samples that follow the same tokens
        share a request.
        """
        started = time.monotonic()
        requests: list[SampleRequest] = []
        while not requests and (due := self._due(idle)):
            for dialogue in [dialogue for dialogue in due if self._continues(dialogue)]:
                request = self._request(dialogue)
                if requests and (merged := _merged(requests[-1], request)):
                    requests[-1] = merged
                else:
                    requests.append(request)
                self._asked[self._requests + len(requests) - 1, dialogue.sample] = dialogue
        self._requests += len(requests)
        self.seconds_waited += time.monotonic() - started
        return requests

    def receive(self, completion: Completion) -> None:
        """Take a reply from the engine and pass it on."""
        self.watcher.check()
        dialogue = self._asked.pop((completion.request, completion.sample))
        text, last = self._written(completion), completion.finish_reason is FinishReason.LENGTH
        dialogue.add(completion, text)
        self.exchanges[dialogue.key].reply(text, last=last)
        self._open.append(dialogue)
        if dialogue.replies == 1:  # Progress counts trajectories.
            self.watcher.completion(completion)

    def _due(self, idle: bool) -> list[Dialogue]:
        """Remove and return the open dialogues whose answers are due."""
        if idle and (self.repeatable or not self._requests):
            # Workers end in an order that does not repeat.
            due = sorted(self._open, key=lambda dialogue: dialogue.key)
        elif self.repeatable or not (idle or any(one.stage for one in self._open)):
            # A score asks for no other reply, so wait for it at the end.
            answered = [dialogue for dialogue in self._open if dialogue.stage]
            due = answered[: max(0, len(answered) - _LEFT_OPEN)]
        else:
            while True:
                self.watcher.check()
                due = [dialogue for dialogue in self._open if self.exchanges[dialogue.key].ready]
                # If the engine decodes no row, wait for one answer.
                if due or not self._open or not idle:
                    break
                time.sleep(_POLL_S)
        for dialogue in due:
            self._open.remove(dialogue)
        return due

    def _continues(self, dialogue: Dialogue) -> bool:
        """Wait for the answer to a dialogue. Return False if it has ended; `scored` then has its
        score.
        """
        stage, exchange = dialogue.stage, self.exchanges[dialogue.key]
        answer = exchange.answer(self.watcher.check)
        if isinstance(answer, Observation):
            if stage is None:
                return True
            try:
                dialogue.add_observation(answer, stage.renderer)
            except ConfigurationError as error:  # The chat template refuses the conversation.
                answer = could_not_judge(str(error))
            else:
                fits = len(dialogue.context_ids) < stage.context
                if fits and dialogue.used < self.plan.max_tokens:
                    return True
                dialogue.cut = True  # Another reply has no room.
                exchange.end()
                answer = exchange.answer(self.watcher.check)
        assert isinstance(answer, Score)  # The end of an exchange is a verdict.
        trajectory = dialogue.trajectory
        alone = len(trajectory.turns) == 1 and not trajectory.turns[0].restarts
        if alone or stage is None:
            text = self._written(trajectory.turns[0].completion)
        else:
            text = stage.decode(dialogue.token_ids)
        self.scored[dialogue.key] = Scored(trajectory, text, answer)
        return False

    def _written(self, completion: Completion) -> str:
        if completion.text is None:
            return self.text(completion.token_ids)
        return completion.text

    def _request(self, dialogue: Dialogue) -> SampleRequest:
        plan = self.plan
        return SampleRequest(
            prompt_ids=dialogue.context_ids,
            count=1,
            max_tokens=plan.max_tokens - dialogue.used,
            temperature=plan.temperature,
            noise=NoiseKey(plan.seed, plan.stream, self.step, dialogue.slot),
            first_sample=dialogue.sample,
            first_position=dialogue.used,
            truncation=plan.truncation,
            extends=dialogue.extends,
            extendable=dialogue.stage is not None,
            messages=dialogue.prompt.messages if dialogue.stage is None else (),
        )


def _merged(first: SampleRequest, second: SampleRequest) -> SampleRequest | None:
    """Return one request for the samples of both if they follow the same tokens; else None."""
    after = first.first_sample + first.count
    follows = first.noise == second.noise and second.first_sample == after
    same = first.prompt_ids is second.prompt_ids and first.first_position == second.first_position
    if follows and same:
        return replace(first, count=first.count + second.count)
    return None


def environment_seed(plan: SamplingPlan, step: int, slot: int) -> int:
    """Return a seed that is the same for all samples of a group."""
    return int(philox(plan.seed, Stream.ENVIRONMENT, (step, slot, plan.stream, 0))[0])
