"""The parity gate: before the first optimizer step, engine and learner must be the same policy, adapter included.

It samples a few completions, one of them after a prompt longer than a page of a KV cache, and compares the engine's log-probs with the
learner's: each difference, and in half precision what all of them together say about the temperature. At a fresh start every lora_B is 0,
so an engine that ignores the adapter would pass. The gate therefore gives the adapter a seeded trial value with a visible effect on every
adapted layer and samples again. If the engine lacks part of the adapter, the differences contain a share of its effect; the gate fits this
share for each group of layers. The adapter is then restored byte for byte.
The gate also checks that EOS is an action, that the chat template survives a round trip, and that the gold answer scores 1 where the
reward compares answers. A failed check stops the run.
"""

import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import cycle
from math import isclose

import numpy as np
import numpy.typing as npt

from retrain.backends.base import Backend, TrialAdapter
from retrain.environments.episodes import EpisodeHost, play
from retrain.environments.loading import environment_code
from retrain.errors import RunFailed
from retrain.inference_engine.base import NoiseKey, SampleRequest, Truncation
from retrain.noise import Stream
from retrain.rewards import Scorer, ScoreRequest, gold_response
from retrain.types import Completion, Example, FinishReason, Float32Array, Int32Array, Outcome, Prompt, Row, Trajectory

_PROMPTS = 4
_SAMPLES = 2
_TOKENS = 32
"""Per completion, also where the run's are shorter: of a few tokens rounding alone can look like a fault."""
_SERVED_ROOM = 512
"""Tokens that a server takes at least: prompt and completion together, as `retrain serve` starts one."""
_PAGE = 256
"""Tokens. No server's KV cache has longer blocks, and a block that is not full is never reused."""
_FEW_TOKENS = 16
"""Tokens per completion after the long prompt, and in the last check, after the adapter has been restored."""

_FP32_IN_PROCESS = 1e-4
_FP32_SERVER = 1e-3
_HALF_MEAN = 0.02
_HALF_MAX = 0.5
"""These four are nats at temperature 1 and above; below, log-probs are so many times as sensitive to the logits' rounding. Known faults are
far above: raw log-probs at T = 0.7 give 1.97, a stale KV cache 0.2, the base model without the adapter more.
"""

_TRIAL_SHARE = 0.02
"""Share of the trial adapter's mean effect by which half precision may be off on average, if that is more. Some seeds change the policy by
nats."""

_VISIBLE, _VISIBLE_HALF = (0.02, 0.5), (0.1, 1.0)
"""Nats by which the trial adapter should change the log-probs on average: far above rounding, and still a language model."""
_FIRST_STRENGTH, _STRENGTH_TRIES = 0.1, 6
_PROBED = 2
"""Effects are measured on this many completions, the longest ones."""
_MISSING = 0.25
"""Share of a group's effect that may be missing or too much; where the engine applies the adapter, it is within a few hundredths of 0."""
_SIGNIFICANT = 5.0
"""Standard errors by which that share must differ from 0."""
_ROUNDING = 1e-5
"""Nats per token that must be off, at temperature 1 and above: rounding in float32 gives less, and a few tokens of it can look like the
effect of a group.
"""
_IGNORED = 0.9
"""From this share of the whole adapter on, the engine ignores it."""
_WHOLE = "all layers"
_HOTTER = 1.1
"""The temperature, as a multiple of the run's, whose effect on the log-probs is looked for in the differences."""
_WRONG_TEMPERATURE = 0.5
"""Share of that effect which the differences may contain: 5% of the temperature."""
_ONE_TOKEN = 0.9
"""Share of the sum of squares above which one token decides a fit, which is then only as accurate as that token's rounding, whatever its
standard error."""
_FITTED = 24
"""Tokens that a fit needs in half precision: of fewer, a standard error says nothing."""


@dataclass(frozen=True)
class GateResult:
    """The gate's measurements, kept in environment.json."""

    tokens: int
    max_difference: float | None
    """This and the next two: None where the backend cannot score rows, so that nothing was compared."""
    mean_difference: float | None
    tolerance: float | None
    gold: str
    """"<right>/<asked>" gold answers, or "not applicable" where the reward does not compare answers."""
    adapter_effect: float | None
    """Nats by which the trial adapter changed the log-probs on average; None where the backend cannot change its adapter."""
    groups: int
    """Groups of layers whose effect was measured one by one."""
    longest_prompt: int
    """Tokens."""

    def to_json(self) -> dict[str, float | int | str | None]:
        return asdict(self)

    def line(self) -> str:
        if self.max_difference is None:
            return (
                f"Parity gate passed in part: {self.tokens} tokens sampled, gold answers score: {self.gold}; engine and learner "
                "were not compared, since this backend's trainer returns no log-probs."
            )
        effect = (
            "the adapter's effect was not checked, since this backend cannot try one"
            if self.adapter_effect is None
            else f"the adapter changes the log-probs by {self.adapter_effect:.2g} nats on average"
        )
        return (
            f"Parity gate passed: engine and learner agree to {self.max_difference:.1e} nats over {self.tokens} tokens "
            f"(tolerance {self.tolerance:.2g}), {effect}, EOS is trained, gold answers score: {self.gold}."
        )


@dataclass(frozen=True)
class GateInputs:
    backend: Backend
    check_gold: Callable[[Sequence[Prompt]], str]
    """Says how many gold answers score, or "not applicable"; raises RunFailed for one that does not."""
    decode: Callable[[Int32Array], str]
    """Token ids to text with special tokens kept."""
    eos_ids: Sequence[int]
    temperature: float
    truncation: Truncation
    max_tokens: int
    longest_row: int
    """Tokens of the run's longest prompt and completion together."""
    seed: int
    half_precision: bool
    """Weights, activations or the KV cache of either side are rounded to 16 bits or fewer."""
    step: int
    """Training steps behind the weights."""
    trained: bool
    """The engine already serves these weights, and is checked with them before it is given the trial adapter."""

    @property
    def sharpness(self) -> float:
        """The factor by which the temperature multiplies the rounding of logits, at least 1."""
        raw = self.backend.engine.capabilities.logprobs == "raw"
        return 1.0 if raw else 1 / min(1.0, self.temperature)

    @property
    def consequence(self) -> str:
        """The consequence of a failed check, in words."""
        return "the run stops" if self.trained else "nothing was trained"


def parity_gate(inputs: GateInputs, prompts: Sequence[Prompt]) -> GateResult:
    """Run the gate. Raises RunFailed in one sentence that names the failed check. The adapter's bytes are restored in any case."""
    prompts = prompts[:_PROMPTS]
    _check_template(inputs, prompts)
    asked = [*prompts, _long_prompt(inputs, prompts)]
    if not inputs.backend.capabilities.scores_rows:
        return _gate_without_learner(inputs, prompts)
    few = asked[:1] + asked[-1:]
    trial = inputs.backend.trial_adapter(inputs.seed)
    if not inputs.trained:
        _sync(inputs)
    sampled = _sampled(inputs, asked if trial is None else few, _FEW_TOKENS)
    differences = _differences(sampled)
    _check_differences(inputs, differences, "after the first step's adapter was synced, " if inputs.trained else "")
    effect = None
    if trial is not None:
        with trial:
            strength = _visible_strength(inputs, trial, sampled)
            _sync(inputs)
            sampled = _sampled(inputs, asked, _TOKENS)
            differences = _differences(sampled)
            effect, suspects = _adapter_suspects(inputs, trial, strength, sampled)
            suspects += _temperature_suspects(inputs, sampled)
            if suspects:
                raise RunFailed(max(suspects, key=lambda suspect: suspect.explained).sentence)
            _check_differences(inputs, differences, "with a trial adapter, ", effect)
        _sync(inputs)
        if not inputs.backend.engine.capabilities.in_process:
            _check_differences(inputs, _differences(_sampled(inputs, few, _FEW_TOKENS)), "after the trial adapter was taken back, ")
    _check_eos(inputs, prompts[0])
    return GateResult(
        tokens=len(differences),
        max_difference=float(differences.max()),
        mean_difference=float(differences.mean()),
        tolerance=_tolerance(inputs),
        gold=inputs.check_gold(prompts),
        adapter_effect=effect,
        groups=len(trial.groups) if trial is not None else 0,
        longest_prompt=max(len(prompt.token_ids) for prompt in asked),
    )


def _gate_without_learner(inputs: GateInputs, prompts: Sequence[Prompt]) -> GateResult:
    """Check a sampler alone: that it answers in the model's tokens, and that gold answers are rewarded."""
    _sync(inputs)
    completions = list(inputs.backend.engine.sample(_requests(inputs, prompts, _FEW_TOKENS)))
    logprobs = np.concatenate([completion.logprobs for completion in completions])
    if not np.isfinite(logprobs).all() or logprobs.max() > 0:
        raise RunFailed("Parity gate: the engine returned log-probs that are not finite or above 0; check its model and its settings.")
    return GateResult(
        tokens=len(logprobs),
        max_difference=None,
        mean_difference=None,
        tolerance=None,
        gold=inputs.check_gold(prompts),
        adapter_effect=None,
        groups=0,
        longest_prompt=max(len(prompt.token_ids) for prompt in prompts),
    )


def adapter_check(inputs: GateInputs, prompts: Sequence[Prompt]) -> None:
    """Run only the first check, with the adapter that the engine serves. Raises RunFailed."""
    prompts = prompts[:_PROMPTS]
    sampled = _sampled(inputs, [prompts[0], _long_prompt(inputs, prompts)], _FEW_TOKENS)
    _check_differences(inputs, _differences(sampled), "after a server woke up or came back, ")


def _sync(inputs: GateInputs) -> None:
    inputs.backend.engine.sync(inputs.backend.save_adapter, inputs.step)


def _long_prompt(inputs: GateInputs, prompts: Sequence[Prompt]) -> Prompt:
    """Return the prompts' tokens, repeated to more than a page of a KV cache, and past the model's sliding window if the run gets that
    far.
    """
    positions, window = inputs.backend.reach
    wanted = max(_PAGE, window if window + _FEW_TOKENS < inputs.longest_row else 0) + 1  # a server has room for the longest row alone
    length = max(1, min(wanted, positions - _FEW_TOKENS))
    ids = np.resize(np.concatenate([prompt.token_ids for prompt in prompts]), length).astype(np.int32)
    if not inputs.backend.engine.capabilities.token_ids_in:  # whole prompts then: cut anywhere else, text may encode to other ids
        ids = prompts[0].token_ids
        for prompt in cycle([*prompts[1:], prompts[0]]):
            if len(ids) >= length or len(ids) + len(prompt.token_ids) > positions - _FEW_TOKENS:
                break
            ids = np.concatenate([ids, prompt.token_ids])
    return Prompt(Example(prompt="", reference="", example_id="the gate's long prompt"), "", ids)


# -- engine and learner on the same tokens ---------------------------------------------------------------------------


@dataclass(frozen=True)
class _Sampled:
    rows: list[Row]
    """Rows with the engine's log-probs."""
    learner: list[Float32Array]
    """[T] of each row."""

    @property
    def differences(self) -> list[Float32Array]:
        """[T] engine - learner of each row."""
        return [row.logprobs - own for row, own in zip(self.rows, self.learner, strict=True)]


def _sampled(inputs: GateInputs, prompts: Sequence[Prompt], max_tokens: int) -> _Sampled:
    """Sample a few completions of each prompt, and one of the long prompt, which comes last."""
    *short, long = _requests(inputs, prompts, max_tokens)
    asked = [*short, replace(long, count=1, max_tokens=min(_FEW_TOKENS, long.max_tokens))]
    engine = inputs.backend.engine
    requests = [request for request in asked for _ in range(engine.replicas)]  # shared out in turn, so each server gets each
    completions = sorted(engine.sample(requests), key=lambda item: (item.request, item.sample))
    if inputs.truncation.active and any(item.kept is None for item in completions):
        raise RunFailed(
            "Parity gate: [training] top_k, top_p or min_p is set, but the engine's completions do not say how many tokens were kept, so "
            'the engine may not truncate at all: leave the three off, or use [inference] engine = "pytorch".'
        )
    rows = []
    for item in completions:
        prompt, nothing = prompts[item.request // engine.replicas], np.zeros(len(item.token_ids), np.float32)
        rows += Row.of(prompt, Trajectory.of(item), nothing, group=item.request)
    return _Sampled(rows, _learner_logprobs(inputs, rows))


def _learner_logprobs(inputs: GateInputs, rows: Sequence[Row]) -> list[Float32Array]:
    """[T] of each row, at the temperature of the engine's log-probs: 1 where they are raw."""
    if inputs.backend.engine.capabilities.logprobs == "raw" and inputs.temperature != 1:
        return inputs.backend.logprobs(rows, 1.0)
    return inputs.backend.logprobs(rows)


def _requests(inputs: GateInputs, prompts: Sequence[Prompt], max_tokens: int) -> list[SampleRequest]:
    return [
        SampleRequest(
            prompt_ids=prompt.token_ids,
            count=_SAMPLES,
            max_tokens=min(max_tokens, _room(inputs, len(prompt.token_ids))),
            temperature=inputs.temperature,
            noise=NoiseKey(inputs.seed, Stream.PARITY, 0, slot),
            truncation=inputs.truncation,
        )
        for slot, prompt in enumerate(prompts)
    ]


def _room(inputs: GateInputs, prompt_tokens: int) -> int:
    """Return the number of tokens that fit after a prompt in the model's context, and in the length for which a server was started."""
    positions, _ = inputs.backend.reach
    most = positions if inputs.backend.engine.capabilities.in_process else min(positions, max(inputs.longest_row, _SERVED_ROOM))
    return max(inputs.max_tokens, most - prompt_tokens)


def _differences(sampled: _Sampled) -> Float32Array:
    """[n] |engine - learner| of every sampled token."""
    return np.abs(np.concatenate(sampled.differences))


def _tolerance(inputs: GateInputs) -> float:
    in_float32 = _FP32_IN_PROCESS if inputs.backend.engine.capabilities.in_process else _FP32_SERVER
    return (_HALF_MAX if inputs.half_precision else in_float32) * inputs.sharpness


def _check_differences(inputs: GateInputs, differences: Float32Array, when: str = "", effect: float = 0.0) -> None:
    """Raises RunFailed for a difference above the tolerance, or in half precision for their mean; `effect` [nats]: the trial adapter's."""
    if not np.isfinite(differences).all():
        raise RunFailed("Parity gate: a log-prob is not finite before any training; check the model's weights and [model] dtype.")
    largest, mean = float(differences.max()), float(differences.mean())
    if when:
        advice = (
            "the engine still serves another adapter, or keys and values computed with it; check how it loads adapters and caches prefixes"
        )
    elif inputs.backend.engine.capabilities.in_process:
        advice = f"the ratio would be wrong, so {inputs.consequence}; set [inference] dtype to [model] dtype, or report it"
    else:
        advice = (
            f"so {inputs.consequence}; check that the server has the same model and tokenizer, and its dtype: [inference] dtype says it"
        )
    allowed, mean_allowed = _tolerance(inputs), max(_HALF_MEAN * inputs.sharpness, _TRIAL_SHARE * effect)
    if largest <= allowed and (mean <= mean_allowed or not inputs.half_precision):
        return
    found = f"disagree by {largest:.3g} nats (allowed: {allowed:.2g})"
    if inputs.half_precision:
        found = f"disagree by {largest:.3g} nats at most and {mean:.3g} on average (allowed: {allowed:.2g} and {mean_allowed:.2g})"
    raise RunFailed(f"Parity gate: {when}engine and learner {found}; {inputs.backend.engine.why_it_differs() or advice}.")


# -- the adapter's effect --------------------------------------------------------------------------------------------


def _visible_strength(inputs: GateInputs, trial: TrialAdapter, sampled: _Sampled) -> float:
    """Bisect for the strength at which the trial adapter changes log-probs visibly. Leaves the trial adapter at it."""
    visible = _VISIBLE_HALF if inputs.half_precision else _VISIBLE
    before = np.concatenate(sampled.learner)
    strength, bounds = _FIRST_STRENGTH, [0.0, float("inf")]
    for _ in range(_STRENGTH_TRIES):
        trial.set(strength)
        effect = float(np.abs(np.concatenate(_learner_logprobs(inputs, sampled.rows)) - before).mean())
        if visible[0] <= effect <= visible[1]:
            break
        bounds[effect > visible[1]] = strength
        low, high = bounds
        strength = 2 * low if high == float("inf") else high / 2 if not low else (low * high) ** 0.5
    trial.set(strength)
    return strength


@dataclass(frozen=True)
class _Suspect:
    """A fault that the differences look like."""

    explained: float
    """The part of the difference's sum of squares that it explains, between 0 and 1."""
    sentence: str


def _adapter_suspects(inputs: GateInputs, trial: TrialAdapter, strength: float, sampled: _Sampled) -> tuple[float, list[_Suspect]]:
    """Return the trial adapter's mean effect in nats, and the groups of which the engine's log-probs lack part, or have too much.

    A group's effect is what the learner's log-probs lose without the group, on the completions that the whole adapter changes most. The
    whole adapter counts as one more group, on all completions.
    """
    trial.set(0.0)
    whole = [own - without for own, without in zip(sampled.learner, _learner_logprobs(inputs, sampled.rows), strict=True)]
    probed = sorted(range(len(whole)), key=lambda number: -float(np.abs(whole[number]).sum()))[:_PROBED]
    rows, own = [sampled.rows[number] for number in probed], np.concatenate([sampled.learner[number] for number in probed])
    effects = {}
    for group in trial.groups:
        trial.set(strength, without=group)
        effects[group] = own - np.concatenate(_learner_logprobs(inputs, rows))
    trial.set(strength)
    differences = sampled.differences
    fits, fewest = [], _FITTED if inputs.half_precision else 1
    for numbers, fitted in ((range(len(whole)), {_WHOLE: np.concatenate(whole)}), (probed, effects)):
        difference = np.concatenate([differences[number] for number in numbers])
        fits += _fits(difference, fitted, inputs.half_precision) if len(difference) >= fewest else []
    off = [fit for fit in fits if abs(fit.share) > max(_MISSING, _SIGNIFICANT * fit.error) and fit.nats > _ROUNDING * inputs.sharpness]
    suspects = [_Suspect(fit.explained, fit.sentence(inputs.consequence)) for fit in off]
    return float(np.abs(np.concatenate(whole)).mean()), suspects


def _temperature_suspects(inputs: GateInputs, sampled: _Sampled) -> list[_Suspect]:
    """Return another temperature as a suspect where the differences, each within half precision's tolerance, together say so.

    They are fitted by least squares as a share of what a hotter temperature would change.
    """
    temperature = 1.0 if inputs.backend.engine.capabilities.logprobs == "raw" else inputs.temperature
    difference = np.concatenate(sampled.differences)
    if not inputs.half_precision or len(difference) < _FITTED or not np.isfinite(difference).all():
        return []  # in float32 the tolerance of a single difference leaves nothing
    hotter = np.concatenate(inputs.backend.logprobs(sampled.rows, _HOTTER * temperature)).astype(np.float64)
    effect = hotter - np.concatenate(sampled.learner)
    if not (size := effect @ effect):
        return []  # a backend whose learner knows one temperature only
    if np.square(effect).max() > _ONE_TOKEN * size:
        return []
    share = float(effect @ difference / size)
    if abs(share) <= max(_WRONG_TEMPERATURE, _SIGNIFICANT * _standard_error(effect, difference - share * effect)):
        return []
    looks = temperature * (1 + (_HOTTER - 1) * share)
    sentence = (
        f"Parity gate: the engine's log-probs differ from the learner's as if its temperature were {looks:.2g} instead of "
        f"{temperature:g}, so {inputs.consequence}; check that its log-probs are those of the distribution it samples from."
    )
    return [_Suspect(float(share**2 * size / (difference @ difference)), sentence)]


@dataclass(frozen=True)
class _Fit:
    """Weighted least squares over the tokens: engine - learner = -share * (effect of a group)."""

    group: str
    share: float
    """The part of the group's effect that the engine lacks; below 0 where it has too much of it."""
    error: float
    """Standard error of the share."""
    nats: float
    """Root mean square of that part over the tokens, in nats."""
    explained: float
    """The part of the difference's sum of squares that the fit explains, between 0 and 1."""

    def sentence(self, consequence: str) -> str:
        advice = f"so {consequence}; check how the engine loads the adapter, its scale, the names of its layers, and cached prefixes."
        if self.group == _WHOLE and self.share > _IGNORED:
            return f"Parity gate: the engine ignores the adapter and samples from the base model, {advice}"
        where = "" if self.group == _WHOLE else f" on {self.group}"
        amount = f"{min(self.share, 1):.0%} of the adapter's effect{where} were missing"
        if self.share < 0:
            amount = f"the adapter's effect{where} were {-self.share:.0%} too large"
        return f"Parity gate: the engine's log-probs differ from the learner's as if {amount}, {advice}"


def _fits(difference: Float32Array, effects: Mapping[str, Float32Array], half_precision: bool) -> list[_Fit]:
    """Fit a share for each group of `effects`, [n] like `difference`.

    Rounding moves a token's log-prob in proportion to its sensitivity, which the effects show. Few tokens of a sharp policy are sensitive:
    unweighted, their rounding alone would decide the fit, and look like the effect of some group.
    """
    if not np.isfinite(difference).all():
        return []
    weights = 1 / (np.sqrt(sum(np.square(effect, dtype=np.float64) for effect in effects.values())) + _ROUNDING)
    fits = []
    for group, effect in effects.items():
        own, found = weights * effect, weights * difference
        size, total = float(own @ own), float(found @ found)
        if not size or not total:
            continue
        share = -float(found @ own) / size
        rest = found + share * own
        error = _standard_error(own, rest) if half_precision else float(np.sqrt((rest @ rest) / len(rest) / size))
        nats = abs(share) * float(np.sqrt(np.mean(np.square(effect))))
        fits.append(_Fit(group, share, error, nats, share**2 * size / total))
    return fits


def _standard_error(regressor: npt.NDArray[np.float64], rest: npt.NDArray[np.float64]) -> float:
    """Standard error of a least-squares slope in half precision, given the regressor and the residuals [n].

    A token's rounding depends on the token, and a few tokens of a sharp policy can decide the fit; it allows for both (HC3 of MacKinnon and
    White, J. Econometrics 29, 1985, 305).
    """
    size = regressor @ regressor
    leverage = np.square(regressor) / size
    return float(np.linalg.norm(regressor * rest / np.maximum(1 - leverage, 1e-9)) / size)


# -- tokens, template, reward ----------------------------------------------------------------------------------------


def _check_eos(inputs: GateInputs, prompt: Prompt) -> None:
    """A completion of EOS alone must become a row with that one action, and the learner must give it a log-prob."""
    eos = np.array([inputs.eos_ids[0]], np.int32)
    nothing = np.zeros(1, np.float32)
    completion = Completion(0, 0, eos, nothing, None, FinishReason.STOP)
    (row,) = Row.of(prompt, Trajectory.of(completion), nothing, group=0)
    actions = [int(row.token_ids[position]) for position in row.action_positions()]
    (logprob,) = inputs.backend.logprobs([row])
    if actions != [int(eos[0])] or logprob.shape != (1,) or not np.isfinite(logprob).all():
        raise RunFailed(
            f"Parity gate: the sampled end-of-sequence token {int(eos[0])} is not trained, so the model would never learn to stop."
        )


def _check_template(inputs: GateInputs, prompts: Sequence[Prompt]) -> None:
    for prompt in prompts:
        back = inputs.decode(prompt.token_ids)
        # A tokenizer may add BOS, normalise Unicode and move a leading space; any other change means a broken template.
        if not _plain(back).endswith(_plain(prompt.text)):
            raise RunFailed(
                f"Parity gate: prompt {prompt.prompt_id} does not survive the tokenizer: {prompt.text[:60]!r} becomes {back[:60]!r}; "
                "check the tokenizer's files and [data] chat_template_args."
            )


def _plain(text: str) -> str:
    return "".join(unicodedata.normalize("NFKC", text).split())


_NOT_APPLICABLE = "not applicable"


def environment_gold(host: EpisodeHost, prompts: Sequence[Prompt]) -> str:
    """Play the replies that the environment itself calls right; each episode must be scored as right."""
    with environment_code("[environment] asking for its gold replies", host.timeout_s):
        known = [(prompt, replies) for prompt in prompts if (replies := host.environment.gold(prompt.example))]
    for prompt, replies in known:
        score = play(host, prompt.example, replies)
        if score.outcome is not Outcome.RIGHT:
            raise RunFailed(
                f"Parity gate: the environment's own solution {list(replies)} of {prompt.prompt_id} scores {score.reward}"
                f"{f' ({score.reason})' if score.reason else ''}, which is not right at [reward] correct_threshold = "
                f"{host.correct_threshold:g}; check the environment, or lower the threshold."
            )
    return f"{len(known)}/{len(known)}" if known else _NOT_APPLICABLE


def scored_gold(scorer: Scorer, prompts: Sequence[Prompt]) -> str:
    """Score the references of the data as answers."""
    if not scorer.compares_answers:
        return _NOT_APPLICABLE
    requests = [
        ScoreRequest(
            response=gold_response(prompt.example.reference),
            reference=prompt.example.reference,
            prompt=prompt.text,
            example=prompt.example,
            step=0,
            slot=slot,
            sample=0,
        )
        for slot, prompt in enumerate(prompts)
    ]
    scores = [future.result() for future in [scorer.submit(request) for request in requests]]
    for prompt, score in zip(prompts, scores, strict=True):
        if score.reward is None or not isclose(score.reward, scorer.gold_reward):
            raise RunFailed(
                f"Parity gate: the gold answer {prompt.example.reference!r} of {prompt.prompt_id} scores {score.reward} instead of "
                f"{scorer.gold_reward}{f' ({score.reason})' if score.reason else ''}, so a right completion would not be rewarded; "
                "check [reward] type and normalize, or the reference."
            )
    return f"{len(scores)}/{len(scores)}"
