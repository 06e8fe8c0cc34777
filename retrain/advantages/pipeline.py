"""Credit assignment of one step, vectorised over flat ragged float64 arrays.

The order is fixed: episode advantage; uncertainty, capped; SEPA on the uncertainty; GTPO weights from it; HICRA; the top-rho mask on
the raw uncertainty; the check that every number is finite. Batch normalisation is part of the episode advantage (`reinforce_pp`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from retrain.advantages.algorithms import AlgorithmContext, recipe_of
from retrain.advantages.planning import RegexDetector
from retrain.advantages.ragged import BoolArray, Float64Array, Int64Array, flatten
from retrain.advantages.resolve import (
    ResolvedTransform,
    numbers,
    resolve_advantage,
    resolve_algorithm,
    resolve_transform,
    resolve_uncertainty,
    step_tokens,
    token_lists,
)
from retrain.advantages.sepa import check_ramp
from retrain.advantages.step import CreditStatistics, StepTokens, mean_and_variance
from retrain.advantages.transforms import TransformContext, TransformSpec, gtpo_group_weights, gtpo_weights, hicra, inverted, top_rho
from retrain.advantages.uncertainty import SHANNON_ENTROPY, canonical_kind, capped, surprisal
from retrain.errors import ConfigurationError, RunFailed
from retrain.plugins import refuse_unknown_params, user_code
from retrain.types import Float32Array, Group, Int32Array, Row

if TYPE_CHECKING:
    from retrain.config import TrainConfig

UNINFORMATIVE = 1e-12
"""A group is left out of training when no token's advantage is larger than this."""


@dataclass(frozen=True)
class GroupCredit:
    """What one group of G completions was given."""

    advantages: list[float]
    """[G] episode advantages; for an algorithm plugin the mean over each completion's tokens."""
    token_advantages: list[Float64Array]
    """[G][T] as the loss takes them."""
    informative: bool
    """Some token's advantage, before the top-rho mask, is not zero."""
    skip_reason: str
    """"" for an informative group, else all_correct, all_wrong or other."""


@dataclass(frozen=True)
class Assigned:
    """The arrays of one step, before they are cut into groups."""

    episode: Float64Array
    """[N]"""
    stages: dict[str, Float64Array]
    """Stage -> token advantages [n], in the order in which the stages were applied; the last one goes to the loss."""
    uncertainty: Float64Array | None
    """[n] capped and before SEPA; None where nothing reads it."""
    pooled: Float64Array | None
    """[n] what SEPA or a plugin made of it; None without such a step."""
    informative: BoolArray
    """[P]"""
    counted: Int64Array
    """[N] tokens of each completion that a mean of the policy term is over; 0 outside the informative groups and the loss."""
    kept_fraction: float | None
    tau: float | None

    @property
    def final(self) -> Float64Array:
        return self.stages[next(reversed(self.stages))]


@dataclass(frozen=True)
class Credit:
    """Token advantages of one step, with what is recorded about them."""

    groups: list[GroupCredit]
    statistics: CreditStatistics
    exec_uncertainty: Float64Array
    """The configured uncertainty of all execution tokens, for SEPAController.update_auto; empty where nothing reads it."""
    tokens: StepTokens
    assigned: Assigned
    sources: Sequence[Group]

    def rows(self) -> list[Row]:
        """All judged completions in their order. Those of other than informative groups have advantages and `counted` of 0."""
        counted = iter(self.assigned.counted.tolist())
        return [
            Row.from_completion(source.prompt, completion, (advantages * group.informative).astype(np.float32), number, next(counted))
            for number, (source, group) in enumerate(zip(self.sources, self.groups, strict=True))
            for completion, advantages in zip(source.completions, group.token_advantages, strict=True)
        ]

    def stages_float32(self) -> dict[str, Float32Array]:
        """Token advantages [n] after each stage, as the token side file stores them."""
        return {stage: values.astype(np.float32) for stage, values in self.assigned.stages.items()}


class CreditPipeline:
    """Built once a run from the configuration; `assign` is then a pure function of its arguments.

    `pieces` decodes the token ids of a completion into one text piece a token. Raises ConfigurationError for names that are not known,
    plugins that do not load, and values that contradict each other.
    """

    def __init__(self, config: "TrainConfig", pieces: Callable[[Int32Array], list[str]]) -> None:
        self.config = config
        self.notes: list[str] = []
        """Sentences to print at the start of the run."""
        self._pieces = pieces
        algorithm = config.algorithm
        recipe = recipe_of(config.algorithm)
        self._algorithm = None if recipe else resolve_algorithm(algorithm.algorithm_mode, config, self.notes)
        if recipe is None:
            self._transform = ResolvedTransform(TransformSpec("algorithm", needs_planning=True, uses_sepa_controller=True), None, {})
            self._episode = None
        else:
            if algorithm.algorithm_mode:
                refuse_unknown_params("algorithm", algorithm.algorithm_mode, frozenset(), config)
                config = _without_component_params(config)
            self._episode = resolve_advantage(recipe.advantage, config, self.notes)
            self._transform = resolve_transform(recipe.transform, config, self.notes)
        self.spec = self._transform.spec
        self.uncertainty_kind = canonical_kind(str(config.algorithm.transform_params.get("uncertainty_kind", algorithm.uncertainty_kind)))
        self._uncertainty = resolve_uncertainty(self.uncertainty_kind, config, self.notes) if self.needs_uncertainty else None
        self._detector = self._make_detector()
        self._check_values()

    @property
    def needs_planning(self) -> bool:
        return self.spec.needs_planning

    @property
    def uses_sepa_controller(self) -> bool:
        return self.spec.uses_sepa_controller

    @property
    def needs_uncertainty(self) -> bool:
        hands_over = self._algorithm is not None or self._transform.function is not None
        return hands_over or self.spec.needs_uncertainty or self.config.algorithm.surprisal_mask_rho > 0

    @property
    def needs_entropies(self) -> bool:
        """Whether the engine must record Shannon entropies."""
        return self.needs_uncertainty and self.uncertainty_kind == SHANNON_ENTROPY

    def assign(self, groups: Sequence[Group], step: int, sepa_lambda: float) -> Credit:
        """Credit for judged groups. Raises RunFailed naming group, completion and position of what is not a finite number."""
        try:
            tokens = StepTokens.of(groups, self._planning(groups), self.config.loss.mask_truncated)
            assigned = self.compute(tokens, step, sepa_lambda)
        except ValueError as error:
            raise RunFailed(f"Credit assignment of step {step}: {error}.") from error
        return Credit(
            groups=self._group_credits(tokens, assigned),
            statistics=self._statistics(tokens, assigned),
            exec_uncertainty=self._exec_uncertainty(tokens, assigned),
            tokens=tokens,
            assigned=assigned,
            sources=groups,
        )

    def compute(self, tokens: StepTokens, step: int, sepa_lambda: float) -> Assigned:
        """The stages over flat arrays. Raises ValueError naming group, completion and position; RunFailed for a plugin's exception."""
        uncertainty = capped(self._uncertainty(tokens, step)) if self._uncertainty is not None else None
        lam = sepa_lambda if self.uses_sepa_controller else 0.0
        if self._algorithm is not None:
            episode, stages, pooled = self._run_algorithm(tokens, step, lam, uncertainty)
        else:
            episode, stages, pooled = self._run_composed(tokens, step, lam, uncertainty)
        final = next(reversed(stages.values()))
        informative = _informative(tokens, final)
        trained = informative[tokens.group_of] & tokens.in_loss
        counted = np.where(trained, tokens.segments.lengths, 0)
        kept_fraction, tau = None, None
        if self.config.algorithm.surprisal_mask_rho > 0 and uncertainty is not None:
            keep, tau = self._mask(tokens, uncertainty, trained)
            stages["surprisal_mask"] = final = np.where(keep, final, 0.0)
            kept = np.where(trained, tokens.segments.sums(keep.astype(np.float64)), 0).astype(np.int64)
            kept_fraction = float(kept.sum() / counted.sum()) if counted.any() else None
            counted = kept if self.config.algorithm.surprisal_mask_denominator == "kept" else counted
        for token in np.flatnonzero(~np.isfinite(final)):
            raise ValueError(f"{tokens.token_place(int(token))}: the advantage is {final[token]}, it must be a finite number")
        return Assigned(episode, stages, uncertainty, pooled, informative, counted, kept_fraction, tau)

    # -- stages ------------------------------------------------------------------------------------------------------

    def _run_composed(
        self, tokens: StepTokens, step: int, lam: float, uncertainty: Float64Array | None
    ) -> tuple[Float64Array, dict[str, Float64Array], Float64Array | None]:
        assert self._episode is not None
        episode = flatten(self._episode(tokens, step))
        advantages = tokens.segments.spread_floats(episode)
        stages = {"episode": advantages}
        pooled = None
        if self._transform.function is not None:
            stages["transform"] = self._per_group(tokens, step, lam, uncertainty, episode, lambda _, ctx: self._call_transform(ctx))
            return episode, stages, pooled
        if self.spec.use_gtpo and uncertainty is not None:
            pooled = self._entropy_transform(tokens, uncertainty, lam)
            weighted = advantages * self._weights(tokens, uncertainty if pooled is None else pooled, episode)
            stages["gtpo"] = weighted
        if self.spec.apply_hicra:
            stages["hicra"] = hicra(next(reversed(stages.values())), tokens.planning, self.config.hicra.alpha)
        if self.spec.post_process is not None:
            before = tokens.nested(next(reversed(stages.values())))
            stages["post_process"] = self._per_group(
                tokens, step, lam, uncertainty, episode, lambda group, ctx: self._call_post_process(before[group], ctx)
            )
        return episode, stages, pooled

    def _run_algorithm(
        self, tokens: StepTokens, step: int, lam: float, uncertainty: Float64Array | None
    ) -> tuple[Float64Array, dict[str, Float64Array], Float64Array | None]:
        assert self._algorithm is not None and uncertainty is not None
        context = AlgorithmContext(
            rewards=[list(rewards) for rewards in tokens.rewards],
            logprobs=tokens.nested(tokens.logprobs),
            entropies=tokens.nested(uncertainty),
            planning_mask=tokens.nested_masks(),
            sepa_lambda=lam,
            step=step,
            gtpo_beta=self.config.gtpo.beta,
            hicra_alpha=self.config.hicra.alpha,
            params=dict(self.config.algorithm.params),
        )
        name = self.config.algorithm.algorithm_mode
        advantages = step_tokens(self._algorithm(context), tokens, f'algorithm "{name}"')
        return tokens.segments.means(advantages), {"algorithm": advantages}, None

    def _entropy_transform(self, tokens: StepTokens, uncertainty: Float64Array, lam: float) -> Float64Array | None:
        spec, segments = self.spec, tokens.segments
        if spec.flat_entropy_transform is not None:
            with user_code(f'transform "{spec.name}"', RunFailed):
                changed = spec.flat_entropy_transform(uncertainty, tokens.planning, segments, lam)
            return self._located(changed, tokens)
        if spec.entropy_transform is None:
            return None
        rows = []
        masks = segments.split(tokens.planning.astype(np.float64))
        for index, (values, mask) in enumerate(zip(segments.split(uncertainty), masks, strict=True)):
            place = tokens.place(index)
            with user_code(f'transform "{spec.name}" on {place}', RunFailed):
                changed_row = spec.entropy_transform(values.tolist(), mask.astype(int).tolist(), lam)
            rows.append(numbers(changed_row, len(values), f'{place}: transform "{spec.name}"'))
        return flatten(rows)

    def _located(self, changed: Float64Array, tokens: StepTokens) -> Float64Array:
        """The result of a flat transform, or ValueError naming the token that is not finite."""
        if np.shape(changed) != (tokens.segments.total,):
            raise ValueError(f'transform "{self.spec.name}" gave shape {np.shape(changed)} for {tokens.segments.total} tokens')
        for token in np.flatnonzero(~np.isfinite(changed)):
            raise ValueError(f'{tokens.token_place(int(token))}: transform "{self.spec.name}" gave {changed[token]}')
        return changed

    def _weights(self, tokens: StepTokens, uncertainty: Float64Array, episode: Float64Array) -> Float64Array:
        gtpo = self.config.gtpo
        if gtpo.negative == "inverse":
            uncertainty = inverted(uncertainty, tokens.segments, episode)
        if gtpo.norm == "group":
            return gtpo_group_weights(uncertainty, tokens.segments, gtpo.beta, tokens.group_of, episode)
        return gtpo_weights(uncertainty, tokens.segments, gtpo.beta)

    def _per_group(
        self,
        tokens: StepTokens,
        step: int,
        lam: float,
        uncertainty: Float64Array | None,
        episode: Float64Array,
        function: Callable[[int, TransformContext], Sequence[Sequence[float]]],
    ) -> Float64Array:
        """Run a plugin over the groups, as plain lists."""
        assert uncertainty is not None
        logprobs, entropies, masks = tokens.nested(tokens.logprobs), tokens.nested(uncertainty), tokens.nested_masks()
        rows: list[Float64Array] = []
        for group, (rewards, counts) in enumerate(zip(tokens.rewards, tokens.token_counts, strict=True)):
            context = TransformContext(
                rewards=list(rewards),
                advantages=episode[tokens.group_of == group].tolist(),
                logprobs=logprobs[group],
                entropies=entropies[group],
                planning_mask=masks[group],
                sepa_lambda=lam,
                step=step,
                group=group,
                gtpo_beta=self.config.gtpo.beta,
                hicra_alpha=self.config.hicra.alpha,
                params=dict(self._transform.params),
            )
            rows.extend(token_lists(function(group, context), counts, f'group {group}: transform "{self.spec.name}"'))
        return flatten(rows)

    def _call_transform(self, context: TransformContext) -> Sequence[Sequence[float]]:
        assert self._transform.function is not None
        return self._transform.function(context)

    def _call_post_process(self, token_advantages: list[list[float]], context: TransformContext) -> Sequence[Sequence[float]]:
        assert self.spec.post_process is not None
        with user_code(f'post_process of transform "{self.spec.name}" on group {context.group}', RunFailed):
            return self.spec.post_process(token_advantages, context)

    def _mask(self, tokens: StepTokens, uncertainty: Float64Array, trained: BoolArray) -> tuple[BoolArray, float | None]:
        """The tokens [n] whose advantage is kept, and the step's threshold. Only tokens of the `trained` completions [N] set it."""
        algorithm, segments = self.config.algorithm, tokens.segments
        completions = np.repeat(np.arange(len(segments)), segments.lengths)
        pools: dict[str, tuple[Int64Array, int]] = {
            "batch": (np.zeros(segments.total, dtype=np.int64), 1),
            "group": (tokens.token_groups(), len(tokens.rewards)),
            "completion": (completions, len(segments)),
        }
        pool, count = pools[algorithm.surprisal_mask_scope]
        result = top_rho(uncertainty, np.where(trained[completions], pool, -1), count, algorithm.surprisal_mask_rho)
        return result.keep, (result.thresholds[0] if algorithm.surprisal_mask_scope == "batch" else None)

    # -- what is recorded --------------------------------------------------------------------------------------------

    def _group_credits(self, tokens: StepTokens, assigned: Assigned) -> list[GroupCredit]:
        pieces = iter(tokens.segments.split(assigned.final))
        episode = iter(assigned.episode.tolist())
        return [
            GroupCredit(
                advantages=[next(episode) for _ in rewards],
                token_advantages=[next(pieces) for _ in rewards],
                informative=bool(informative),
                skip_reason="" if informative else self._skip_reason(rewards),
            )
            for rewards, informative in zip(tokens.rewards, assigned.informative, strict=True)
        ]

    def _skip_reason(self, rewards: Sequence[float]) -> str:
        correct = [reward > self.config.reward.correct_threshold for reward in rewards]
        if not correct:
            return "other"
        return "all_correct" if all(correct) else "other" if any(correct) else "all_wrong"

    def _statistics(self, tokens: StepTokens, assigned: Assigned) -> CreditStatistics:
        plan = tokens.planning
        s = surprisal(tokens.logprobs)
        h = capped(tokens.entropies) if tokens.entropies is not None else np.zeros(0)
        known = tokens.entropies is not None
        (exec_h, exec_h_var), (plan_h, plan_h_var) = (mean_and_variance(h[part] if known else h) for part in (~plan, plan))
        (exec_s, exec_s_var), (plan_s, plan_s_var) = (mean_and_variance(s[part]) for part in (~plan, plan))
        reasons = [
            self._skip_reason(rewards) for rewards, informative in zip(tokens.rewards, assigned.informative, strict=True) if not informative
        ]
        return CreditStatistics(
            exec_entropy_mean=exec_h,
            exec_entropy_var=exec_h_var,
            plan_entropy_mean=plan_h,
            plan_entropy_var=plan_h_var,
            exec_surprisal_mean=exec_s,
            exec_surprisal_var=exec_s_var,
            plan_surprisal_mean=plan_s,
            plan_surprisal_var=plan_s_var,
            max_abs_advantage=float(np.abs(assigned.final).max()) if len(assigned.final) else None,
            surprisal_kept_fraction=assigned.kept_fraction,
            surprisal_tau=assigned.tau,
            informative_fraction=float(assigned.informative.mean()) if len(assigned.informative) else None,
            groups_skipped_all_correct=reasons.count("all_correct"),
            groups_skipped_all_wrong=reasons.count("all_wrong"),
            groups_skipped_other=reasons.count("other"),
        )

    def _exec_uncertainty(self, tokens: StepTokens, assigned: Assigned) -> Float64Array:
        if assigned.uncertainty is None or not self.uses_sepa_controller:
            return np.zeros(0)
        return assigned.uncertainty[~tokens.planning]

    # -- set-up ------------------------------------------------------------------------------------------------------

    def _make_detector(self) -> RegexDetector | None:
        if not self.needs_planning:
            return None
        planning = self.config.planning
        if planning.detector != "regex":
            raise ConfigurationError(
                f'[planning] detector = "{planning.detector}" is not built yet; use detector = "regex", or a transform_mode that looks for '
                "no planning phrases."
            )
        return RegexDetector(planning.grams)

    def _planning(self, groups: Sequence[Group]) -> BoolArray | None:
        """[n] the tokens inside planning phrases; None for a condition that does not look for them."""
        if self._detector is None:
            return None
        masks = [self._detector.detect(self._pieces(completion.token_ids)) for group in groups for completion in group.completions]
        return np.concatenate([np.zeros(0, dtype=np.uint8), *masks]).astype(np.bool_)

    def _check_values(self) -> None:
        config, spec = self.config, self.spec
        composed = self._algorithm is None and self._transform.function is None
        if composed and spec.uses_sepa_controller:
            check_ramp(config.sepa)
        if spec.needs_rho and config.algorithm.surprisal_mask_rho == 0:
            raise ConfigurationError(f'[algorithm] transform "{spec.name}" means nothing without surprisal_mask_rho above 0; set it.')
        if spec.use_gtpo and config.gtpo.beta > 1:
            self.notes.append(f"[gtpo] beta = {config.gtpo.beta:g} is above 1: weights are clipped at 0 and no longer average to 1.")
        if spec.apply_hicra and config.hicra.alpha == 1:
            self.notes.append("[hicra] alpha = 1 removes the penalty of planning tokens in wrong completions altogether.")


def _informative(tokens: StepTokens, advantages: Float64Array) -> BoolArray:
    """[P] whether any token of a group has an advantage."""
    largest = tokens.segments.maxima(np.abs(advantages))
    informative = np.zeros(len(tokens.rewards), dtype=np.bool_)
    np.logical_or.at(informative, tokens.group_of, largest > UNINFORMATIVE)
    return informative


def _without_component_params(config: "TrainConfig") -> "TrainConfig":
    """A recipe replaces advantage_mode and transform_mode, and with them the tables of their parameters."""
    algorithm = config.algorithm.model_copy(update={"advantage_params": {}, "transform_params": {}})
    return config.model_copy(update={"algorithm": algorithm})
