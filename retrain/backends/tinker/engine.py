"""The sampler of the Tinker backend: the service samples from the weights that its learner saved
last.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from retrain.backends.tinker.facts import SAMPLER
from retrain.backends.tinker.service import Service
from retrain.errors import RunFailed
from retrain.inference_engine.base import InferenceEngine, SampleRequest
from retrain.types import Completion, FinishReason


@dataclass(eq=False)
class TinkerEngine(InferenceEngine):
    """All requests of a call go out at once; the SDK limits how many are on their way."""

    capabilities = SAMPLER

    service: Service
    eos_ids: list[int]
    request_sampler: Callable[[], Any]
    """Asks the learner for a sampler of its weights of this moment; returns the SDK's future."""
    _coming: Any = None
    """The sampler of the newest weights, asked for and not waited for yet."""
    _sampler: Any = None

    def expect_new_weights(self) -> None:
        """Ask for a sampler of the weights after all updates requested so far, without waiting for
        any of them.
        """
        self._coming = self.request_sampler()

    def sync(self, save_adapter: Callable[[Path], None], step: int) -> None:  # noqa: ARG002 - the weights stay with the service
        if self._coming is None:
            self.expect_new_weights()
        coming, self._coming = self._coming, None
        self._sampler = self.service.result("a sampler of the new weights", lambda: coming)

    def sample(self, requests: Sequence[SampleRequest]) -> Iterator[Completion]:
        what = f"{sum(request.count for request in requests)} completions"
        asked: dict[Future[Any], int] = {}
        with self.service.slot(), self.service.answering(what, of_sampler=True):
            try:
                asked |= {self._ask(request): number for number, request in enumerate(requests)}
                for future in as_completed(asked, timeout=self.service.timeout):
                    number = asked[future]
                    for index, sequence in enumerate(future.result().sequences):
                        yield self._completion(number, requests[number], index, sequence)
            except GeneratorExit:  # the run stops, and nobody waits for the rest
                for future in asked:
                    future.cancel()
                raise

    def _ask(self, request: SampleRequest) -> "Future[Any]":
        from tinker import types

        params = types.SamplingParams(
            max_tokens=request.max_tokens,
            temperature=request.temperature,
            seed=request.noise.seed_of(request.first_sample, request.first_position),
            stop=self.eos_ids,
        )
        prompt = types.ModelInput.from_ints(request.prompt_ids.tolist())
        future: Future[Any] = self._sampler.sample(
            prompt=prompt, num_samples=request.count, sampling_params=params
        ).future()
        return future

    def _completion(
        self, number: int, request: SampleRequest, index: int, sequence: Any
    ) -> Completion:
        tokens = np.array(sequence.tokens, np.int32)
        logprobs = np.array([] if sequence.logprobs is None else sequence.logprobs, np.float32)
        if not len(logprobs) == len(tokens) > 0:
            raise RunFailed(
                f"Tinker returned {len(tokens)} tokens with {len(logprobs)} log-probs; the loss"
                " needs one for each."
            )
        ended = int(tokens[-1]) in self.eos_ids
        if not ended and len(tokens) < request.max_tokens:
            raise RunFailed(
                f"Tinker ended a completion after {len(tokens)} of {request.max_tokens} tokens"
                f" ({sequence.stop_reason}) without an end-of-sequence token, so the model"
                " would never learn to stop. retrain did not train on it."
            )
        reason = FinishReason.STOP if ended else FinishReason.LENGTH
        return Completion(number, request.first_sample + index, tokens, logprobs, None, reason)
