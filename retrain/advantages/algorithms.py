"""The data that plugins of credit assignment may read. An algorithm plugin computes the token
advantages of the whole step itself.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

from retrain.errors import ConfigurationError
from retrain.types import Example, FinishReason, Group


class NotInStep(ConfigurationError):
    """A plugin reads what a made-up step does not have."""

    def __init__(self, name: str) -> None:
        """`name` is the property that it reads."""
        self.name = name
        super().__init__(f"A plugin reads `{name}`, which a made-up step does not have.")


class NoTeacher(ConfigurationError):
    """A plugin reads the log-probs of a teacher, and there is none."""


Reference = Callable[[], Any]
"""Computes the log-probs of the teacher of `[algorithm] teacher`; raises NoTeacher if there is
none."""


def no_reference() -> Any:
    raise NoTeacher(
        "The run has no teacher that gives `reference_logprobs`; set [algorithm] teacher to"
        ' "base", "answer" or the folder of an adapter.'
    )


MADE_UP: dict[str, Any] = {}
"""`info` of the example of a made-up group; a plugin cannot read such an example."""


@dataclass(frozen=True)
class AdvantageContext:
    """One group of G judged completions. retrain computes its properties when you read them. They
    raise NotInStep in a made-up step.
    """

    rewards: list[float]
    """[G] rewards."""
    token_counts: list[int]
    """[G] action tokens of each completion."""
    step: int
    group: int
    """The group's place in the step."""
    params: dict[str, Any] = field(default_factory=dict)
    """`[algorithm.advantage_params]`"""
    source: Group | None = field(default=None, repr=False, compare=False)
    """The judged group behind the properties; None where only rewards are known."""
    max_tokens: int = 0
    """`[training] max_tokens`, the length at which the sampler cuts a completion."""
    reference: Reference = field(default=no_reference, repr=False, compare=False)
    """What `reference_logprobs` asks."""

    @property
    def reference_logprobs(self) -> list[list[float]]:
        """[G][T] natural log-probs of the sampled tokens by the teacher of `[algorithm]
        teacher`, at the training temperature.
        """
        logprobs: list[list[float]] = self.reference()
        return logprobs

    @property
    def example(self) -> Example:
        example = self._source("example").prompt.example
        if example.info is MADE_UP:
            raise NotInStep("example")
        return example

    @property
    def prompt_id(self) -> str:
        """The example's name, stable over the steps of a run."""
        return self._source("prompt_id").prompt.prompt_id

    @property
    def texts(self) -> list[str]:
        """[G] the sampled texts."""
        return [member.text for member in self._source("texts").members]

    @property
    def token_ids(self) -> list[list[int]]:
        """[G][T] action tokens, the sampled EOS included."""
        return [one.token_ids.tolist() for one in self._source("token_ids").trajectories]

    @property
    def finish_reasons(self) -> list[FinishReason]:
        """[G] "stop" or "length"."""
        return [one.finish_reason for one in self._source("finish_reasons").trajectories]

    @property
    def reward_parts(self) -> list[tuple[float, ...]]:
        """[G][K] the K rewards of `[reward] type`, in its order and without their weights.

        Empty tuples where an environment judges.
        """
        return [member.score.parts for member in self._source("reward_parts").members]

    @property
    def turn_spans(self) -> list[list[tuple[int, int]]]:
        """[G][turns] half-open range of each turn's actions among the T of its completion."""
        spans = []
        for one in self._source("turn_spans").trajectories:
            lengths = (len(completion.token_ids) for completion in one.completions)
            spans.append(list(pairwise(accumulate(lengths, initial=0))))
        return spans

    @property
    def turn_contexts(self) -> list[list[list[int]]]:
        """[G][turns] the environment's tokens before each turn. The first turn has none, because it
        follows the prompt.
        """
        trajectories = self._source("turn_contexts").trajectories
        return [[turn.context.tolist() for turn in one.turns] for one in trajectories]

    @property
    def turn_rewards(self) -> list[tuple[float, ...]]:
        """[G][turns] the reward of each turn. Empty tuples if only the whole has a reward."""
        return [member.score.turn_rewards for member in self._source("turn_rewards").members]

    def _source(self, name: str) -> Group:
        if self.source is None:
            raise NotInStep(name)
        return self.source


@dataclass(frozen=True)
class StepAdvantageContext:
    """The P groups of a step, for an advantage that declares `f.step_level = True`."""

    groups: list[AdvantageContext]
    """[P]"""
    step: int
    params: dict[str, Any] = field(default_factory=dict)
    """`[algorithm.advantage_params]`"""

    @property
    def rewards(self) -> list[list[float]]:
        """[P][G] rewards."""
        return [group.rewards for group in self.groups]


@dataclass(frozen=True)
class UncertaintyContext:
    """One completion of T action tokens."""

    logprobs: list[float]
    """[T] natural log-probs of the sampled policy."""
    token_entropies: list[float] | None
    """[T] Shannon entropies in nats; None if the engine records none."""
    step: int
    group: int
    completion: int
    params: dict[str, Any] = field(default_factory=dict)
    """`[algorithm.uncertainty_params]`"""


@dataclass(frozen=True)
class AlgorithmContext:
    """An algorithm's view of a step of P groups with G completions each; G and T may differ."""

    rewards: list[list[float]]
    """[P][G] rewards."""
    logprobs: list[list[list[float]]]
    """[P][G][T] natural log-probs of the sampled policy."""
    entropies: list[list[list[float]]]
    """[P][G][T] the configured uncertainty, within [0, 50]."""
    planning_mask: list[list[list[int]]]
    """[P][G][T] 1 inside a planning phrase."""
    sepa_lambda: float
    step: int
    gtpo_beta: float
    hicra_alpha: float
    params: dict[str, Any] = field(default_factory=dict)
    """`[algorithm.params]`"""
    groups: Sequence[AdvantageContext] = field(default=(), repr=False)
    """[P] what else each group has: texts, token ids, finish reasons and so on."""
    reference: Reference = field(default=no_reference, repr=False, compare=False)
    """What `reference_logprobs` asks."""

    @property
    def reference_logprobs(self) -> list[list[list[float]]]:
        """[P][G][T] natural log-probs of the sampled tokens by the teacher of `[algorithm]
        teacher`, at the training temperature.
        """
        logprobs: list[list[list[float]]] = self.reference()
        return logprobs


@dataclass(frozen=True)
class AlgorithmOutput:
    token_advs: Sequence[Sequence[Sequence[float]]]
    """[P][G][T] token advantages."""
