"""The parity gate: before the first optimizer step, engine and learner must be the same policy.

It samples a few completions, lets the learner compute the same log-probs, and checks that EOS is an action, that the chat template
survives a round trip, and that the gold answer scores 1 where the reward compares answers. A gate that fails stops the run.
"""

import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from math import isclose

import numpy as np

from retrain.backends.base import Backend
from retrain.errors import RunFailed
from retrain.inference_engine.base import NoiseKey, SampleRequest, Truncation
from retrain.noise import Stream
from retrain.rewards import Scorer, ScoreRequest, gold_response
from retrain.types import Completion, FinishReason, Float32Array, Int32Array, Prompt, Row

_PROMPTS = 4
_SAMPLES = 2
_MAX_TOKENS = 48

_FP32_IN_PROCESS = 1e-4
_FP32_SERVER = 1e-3
_BF16_MEAN = 0.02
_BF16_MAX = 0.5
"""Known faults are far above: raw log-probs at T = 0.7 give 1.97, a stale KV cache 0.2, the base model instead of the adapter more."""


@dataclass(frozen=True)
class GateResult:
    """What the gate measured; kept in environment.json."""

    tokens: int
    max_difference: float
    mean_difference: float
    tolerance: float
    gold: str
    """"<right>/<asked>" gold answers, or "not applicable" where the reward does not compare answers."""

    def to_json(self) -> dict[str, float | int | str]:
        return asdict(self)

    def line(self) -> str:
        return (
            f"Parity gate passed: engine and learner agree to {self.max_difference:.1e} nats over {self.tokens} tokens "
            f"(tolerance {self.tolerance:g}), EOS is trained, gold answers score: {self.gold}."
        )


@dataclass(frozen=True)
class GateInputs:
    backend: Backend
    scorer: Scorer
    decode: Callable[[Int32Array], str]
    """Token ids to text with special tokens kept."""
    eos_ids: Sequence[int]
    temperature: float
    truncation: Truncation
    max_tokens: int
    seed: int
    half_precision: bool
    """Weights, activations or the KV cache of either side are rounded to 16 bits or fewer."""
    in_process: bool


def parity_gate(inputs: GateInputs, prompts: Sequence[Prompt]) -> GateResult:
    """Raises RunFailed in one sentence that names the check that failed."""
    prompts = prompts[:_PROMPTS]
    _check_template(inputs, prompts)
    completions = _sample(inputs, prompts)
    differences = _differences(inputs, prompts, completions)
    tolerance = _check_differences(inputs, differences)
    _check_eos(inputs, prompts[0])
    return GateResult(
        tokens=len(differences),
        max_difference=float(differences.max()),
        mean_difference=float(differences.mean()),
        tolerance=tolerance,
        gold=_check_gold(inputs, prompts),
    )


def _sample(inputs: GateInputs, prompts: Sequence[Prompt]) -> list[Completion]:
    requests = [
        SampleRequest(
            prompt_ids=prompt.token_ids,
            count=_SAMPLES,
            max_tokens=min(_MAX_TOKENS, inputs.max_tokens),
            temperature=inputs.temperature,
            noise=NoiseKey(inputs.seed, Stream.PARITY, 0, slot),
            truncation=inputs.truncation,
        )
        for slot, prompt in enumerate(prompts)
    ]
    completions = sorted(inputs.backend.engine.sample(requests), key=lambda item: (item.request, item.sample))
    if inputs.truncation.active and any(item.kept is None for item in completions):
        raise RunFailed(
            "Parity gate: [training] top_k, top_p or min_p is set, and the engine's completions do not say how many tokens were kept, so "
            'it may not truncate at all: leave the three off, or use [inference] engine = "pytorch".'
        )
    return completions


def _differences(inputs: GateInputs, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> Float32Array:
    """|engine - learner| of every sampled token."""
    rows = [
        Row.from_completion(prompts[item.request], item, np.zeros(len(item.token_ids), np.float32), group=item.request)
        for item in completions
    ]
    learner = inputs.backend.logprobs(rows)
    return np.concatenate([np.abs(item.logprobs - ours) for item, ours in zip(completions, learner, strict=True)])


def _check_differences(inputs: GateInputs, differences: Float32Array) -> float:
    if not np.isfinite(differences).all():
        raise RunFailed("Parity gate: a log-prob is not finite before any training: check the model's weights and [model] dtype.")
    largest, mean = float(differences.max()), float(differences.mean())
    if inputs.half_precision:
        if largest > _BF16_MAX or mean > _BF16_MEAN:
            raise RunFailed(
                f"Parity gate: engine and learner disagree by {largest:.3g} nats at most and {mean:.3g} on average (allowed in half "
                f"precision: {_BF16_MAX} and {_BF16_MEAN}); the ratio would be wrong from the first step, so nothing was trained: "
                "set [inference] dtype to [model] dtype, or report it."
            )
        return _BF16_MAX
    tolerance = _FP32_IN_PROCESS if inputs.in_process else _FP32_SERVER
    if largest > tolerance:
        raise RunFailed(
            f"Parity gate: engine and learner disagree by {largest:.3g} nats (allowed: {tolerance:g}); the ratio would be wrong from "
            "the first step, so nothing was trained: set [inference] dtype to [model] dtype, or report it."
        )
    return tolerance


def _check_eos(inputs: GateInputs, prompt: Prompt) -> None:
    """A completion that is EOS alone must be a row with that one action, and the learner must give it a log-prob."""
    eos = np.array([inputs.eos_ids[0]], np.int32)
    nothing = np.zeros(1, np.float32)
    completion = Completion(0, 0, eos, nothing, None, FinishReason.STOP)
    row = Row.from_completion(prompt, completion, nothing, group=0)
    actions = [int(row.token_ids[position]) for position in row.action_positions()]
    (logprob,) = inputs.backend.logprobs([row])
    if actions != [int(eos[0])] or logprob.shape != (1,) or not np.isfinite(logprob).all():
        raise RunFailed(
            f"Parity gate: the sampled end-of-sequence token {int(eos[0])} is not trained, so completions would never learn to stop."
        )


def _check_template(inputs: GateInputs, prompts: Sequence[Prompt]) -> None:
    for prompt in prompts:
        back = inputs.decode(prompt.token_ids)
        # A tokenizer may add BOS, normalise Unicode and move a leading space; anything else is a broken template.
        if not _plain(back).endswith(_plain(prompt.text)):
            raise RunFailed(
                f"Parity gate: prompt {prompt.prompt_id} does not survive the tokenizer: {prompt.text[:60]!r} came back as {back[:60]!r}; "
                "check the tokenizer's files and [data] chat_template_args."
            )


def _plain(text: str) -> str:
    return "".join(unicodedata.normalize("NFKC", text).split())


def _check_gold(inputs: GateInputs, prompts: Sequence[Prompt]) -> str:
    if not inputs.scorer.compares_answers:
        return "not applicable"
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
    scores = [future.result() for future in [inputs.scorer.submit(request) for request in requests]]
    for prompt, score in zip(prompts, scores, strict=True):
        if score.reward is None or not isclose(score.reward, inputs.scorer.gold_reward):
            raise RunFailed(
                f"Parity gate: the gold answer {prompt.example.reference!r} of {prompt.prompt_id} scores {score.reward} instead of "
                f"{inputs.scorer.gold_reward} {score.reason}, so a right completion would not be rewarded: "
                "check [reward] type and normalize, or the reference."
            )
    return f"{len(scores)}/{len(scores)}"
