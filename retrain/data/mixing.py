"""The prompts of a run on the sources of `[[data.mix]]`. Sources have exact shares of all steps so
far, and each has its own shuffle or sampler.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import floor
from typing import TYPE_CHECKING, Any

from retrain.config.moving import value_at
from retrain.config.plan import sources_of
from retrain.data.prompts import MixedPrompts, PromptSet
from retrain.data.samplers import PromptChoice
from retrain.types import Group

if TYPE_CHECKING:
    from retrain.config import TrainConfig


@dataclass(frozen=True)
class Shares:
    """The prompts that each source has given, and the number that it still owes."""

    owed: tuple[float, ...]
    """Its share of all prompts so far, by the weights of their steps, less those it gave."""
    taken: tuple[int, ...]
    """The prompts that it gave."""

    @classmethod
    def of(cls, sources: int) -> "Shares":
        """Return the shares before the first step."""
        return cls((0.0,) * sources, (0,) * sources)

    def after(self, weights: Sequence[float], count: int) -> "Shares":
        """Return the shares after a step of `count` prompts. A source gets the whole prompts that
        it is due; the largest remainders of the running sums get the rest.
        """
        total = sum(weights)
        owed = [
            due + count * weight / total for due, weight in zip(self.owed, weights, strict=True)
        ]
        given = [max(0, floor(due)) for due in owed]
        # Below 0 only where weights jump from source to source: they give the excess back.
        while left := count - sum(given):
            able = [number for number, own in enumerate(given) if left > 0 or own]
            first = max if left > 0 else min
            given[first(able, key=lambda i: owed[i] - given[i])] += 1 if left > 0 else -1
        return Shares(
            tuple(due - own for due, own in zip(owed, given, strict=True)),
            tuple(before + own for before, own in zip(self.taken, given, strict=True)),
        )


@dataclass(frozen=True)
class Quota:
    """The prompts that a source gives to a run of fixed batches."""

    task: str
    first_step: int
    last_step: int
    all_steps: int


def planned_quotas(config: "TrainConfig") -> list[Quota]:
    """Return the quotas of the sources of `[[data.mix]]`; [] without it."""
    sources, training = sources_of(config), config.training
    shares = Shares.of(len(sources))
    taken = [shares.taken]
    for step in range(training.max_steps):
        weights = [value_at(source.weight, step) for source in sources]
        shares = shares.after(weights, training.batch_size)
        taken.append(shares.taken)
    first, before, last = taken[:2][-1], taken[-2:][0], taken[-1]
    return [
        Quota(source.task, first[number], last[number] - before[number], last[number])
        for number, source in enumerate(sources)
        if source.task
    ]


class MixedChoice(PromptChoice):
    """The prompts of the steps of a mixture."""

    def __init__(self, config: "TrainConfig", prompts: MixedPrompts) -> None:
        self.prompts, self._starts = prompts, prompts.starts
        self._chosen = {}
        self._sources = sources_of(config)
        self._own = [
            PromptChoice(source.config, own)
            for source, own in zip(self._sources, prompts.sets, strict=True)
        ]
        self._shares = Shares.of(len(self._own))
        self._after: dict[int, Shares] = {}
        """Step -> the shares after it, until `observe` has seen the step."""

    def indices(self, step: int, count: int, seed: int) -> list[int]:
        """Return the choice for a step, the prompts of each source spread over it. In split mode
        the run may not have observed the previous step yet.
        """
        before = self._after.get(step - 1, self._shares)
        weights = [value_at(source.weight, step) for source in self._sources]
        self._after[step] = after = before.after(weights, count)
        chosen: list[tuple[float, int, int]] = []
        for number, own in enumerate(self._own):
            done, start = before.taken[number], self._starts[number]
            quota = after.taken[number] - done
            local = own.indices(step, quota, seed) if quota else []
            if local is None:
                local = own.prompts.order(done, quota, seed)
            chosen += [((j + 0.5) / quota, number, start + i) for j, i in enumerate(local)]
        return [index for *_, index in sorted(chosen)]

    def observe(self, step: int, groups: Sequence[Group]) -> None:
        self._shares = self._after.pop(step, self._shares)  # the first rank alone chooses
        pairs = list(zip(self._chosen.pop(step), groups, strict=True))
        for own, start in zip(self._own, self._starts, strict=True):
            mine = [(i - start, group) for i, group in pairs if 0 <= i - start < len(own.prompts)]
            own.learn(step, [index for index, _ in mine], [group for _, group in mine])

    def state_dict(self) -> dict[str, Any]:
        samplers = [own.state_dict() for own in self._own]
        return {"owed": self._shares.owed, "taken": self._shares.taken, "samplers": samplers}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._shares = Shares(tuple(state["owed"]), tuple(state["taken"]))
        for own, kept in zip(self._own, state["samplers"], strict=True):
            own.load_state_dict(kept)


def prompt_choice(config: "TrainConfig", prompts: PromptSet) -> PromptChoice:
    """Return the choice of a run's prompts."""
    if isinstance(prompts, MixedPrompts):
        return MixedChoice(config, prompts)
    return PromptChoice(config, prompts)
