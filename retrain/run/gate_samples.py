"""Ask an engine for the completions of the parity gate, as rows with the learner's log-probs. They
answer a few prompts of the run and a long prompt.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, cycle
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from retrain.backends.base import Backend
from retrain.errors import RunFailed
from retrain.inference_engine.base import NoiseKey, SampleRequest, Truncation
from retrain.noise import Stream
from retrain.types import (
    Completion,
    Example,
    FinishReason,
    Float32Array,
    Int32Array,
    Prompt,
    Row,
    Trajectory,
)

PROMPTS = 4
TOKENS = 32
"""Tokens per completion, even if the run's completions are shorter: over few tokens, rounding alone
can look like a fault.
"""
FEW_TOKENS = 16
"""Tokens per completion after the long prompt, and with the current adapter."""
SAMPLES = 2
_DRAWS = 4
"""Completions of one prompt, of which no two may be equal by chance."""
_SERVED_ROOM = 512
"""Least number of tokens of prompt and completion that a server takes, as `retrain serve` starts
it.
"""
PAGE = 256
"""Tokens. No server's KV cache has longer blocks, and a server never reuses a block that is not
full.
"""
_ROUNDED_LOGPROB = 1e-3
"""Nats above 0 that rounding may give a log-prob."""


@dataclass(frozen=True)
class GateInputs:
    backend: Backend
    check_references: Callable[[Sequence[Prompt]], str]
    """Says how many reference answers score, or "not applicable"; raises RunFailed for a reference
    answer that does not.
    """
    eos_ids: Sequence[int]
    answers: Callable[[Prompt], list[Int32Array]]
    """Token ids of answers to a prompt, after which a completion may well end; empty without a
    known answer.
    """
    temperature: float
    truncation: Truncation
    longest_row: int
    """Tokens of the run's longest prompt and completion together."""
    seed: int
    half_precision: bool
    """True if either side rounds weights, activations or the KV cache to 16 bits or fewer."""
    eight_bits: bool
    """True if the sampler rounds its weights or its KV cache to 8 bits or fewer."""
    dtype_set: bool
    """True if [inference] dtype says in which type the sampler computes."""
    step: int
    """Training steps behind the weights."""
    trained: bool
    """The engine already serves these weights, and the gate checks it with them before the trial
    adapter.
    """

    @property
    def in_process(self) -> bool:
        return self.backend.engine.capabilities.in_process

    @property
    def engine_temperature(self) -> float:
        """The temperature of the engine's log-probs: raw log-probs are at 1, at any temperature of
        the run.
        """
        return 1.0 if self.backend.engine.capabilities.logprobs == "raw" else self.temperature

    @property
    def sharpness(self) -> float:
        """The factor by which the temperature multiplies the rounding of logits, at least 1."""
        return 1 / min(1.0, self.engine_temperature)

    def sync(self) -> None:
        self.backend.engine.sync(self.backend.save_adapter, self.step)

    def learner_logprobs(self, rows: Sequence[Row]) -> Float32Array:
        """Return [n] of all tokens of the rows, at the temperature of the engine's log-probs."""
        return np.concatenate(self.backend.logprobs(rows, self.engine_temperature))


@dataclass(frozen=True)
class GateSample:
    """Completions as rows, and the learner's log-probs under the same adapter."""

    inputs: GateInputs
    rows: list[Row]
    learner: Float32Array
    """[n] of all tokens of the rows."""

    @property
    def off(self) -> Float32Array:
        """[n] engine - learner."""
        return np.concatenate([row.logprobs for row in self.rows]) - self.learner

    @property
    def at_end(self) -> npt.NDArray[np.bool_]:
        """[n] the tokens that end a completion."""
        ids = [row.token_ids[list(row.action_positions())] for row in self.rows]
        return np.isin(np.concatenate(ids), self.inputs.eos_ids)

    @cached_property
    def rounding(self) -> Float32Array:
        """[n] effect of half precision on the learner's log-probs; 0 if it is unknown. Ask for it
        before the adapter changes.
        """
        inputs = self.inputs
        other = inputs.backend.rounded_logprobs(self.rows, inputs.engine_temperature)
        return np.concatenate(other) - self.learner if other else np.zeros_like(self.learner)


Samples = dict[str, GateSample]
"""Address of a server, or "" -> its completions. A judgment of all servers together would hide the
fault of one server among sound ones.
"""


class Asked(NamedTuple):
    prompt: Prompt
    slot: int
    """The slot of the noise. It is the same in every look: an engine may know the prompt by it, and
    hold its old keys and values.
    """
    draws: int
    max_tokens: int


def sampled(inputs: GateInputs, asked: Sequence[Asked], look: int) -> Samples:
    """Sample completions, and score them with the learner. Each look has other samples."""
    rows, replicas = dict[str, list[Row]](), inputs.backend.engine.replicas
    for item in completed(inputs, asked, look):
        nothing = np.zeros(len(item.token_ids), np.float32)
        prompt, own = asked[item.request // replicas].prompt, Trajectory.of(item)
        rows.setdefault(item.server, []).extend(Row.of(prompt, own, nothing, group=item.request))
    return {
        server: GateSample(inputs, own, inputs.learner_logprobs(own))
        for server, own in sorted(rows.items())
    }


def joined(samples: Samples) -> GateSample:
    """Return the completions of all servers as one sample. It keeps their rounding, since the
    adapter changes before anybody asks for it.
    """
    parts = list(samples.values())
    if len(parts) == 1:
        return parts[0]
    rows = list(chain.from_iterable(part.rows for part in parts))
    whole = GateSample(parts[0].inputs, rows, np.concatenate([part.learner for part in parts]))
    if whole.inputs.half_precision:
        vars(whole)["rounding"] = np.concatenate([part.rounding for part in parts])
    return whole


def completed(inputs: GateInputs, asked: Sequence[Asked], look: int) -> list[Completion]:
    """Sample every request on each of the engine's servers; `Completion.request` numbers these
    copies. Raises RunFailed for completions that no policy of this model and these requests gives.
    """
    engine = inputs.backend.engine
    requests = [
        SampleRequest(
            prompt_ids=prompt.token_ids,
            count=count,
            max_tokens=min(max_tokens, positions(inputs) - len(prompt.token_ids)),
            temperature=inputs.temperature,
            noise=NoiseKey(inputs.seed, Stream.PARITY, 0, slot),
            first_sample=look * count,
            truncation=inputs.truncation,
        )
        for prompt, slot, count, max_tokens in asked
        # The engine assigns copies in turn, so each server gets each.
        for _ in range(engine.replicas)
    ]
    completions = sorted(engine.sample(requests), key=lambda item: (item.request, item.sample))
    wanted = sum(one.count for one in requests)
    if len(completions) != wanted:
        raise RunFailed(
            f"Parity gate: the engine returned {len(completions)} completions, and the request"
            f" was for {wanted}."
        )
    for item in completions:
        problem = _problem(item, requests[item.request], inputs.eos_ids)
        if problem:
            raise RunFailed(f"Parity gate: the engine {problem}.")
    return completions


def _problem(completion: Completion, request: SampleRequest, eos_ids: Sequence[int]) -> str:
    """Return why the policy cannot have sampled this completion; "" if it can."""
    ids, logprobs = completion.token_ids, completion.logprobs
    stopped = completion.finish_reason is FinishReason.STOP
    ends = np.isin(ids, eos_ids)
    if not len(ids) == len(logprobs) > 0:
        return (
            f"returned {len(ids)} tokens with {len(logprobs)} log-probs; all sampled tokens have"
            " one, the end-of-sequence token too"
        )
    if ends[:-1].any() or ends[-1] != stopped:
        return (
            "returned a completion that stopped without an end-of-sequence token"
            f" ({[*eos_ids]}), or went on after it, so the model would not learn to end"
        )
    if not stopped and len(ids) != request.max_tokens:
        return (
            f"returned {len(ids)} tokens of a completion that did not stop, and the request was"
            f" for {request.max_tokens}"
        )
    broken = logprobs[~(np.isfinite(logprobs) & (logprobs <= _ROUNDED_LOGPROB))]
    if len(broken):
        return (
            f"returned a log-prob of {broken[0]:.3g}, which no sampled token has: check the model's"
            " weights and [model] dtype"
        )
    if request.truncation.active and (completion.kept is None or len(completion.kept) != len(ids)):
        return (
            "does not report the tokens that [training] top_k, top_p and min_p keep, so it may"
            ' not truncate; leave these off, or use engine = "pytorch"'
        )
    return ""


def long_prompt(inputs: GateInputs, prompts: Sequence[Prompt]) -> Prompt:
    """Return the prompts' tokens, repeated to more than a page of a KV cache. If the run gets past
    the model's sliding window, the prompt does too.
    """
    room, wanted = positions(inputs) - FEW_TOKENS, PAGE
    _, window = inputs.backend.reach
    if window + FEW_TOKENS < inputs.longest_row:  # A server has room for the longest row alone.
        wanted = max(wanted, window)
    length = max(1, min(wanted + 1, room))
    ids = np.resize(np.concatenate([prompt.token_ids for prompt in prompts]), length)
    ids = ids.astype(np.int32)
    # Use whole prompts if the server takes text: a cut prompt may encode to other ids.
    if not inputs.backend.engine.capabilities.token_ids_in:
        ids = prompts[0].token_ids
        for prompt in cycle([*prompts[1:], prompts[0]]):
            if len(ids) >= length or len(ids) + len(prompt.token_ids) > room:
                break
            ids = np.concatenate([ids, prompt.token_ids])
    return _own_prompt(ids)


def endings(inputs: GateInputs, prompts: Sequence[Prompt]) -> list[Asked]:
    """Ask for completions of the first prompt, and for one token after each known answer, since few
    completions of the gate's length end by themselves.
    """
    asked = [Asked(prompts[0], PROMPTS + 1, _DRAWS, TOKENS)]
    # A cut prompt may not encode to the same ids again.
    if not inputs.backend.engine.capabilities.token_ids_in:
        return asked
    for prompt in prompts:
        for answer in inputs.answers(prompt):
            ids = np.append(prompt.token_ids, answer).astype(np.int32)
            if len(ids) < positions(inputs):
                asked.append(Asked(_own_prompt(ids), PROMPTS + 1 + len(asked), _DRAWS, 1))
    return asked


def _own_prompt(ids: Int32Array) -> Prompt:
    return Prompt(Example(prompt="", reference="", example_id="the gate's own"), "", ids)


def positions(inputs: GateInputs) -> int:
    """Return the number of tokens that prompt and completion may have together: in the model's
    context, and in the length of the server's context. MLX-LM, which takes text, has no such
    length.
    """
    known, _ = inputs.backend.reach
    if not inputs.in_process and inputs.backend.engine.capabilities.token_ids_in:
        known = min(known, max(inputs.longest_row, _SERVED_ROOM))
    return known
