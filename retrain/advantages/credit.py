"""The credit of one step's completions: token advantages, the learner's rows, and their records."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from retrain.advantages.step import BoolArray, StepTokens
from retrain.advantages.transforms import capped, surprisal
from retrain.types import Float32Array, Float64Array, Group, Row


@dataclass(frozen=True)
class CreditStages:
    """The stages of credit for one step of P groups, N completions and n tokens, as flat arrays."""

    episode: Float64Array
    """[N] episode advantages."""
    stages: dict[str, Float64Array]
    """Stage -> token advantages [n], in the order applied; the last one
    goes to the loss."""
    uncertainty: Float64Array | None
    """[n] uncertainty, capped and before SEPA; None if nothing reads it."""
    informative: BoolArray
    """[P] True if some token of the group has an advantage before the top-rho mask."""
    counts: BoolArray
    """[n] True for the tokens that a mean of the policy term counts; all of them belong to
    informative groups and to the loss.
    """
    trained: BoolArray
    """[N] True if the loss has a term for the completion: a policy term, or a KL or entropy
    term."""
    kept_fraction: float | None
    """Fraction of the tokens of trained completions that the top-rho mask kept; None with the mask
    off."""
    tau: float | None
    """Threshold of the mask; None with the mask off, and if every group or completion has its
    own."""

    @property
    def final(self) -> Float64Array:
        """[n] token advantages as the loss takes them."""
        return self.stages[next(reversed(self.stages))]


@dataclass(frozen=True)
class GroupCredit:
    """The credit of one group of G completions."""

    advantages: list[float]
    """[G] episode advantages; for an algorithm plugin the mean over each completion's tokens."""
    token_advantages: list[Float64Array]
    """[G][T] as the loss takes them."""
    informative: bool
    skip_reason: str
    """"" for an informative group; otherwise all_correct, all_wrong or other."""


@dataclass(frozen=True)
class CreditStatistics:
    """The fields of the step record that credit assignment fills; None if there is nothing to
    average.

    Means and population variances weigh every token of the judged completions equally, skipped
    groups included. Execution tokens are the tokens outside planning phrases. A condition that does
    not look for phrases has no execution tokens.
    """

    exec_entropy_mean: float | None
    exec_entropy_var: float | None
    plan_entropy_mean: float | None
    plan_entropy_var: float | None
    exec_surprisal_mean: float | None
    exec_surprisal_var: float | None
    plan_surprisal_mean: float | None
    plan_surprisal_var: float | None
    max_abs_advantage: float | None
    surprisal_kept_fraction: float | None
    surprisal_tau: float | None
    """Threshold of the mask; it and `surprisal_kept_fraction` are as in `CreditStages`."""
    informative_fraction: float | None
    """Fraction of the groups in which some token has an advantage."""
    groups_skipped_all_correct: int
    groups_skipped_all_wrong: int
    groups_skipped_other: int

    @classmethod
    def of(
        cls,
        tokens: StepTokens,
        assigned: CreditStages,
        groups: Sequence[GroupCredit],
        *,
        looks_for_phrases: bool,
    ) -> "CreditStatistics":
        execution = ~tokens.planning & looks_for_phrases
        surprisals = surprisal(tokens.logprobs)
        entropies = None if tokens.entropies is None else capped(tokens.entropies)
        exec_entropy_mean, exec_entropy_var = _mean_and_variance(entropies, execution)
        plan_entropy_mean, plan_entropy_var = _mean_and_variance(entropies, tokens.planning)
        exec_surprisal_mean, exec_surprisal_var = _mean_and_variance(surprisals, execution)
        plan_surprisal_mean, plan_surprisal_var = _mean_and_variance(surprisals, tokens.planning)
        reasons = [group.skip_reason for group in groups]
        return cls(
            exec_entropy_mean=exec_entropy_mean,
            exec_entropy_var=exec_entropy_var,
            plan_entropy_mean=plan_entropy_mean,
            plan_entropy_var=plan_entropy_var,
            exec_surprisal_mean=exec_surprisal_mean,
            exec_surprisal_var=exec_surprisal_var,
            plan_surprisal_mean=plan_surprisal_mean,
            plan_surprisal_var=plan_surprisal_var,
            max_abs_advantage=float(np.abs(assigned.final).max()) if len(assigned.final) else None,
            surprisal_kept_fraction=assigned.kept_fraction,
            surprisal_tau=assigned.tau,
            informative_fraction=float(assigned.informative.mean()) if groups else None,
            groups_skipped_all_correct=reasons.count("all_correct"),
            groups_skipped_all_wrong=reasons.count("all_wrong"),
            groups_skipped_other=reasons.count("other"),
        )


@dataclass(frozen=True)
class Credit:
    """The token advantages of one step, with their records."""

    sources: Sequence[Group]
    """The judged groups that receive credit."""
    tokens: StepTokens
    assigned: CreditStages
    groups: list[GroupCredit]
    statistics: CreditStatistics
    exec_uncertainty: Float64Array
    """The configured uncertainty of all execution tokens, for SEPAController.update_auto; empty if
    nothing reads it."""

    @classmethod
    def of(
        cls,
        sources: Sequence[Group],
        tokens: StepTokens,
        assigned: CreditStages,
        exec_uncertainty: Float64Array,
        *,
        looks_for_phrases: bool,
    ) -> "Credit":
        """Return the credit of each group, and the statistics over all of them."""
        episodes = tokens.by_group(assigned.episode.tolist())
        advantages = tokens.by_group(tokens.segments.split(assigned.final))
        groups = []
        for group, episode, rows, informative in zip(
            sources, episodes, advantages, assigned.informative, strict=True
        ):
            if informative:
                reason = ""
            elif group.correct == len(group) > 0:
                reason = "all_correct"
            else:
                reason = "all_wrong" if group.correct == 0 < len(group) else "other"
            groups.append(GroupCredit(episode, rows, bool(informative), reason))
        return cls(
            sources,
            tokens,
            assigned,
            groups,
            CreditStatistics.of(tokens, assigned, groups, looks_for_phrases=looks_for_phrases),
            exec_uncertainty,
        )

    def rows(self) -> list[Row]:
        """Return the rows of each judged trajectory, in order. A row outside the informative groups
        has no advantage.
        """
        trajectories = [
            (group.prompt, trajectory)
            for group in self.sources
            for trajectory in group.trajectories
        ]
        segments, advantages = (
            self.tokens.segments,
            self.assigned.final * self.assigned.informative[self.tokens.token_groups()],
        )
        given = zip(
            trajectories,
            segments.split(advantages.astype(np.float32)),
            segments.split(self.assigned.counts),
            self.tokens.group_of.tolist(),
            self.assigned.trained.tolist(),
            strict=True,
        )
        rows: list[Row] = []
        for (prompt, trajectory), own, counts, number, trained in given:
            rows += Row.of(prompt, trajectory, own, group=number, counts=counts, trained=trained)
        return rows

    def stages_float32(self) -> dict[str, Float32Array]:
        """Return the token advantages [n] after each stage, as the token table stores them."""
        return {stage: values.astype(np.float32) for stage, values in self.assigned.stages.items()}


def _mean_and_variance(
    values: Float64Array | None, part: BoolArray
) -> tuple[float, float] | tuple[None, None]:
    """Return mean and variance over the tokens of `part` [n]; None if there are none, or no
    values.
    """
    if values is None or not part.any():
        return None, None
    return float(values[part].mean()), float(values[part].var())
