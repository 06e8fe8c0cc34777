"""Run the parity gate: before the first optimizer step, engine and learner must be the same policy.

It asks one question: under an adapter with a visible effect, do engine and learner give the same
log-probs? At a fresh start every lora_B is 0, so an engine that ignores the adapter would pass. The
gate therefore gives the adapter a seeded trial value, compares, and restores it byte for byte. Then
it compares again, on completions that follow an answer, so that some end. Both comparisons use a
temperature at which few tokens are certain: a wrong log-prob of a certain token would not show. The
gate tests a difference that noise could explain again, with other noise. A check that fails twice
stops the run with one sentence. The gate also requires that reference answers score.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import inf, isclose

import numpy as np

from retrain.backends.base import TrialAdapter
from retrain.backends.rows import by_depth
from retrain.environments.episodes import EpisodeHost, play
from retrain.environments.loading import environment_code
from retrain.errors import RunFailed
from retrain.inference_engine.base import Truncation
from retrain.rewards import Scorer, ScoreRequest, boxed_reference
from retrain.run.gate_faults import Bare, fault, identical, tolerance
from retrain.run.gate_samples import (
    FEW_TOKENS,
    PROMPTS,
    SAMPLES,
    TOKENS,
    Asked,
    GateInputs,
    GateSample,
    completed,
    endings,
    joined,
    long_prompt,
    sampled,
)
from retrain.types import Float32Array, Outcome, Prompt, Row, Score

_LOOKS = 2
"""Number of looks that must show a fault, each with its own samples and noise, before the run
stops.
"""
_VISIBLE = (0.1, 1.0)
"""Nats by which the trial adapter should change the log-probs on average: far above rounding, and
still a language model."""
_HOT = 2.0
"""Least temperature of the looks after the first; every server takes it."""
_FIRST_STRENGTH, _STRENGTH_TRIES = 0.1, 8
_CHECK = (
    "check the engine's model, tokenizer, [inference] dtype, adapter and its scale, cached"
    " prefixes, and its own seed, temperature, top_p and penalty"
)
_NOT_APPLICABLE = "not applicable"


@dataclass(frozen=True)
class GateResult:
    """The gate's measurements, kept in environment.json."""

    tokens: int
    longest_prompt: int
    """Tokens."""
    reference_answers: str = _NOT_APPLICABLE
    """"<right>/<asked>" reference answers, unless the reward does not compare answers."""
    max_difference: float | None = None
    """The largest difference in nats. This and the next four fields are None if the backend cannot
    score rows, so that the gate compared no log-probs.
    """
    mean_difference: float | None = None
    tolerance: float | None = None
    """The limit of the mean difference in half precision, else of the largest difference."""
    logprob_diff_by_depth: list[float | None] | None = None
    """Mean difference in each quarter of the completions' positions, since some grow with the
    context."""
    rounding: float | None = None
    """Nats by which half precision moves the learner's own log-probs on average; None in float32,
    or if it is unknown.
    """
    adapter_effect: float | None = None
    """Nats by which the trial adapter changed the log-probs on average; None if the backend cannot
    change its adapter.
    """
    half_precision: bool = False
    """True if the gate used the half-precision tolerance: a key asks for it, or the differences
    look like half-precision rounding.
    """
    endings: int = 0
    """Completions that ended at EOS."""

    def to_json(self) -> dict[str, object]:
        return asdict(self)

    @property
    def brief(self) -> str:
        """The short form of `line`, for a terminal."""
        return (
            f"gate: engine and learner {self._agreement},"
            f" reference answers {self.reference_answers}"
        )

    @property
    def _agreement(self) -> str:
        if self.max_difference is None:
            return "not compared"
        if self.half_precision:
            return f"agree to {self.mean_difference:.2g} nats on average"
        return f"agree to {self.max_difference:.1e} nats"

    def line(self) -> str:
        if self.max_difference is None:
            return (
                f"Parity gate passed in part: reference answers accepted {self.reference_answers},"
                f" {self.tokens} tokens sampled. The gate compared no log-probs, since this"
                " backend's trainer returns none."
            )
        effect = "the effect of an update is unknown, since this backend cannot try one"
        if self.adapter_effect is not None:
            effect = (
                f"a trial update changes the log-probs by {self.adapter_effect:.2g} nats on average"
            )
        ends = "completions end at EOS" if self.endings else "no completion ended at EOS"
        return (
            f"Parity gate passed: engine and learner {self._agreement} over {self.tokens}"
            f" tokens (tolerance {self.tolerance:.2g}), {effect}, {ends}, reference answers"
            f" accepted {self.reference_answers}."
        )


def parity_gate(inputs: GateInputs, prompts: Sequence[Prompt]) -> GateResult:
    """Run the gate. Raises RunFailed in one sentence. It restores the adapter's bytes in any
    case.
    """
    prompts = prompts[:PROMPTS]
    if not inputs.trained:
        inputs.sync()
    if inputs.backend.capabilities.scores_rows:
        passed = _compared(inputs, prompts)
    else:
        tokens = sum(len(item.token_ids) for item in completed(inputs, _few(inputs, prompts), 0))
        passed = GateResult(tokens, max(len(prompt.token_ids) for prompt in prompts))
    return replace(passed, reference_answers=inputs.check_references(prompts))


def adapter_check(inputs: GateInputs, prompts: Sequence[Prompt]) -> None:
    """Compare with the adapter that the engine serves, without a trial adapter. Raises
    RunFailed.
    """
    _compare(inputs, _few(inputs, prompts), "after a server woke up or came back, ")


def _few(inputs: GateInputs, prompts: Sequence[Prompt]) -> list[Asked]:
    """Ask for a prompt of the run, and for the long one."""
    return [Asked(prompts[0], 0, SAMPLES, FEW_TOKENS), _long(inputs, prompts[:PROMPTS])]


def _long(inputs: GateInputs, prompts: Sequence[Prompt]) -> Asked:
    return Asked(long_prompt(inputs, prompts), PROMPTS, 1, FEW_TOKENS)


def _compared(inputs: GateInputs, prompts: Sequence[Prompt]) -> GateResult:
    """Compare with the current adapter, with a visible trial adapter, and with the current adapter
    again.
    """
    trial, effect = inputs.backend.trial_adapter(inputs.seed), None
    long = _long(inputs, prompts)
    every = [*(Asked(one, slot, SAMPLES, TOKENS) for slot, one in enumerate(prompts)), long]
    found = _first_look(inputs, every)
    inputs, result = found.inputs, _result(found, len(long.prompt.token_ids))
    hot = replace(inputs, temperature=max(_HOT, inputs.temperature), truncation=Truncation())
    judge = partial(_hot_fault, raw_is_right=inputs.temperature == 1)
    if trial is not None:
        known = replace(found, inputs=hot, learner=hot.learner_logprobs(found.rows))
        with trial:
            effect, bare = _visible(trial, known)
            inputs.sync()
            when = f"with a trial adapter that changes log-probs by {effect:.2g} nats, "
            _compare(hot, every, when, partial(judge, bare=bare))
        inputs.sync()
    asked = [*endings(inputs, prompts), long]
    ended = _compare(hot, asked, f"at temperature {hot.temperature:g}, ", judge).at_end.sum()
    return replace(result, adapter_effect=effect, endings=int(ended))


def _result(found: GateSample, longest_prompt: int) -> GateResult:
    """Return what the first look measured, before the adapter changes."""
    off, lengths = np.abs(found.off), [row.num_actions for row in found.rows]
    half = found.inputs.half_precision
    return GateResult(
        tokens=len(off),
        longest_prompt=longest_prompt,
        max_difference=float(off.max()),
        mean_difference=float(off.mean()),
        tolerance=tolerance(found),
        logprob_diff_by_depth=by_depth(np.split(off, np.cumsum(lengths)), TOKENS),
        rounding=float(np.abs(found.rounding).mean()) if half else None,
        half_precision=half,
    )


# -- looks -----------------------------------------------------------------------------------------


def _first_look(inputs: GateInputs, asked: Sequence[Asked]) -> GateSample:
    """Compare with the current adapter. A server without a key for its precision may differ as half
    precision makes this model differ. The gate then uses half precision from there on.
    """
    when = "after the sync of the first step's adapter, " if inputs.trained else ""
    try:
        return _compare(inputs, asked, when)
    except RunFailed:
        if inputs.half_precision or inputs.in_process or inputs.dtype_set or inputs.trained:
            raise
        parts = sampled(replace(inputs, half_precision=True), asked, 0)
        if any(map(fault, parts.values())):
            raise
        inputs.backend.engine.rounds = True
        return joined(parts)


def _compare(
    inputs: GateInputs,
    asked: Sequence[Asked],
    when: str,
    judge: Callable[[GateSample], str] = fault,
) -> GateSample:
    """Look until every server has passed in some look, and return the samples of the newest look.
    Raises RunFailed if a server fails in all looks.
    """
    looks = []
    for look in range(_LOOKS):
        parts = sampled(inputs, asked, look)
        found = {server: judge(part) for server, part in parts.items()}
        looks.append(found)
        wrong = [server for server in found if all(one.get(server, "?") for one in looks)]
        if not wrong:
            return joined(parts)
    where, consequence = "", "the run stops" if inputs.trained else "nothing was trained"
    if len(wrong) < len(found):
        where = f", at {' and '.join(wrong)} alone of {len(found)} servers"
    advice = inputs.backend.engine.why_it_differs() or _CHECK
    raise RunFailed(f"Parity gate{where}: {when}{found[wrong[0]]}, so {consequence}; {advice}.")


def _hot_fault(part: GateSample, *, raw_is_right: bool, bare: Bare | None = None) -> str:
    """Return the fault of completions at a higher temperature than the run uses; "" without one.
    `raw_is_right`: the run's temperature is 1, so log-probs before the temperature are right too.
    """
    found = fault(part, bare)
    if found and raw_is_right:
        at_one = replace(part.inputs, temperature=1.0)
        own = at_one.learner_logprobs(part.rows)
        found = fault(replace(part, inputs=at_one, learner=own))
    return identical(part) or found


# -- the trial adapter -----------------------------------------------------------------------------


def _visible(trial: TrialAdapter, sample: GateSample) -> tuple[float, Bare]:
    """Search the strength at which the trial adapter changes log-probs visibly, and keep it. Return
    the mean change in nats, and a function that scores without the trial adapter.
    """
    strength, effect, low, high = _FIRST_STRENGTH, 0.0, 0.0, inf
    for _ in range(_STRENGTH_TRIES):
        trial.set(strength)
        changed = sample.inputs.learner_logprobs(sample.rows) - sample.learner
        effect = float(np.abs(changed).mean())
        if _VISIBLE[0] <= effect <= _VISIBLE[1]:
            break
        low, high = (strength, high) if effect < _VISIBLE[0] else (low, strength)
        strength = 2 * low if high == inf else (low * high) ** 0.5 or high / 2
    trial.set(strength)

    def bare(rows: Sequence[Row]) -> Float32Array:
        trial.set(0.0)
        logprobs = sample.inputs.learner_logprobs(rows)
        trial.set(strength)
        return logprobs

    return effect, bare


# -- reference answers ----------------------------------------------------------------------


def play_references(host: EpisodeHost, prompts: Sequence[Prompt]) -> str:
    """Play the replies that the environment itself calls right, and raise RunFailed unless each
    episode scores as right.
    """
    with environment_code("[environment] asking for its right replies", host.timeout_s):
        # A plugin of 0.10 calls the method gold.
        named = "gold" if hasattr(type(host.environment), "gold") else "reference_replies"
        ask = getattr(host.environment, named)
        asked = [(prompt, list(ask(prompt.example) or ())) for prompt in prompts]
        known = [(prompt, replies) for prompt, replies in asked if replies]
    for prompt, replies in known:
        score = play(host, prompt.example, replies)
        if score.outcome is not Outcome.RIGHT:
            raise _refused(
                f"the environment's own solution {replies} of {prompt.prompt_id}",
                score,
                "the environment, or lower [reward] correct_threshold",
            )
    return f"{len(known)}/{len(known)}" if known else _NOT_APPLICABLE


def score_references(scorer: Scorer, think_end_token: str, prompts: Sequence[Prompt]) -> str:
    """Score the data's references as answers."""
    if not scorer.compares_answers:
        return _NOT_APPLICABLE
    futures = [
        scorer.submit(
            ScoreRequest(
                response=think_end_token + boxed_reference(prompt.example.reference),
                reference=prompt.example.reference,
                prompt="",  # It may open a thought.
                example=prompt.example,
                step=0,
                slot=slot,
                sample=0,
            )
        )
        for slot, prompt in enumerate(prompts)
    ]
    for prompt, score in zip(prompts, [future.result() for future in futures], strict=True):
        if score.reward is None or not isclose(score.reward, scorer.reference_reward):
            raise _refused(
                f"the reference answer {prompt.example.reference!r} of {prompt.prompt_id}",
                score,
                "[reward] type and normalize, or the reference",
            )
    return f"{len(prompts)}/{len(prompts)}"


def _refused(what: str, score: Score, advice: str) -> RunFailed:
    reason = f" ({score.reason})" if score.reason else ""
    return RunFailed(
        f"Parity gate: {what} gets reward {score.reward}{reason}, as a right completion would."
        f" Check {advice}."
    )
