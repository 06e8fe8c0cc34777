"""Sampling the groups of one step: prompts become requests, completions texts, and texts scores, while others still decode."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from threading import Event
from time import monotonic

from retrain.distributed import ALONE, World
from retrain.errors import Interrupted
from retrain.inference_engine.base import WHOLE_VOCABULARY, InferenceEngine, NoiseKey, SampleRequest, Truncation
from retrain.rewards import Scorer, ScoreRequest
from retrain.types import Completion, Group, Int32Array, Prompt, Score, Scored

_PATIENCE_S = 0.5
"""How often a process that waits for scores looks for a signal."""
_Members = dict[int, tuple[Completion, str, Future[Score]]]
"""Completions of one prompt by sample index, each with its text and a score that may still be pending."""


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
        return sum(len(group.prompt.token_ids) + len(completion.token_ids) for group in self.drawn for completion in group.completions)


class Sampler:
    """Draws scored groups from an engine; in a parallel run each process draws its share, and all of them get all groups."""

    def __init__(
        self,
        engine: InferenceEngine,
        scorer: Scorer,
        text: Callable[[Int32Array], str],
        *,
        clock: Callable[[], float] = monotonic,
        world: World = ALONE,
    ) -> None:
        """`text` decodes the token ids of a completion."""
        self.engine = engine
        self.scorer = scorer
        self.text = text
        self.clock = clock
        self.world = world

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
        """One group for each slot of `prompts`; adds the seconds to `rollout`."""
        slots = list(prompts)
        requests = [
            SampleRequest(
                prompt_ids=prompts[slot].token_ids,
                count=plan.group_size,
                max_tokens=plan.max_tokens,
                temperature=plan.temperature,
                noise=NoiseKey(plan.seed, plan.stream, step, slot),
                first_sample=first_sample,
                truncation=plan.truncation,
            )
            for slot in slots
        ]
        members: dict[int, _Members] = {slot: {} for slot in slots}
        started = self.clock()
        for completion in self.engine.sample(requests):
            watcher.check()
            slot = slots[completion.request]
            text = self.text(completion.token_ids)
            members[slot][completion.sample] = (completion, text, self._submit(prompts[slot], text, step, slot, completion.sample))
            watcher.completion(completion)
        sampled = self.clock()
        groups = {slot: _group(prompts[slot], slot, members[slot], watcher.check) for slot in slots}
        rollout.sample_seconds += sampled - started
        rollout.reward_seconds += self.clock() - sampled
        return groups

    def _submit(self, prompt: Prompt, text: str, step: int, slot: int, sample: int) -> Future[Score]:
        request = ScoreRequest(
            response=text,
            reference=prompt.example.reference,
            prompt=prompt.text,
            example=prompt.example,
            step=step,
            slot=slot,
            sample=sample,
        )
        return self.scorer.submit(request)


def _group(prompt: Prompt, slot: int, members: _Members, check: Callable[[], None]) -> Group:
    """Order by sample index, so that a group does not depend on which completion finished first."""
    scored = []
    for _, (completion, text, score) in sorted(members.items()):
        check()
        while not wait([score], _PATIENCE_S).done:  # a judge may take minutes, and a signal should not
            check()
        scored.append(Scored(completion, text, score.result()))
    return Group(prompt, slot, scored)


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
