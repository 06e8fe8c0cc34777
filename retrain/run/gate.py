"""The parity gate: before the first optimizer step, engine and learner must be the same policy,
adapter included.

It samples a few completions, one of them after a prompt longer than a page of a KV cache, and
compares the engine's log-probs with the learner's; `gate_fits.py` says what the differences mean.
At a fresh start every lora_B is 0, so an engine that ignores the adapter would pass. The gate
therefore gives the adapter a seeded trial value with a visible effect on every adapted layer and
samples again. If the engine lacks part of the adapter, the differences contain a share of its
effect; the gate fits this share for each group of layers. The adapter is then restored byte for
byte. The gate also checks that truncation keeps what it should, that completions end at EOS with
its log-prob, that completions are drawn one by one, that the chat template survives a round trip,
and that the gold answer scores 1 where the reward compares answers. What noise could explain is
looked at again with other noise; what fails twice stops the run.
"""

import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain, cycle
from math import exp, isclose

import numpy as np

from retrain.backends.base import TrialAdapter
from retrain.environments.episodes import EpisodeHost, play
from retrain.environments.loading import environment_code
from retrain.errors import RunFailed
from retrain.inference_engine.base import NoiseKey, SampleRequest, Truncation
from retrain.noise import Stream
from retrain.rewards import Scorer, ScoreRequest, gold_response
from retrain.run.gate_fits import (
    CHECK,
    GateInputs,
    GateSample,
    adapter_suspects,
    agreement,
    rounding_hides_temperature,
    temperature_suspects,
    visible_strength,
)
from retrain.run.gate_looks import Findings, first_sound
from retrain.run.identical import chance_of_identical
from retrain.types import (
    Completion,
    Example,
    FinishReason,
    Float32Array,
    Int32Array,
    Outcome,
    Prompt,
    Row,
    Trajectory,
)

_PROMPTS = 4
_SAMPLES = 2
_TOKENS = 32
"""Per completion, also where the run's are shorter: of a few tokens rounding alone can look like a
fault."""
_SERVED_ROOM = 512
"""Tokens that a server takes at least: prompt and completion together, as `retrain serve` starts
one."""
_PAGE = 256
"""Tokens. No server's KV cache has longer blocks, and a block that is not full is never reused."""
_FEW_TOKENS = 16
"""Tokens per completion after the long prompt, and in the last check, after the adapter has been
restored."""
_LOOKS = 2
"""A run stops if as many samples, each with its own noise, show a fault."""
_ROUNDED_LOGPROB = 1e-3
"""Nats above 0 that rounding may give a log-prob."""
_IMPOSSIBLE = 1e-6
"""Chance of identical completions, in each of two looks, below which they are not drawn one by
one."""
_MISCOUNTED, _MISCOUNTED_IN_HALF = 0.01, 0.1
"""Share of tokens, and at least two of them, whose kept count may be outside of what rounding
allows. Half precision is known by its mean alone, and single tokens move by several times that."""
_MAX_SLACK = 500.0
"""Nats of rounding that a count allows for: near temperature 0 no float would hold e to it."""
_ENDINGS, _EXPECTED_ENDINGS = 64, 10.0
"""Completions of one token that the gate asks for so that some are EOS, and how many it then has to
expect to miss them: none has a chance of e^-10."""
_ENDING = "where completions end, "
_EXPLAINS = 0.5
"""Share of the differences' sum of squares from which a direction says more than their size."""
_FEW_EOS = 4
"""Ids of EOS that are tried."""
_CERTAIN = 0.8
"""From this probability on, EOS is sampled hot."""
_ALONE = 4
"""Completions, sampled hot: none may equal another by chance."""
_HOT = 2.0
"""The temperature of hot samples, if the run's is not higher: the highest that every server
takes."""

_NOT_APPLICABLE = "not applicable"


@dataclass(frozen=True)
class GateResult:
    """The gate's measurements, kept in environment.json."""

    tokens: int
    longest_prompt: int
    """Tokens."""
    gold: str = _NOT_APPLICABLE
    """"<right>/<asked>" gold answers, unless the reward does not compare answers."""
    max_difference: float | None = None
    """This and the next two: None where the backend cannot score rows, so that nothing was
    compared."""
    mean_difference: float | None = None
    tolerance: float | None = None
    """For the mean in half precision, else for the largest difference."""
    adapter_effect: float | None = None
    """Nats by which the trial adapter changed the log-probs on average; None where the backend
    cannot change its adapter."""
    groups: int = 0
    """Groups of layers. Where engine and learner differ by more than rounding, each is fitted by
    itself."""
    half_precision: bool = False
    """Engine and learner were compared as in half precision, since a key says so or since they
    differ just so."""
    rounding: float | None = None
    """Nats by which half precision moves the learner's own log-probs on average; None in float32,
    or where it is not known."""
    endings: int = 0
    """Completions that ended at EOS."""

    def to_json(self) -> dict[str, float | int | str | None]:
        return asdict(self)

    @property
    def brief(self) -> str:
        """The short form of `line`, for a terminal."""
        found = "engine and learner not compared"
        if self.max_difference is not None:
            apart = self.mean_difference if self.half_precision else self.max_difference
            found = f"engine and learner agree to {apart:.1e} nats"
        return f"gate: {found}, gold answers {self.gold}"

    def line(self) -> str:
        if self.max_difference is None:
            return (
                f"Parity gate passed in part: {self.tokens} tokens sampled, gold answers score:"
                f" {self.gold}; engine and learner were not compared, since this backend's trainer"
                " returns no log-probs."
            )
        effect = "the adapter's effect was not checked, since this backend cannot try one"
        if self.adapter_effect is not None:
            effect = (
                f"the adapter changes the log-probs by {self.adapter_effect:.2g} nats on average"
            )
        found, own = f"{self.max_difference:.1e} nats", ""
        if self.half_precision:
            found = f"{self.mean_difference:.2g} nats on average"
        if self.half_precision and self.rounding is not None:
            own = f"; half precision moves the learner's own by {self.rounding:.2g}"
        found += f" over {self.tokens} tokens (tolerance {self.tolerance:.2g}{own})"
        ends = "EOS is trained"
        if not self.endings:
            ends = "EOS is trained (no completion could be made to end)"
        return (
            f"Parity gate passed: engine and learner agree to {found}, {effect}, {ends}, gold"
            f" answers score: {self.gold}."
        )


def parity_gate(inputs: GateInputs, prompts: Sequence[Prompt]) -> GateResult:
    """Run the gate. Raises RunFailed in one sentence that names the failed check. The adapter's
    bytes are restored in any case.
    """
    prompts = prompts[:_PROMPTS]
    passed = _compared(inputs, prompts)
    # 5. Gold answers are rewarded.
    return replace(passed, gold=inputs.check_gold(prompts))


def _compared(inputs: GateInputs, prompts: Sequence[Prompt]) -> GateResult:
    """Run the gate but for the gold answers."""
    # 1. The prompts survive the tokenizer.
    _check_template(inputs, prompts)
    asked = [*prompts, _long_prompt(inputs, prompts)]
    if not inputs.backend.capabilities.scores_rows:
        return _gate_without_learner(inputs, prompts)
    # 2. Engine and learner agree with the adapter as it is: on few prompts, where a trial adapter
    # asks all of them next.
    few = asked[:1] + asked[-1:]
    trial = inputs.backend.trial_adapter(inputs.seed)
    if not inputs.trained:
        _sync(inputs)
    when = "after the first step's adapter was synced, " if inputs.trained else ""
    sampled = _first_look(inputs, asked if trial is None else few, when)
    inputs = sampled.inputs
    # 3. They agree under an adapter that shows, and again after it was taken back.
    found, effect = agreement(sampled), None
    if trial is not None:
        with trial:
            strength = visible_strength(trial, sampled)
            _sync(inputs)
            looks = (_trial_look(inputs, trial, strength, asked, look) for look in range(_LOOKS))
            sampled, effect = first_sound(looks)
            found = agreement(sampled)
        _sync(inputs)
        if not inputs.in_process:
            _compare(inputs, few, _FEW_TOKENS, "after the trial adapter was taken back, ")
    # 4. The end of a completion is trained, and completions are equal only by chance.
    _check_eos(inputs, prompts[0])
    _check_drawn_alone(inputs, prompts[0])
    endings = _check_endings(sampled, prompts)
    return GateResult(
        tokens=found.tokens,
        max_difference=found.largest,
        mean_difference=found.mean,
        tolerance=found.tolerance,
        adapter_effect=effect,
        groups=len(trial.groups) if trial is not None else 0,
        longest_prompt=max(len(prompt.token_ids) for prompt in asked),
        half_precision=inputs.half_precision,
        rounding=found.rounding,
        endings=endings,
    )


def _gate_without_learner(inputs: GateInputs, prompts: Sequence[Prompt]) -> GateResult:
    """Check a sampler alone: that it answers in the model's tokens, with log-probs."""
    _sync(inputs)
    completions = _ask(inputs, _requests(inputs, prompts, _FEW_TOKENS, 0))
    _check_finite([completion.logprobs for completion in completions])
    return GateResult(
        tokens=sum(len(completion.token_ids) for completion in completions),
        longest_prompt=max(len(prompt.token_ids) for prompt in prompts),
    )


def adapter_check(inputs: GateInputs, prompts: Sequence[Prompt]) -> None:
    """Run only the first check, with the adapter that the engine serves. Raises RunFailed."""
    prompts = prompts[:_PROMPTS]
    few = [prompts[0], _long_prompt(inputs, prompts)]
    _compare(inputs, few, _FEW_TOKENS, "after a server woke up or came back, ")


def _sync(inputs: GateInputs) -> None:
    inputs.backend.engine.sync(inputs.backend.save_adapter, inputs.step)


def _long_prompt(inputs: GateInputs, prompts: Sequence[Prompt]) -> Prompt:
    """Return the prompts' tokens, repeated to more than a page of a KV cache, and past the model's
    sliding window if the run gets that far.
    """
    positions, wanted = _positions(inputs), _PAGE
    _, window = inputs.backend.reach
    if window + _FEW_TOKENS < inputs.longest_row:  # a server has room for the longest row alone
        wanted = max(wanted, window)
    length = max(1, min(wanted + 1, positions - _FEW_TOKENS))
    ids = np.resize(np.concatenate([prompt.token_ids for prompt in prompts]), length)
    ids = ids.astype(np.int32)
    # Whole prompts where text is sent: cut anywhere else, it may encode to other ids.
    if not inputs.backend.engine.capabilities.token_ids_in:
        ids = prompts[0].token_ids
        for prompt in cycle([*prompts[1:], prompts[0]]):
            if len(ids) >= length or len(ids) + len(prompt.token_ids) > positions - _FEW_TOKENS:
                break
            ids = np.concatenate([ids, prompt.token_ids])
    return Prompt(Example(prompt="", reference="", example_id="the gate's long prompt"), "", ids)


# -- engine and learner on the same tokens ---------------------------------------------------------


def _first_look(inputs: GateInputs, prompts: Sequence[Prompt], when: str) -> GateSample:
    """Compare with the adapter as it is. A server whose precision no key gives is compared in half
    precision from then on if it differs as half precision makes this model differ.
    """
    try:
        return _compare(inputs, prompts, _FEW_TOKENS, when)
    except RunFailed:
        if inputs.half_precision or inputs.in_process or inputs.dtype_set or inputs.trained:
            raise
        halved = replace(inputs, half_precision=True)
        sampled = _sampled(halved, prompts, _FEW_TOKENS, 0)
        for part in sampled.by_server().values():
            if _fault(part, when) or temperature_suspects(part):
                raise
        inputs.backend.engine.rounds = True
        return sampled


def _compare(
    inputs: GateInputs,
    prompts: Sequence[Prompt],
    max_tokens: int,
    when: str,
) -> GateSample:
    """Sample and compare. Raises RunFailed if every look finds a fault."""

    def looks() -> Iterator[tuple[GateSample, Findings]]:
        for look in range(_LOOKS):
            sampled = _sampled(inputs, prompts, max_tokens, look)
            parts = sampled.by_server().items()
            yield sampled, {server: _fault(part, when) for server, part in parts}

    return first_sound(looks())


def _trial_look(
    inputs: GateInputs, trial: TrialAdapter, strength: float, prompts: Sequence[Prompt], look: int
) -> tuple[tuple[GateSample, float], Findings]:
    """Sample under the trial adapter, which the engine serves; return the completions, by how many
    nats the adapter changed the log-probs on average, and what is wrong with them.
    """
    sampled = _sampled(inputs, prompts, _TOKENS, look)
    effects, findings = list[float](), {}
    for server, part in sampled.by_server().items():
        # First, since it measures rounding under this adapter.
        found = _fault(part, "with a trial adapter, ")
        effect, suspects = adapter_suspects(trial, strength, part)
        hotter = temperature_suspects(part)
        if hotter and not rounding_hides_temperature(part):
            suspects += hotter
        explained, sentence = max(suspects, default=(0.0, ""))
        effects.append(effect)
        findings[server] = sentence if not found or explained > _EXPLAINS else found
    return (sampled, float(np.mean(effects))), findings


def _fault(part: GateSample, when: str) -> str:
    """Return the fault that a server's completions show, as a sentence; "" if there is none."""
    return _miscounted(part) or _disagreement(part, when)


def _miscounted(sampled: GateSample) -> str:
    """Compare the engine's kept counts with the counts by the learner's own logits, which rounding
    may move at the boundary.
    """
    inputs, cuts = sampled.inputs, sampled.inputs.truncation
    counts = [row.kept for row in sampled.rows if row.kept is not None]
    if not counts:
        return ""
    # Rounding moves tokens across the boundary, so a count lies between the counts of a slightly
    # tighter cut and of a slightly wider one.
    slack = min(2 * agreement(sampled).tolerance, _MAX_SLACK)
    fewest = inputs.backend.kept(sampled.rows, _moved(cuts, -slack))
    most = inputs.backend.kept(sampled.rows, _moved(cuts, slack))
    if fewest is None or most is None:
        return ""
    low, high = np.concatenate(fewest), np.concatenate(most)
    found = np.concatenate(counts)
    outside = (found < low) | (found > high)
    allowed = _MISCOUNTED_IN_HALF if inputs.half_precision else _MISCOUNTED
    if outside.sum() <= max(1, allowed * len(found)):
        return ""
    worst = int(np.argmax(np.maximum(low - found, found - high)))
    if low[worst] == high[worst]:
        right = f"{low[worst]:,.0f}"
    else:
        right = f"{low[worst]:,.0f} to {high[worst]:,.0f}"
    return (
        f"Parity gate: the engine kept {found[worst]:,} tokens where [training] top_k ="
        f" {cuts.top_k}, top_p = {cuts.top_p:g} and min_p = {cuts.min_p:g} keep {right} of the"
        f" learner's distribution, and {outside.sum()} of {len(found)} counts are wrong, so"
        f" {inputs.consequence}; check that the engine truncates as the request says."
    )


def _moved(cuts: Truncation, slack: float) -> Truncation:
    """Cuts that keep as many tokens, at most or (with `slack` below 0) at least, as `cuts` do if
    logits move by |slack| / 2 nats.

    The odds of a set's probability then change by a factor of at most e^|slack|, and so does the
    ratio of two probabilities.
    """
    top_p = cuts.top_p
    if top_p < 1:
        top_p = 1 / (1 + (1 / top_p - 1) * exp(-slack))
    return Truncation(cuts.top_k, top_p, min(1.0, cuts.min_p * exp(-slack)))


def _disagreement(sampled: GateSample, when: str) -> str:
    inputs, found = sampled.inputs, agreement(sampled)
    if not found.excess:
        return ""
    if when == _ENDING:
        advice = (
            f"so {inputs.consequence}; check the log-prob that the engine returns for the"
            " end-of-sequence token, and that it samples with no temperature, top_p or penalty of"
            " its own"
        )
    elif when:
        advice = CHECK
    elif inputs.in_process:
        change = "report it"
        if inputs.dtype_set:
            change = "set [inference] dtype to [model] dtype, or report it"
        advice = f"the ratio would be wrong, so {inputs.consequence}; {change}"
    else:
        same = "model, tokenizer and dtype, which [inference] dtype says"
        if inputs.dtype_set:
            same = "model and tokenizer"
        advice = (
            f"so {inputs.consequence}; check that the server has the same {same}, and that it"
            " samples with no temperature, top_p or penalty of its own"
        )
    own = ""
    if found.rounding is not None:
        own = f", where half precision moves the learner's own by {found.rounding:.2g}"
    reason = inputs.backend.engine.why_it_differs() or advice
    return f"Parity gate: {when}engine and learner disagree {found.excess}{own}; {reason}."


def _sampled(
    inputs: GateInputs, prompts: Sequence[Prompt], max_tokens: int, look: int
) -> GateSample:
    """Sample a few completions of each prompt, and one of the long prompt, which comes last."""
    *short, long = _requests(inputs, prompts, max_tokens, look)
    # The same noise in every sample: an engine may know the prompt by it.
    noise, tokens = replace(long.noise, prompt=_PROMPTS), min(_FEW_TOKENS, long.max_tokens)
    long = replace(long, count=1, max_tokens=tokens, noise=noise)
    sampled = _scored(inputs, prompts, _ask(inputs, [*short, long]))
    last = len(short) * inputs.backend.engine.replicas
    _check_finite(sampled.differences)
    rows = frozenset(number for number, row in enumerate(sampled.rows) if row.group >= last)
    return replace(sampled, long=rows)


def _check_finite(logprobs: Sequence[Float32Array]) -> None:
    if not np.isfinite(np.concatenate(logprobs)).all():
        raise RunFailed(
            "Parity gate: a log-prob is not finite before any training; check the model's weights"
            " and [model] dtype."
        )


def _ask(inputs: GateInputs, requests: Sequence[SampleRequest]) -> list[Completion]:
    """Sample every request on each of the engine's servers; `Completion.request` counts those
    copies. Raises RunFailed for completions that no policy of this model and these requests gives.
    """
    engine = inputs.backend.engine
    # shared out in turn, so each server gets each
    copies = list(chain.from_iterable([request] * engine.replicas for request in requests))
    completions = sorted(engine.sample(copies), key=lambda item: (item.request, item.sample))
    asked = [
        (number, request.first_sample + sample)
        for number, request in enumerate(copies)
        for sample in range(request.count)
    ]
    if [(item.request, item.sample) for item in completions] != asked:
        raise RunFailed(
            f"Parity gate: the engine returned {len(completions)} completions, which are not the"
            f" {len(asked)} asked for."
        )
    for item in completions:
        problem = _problem(item, copies[item.request], inputs.eos_ids)
        if problem:
            raise RunFailed(f"Parity gate: the engine {problem}.")
    return completions


def _problem(completion: Completion, request: SampleRequest, eos_ids: Sequence[int]) -> str:
    """Say why a completion is not one of the policy; "" if it is."""
    ids, logprobs = completion.token_ids, completion.logprobs
    stopped = completion.finish_reason is FinishReason.STOP
    ends = np.isin(ids, eos_ids)
    if not len(ids) == len(logprobs) > 0:
        return (
            f"returned {len(ids)} tokens with {len(logprobs)} log-probs; all sampled tokens have"
            " one, the end-of-sequence token too"
        )
    if stopped and not ends[-1]:
        return (
            "says that a completion stopped, and returned it without an end-of-sequence token"
            f" {[*eos_ids]}, so it would not be trained"
        )
    if ends[:-1].any() or (ends[-1] and not stopped):
        return f"does not stop at the end-of-sequence tokens {[*eos_ids]}"
    if len(ids) > request.max_tokens or (len(ids) < request.max_tokens and not stopped):
        return (
            f"returned {len(ids)} tokens of a completion that did not stop, and was asked for"
            f" {request.max_tokens}"
        )
    broken = logprobs[logprobs > _ROUNDED_LOGPROB]
    if len(broken):
        return f"returned a log-prob of {broken[0]:.3g}, which no token has"
    if request.truncation.active and (completion.kept is None or len(completion.kept) != len(ids)):
        return (
            "does not say how many tokens [training] top_k, top_p and min_p kept, so it may not"
            ' truncate at all: leave the three off, or use [inference] engine = "pytorch"'
        )
    return ""


def _scored(
    inputs: GateInputs, prompts: Sequence[Prompt], completions: Sequence[Completion]
) -> GateSample:
    """Completions of `prompts`, in the order in which `_ask` returns them, with the learner's
    log-probs.
    """
    rows, replicas = [], inputs.backend.engine.replicas
    for item in completions:
        nothing = np.zeros(len(item.token_ids), np.float32)
        rows += Row.of(
            prompts[item.request // replicas], Trajectory.of(item), nothing, group=item.request
        )
    servers = [item.server for item in completions]
    return GateSample(inputs, rows, inputs.learner_logprobs(rows), servers=servers)


def _requests(
    inputs: GateInputs, prompts: Sequence[Prompt], max_tokens: int, look: int
) -> list[SampleRequest]:
    """Another look has other samples of the same noise key, under which an engine may hold the
    prompt's old keys and values.
    """
    return [
        SampleRequest(
            prompt_ids=prompt.token_ids,
            count=_SAMPLES,
            max_tokens=min(max_tokens, _positions(inputs) - len(prompt.token_ids)),
            temperature=inputs.temperature,
            noise=NoiseKey(inputs.seed, Stream.PARITY, 0, slot),
            first_sample=look * _SAMPLES,
            truncation=inputs.truncation,
        )
        for slot, prompt in enumerate(prompts)
    ]


def _positions(inputs: GateInputs) -> int:
    """Return the number of tokens that prompt and completion may have together: in the model's
    context, and in the length for which a server was started. MLX-LM's, which takes text, has none.
    """
    positions, _ = inputs.backend.reach
    if not inputs.in_process and inputs.backend.engine.capabilities.token_ids_in:
        positions = min(positions, max(inputs.longest_row, _SERVED_ROOM))
    return positions


# -- tokens, template, reward ----------------------------------------------------------------------


def _check_eos(inputs: GateInputs, prompt: Prompt) -> None:
    """A completion of EOS alone must become a row with that one action, and the learner must give
    it a log-prob.
    """
    eos = np.array([inputs.eos_ids[0]], np.int32)
    nothing = np.zeros(1, np.float32)
    completion = Completion(0, 0, eos, nothing, None, FinishReason.STOP)
    (row,) = Row.of(prompt, Trajectory.of(completion), nothing, group=0)
    actions = [int(row.token_ids[position]) for position in row.action_positions()]
    (logprob,) = inputs.backend.logprobs([row])
    if actions != [int(eos[0])] or logprob.shape != (1,) or not np.isfinite(logprob).all():
        raise RunFailed(
            f"Parity gate: the sampled end-of-sequence token {int(eos[0])} is not trained, so the"
            " model would never learn to stop."
        )


def _check_endings(sampled: GateSample, prompts: Sequence[Prompt]) -> int:
    """Make completions end, and compare them; return how many of the gate's ended. Raises
    RunFailed.

    Where the learner finds EOS most probable, after an answer or part of a completion, one token is
    sampled many times; at a temperature at which EOS is not certain, since its log-prob would be
    about 0.
    """
    ended = _ended(sampled)
    # A prompt that is cut anywhere may not be encoded to the same ids again.
    if not sampled.inputs.backend.engine.capabilities.token_ids_in:
        return ended
    first = _likely_end(sampled, prompts[0])
    if _ENDINGS * first[2] < 1:
        return ended
    places = enumerate(_ending_places(sampled, prompts, first))
    return ended + first_sound(_ending_look(sampled.inputs, look, *place) for look, place in places)


EndingPlace = tuple[GateInputs, Prompt, float]
"""A place where EOS is likely, as a prompt, and its probability there by the learner, at the
temperature of the inputs."""


def _ending_look(
    own: GateInputs, look: int, inputs: GateInputs, place: Prompt, probability: float
) -> tuple[int, Findings]:
    """Sample one token at a place many times; return how many are EOS, and what is wrong. `own` has
    the run's temperature.
    """
    request = _probe(inputs, place, _ENDINGS, 1, look)
    probes = _scored(inputs, [place], _ask(inputs, [request]))
    surely_kept = probability > 0.5 or not inputs.truncation.active
    expected = surely_kept and _ENDINGS * probability >= _EXPECTED_ENDINGS
    findings = {}
    for server, part in probes.by_server().items():
        sentence = _disagreement(part, _ENDING)
        # Log-probs before the temperature are right for a run at 1. Tokens other than EOS tell them
        # from an EOS whose log-prob is always 0.
        if sentence and own.temperature == 1 and _ended(part) < len(part.rows):
            at_one = replace(part, inputs=own, learner=own.learner_logprobs(part.rows))
            sentence = _disagreement(at_one, _ENDING)
        if expected and not _ended(part):
            sentence = (
                f"Parity gate: none of {_ENDINGS} completions ended, where by the learner the"
                f" end-of-sequence token has a probability of {probability:.2f}, so"
                f" {inputs.consequence}; check that the engine samples it, and returns it."
            )
        findings[server] = sentence
    return _ended(probes), findings


def _ending_places(
    sampled: GateSample, prompts: Sequence[Prompt], first: EndingPlace
) -> Iterator[EndingPlace]:
    """Yield the places of two looks. All draws at one place have one rounding, so the second is
    another place: after the last prompt, or else after the first. It is the first place again only
    where no completion is likely to end anywhere else.
    """
    yield first
    for prompt in (prompts[-1], prompts[0]):
        other = _likely_end(sampled, prompt, first[1].token_ids)
        if _ENDINGS * other[2] >= 1:
            yield other
            return
    yield first


def _ended(sampled: GateSample) -> int:
    """How many completions end at EOS."""
    return int(np.isin([row.token_ids[-1] for row in sampled.rows], sampled.inputs.eos_ids).sum())


def _likely_end(sampled: GateSample, prompt: Prompt, seen: Int32Array | None = None) -> EndingPlace:
    """Return the place after `prompt` where EOS is most probable for the learner; with probability
    0 where the only place is `seen`.
    """
    inputs, start = sampled.inputs, len(prompt.token_ids)
    own = [
        row.token_ids
        for row in sampled.rows
        if np.array_equal(row.token_ids[: row.spans[0][0]], prompt.token_ids)
    ]
    # By their tokens: completions that begin alike share their places.
    begun = {
        ids[start:stop].tobytes(): ids[:stop]
        for ids in own
        for stop in range(start, min(len(ids), start + _FEW_TOKENS + 1))
    }
    begun |= {
        answer.tobytes(): np.append(prompt.token_ids, answer) for answer in inputs.answers(prompt)
    }
    places = [ids.astype(np.int32) for ids in begun.values() if len(ids) < _positions(inputs)]
    if seen is not None:
        places = [ids for ids in places if not np.array_equal(ids, seen)]
    if not places:
        return inputs, prompt, 0.0
    probabilities = _end_probabilities(inputs, places, start)
    place = places[int(np.argmax(probabilities))]
    probability = float(probabilities.max())
    if probability > _CERTAIN and not inputs.raw:
        inputs = replace(inputs, temperature=max(_HOT, inputs.temperature))
        probability = float(_end_probabilities(inputs, [place], start)[0])
    example = Example(prompt="", reference="", example_id="the gate's ending")
    return inputs, Prompt(example, "", place), probability


def _end_probabilities(
    inputs: GateInputs, places: Sequence[Int32Array], start: int
) -> Float32Array:
    """Return the learner's probability of an EOS after each of `places`, which share their first
    `start` tokens.
    """
    rows = []
    for place in places:
        for eos in inputs.eos_ids[:_FEW_EOS]:
            ids = np.append(place, np.int32(eos))
            nothing = np.zeros(len(ids) - start, np.float32)
            rows.append(Row(ids, ((start, len(ids)),), nothing, nothing, group=0))
    last = np.array(
        [own[-1] for own in inputs.backend.logprobs(rows, inputs.temperature)], np.float32
    )
    probabilities: Float32Array = np.exp(last).reshape(len(places), -1).sum(axis=1)
    return probabilities


def _check_drawn_alone(inputs: GateInputs, prompt: Prompt) -> None:
    """Sample a prompt often, hot, so that few completions are probable. Raises RunFailed for equal
    ones that cannot be equal by chance.
    """
    hot = replace(inputs, temperature=max(_HOT, inputs.temperature))

    def looks() -> Iterator[tuple[None, Findings]]:
        for look in range(_LOOKS):
            request = _probe(hot, prompt, _ALONE, _TOKENS, look)
            probes = _scored(hot, [prompt], _ask(hot, [request]))
            parts = probes.by_server().items()
            yield None, {server: _alike(part) for server, part in parts}

    first_sound(looks())


def _alike(part: GateSample) -> str:
    """Say that a server's completions of one prompt are equal, and not by chance; "" if not."""
    inputs, learner = part.inputs, part.learner
    if inputs.raw:
        learner = inputs.backend.logprobs(part.rows, inputs.temperature)
    ids = [row.token_ids[row.spans[0][0] :] for row in part.rows]
    chance = chance_of_identical([list(zip(ids, learner, strict=True))], min_tokens=1)
    if chance >= _IMPOSSIBLE:
        return ""
    return (
        f"Parity gate: completions of one prompt at temperature {inputs.temperature:g} are"
        f" identical, and by the learner's log-probs the chance is below {chance:.0e}: the engine"
        f" draws them with one seed, or ignores the temperature, so {inputs.consequence}; check"
        " how it takes n, seed and temperature."
    )


def _probe(
    inputs: GateInputs, prompt: Prompt, count: int, max_tokens: int, look: int
) -> SampleRequest:
    (request,) = _requests(inputs, [prompt], max_tokens, 0)
    noise = replace(request.noise, prompt=_PROMPTS + 1)
    return replace(request, count=count, first_sample=look * count, noise=noise)


def _check_template(inputs: GateInputs, prompts: Sequence[Prompt]) -> None:
    for prompt in prompts:
        back = inputs.decode(prompt.token_ids)
        # A tokenizer may add BOS, normalise Unicode and move a leading space; any other change
        # means a broken template.
        if not _plain(back).endswith(_plain(prompt.text)):
            raise RunFailed(
                f"Parity gate: prompt {prompt.prompt_id} does not survive the tokenizer:"
                f" {prompt.text[:60]!r} becomes {back[:60]!r}; check the tokenizer's files and"
                " [data] chat_template_args."
            )


def _plain(text: str) -> str:
    return "".join(unicodedata.normalize("NFKC", text).split())


def environment_gold(host: EpisodeHost, prompts: Sequence[Prompt]) -> str:
    """Play the replies that the environment itself calls right; each episode must be scored as
    right.
    """
    with environment_code("[environment] asking for its gold replies", host.timeout_s):
        asked = [(prompt, host.environment.gold(prompt.example)) for prompt in prompts]
    known = [(prompt, replies) for prompt, replies in asked if replies]
    for prompt, replies in known:
        score = play(host, prompt.example, replies)
        if score.outcome is not Outcome.RIGHT:
            raise RunFailed(
                f"Parity gate: the environment's own solution {list(replies)} of {prompt.prompt_id}"
                f" scores {score.reward}{f' ({score.reason})' if score.reason else ''}, which is"
                f" not right at [reward] correct_threshold = {host.correct_threshold:g}; check the"
                " environment, or lower the threshold."
            )
    if known:
        return f"{len(known)}/{len(known)}"
    return _NOT_APPLICABLE


def scored_gold(scorer: Scorer, think_end_token: str, prompts: Sequence[Prompt]) -> str:
    """Score the references of the data as answers."""
    if not scorer.compares_answers:
        return _NOT_APPLICABLE
    requests = [
        ScoreRequest(
            response=think_end_token + gold_response(prompt.example.reference),
            reference=prompt.example.reference,
            prompt="",  # It may open a thought.
            example=prompt.example,
            step=0,
            slot=slot,
            sample=0,
        )
        for slot, prompt in enumerate(prompts)
    ]
    futures = [scorer.submit(request) for request in requests]
    scores = [future.result() for future in futures]
    for prompt, score in zip(prompts, scores, strict=True):
        if score.reward is None or not isclose(score.reward, scorer.gold_reward):
            raise RunFailed(
                f"Parity gate: the gold answer {prompt.example.reference!r} of {prompt.prompt_id}"
                f" scores {score.reward} instead of"
                f" {scorer.gold_reward}{f' ({score.reason})' if score.reason else ''}, so a right"
                " completion would not be rewarded; check [reward] type and normalize, or the"
                " reference."
            )
    return f"{len(scores)}/{len(scores)}"
