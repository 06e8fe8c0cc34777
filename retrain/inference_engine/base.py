"""The contract of an inference engine: token ids in, token ids with log-probs out, as they finish.

An engine knows no text. A request carries everything that its completions depend on, so that a batch's make-up cannot
change them, and an adapter slot, so that several adapters can share one batch.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from retrain.types import Completion, Int32Array

BASE_MODEL = -1
"""The adapter slot of the frozen base model."""


@dataclass(frozen=True)
class NoiseKey:
    """Coordinates that one request's completions share; the engine adds sample and position."""

    seed: int
    stream: int
    step: int
    prompt: int


@dataclass(frozen=True)
class Truncation:
    """Which tokens the sampled distribution keeps (`truncation.py` has the definition); it is renormalised over them."""

    top_k: int = 0
    """0 is off."""
    top_p: float = 1.0
    """1 is off."""
    min_p: float = 0.0
    """0 is off."""

    @property
    def active(self) -> bool:
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


WHOLE_VOCABULARY = Truncation()


@dataclass(frozen=True)
class SampleRequest:
    prompt_ids: Int32Array
    """[P], P >= 1."""
    count: int
    """Completions wanted of this prompt."""
    max_tokens: int
    temperature: float
    """The policy is softmax(logits / temperature), truncated where `truncation` is active; 0 is greedy (evaluation only)."""
    noise: NoiseKey
    first_sample: int = 0
    """Samples are numbered first_sample .. first_sample + count - 1."""
    adapter_slot: int = 0
    truncation: Truncation = WHOLE_VOCABULARY
    """Without effect on a greedy request."""


@dataclass(frozen=True)
class EngineCapabilities:
    noise: Literal["counter", "none"]
    """counter: one Philox uniform per token, so runs are repeatable and conditions share their noise."""
    logprobs: Literal["sampled", "raw"]
    """raw: of softmax(logits) whatever the temperature; the learner then recomputes the old log-probs."""
    entropy: bool
    """Shannon entropy of every token."""
    kept_set: bool = False
    """Truncated requests are served: log-probs are of the renormalised distribution, and completions say how many tokens it kept."""


class InferenceEngine(ABC):
    capabilities: EngineCapabilities

    @abstractmethod
    def sample(self, requests: Sequence[SampleRequest]) -> Iterator[Completion]:
        """Yield every completion of every request once, each as soon as it is finished, in any order."""

    def sync(self, adapter_dir: str, step: int) -> None:  # noqa: B027 - an engine that shares the learner's weights has nothing to do
        """Serve the adapter in `adapter_dir` (a PEFT folder) from now on. Called after every optimizer step."""

    def close(self) -> None:  # noqa: B027
        """Release servers, threads and memory; safe to call twice."""
