"""Credit assignment of one step, vectorized over flat ragged float64 arrays.

The order of the stages never changes: episode advantage, capped uncertainty, SEPA, GTPO weights,
HICRA, the teacher's log-ratio. The top-rho mask on the raw uncertainty comes last. It ends with a
check that every number is finite. Batch normalization is part of the episode advantage
(`reinforce_pp`).
"""

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from retrain.advantages.algorithms import AlgorithmContext, AlgorithmOutput, no_reference
from retrain.advantages.credit import Credit, CreditStages
from retrain.advantages.planning import Encoder, RegexDetector, SemanticDetector
from retrain.advantages.resolve import (
    EpisodeStage,
    PluginAdvantage,
    UncertaintyStage,
    episode_stage,
    numbers,
    output_of,
    same_again,
    small_step,
    step_tokens,
    token_lists,
    transform_of,
    tried,
    uncertainty_stage,
)
from retrain.advantages.sepa import check_ramp
from retrain.advantages.step import (
    BoolArray,
    Int64Array,
    StepTokens,
    Teacher,
    flatten,
)
from retrain.advantages.transforms import (
    TransformContext,
    TransformOutput,
    TransformSpec,
    canonical_kind,
    capped,
    gtpo_group_weights,
    gtpo_weights,
    hicra,
    inverted,
    top_rho,
)
from retrain.config.names import replaces_modes
from retrain.config.recipes import RECIPES
from retrain.errors import ConfigurationError, RunFailed
from retrain.plugins import (
    Plugin,
    load_function,
    params_of,
    refuse_unknown_params,
    user_code,
)
from retrain.types import Float64Array, Group, Int32Array

if TYPE_CHECKING:
    from retrain.config import TrainConfig
    from retrain.config.schema import Planning

UNINFORMATIVE = 1e-12
"""Training skips a group if no token's advantage exceeds this."""

LoadEncoder = Callable[[str], Encoder]
"""Name or folder of a sentence-transformers model -> its encoder."""
Stages = dict[str, Float64Array]
"""Stage -> token advantages [n], in the order of the stages."""


@dataclass(frozen=True)
class _Step:
    """The inputs of every stage of one step."""

    tokens: StepTokens
    number: int
    sepa_lambda: float
    uncertainty: Float64Array | None
    """[n] capped uncertainty; None if nothing reads it."""


class CreditPipeline:
    """The steps of credit assignment. A run makes one pipeline from the configuration, and `assign`
    is a pure function of its arguments.

    `pieces` decodes the token ids of a completion into one text piece per token. `load_encoder`
    loads the sentence encoder of the semantic planning detector by its name, if the run uses this
    detector. Raises ConfigurationError for unknown names, plugins that do not load, and values that
    contradict each other.
    """

    def __init__(
        self,
        config: "TrainConfig",
        pieces: Callable[[Int32Array], list[str]],
        load_encoder: LoadEncoder | None = None,
    ) -> None:
        self.config = config
        self.notes: list[str] = []
        """Sentences to print at the start of the run."""
        self._pieces = pieces
        self._params: dict[str, dict[str, Any]] = {}
        """Kind -> the parameters that its stage reads at every call."""
        self._algorithm: Plugin | None = None
        self._transform: Plugin | None = None
        """A transform of the form f(ctx), which does all the work."""
        self._episode: EpisodeStage | None = None
        self._before: tuple[int, dict[str, Any]] = (-1, {})
        """The newest step, and what the advantage kept before it."""
        self._uncertainty: UncertaintyStage | None = None
        self._detector: RegexDetector | SemanticDetector | None = None
        algorithm = config.algorithm
        if algorithm.modes[0] and replaces_modes(algorithm.algorithm_mode):
            refuse_unknown_params("algorithm", algorithm.algorithm_mode, (), config)
            # A recipe replaces advantage_mode and transform_mode, and with them the tables of their
            # parameters.
            bare = algorithm.model_copy(update={"advantage_params": {}, "transform_params": {}})
            config = config.model_copy(update={"algorithm": bare})
        self._read_modes(config)
        self.uncertainty_kind = kind = canonical_kind(config.algorithm.uncertainty)
        if self._may_need_uncertainty:
            given = self._given("uncertainty", config)
            self._uncertainty = uncertainty_stage(kind, config, self.notes, given)
        if self.needs_planning:
            self._detector = _detector(config.planning, load_encoder)
        self._check_values(config)

    def _read_modes(self, config: "TrainConfig") -> None:
        """Load the advantage and the transform, or the algorithm in their place."""
        name = config.algorithm.algorithm_mode
        advantage, transform = config.algorithm.modes
        plugin: Plugin | None
        if advantage:
            given = self._given("advantage", config)
            self._episode = episode_stage(advantage, config, self.notes, given)
            self.spec, plugin = transform_of(transform, config, self._given("transform", config))
            if plugin and plugin.form.takes_context:
                self._transform = plugin
        else:
            given = self._given("algorithm", config)
            plugin = self._algorithm = load_function("algorithm", name, config, RECIPES, given)
            self.spec = TransformSpec("algorithm", needs_planning=True, uses_sepa_controller=True)
        if plugin:
            self._try(plugin)

    def _given(self, kind: str, config: "TrainConfig") -> dict[str, Any]:
        """Return the parameters of a stage, which `use` changes."""
        self._params[kind] = params_of(kind, config)
        return self._params[kind]

    def _try(self, plugin: Plugin) -> None:
        """Try a transform or an algorithm as a step uses it."""
        small = small_step(self.config)
        at = _Step(small, 0, 0.5, capped(-small.logprobs))
        episode = flatten(small.rewards) - 0.5

        def final() -> list[Any]:
            if self._algorithm:
                return list(_last(self._algorithm_stages(at)[1]))
            return list(_last(self._transform_stages(at, episode)))

        self.notes += tried(plugin, self.config, partial(same_again, final))

    def use(self, config: "TrainConfig") -> None:
        """Use the scheduled values of a step: each stage takes its parameters from `config`."""
        self.config = config
        for kind, params in self._params.items():
            now = params_of(kind, config)
            params.update({name: now[name] for name in params})

    def _check_values(self, config: "TrainConfig") -> None:
        """Raise ConfigurationError for values with which the transform in use does nothing; note
        the values that may surprise.
        """
        if not (self._algorithm or self._transform) and self.spec.uses_sepa_controller:
            check_ramp(config.sepa)
        masks = config.may_be_positive("algorithm.surprisal_mask_rho")
        if self.spec.needs_rho and not masks:
            raise ConfigurationError(
                f'[algorithm] transform "{self.spec.name}" has no effect while surprisal_mask_rho'
                " is 0; set it above 0."
            )
        if self.spec.use_gtpo and config.gtpo.beta > 1:
            self.notes.append(
                f"[gtpo] beta = {config.gtpo.beta:g} is above 1, so retrain clips weights at 0,"
                " and they no longer average to 1."
            )
        if self.spec.apply_hicra and config.hicra.alpha == 1:
            self.notes.append(
                "[hicra] alpha = 1 removes the penalty of planning tokens in wrong completions"
                " altogether."
            )

    @property
    def needs_planning(self) -> bool:
        return self.spec.needs_planning

    @property
    def uses_sepa_controller(self) -> bool:
        return self.spec.uses_sepa_controller

    @property
    def needs_uncertainty(self) -> bool:
        return (
            bool(self._algorithm or self._transform)
            or self.spec.needs_uncertainty
            or self.config.algorithm.surprisal_mask_rho > 0
        )

    @property
    def keeps_state(self) -> bool:
        """The advantage is a plugin that keeps something from step to step."""
        episode = self._episode
        return isinstance(episode, PluginAdvantage) and hasattr(episode.plugin.function, "state")

    def state_dict(self, step: int) -> dict[str, Any]:
        """Return the advantage's state before `step`, also if an interruption came after its credit
        assignment, because the run will take `step` again.
        """
        newest, before = self._before
        if newest == step or not isinstance(self._episode, PluginAdvantage):
            return before
        return self._episode.state()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if isinstance(self._episode, PluginAdvantage):
            self._episode.load(state)

    @property
    def _may_need_uncertainty(self) -> bool:
        """True if some step needs it: [schedule] may begin a mask later."""
        masks = self.config.may_be_positive("algorithm.surprisal_mask_rho")
        return masks or self.needs_uncertainty

    def assign(
        self,
        groups: Sequence[Group],
        step: int,
        sepa_lambda: float,
        teacher: Callable[[Sequence[Group]], Float64Array] | None = None,
    ) -> Credit:
        """Assign credit to judged groups; `teacher` computes [n] log-probs of their tokens where a
        stage reads them. Raises RunFailed naming group, completion and position of a number that is
        not finite.
        """
        scored: Teacher = no_reference
        if teacher is not None:
            scored = partial(teacher, groups)
        if isinstance(self._episode, PluginAdvantage):
            # Keep it for `state_dict`, in case an interrupted run takes the step again.
            self._before = (step, self._episode.state())
        try:
            planning = None  # for a condition that does not look for planning phrases
            if self._detector is not None:
                trajectories = chain.from_iterable(group.trajectories for group in groups)
                turns = list(chain.from_iterable(each.completions for each in trajectories))
                masks = self._detector.detect_all([self._pieces(turn.token_ids) for turn in turns])
                planning = np.concatenate([np.zeros(0, dtype=np.uint8), *masks]).astype(np.bool_)
            tokens = StepTokens.of(groups, planning, self.config.loss.mask_truncated, scored)
            assigned = self.compute(tokens, step, sepa_lambda)
        except ValueError as error:
            raise RunFailed(f"Credit assignment of step {step}: {error}.") from error
        execution = np.zeros(0)  # SEPA's controller learns from it
        if assigned.uncertainty is not None and self.uses_sepa_controller:
            execution = assigned.uncertainty[~tokens.planning]
        return Credit.of(
            groups, tokens, assigned, execution, looks_for_phrases=planning is not None
        )

    def compute(self, tokens: StepTokens, step: int, sepa_lambda: float) -> CreditStages:
        """Compute all stages over flat arrays. Raises ValueError naming group, completion and
        position, or RunFailed from a plugin.
        """
        uncertainty = self._uncertainty_of(tokens, step)
        at = _Step(tokens, step, sepa_lambda if self.uses_sepa_controller else 0.0, uncertainty)
        if self._algorithm is None:
            episode, stages = self._composed_stages(at)
        else:
            episode, stages = self._algorithm_stages(at)
        final = _last(stages)
        # [P] True if some token of the group has an advantage, before the top-rho mask.
        informative = np.zeros(len(tokens.rewards), dtype=np.bool_)
        has_any = tokens.segments.maxima(np.abs(final)) > UNINFORMATIVE
        np.logical_or.at(informative, tokens.group_of, has_any)
        with_policy = informative[tokens.group_of] & tokens.in_loss
        completions = np.repeat(np.arange(len(tokens.segments)), tokens.segments.lengths)
        counts = with_policy[completions]
        kept_fraction = tau = None
        if self.config.algorithm.surprisal_mask_rho > 0 and uncertainty is not None:
            keep, tau = self._mask(tokens, uncertainty, with_policy)
            stages["surprisal_mask"] = final = np.where(keep, final, 0.0)
            kept = keep & counts
            if counts.any():
                kept_fraction = float(kept.sum() / counts.sum())
            if self.config.algorithm.surprisal_mask_denominator == "kept":
                counts = kept
        for token in np.flatnonzero(~np.isfinite(final)):
            raise ValueError(
                f"{tokens.token_place(int(token))}: the advantage is {final[token]}, it must be a"
                " finite number"
            )
        return CreditStages(
            episode,
            stages,
            uncertainty,
            informative,
            counts,
            self._trained(tokens, counts),
            kept_fraction,
            tau,
        )

    def _trained(self, tokens: StepTokens, counts: BoolArray) -> BoolArray:
        """Return [N] True if the loss has a term for the completion: a policy term, or a KL or
        entropy term. All completions in the loss have the latter.
        """
        every = self.config.loss.kl_coef > 0 or self.config.loss.entropy_coef > 0
        return (
            tokens.in_loss
            & (tokens.segments.lengths > 0)
            & ((tokens.segments.sums(counts.astype(np.float64)) > 0) | every)
        )

    def _uncertainty_of(self, tokens: StepTokens, step: int) -> Float64Array | None:
        """Return the capped uncertainty [n]; None if nothing reads it in this step."""
        if self._uncertainty is None or not self.needs_uncertainty:
            return None
        return capped(self._uncertainty(tokens, step))

    # -- stages ------------------------------------------------------------------------------------

    def _composed_stages(self, at: _Step) -> tuple[Float64Array, Stages]:
        """Return the episode advantages [N] and the stages of an advantage and a transform."""
        assert self._episode is not None
        episode = flatten(self._episode(at.tokens, at.number))
        return episode, self._transform_stages(at, episode)

    def _transform_stages(self, at: _Step, episode: Float64Array) -> Stages:
        """Return the stages of the transform of episode advantages [N]."""
        stages: Stages = {"episode": at.tokens.segments.spread(episode)}
        if self._transform:
            whole = partial(output_of, self._transform, TransformOutput)
            stages["transform"] = self._by_context(at, episode, whole)
            return stages
        if self.spec.use_gtpo and at.uncertainty is not None:
            changed = self._entropy_transform(at, at.uncertainty)
            stages["gtpo"] = stages["episode"] * self._weights(at.tokens, changed, episode)
        if self.spec.apply_hicra:
            stages["hicra"] = hicra(_last(stages), at.tokens.planning, self.config.hicra.alpha)
        if self.spec.distils:
            gap = at.tokens.reference_logprobs - at.tokens.logprobs
            stages["distill"] = _last(stages) + self.config.algorithm.teacher_coef * gap
        own = self.spec.post_process
        if own is not None:
            so_far = at.tokens.nested(_last(stages))  # [P][G][T]
            stages["post_process"] = self._by_context(
                at, episode, lambda context: own(so_far[context.group], context)
            )
        return stages

    def _algorithm_stages(self, at: _Step) -> tuple[Float64Array, Stages]:
        """Return the same for an algorithm plugin; its episode advantage is the mean over a
        completion's tokens.
        """
        assert self._algorithm is not None and at.uncertainty is not None
        tokens, params = at.tokens, self._params["algorithm"]
        context = AlgorithmContext(
            rewards=[list(rewards) for rewards in tokens.rewards],
            logprobs=tokens.nested(tokens.logprobs),
            entropies=tokens.nested(at.uncertainty),
            planning_mask=tokens.nested_masks(),
            sepa_lambda=at.sepa_lambda,
            step=at.number,
            gtpo_beta=self.config.gtpo.beta,
            hicra_alpha=self.config.hicra.alpha,
            params=copy(params),
            groups=tokens.contexts(at.number, copy(params), self.config.training.max_tokens),
            reference=lambda: tokens.nested_reference,
        )
        with user_code(self._algorithm.where, RunFailed):
            given = output_of(self._algorithm, AlgorithmOutput, context)
        advantages = step_tokens(given, tokens, f'algorithm "{self._algorithm.name}"')
        return tokens.segments.means(advantages), {"algorithm": advantages}

    def _entropy_transform(self, at: _Step, uncertainty: Float64Array) -> Float64Array:
        """Return the uncertainty [n] that GTPO weights by. Raises ValueError naming a token that a
        transform left not finite.
        """
        spec, segments = self.spec, at.tokens.segments
        # Call a transform of flat arrays once a step, and a transform of lists once a completion.
        if spec.flat_entropy_transform is not None:
            with user_code(f'transform "{spec.name}"', RunFailed):
                changed = spec.flat_entropy_transform(
                    uncertainty, at.tokens.planning, segments, at.sepa_lambda
                )
            return numbers(changed, segments.total, f'transform "{spec.name}"')
        if spec.entropy_transform is None:
            return uncertainty
        rows = []
        for index, (values, mask) in enumerate(
            zip(segments.split(uncertainty), segments.split(at.tokens.planning), strict=True)
        ):
            place = at.tokens.place(index)
            with user_code(f'transform "{spec.name}" on {place}', RunFailed):
                row = spec.entropy_transform(
                    values.tolist(), mask.astype(int).tolist(), at.sepa_lambda
                )
            rows.append(numbers(row, len(values), f'{place}: transform "{spec.name}"'))
        return flatten(rows)

    def _weights(
        self, tokens: StepTokens, uncertainty: Float64Array, episode: Float64Array
    ) -> Float64Array:
        gtpo = self.config.gtpo
        if gtpo.negative == "inverse":
            uncertainty = inverted(uncertainty, tokens.segments, episode)
        if gtpo.norm == "group":
            return gtpo_group_weights(
                uncertainty, tokens.segments, gtpo.beta, tokens.group_of, episode
            )
        return gtpo_weights(uncertainty, tokens.segments, gtpo.beta)

    def _by_context(
        self,
        at: _Step,
        episode: Float64Array,
        function: Callable[[TransformContext], Any],
    ) -> Float64Array:
        """Return the token advantages [n] that a plugin computes group by group."""
        assert at.uncertainty is not None
        tokens = at.tokens
        logprobs, entropies = tokens.nested(tokens.logprobs), tokens.nested(at.uncertainty)
        masks, advantages = tokens.nested_masks(), tokens.by_group(episode.tolist())
        rows: list[Float64Array] = []
        for group, rewards in enumerate(tokens.rewards):
            context = TransformContext(
                rewards=list(rewards),
                advantages=advantages[group],
                logprobs=logprobs[group],
                entropies=entropies[group],
                planning_mask=masks[group],
                sepa_lambda=at.sepa_lambda,
                step=at.number,
                group=group,
                gtpo_beta=self.config.gtpo.beta,
                hicra_alpha=self.config.hicra.alpha,
                params=copy(self._params["transform"]),
                reference=partial(tokens.reference_of, group),
            )
            what = f'transform "{self.spec.name}"'
            with user_code(f"{what} on group {group}", RunFailed):
                given = function(context)
            rows += token_lists(given, tokens.token_counts[group], f"group {group}: {what}")
        return flatten(rows)

    def _mask(
        self, tokens: StepTokens, uncertainty: Float64Array, with_policy: BoolArray
    ) -> tuple[BoolArray, float | None]:
        """Return the tokens [n] whose advantage the mask keeps, and the step's threshold. Only
        completions `with_policy` [N] set the threshold.
        """
        algorithm, segments = self.config.algorithm, tokens.segments
        completions = np.repeat(np.arange(len(segments)), segments.lengths)
        pools: dict[str, tuple[Int64Array, int]] = {
            "batch": (np.zeros(segments.total, dtype=np.int64), 1),
            "group": (tokens.token_groups(), len(tokens.rewards)),
            "completion": (completions, len(segments)),
        }
        pool, count = pools[algorithm.surprisal_mask_scope]
        # Tokens without a policy term set no threshold.
        pool = np.where(with_policy[completions], pool, -1)
        result = top_rho(uncertainty, pool, count, algorithm.surprisal_mask_rho)
        if algorithm.surprisal_mask_scope == "batch":
            return result.keep, result.thresholds[0]
        return result.keep, None


def _detector(
    planning: "Planning", load_encoder: LoadEncoder | None
) -> RegexDetector | SemanticDetector:
    if planning.detector == "regex":
        return RegexDetector(planning.grams)
    if load_encoder is None:
        raise ConfigurationError(
            '[planning] detector = "semantic" needs an encoder: give CreditPipeline one as'
            " load_encoder."
        )
    return SemanticDetector(
        load_encoder(planning.model), planning.threshold, planning.min_similarity
    )


def _last(stages: Stages) -> Float64Array:
    return next(reversed(stages.values()))
