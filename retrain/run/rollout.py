"""Sample the groups of one step: prompts become requests, completions become replies, and the
environment or scorer answers replies while others decode.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import chain
from threading import Event
from time import monotonic

import numpy as np

from retrain.distributed import ALONE, World
from retrain.errors import Interrupted
from retrain.inference_engine.base import InferenceEngine
from retrain.noise import Stream, uniform
from retrain.rewards import Scorer
from retrain.run.dialogues import (
    Dialogue,
    DialogueKey,
    Dialogues,
    Exchange,
    SamplingPlan,
    ScoredReply,
    Stage,
    Watcher,
    environment_seed,
)
from retrain.types import Group, Int32Array, Prompt, Row

FEW = 4
"""Completions to score in a step that trains none."""


@dataclass
class Rollout:
    """The groups of one step in prompt order, with their cost in time."""

    groups: list[Group]
    """The last draw of each prompt, which gets the credit."""
    drawn: list[Group] = field(default_factory=list)
    """Every draw: the first draw of each prompt in prompt order, then the redraws."""
    sample_seconds: float = 0.0
    reward_seconds: float = 0.0
    """Time spent waiting for scores after the last completion."""

    @property
    def first_draws(self) -> list[Group]:
        """One draw of each prompt, selected by no reward."""
        return self.drawn[: len(self.groups)]

    @property
    def usable_groups(self) -> list[Group]:
        """The judged part of each group. A partly judged group needs two judged completions."""
        parts = [(group.judged(), min(2, len(group))) for group in self.groups]
        return [part for part, least in parts if len(part) >= least]

    @property
    def judged(self) -> int:
        """Number of judged completions of the first draws."""
        return sum(len(group.rewards) for group in self.first_draws)

    @property
    def correct(self) -> int:
        """Number of correct completions of the first draws."""
        return sum(group.correct for group in self.first_draws)

    @property
    def correct_rate(self) -> float | None:
        return self.correct / self.judged if self.judged else None

    @property
    def redrawn(self) -> int:
        """Number of draws beyond the first of a prompt."""
        return len(self.drawn) - len(self.groups)

    @property
    def tokens(self) -> int:
        """Prompt and completion tokens of every draw."""
        return sum(
            len(group.prompt.token_ids) + one.num_tokens
            for group in self.drawn
            for one in group.trajectories
        )

    def few_rows(self, seed: int, step: int) -> list[Row]:
        """Choose FEW completions of the first draws by counter noise, and return their rows that
        have a token, in the order of the groups. A choice by rewards would bias the sample.
        """
        members = [(group, one) for group in self.first_draws for one in group.trajectories]
        places = np.array([(group.slot, one.sample) for group, one in members], np.int64)
        slots, samples = places.reshape(-1, 2).T
        noise = uniform(seed, Stream.COMPLETION_CHOICE, step, slots, samples, 0)
        rows: list[Row] = []
        for number in np.sort(np.argsort(noise)[:FEW]):
            group, one = members[number]
            nothing = np.zeros(one.num_actions, np.float32)
            rows += Row.of(group.prompt, one, nothing, group.slot)
        return [row for row in rows if row.num_actions]


Judge = Scorer | Stage
"""The judge of replies to a problem: a reward, or the environment of a dialogue."""


@dataclass(frozen=True)
class Sampler:
    """Draws scored groups from an engine; in a parallel run each process draws its share, and all
    of them get all groups.
    """

    engine: InferenceEngine
    judge: Judge | None
    """Judges the problems of any task that `by_task` does not name."""
    text: Callable[[Int32Array], str]
    """Decodes the token ids of a reply."""
    world: World = ALONE
    by_task: Mapping[str, Judge] = field(default_factory=dict)
    """The judge of each source of a mixture."""

    def draw(
        self, prompts: Sequence[Prompt], step: int, plan: SamplingPlan, watcher: Watcher
    ) -> Rollout:
        """Draw one group per prompt. A redraw keeps the prompt and lets the sample index run on, so
        a step's prompts never change.
        """
        rollout = Rollout(groups=[])
        pending = dict(enumerate(prompts))
        newest: dict[int, Group] = {}
        for attempt in range(plan.redraws + 1):
            # Every rank holds the same `pending`, so all of them leave this loop together.
            own = {slot: pending[slot] for slot in self.world.share(list(pending))}
            shares = self.world.gather(
                self._draw_once(own, step, plan, attempt * plan.group_size, watcher, rollout)
            )
            fresh = dict(chain.from_iterable(share.items() for share in shares))
            newest |= fresh
            rollout.drawn += [fresh[slot] for slot in sorted(fresh)]
            pending = {
                slot: prompts[slot] for slot, group in fresh.items() if len(set(group.rewards)) <= 1
            }
            if not pending:
                break
        rollout.groups = [newest[slot] for slot in range(len(prompts))]
        return rollout

    def _draw_once(
        self,
        prompts: dict[int, Prompt],
        step: int,
        plan: SamplingPlan,
        first_sample: int,
        watcher: Watcher,
        rollout: Rollout,
    ) -> dict[int, Group]:
        """Draw one group for each slot of `prompts`; adds the seconds to `rollout`."""
        started = monotonic()
        samples = range(first_sample, first_sample + plan.group_size)
        opened: list[Dialogue] = []
        exchanges: dict[DialogueKey, Exchange] = {}
        for slot, prompt in prompts.items():
            judge = self.by_task.get(prompt.example.task, self.judge)
            stage = judge if isinstance(judge, Stage) else None
            own = [Dialogue(prompt, slot, sample, stage) for sample in samples]
            opened += own
            if isinstance(judge, Stage):
                seed = environment_seed(plan, step, slot)
                exchanges |= {one.key: judge.host.begin(prompt.example, seed) for one in own}
            else:
                assert judge is not None  # Every task has a judge.
                group = judge.group(plan.group_size)
                exchanges |= {one.key: ScoredReply(group, one, step) for one in own}
        dialogues = Dialogues(
            exchanges,
            opened,
            step,
            plan,
            text=self.text,
            repeatable=self.engine.capabilities.noise == "counter",
            watcher=watcher,
        )
        for completion in self.engine.sample_feed(dialogues):
            dialogues.receive(completion)
        rollout.reward_seconds += dialogues.seconds_waited
        rollout.sample_seconds += monotonic() - started - dialogues.seconds_waited
        scored = dialogues.scored
        return {
            slot: Group(prompt, slot, [scored[slot, sample] for sample in samples])
            for slot, prompt in prompts.items()
        }


class _RolloutDropped(Exception):
    """The prefetched rollout is no longer wanted."""


@dataclass
class PrefetchedRollout:
    """At most one running rollout, which a separate thread draws while the learner trains on the
    step before.
    """

    check: Callable[[], None]
    """Raises when a signal has asked the run to stop; `take` passes the error on."""

    def __post_init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="sampler")
        self._unwanted = Event()
        self._under_way: Future[Rollout] | None = None

    def start(self, draw: Callable[[Watcher], Rollout]) -> None:
        self._unwanted.clear()
        watcher = Watcher(self._go_on, lambda _: None)
        self._under_way = self._pool.submit(draw, watcher)

    def take(self) -> Rollout | None:
        """Wait for the rollout that `start` began; None without one."""
        future, self._under_way = self._under_way, None
        return future.result() if future else None

    def drop(self) -> None:
        """Cancel the running rollout, so that the next one samples with the newest weights."""
        self._unwanted.set()
        future, self._under_way = self._under_way, None
        error = future and future.exception()
        if error and not isinstance(error, _RolloutDropped | Interrupted):
            raise error

    def close(self) -> None:
        self._unwanted.set()
        self._pool.shutdown()

    def _go_on(self) -> None:
        if self._unwanted.is_set():
            raise _RolloutDropped
        self.check()
