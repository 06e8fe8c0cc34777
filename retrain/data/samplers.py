"""The choice of a step's prompts: by the shuffle of every epoch, or by a sampler that learns from
rewards.

A sampler receives its random numbers, and the checkpoint holds what it has seen. A resumed run
therefore chooses the same prompts as an undisturbed run.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

from retrain import noise
from retrain.data.prompts import PromptSet
from retrain.errors import ConfigurationError, RunFailed
from retrain.plugins import (
    Fault,
    load_plugin,
    params_of,
    restore,
    state_of,
    user_code,
)
from retrain.types import (
    Completion,
    Example,
    FinishReason,
    Group,
    Prompt,
    Score,
    Scored,
    Trajectory,
)

if TYPE_CHECKING:
    from retrain.config import TrainConfig

Uniforms = npt.NDArray[np.float64]


class PromptSampler(ABC):
    """Chooses the prompts of each step. retrain calls `Sampler(examples, params)` with the run's
    examples and the table `[data] sampler_params`. `size` is the number of examples. `choose`
    depends on its arguments and on earlier observations alone; only `observe` and `load` may change
    the sampler.
    """

    def __init__(self, examples: Sequence[Example], params: Mapping[str, Any]) -> None:
        """`params` is the table `[data] sampler_params`. Raise ValueError for one that is wrong."""
        self.size = len(examples)

    @abstractmethod
    def choose(self, step: int, count: int, uniforms: Uniforms) -> Sequence[int]:
        """Return `count` indices of examples. `uniforms` [size], above 0 and below 1, belong to the
        step and are the same for every sampler and condition of a seed.

        In split mode the newest observed step is step - 2, else step - 1.
        """

    def observe(self, indices: Sequence[int], groups: Sequence[Group]) -> None:  # noqa: B027
        """Learn from a step's examples and the judged part of their first groups, in the same
        order.
        """

    def state(self) -> dict[str, Any]:
        """Return all that `observe` changed, as JSON can hold it."""
        return {}

    def load(self, state: dict[str, Any]) -> None:  # noqa: B027
        """Take over what `state` returned."""


class _Counting(PromptSampler):
    """Counts of each example: how often a step took it, its correct completions, and all its judged
    completions.
    """

    defaults: ClassVar[Mapping[str, float]] = {}

    def __init__(self, examples: Sequence[Example], params: Mapping[str, Any]) -> None:
        super().__init__(examples, params)
        unknown = params.keys() - self.defaults.keys()
        if unknown:
            raise ValueError(
                f"{', '.join(sorted(unknown))} is not one of {', '.join(self.defaults)}"
            )
        self.params = {**self.defaults, **params}
        for name, value in self.params.items():
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
                raise ValueError(f"{name} = {value} is not a number from 0 to 1")
        self.taken = np.zeros(self.size, dtype=np.int64)
        self.right = np.zeros(self.size)
        self.judged = np.zeros(self.size)

    def observe(self, indices: Sequence[int], groups: Sequence[Group]) -> None:
        for index, group in zip(indices, groups, strict=True):
            self.taken[index] += 1
            if len(group):  # an unjudged group says nothing
                self._count(index, group.correct, len(group))

    def _count(self, index: int, right: int, judged: int) -> None:
        """Keep only the counts of the newest group."""
        self.right[index], self.judged[index] = right, judged

    def _in_turn(self, among: npt.NDArray[np.intp], count: int, uniforms: Uniforms) -> list[int]:
        """Take `count` of the examples `among`, the least often taken examples first."""
        order = among[np.lexsort((uniforms[among], self.taken[among]))]
        if len(order):
            return np.resize(order, count).tolist()
        return []

    def state(self) -> dict[str, Any]:
        seen = np.flatnonzero(self.taken)
        columns = (seen, self.taken[seen], self.right[seen], self.judged[seen])
        rows = zip(*map(np.ndarray.tolist, columns), strict=True)
        return {"seen": list(map(list, rows))}

    def load(self, state: dict[str, Any]) -> None:
        for index, taken, right, judged in state["seen"]:
            self.taken[index], self.right[index], self.judged[index] = taken, right, judged


class DropSolved(_Counting):
    """Examples whose last group had a pass rate of `threshold` or more never come back: the
    no-positive-resampling of ScaleRL (arXiv 2510.13786). When the run has solved all, all come
    back.
    """

    defaults: ClassVar[Mapping[str, float]] = {"threshold": 0.9}

    def choose(self, step: int, count: int, uniforms: Uniforms) -> list[int]:
        # Divided, since the product 0.56 x 25 is above 14.
        rates = np.divide(
            self.right, self.judged, out=np.full(self.size, -1.0), where=self.judged > 0
        )
        left = np.flatnonzero(rates < self.params["threshold"])
        return self._in_turn(left if len(left) else np.arange(self.size), count, uniforms)


class Pools(_Counting):
    """Fractions `easy` and `hard` of a step are examples whose last group was all right or all
    wrong. The rest had mixed groups or are new. The other pools fill a pool that runs short.
    """

    defaults: ClassVar[Mapping[str, float]] = {"easy": 0.1, "hard": 0.1}

    def choose(self, step: int, count: int, uniforms: Uniforms) -> list[int]:
        easy = (self.judged > 0) & (self.right == self.judged)
        hard = (self.judged > 0) & (self.right == 0)
        pools = [np.flatnonzero(pool) for pool in (easy, hard, ~(easy | hard))]
        wanted = [round(count * self.params[name]) for name in ("easy", "hard")]
        wanted.append(max(0, count - sum(wanted)))
        chosen: list[int] = []
        for pool, number in zip(pools, wanted, strict=True):
            chosen += self._in_turn(pool, min(number, len(pool)), uniforms)
        # Large fractions, or their rounding, can ask for more than a step has.
        chosen = chosen[:count]
        rest = np.setdiff1d(np.arange(self.size), chosen)
        return chosen + self._in_turn(
            rest if len(rest) else np.arange(self.size), count - len(chosen), uniforms
        )


class Learnability(_Counting):
    """The sampler draws examples with weights p (1 - p), where p is the pass rate so far plus one
    right and one wrong answer. Every later group multiplies the weight of older groups by `memory`.
    """

    defaults: ClassVar[Mapping[str, float]] = {"memory": 0.5}

    def _count(self, index: int, right: int, judged: int) -> None:
        self.right[index] = self.params["memory"] * self.right[index] + right
        self.judged[index] = self.params["memory"] * self.judged[index] + judged

    def choose(self, step: int, count: int, uniforms: Uniforms) -> list[int]:
        p = (self.right + 1) / (self.judged + 2)
        # The smallest of exponential times with these rates are a weighted draw without return.
        times = -np.log1p(-uniforms) / (p * (1 - p))
        return np.resize(np.argsort(times, kind="stable"), count).tolist()


SAMPLERS: dict[str, type[PromptSampler] | None] = {
    "shuffle": None,
    "pools": Pools,
    "drop_solved": DropSolved,
    "learnability": Learnability,
}
"""`[data] sampler`; the shuffle needs no state, see `PromptSet.batch`."""


class PromptChoice:
    """The prompts of a run's steps, by the shuffle or by a sampler, with a check of its indices."""

    def __init__(self, config: "TrainConfig", prompts: PromptSet) -> None:
        """Raises ConfigurationError for a sampler that does not load or fails a trial."""
        self.prompts = prompts
        self.where = f'[data] sampler = "{config.data.sampler}"'
        self._sampler = build_sampler(config, prompts.examples)
        self._chosen: dict[int, list[int]] = {}
        """Step -> indices, until the run observes the step."""

    def indices(self, step: int, count: int, seed: int) -> list[int] | None:
        """Return the sampler's choice for a step; None for the shuffle. Raises RunFailed for
        indices that are not `count` examples.
        """
        if self._sampler is None:
            return None
        with user_code(f"{self.where} at step {step}", RunFailed):
            return _choice(self._sampler, step, count, len(self.prompts), seed)

    def take(
        self, step: int, cursor: int, count: int, seed: int, indices: list[int] | None
    ) -> list[Prompt]:
        """Return the prompts of a step: those at `indices`, or from the shuffle's `cursor` on."""
        if indices is None:
            return self.prompts.batch(cursor, count, seed)
        self._chosen[step] = indices
        return self.prompts.at(indices)

    def observe(self, step: int, groups: Sequence[Group]) -> None:
        """Show the sampler a step's first groups."""
        if self._sampler is not None:
            self.learn(step, self._chosen.pop(step), groups)

    def learn(self, step: int, indices: Sequence[int], groups: Sequence[Group]) -> None:
        """Show the sampler the first groups of examples."""
        if self._sampler is None:
            return
        judged = [group.judged() for group in groups]
        with user_code(f"{self.where} after step {step}", RunFailed):
            self._sampler.observe(indices, judged)

    def state_dict(self) -> dict[str, Any]:
        """Return what the sampler keeps, through JSON; {} for the shuffle."""
        return state_of(self.where, self._sampler)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        restore(self.where, self._sampler, state)


def build_sampler(config: "TrainConfig", examples: Sequence[Example]) -> PromptSampler | None:
    """Return the configured sampler, tried on a copy; None for the shuffle. Raises
    ConfigurationError.
    """
    data = config.data
    plugin = load_plugin("sampler", data.sampler, config, SAMPLERS)
    if plugin is None:
        return None
    where = f'[data] sampler = "{data.sampler}"'

    def make(some: Sequence[Example]) -> PromptSampler:
        try:
            made: PromptSampler = plugin(some, params_of("sampler", config))
        except ValueError as error:
            raise ConfigurationError(f"[data] sampler_params: {error}.") from error
        return made

    # Ask for the number of a step, because a run may have to repeat few examples as well.
    some = list(examples[:_TRIAL])
    count = min(4, max(len(some), config.training.batch_size))
    with user_code(where, ConfigurationError):
        _try(make, some, count)
        return make(examples)


_TRIAL = 8
"""Examples of the trial."""
_TOKEN = np.zeros(1, np.int32)


def _try(
    make: Callable[[Sequence[Example]], PromptSampler], examples: list[Example], count: int
) -> None:
    """Try a sampler for three steps. Raises Fault."""
    size, tried = len(examples), make(examples)
    for step in range(3):
        before = _kept(tried)
        chosen = _choice(tried, step, count, size)
        if _kept(tried) != before:
            raise Fault("changes its state in `choose`, which `observe` alone may do")
        if _choice(tried, step, count, size) != chosen:
            raise Fault("gives other indices at a second call of `choose`")
        tried.observe(chosen, [_trial_group(examples[index], index) for index in chosen])
        # Another sampler with the stored state must continue in the same way, as in a resumed run.
        again, after = make(examples), _kept(tried)
        again.load(json.loads(after))
        choices = [_choice(one, step + 1, count, size) for one in (again, tried)]
        if choices[0] != choices[1] or _kept(again) != after:
            raise Fault(
                "does not restore in `load` what `state` returned, so a resumed run would differ"
            )


def _trial_group(example: Example, index: int) -> Group:
    """Two judged completions; index % 3 of them are right."""
    members = []
    for sample in range(2):
        logprobs = np.zeros(1, np.float32)
        completion = Completion(index, sample, _TOKEN, logprobs, None, FinishReason.STOP)
        score = Score.of(float(sample < index % 3), 0.5)
        members.append(Scored(Trajectory.of(completion), "", score))
    return Group(Prompt(example, "", _TOKEN), index, members)


def _kept(sampler: PromptSampler) -> str:
    state = sampler.state()
    try:
        return json.dumps(state, sort_keys=True)
    except TypeError as error:
        raise Fault(f"returns in `state` what JSON cannot hold: {error}") from error


def _choice(sampler: PromptSampler, step: int, count: int, size: int, seed: int = 0) -> list[int]:
    uniforms = noise.uniform(seed, noise.Stream.PROMPT_CHOICE, step, 0, 0, np.arange(size))
    return checked_indices(sampler.choose(step, count, uniforms.astype(np.float64)), count, size)


def checked_indices(chosen: Any, count: int, size: int) -> list[int]:
    """Return indices as a list. Raises Fault saying what is wrong with them."""
    array = np.asarray(chosen)
    if array.shape != (count,) or not np.issubdtype(array.dtype, np.integer):
        raise Fault(
            f"chose an array of shape {array.shape} and type {array.dtype}, it must choose {count}"
            " whole numbers"
        )
    for index in array[(array < 0) | (array >= size)]:
        raise Fault(f"chose the example {index}, there are {size}: 0 to {size - 1}")
    indices: list[int] = array.tolist()
    return indices
