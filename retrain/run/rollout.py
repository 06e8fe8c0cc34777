"""Sampling the groups of one step: prompts become requests, completions replies, and replies are answered or scored while others decode."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from threading import Event
from time import monotonic

from retrain.data.chat import ChatRenderer
from retrain.distributed import ALONE, World
from retrain.environments.base import Observation
from retrain.environments.episodes import EpisodeHost, could_not_judge
from retrain.errors import ConfigurationError, Interrupted
from retrain.inference_engine.base import WHOLE_VOCABULARY, InferenceEngine, NoiseKey, SampleRequest, Truncation
from retrain.noise import Stream, philox
from retrain.rewards import Scorer
from retrain.run.dialogue import Dialogue, DialogueKey
from retrain.run.exchange import Exchange, ScoredReply
from retrain.types import Completion, Group, Int32Array, Prompt, Score, Scored

Exchanges = Mapping[DialogueKey, Exchange]


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
    """Called from inside a long step."""

    check: Callable[[], None]
    """Raises when the run was asked to stop."""
    completion: Callable[[Completion], None]


@dataclass
class Rollout:
    """The groups of one step in prompt order, with what they cost."""

    groups: list[Group]
    """The last draw of each prompt, which credit is assigned for."""
    drawn: list[Group] = field(default_factory=list)
    """Every draw: the first one of each prompt in prompt order, then the redraws."""
    sample_seconds: float = 0.0
    reward_seconds: float = 0.0
    """Time spent waiting for scores after the last completion."""

    @property
    def first_draws(self) -> list[Group]:
        """One draw of each prompt, which no reward has selected."""
        return self.drawn[: len(self.groups)]

    @property
    def usable_groups(self) -> list[Group]:
        """The judged part of each group; a group of which fewer than two completions could be judged is dropped."""
        judged = [group.judged() for group in self.groups]
        return [part for part, whole in zip(judged, self.groups, strict=True) if len(part) == len(whole) or len(part) >= 2]

    @property
    def redrawn(self) -> int:
        """Draws beyond the first of a prompt."""
        return len(self.drawn) - len(self.groups)

    @property
    def tokens(self) -> int:
        """Prompt and completion tokens of every draw."""
        return sum(len(group.prompt.token_ids) + one.num_tokens for group in self.drawn for one in group.trajectories)


@dataclass(frozen=True)
class Stage:
    """What dialogues of several turns need."""

    host: EpisodeHost
    renderer: ChatRenderer
    decode: Callable[[Int32Array], str]
    """Token ids to text, special tokens by their names."""
    context: int
    """Positions that the model has; 0 if it names no limit."""


class Sampler:
    """Draws scored groups from an engine; in a parallel run each process draws its share, and all of them get all groups."""

    def __init__(
        self,
        engine: InferenceEngine,
        scorer: Scorer | None,
        text: Callable[[Int32Array], str],
        *,
        clock: Callable[[], float] = monotonic,
        world: World = ALONE,
        stage: Stage | None = None,
    ) -> None:
        """`text` decodes the token ids of a reply. With a `stage` its environment answers and judges, else the scorer."""
        self.engine = engine
        self.scorer = scorer
        self.text = text
        self.clock = clock
        self.world = world
        self.stage = stage

    def draw(self, prompts: Sequence[Prompt], step: int, plan: SamplingPlan, watcher: Watcher) -> Rollout:
        """One group per prompt. A redraw keeps the prompt and lets the sample index run on, so a step's prompts never change."""
        rollout = Rollout(groups=[])
        pending = dict(enumerate(prompts))
        newest: dict[int, Group] = {}
        for attempt in range(plan.redraws + 1):
            own = {slot: pending[slot] for slot in self.world.share(list(pending))}
            shares = self.world.gather(self._draw_once(own, step, plan, attempt * plan.group_size, watcher, rollout))
            fresh = {slot: group for share in shares for slot, group in share.items()}
            newest |= fresh
            rollout.drawn += [fresh[slot] for slot in sorted(fresh)]
            pending = {slot: prompts[slot] for slot, group in fresh.items() if len(set(group.rewards)) <= 1}
            if not pending:
                break
        rollout.groups = [newest[slot] for slot in range(len(prompts))]
        return rollout

    def _draw_once(
        self, prompts: dict[int, Prompt], step: int, plan: SamplingPlan, first_sample: int, watcher: Watcher, rollout: Rollout
    ) -> dict[int, Group]:
        """One group for each slot of `prompts`; adds the seconds to `rollout`.

        The dialogues advance in rounds, each by one reply, so that the batch of a round is a function of the tokens before it.
        """
        samples = range(first_sample, first_sample + plan.group_size)
        dialogues = [Dialogue(prompt, slot, sample) for slot, prompt in prompts.items() for sample in samples]
        exchanges = {dialogue.key: self._begin(dialogue, step, plan) for dialogue in dialogues}
        members: dict[tuple[int, int], Scored] = {}
        unfinished = self._answered(dialogues, exchanges, plan, watcher, members)
        while self.world.any_rank(bool(unfinished)):
            started = self.clock()
            for dialogue in self._replies(unfinished, step, plan, watcher):
                exchanges[dialogue.key].reply(dialogue.reply, last=dialogue.ended_by_length)
            sampled = self.clock()
            unfinished = self._answered(unfinished, exchanges, plan, watcher, members)
            rollout.sample_seconds += sampled - started
            rollout.reward_seconds += self.clock() - sampled
        return {slot: Group(prompt, slot, [members[slot, sample] for sample in samples]) for slot, prompt in prompts.items()}

    def _begin(self, dialogue: Dialogue, step: int, plan: SamplingPlan) -> Exchange:
        if self.stage is None:
            assert self.scorer is not None  # one of the two judges
            return ScoredReply(self.scorer, dialogue, step)
        return self.stage.host.begin(dialogue.prompt.example, environment_seed(plan, step, dialogue.slot))

    def _replies(self, dialogues: Sequence[Dialogue], step: int, plan: SamplingPlan, watcher: Watcher) -> Iterator[Dialogue]:
        """Sample one reply in each dialogue; yields a dialogue as soon as it has its reply."""
        requests: list[SampleRequest] = []
        asked: dict[tuple[int, int], Dialogue] = {}
        for dialogue in dialogues:
            request = self._request(dialogue, step, plan)
            if requests and (merged := _merged(requests[-1], request)):
                requests[-1] = merged
            else:
                requests.append(request)
            asked[len(requests) - 1, dialogue.sample] = dialogue
        for completion in self.engine.sample(requests):
            watcher.check()
            dialogue = asked[completion.request, completion.sample]
            dialogue.add(completion, self._written(completion))
            yield dialogue
            if dialogue.replies == 1:  # progress is counted in trajectories
                watcher.completion(completion)

    def _request(self, dialogue: Dialogue, step: int, plan: SamplingPlan) -> SampleRequest:
        return SampleRequest(
            prompt_ids=dialogue.in_sight,
            count=1,
            max_tokens=plan.max_tokens - dialogue.used,
            temperature=plan.temperature,
            noise=NoiseKey(plan.seed, plan.stream, step, dialogue.slot),
            first_sample=dialogue.sample,
            first_position=dialogue.used,
            truncation=plan.truncation,
        )

    def _answered(
        self, dialogues: Sequence[Dialogue], exchanges: Exchanges, plan: SamplingPlan, watcher: Watcher, members: dict[DialogueKey, Scored]
    ) -> list[Dialogue]:
        """Wait for what is said to each dialogue; returns those that go on, and adds the others to `members`."""
        going_on: list[Dialogue] = []
        for dialogue in dialogues:
            exchange = exchanges[dialogue.key]
            answer: Observation | Score | None = exchange.answer(watcher.check)
            if isinstance(answer, Observation):
                answer = self._heard(dialogue, answer, exchange, plan, watcher)
            if answer is None:
                going_on.append(dialogue)
            else:
                members[dialogue.key] = self._scored(dialogue, answer)
        return going_on

    def _heard(
        self, dialogue: Dialogue, said: Observation, exchange: Exchange, plan: SamplingPlan, watcher: Watcher
    ) -> Observation | Score | None:
        """None if the dialogue goes on; else the verdict, since no token is left for another reply."""
        if self.stage is None:
            return None
        try:
            dialogue.hear(said, self.stage.renderer)
        except ConfigurationError as error:  # the chat template refuses the conversation
            return could_not_judge(str(error))
        if dialogue.used < plan.max_tokens and len(dialogue.in_sight) < (self.stage.context or math.inf):
            return None
        dialogue.cut = True
        exchange.end()
        return exchange.answer(watcher.check)

    def _scored(self, dialogue: Dialogue, score: Observation | Score) -> Scored:
        assert isinstance(score, Score)  # the end of an exchange is a verdict
        trajectory = dialogue.trajectory
        alone = len(trajectory.turns) == 1 and not trajectory.turns[0].restarts
        text = self._written(trajectory.turns[0].completion) if alone or self.stage is None else self.stage.decode(dialogue.said)
        return Scored(trajectory, text, score)

    def _written(self, completion: Completion) -> str:
        return self.text(completion.token_ids) if completion.text is None else completion.text


def _merged(first: SampleRequest, second: SampleRequest) -> SampleRequest | None:
    """One request for the samples of both, where they follow the same tokens; else None."""
    follows = first.noise == second.noise and second.first_sample == first.first_sample + first.count
    same = first.prompt_ids is second.prompt_ids and first.first_position == second.first_position
    return replace(first, count=first.count + second.count) if follows and same else None


def environment_seed(plan: SamplingPlan, step: int, slot: int) -> int:
    """The same for all samples of a group."""
    return int(philox(plan.seed, Stream.ENVIRONMENT, (step, slot, plan.stream, 0))[0])


class _Dropped(Exception):
    """The prefetched rollout is no longer wanted."""


class PrefetchedRollout:
    """At most one rollout under way, drawn in a thread of its own while the step before it is learned."""

    def __init__(self, check: Callable[[], None]) -> None:
        """`check` raises when a signal has asked the run to stop; `take` passes the error on."""
        self._check = check
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="sampler")
        self._unwanted = Event()
        self._under_way: Future[Rollout] | None = None

    def start(self, draw: Callable[[Watcher], Rollout]) -> None:
        self._unwanted.clear()
        self._under_way = self._pool.submit(draw, Watcher(check=self._go_on, completion=lambda _: None))

    def take(self) -> Rollout | None:
        """Wait for the rollout that was started; None if there was none."""
        future, self._under_way = self._under_way, None
        return future.result() if future else None

    def drop(self) -> None:
        """Cancel the rollout under way, so that the next one is drawn with the newest weights."""
        self._unwanted.set()
        future, self._under_way = self._under_way, None
        if future and (error := future.exception()) and not isinstance(error, _Dropped | Interrupted):
            raise error

    def close(self) -> None:
        self._unwanted.set()
        self._pool.shutdown()

    def _go_on(self) -> None:
        if self._unwanted.is_set():
            raise _Dropped
        self._check()
