"""The contract of an inference engine: token ids in, token ids with log-probs out, as they finish.

An engine knows no text. A request carries everything that its completions depend on, so that the
composition of a batch cannot change them. It also says whether the adapter or the base model
samples.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol

from retrain.errors import ConfigurationError
from retrain.noise import uniform
from retrain.system import imported
from retrain.types import ChatMessage, Completion, Int32Array

if TYPE_CHECKING:
    from retrain.config import TrainConfig
    from retrain.inference_engine.commands import ServerCommand, ServerNeeds

BASE_MODEL = -1
"""The adapter slot of the frozen base model."""


@dataclass(frozen=True)
class NoiseKey:
    """Coordinates that one request's completions share; the engine adds sample and position."""

    seed: int
    stream: int
    step: int
    prompt: int

    def seed_of(self, sample: int, position: int = 0) -> int:
        """Return a seed of 31 bits for one completion, for a sampler with its own random numbers.
        It is the same for every condition of a campaign. `position` is the first position of the
        request. With the seed of an earlier turn, a later turn would reuse random numbers that its
        own history reveals.
        """
        place = self.step, self.prompt, sample, position
        return int(uniform(self.seed, self.stream, *place) * 2**31)


@dataclass(frozen=True)
class Truncation:
    """The tokens over which the sampler renormalizes the distribution (`model/truncation.py` has
    the definition).
    """

    top_k: int = 0
    """0 is off."""
    top_p: float = 1.0
    """1 is off."""
    min_p: float = 0.0
    """0 is off."""

    @property
    def active(self) -> bool:
        return self != WHOLE_VOCABULARY


WHOLE_VOCABULARY = Truncation()


@dataclass(frozen=True)
class SampleRequest:
    """One prompt and the settings of its completions."""

    prompt_ids: Int32Array
    """[P], P >= 1."""
    count: int
    """Completions per prompt."""
    max_tokens: int
    temperature: float
    """The policy is softmax(logits / temperature), truncated where `truncation` is active; 0 is
    greedy (evaluation only)."""
    noise: NoiseKey
    first_sample: int = 0
    """Samples have the numbers first_sample .. first_sample + count - 1."""
    adapter_slot: int = 0
    """0 for the trained adapter, or BASE_MODEL."""
    truncation: Truncation = WHOLE_VOCABULARY
    """It has no effect on a greedy request."""
    first_position: int = 0
    """The noise coordinate of the first token: in a later turn of a trajectory, the tokens sampled
    in the turns before."""
    extends: int = 0
    """Number of leading prompt tokens shared with an earlier request, so that the engine may reuse
    its KV cache; 0 if unknown.
    """
    extendable: bool = False
    """True if a later request may extend this request."""
    messages: tuple[ChatMessage, ...] = ()
    """The conversation of the prompt, for a server that takes nothing else; empty in dialogues of
    several turns."""


class RequestFeed(Protocol):
    """Requests that arrive while others decode: the next turns of dialogues."""

    def more(self, idle: bool) -> Sequence[SampleRequest]:
        """Return requests to sample now. With `idle`, no request is under way, so wait for some. An
        empty answer then ends the feed.
        """
        ...


class RequestList:
    """A feed of requests that are all known at the start."""

    def __init__(self, requests: Sequence[SampleRequest]) -> None:
        self._requests = requests

    def more(self, idle: bool) -> Sequence[SampleRequest]:
        """Return all of them, the first time."""
        requests, self._requests = self._requests, ()
        return requests


@dataclass(frozen=True)
class EngineCapabilities:
    """The abilities that an engine declares on its class, so that retrain can check a configuration
    before it loads anything.
    """

    in_process: bool
    """True if it computes with the learner's own weights, in this process."""
    adapter_reload: bool
    """True if `sync` makes it serve a new adapter. An engine with neither this nor `in_process`
    cannot follow the training, so retrain refuses it.
    """
    logprobs: Literal["sampled", "raw", "none"]
    """"sampled": log-probs of softmax(logits / temperature). "raw": log-probs of softmax(logits)
    whatever the temperature, so that the learner recomputes the old log-probs. retrain refuses
    "none".
    """
    token_ids_in: bool = True
    """True if prompts reach the model as token ids. If False, they reach it as text, which the
    engine must check by encoding it back. The parity gate then joins whole prompts, past the run's
    longest row if need be.
    """
    token_ids_out: bool = True
    """True if the sampled ids come back. retrain refuses False, since decoding and encoding again
    would train other tokens.
    """
    n: bool = True
    """True if one call samples all completions of a prompt; False if each needs a call."""
    noise: Literal["counter", "none"] = "none"
    """counter: one Philox uniform per token, so runs are repeatable and conditions share their
    noise."""
    entropy: bool = False
    """True if it returns the Shannon entropy of every token's distribution."""
    kept_set: bool = False
    """True if the engine serves truncated requests: log-probs refer to the renormalized
    distribution, and completions say how many tokens it kept.
    """
    prefix_cache: bool = False
    """True if it can compute a prompt once for all of its completions; [inference] prefix_caching
    switches this on and off.
    """


@dataclass(frozen=True)
class Description:
    """The words of `retrain backends` about a built-in engine or backend."""

    what: str
    verified: str
    """Against what its tests run. contract: a stand-in written from the documented API."""
    packages: tuple[str, ...] = ()
    """Distributions that it runs on: here, or for a server where that runs."""
    extra: str = ""
    """The extra of this package that installs them."""
    install: str = ""
    """A command or a sentence, where no extra installs them."""


ENGINES: dict[str, str] = {
    "pytorch": "retrain.inference_engine.pytorch.PyTorchEngine",
    "max": "retrain.inference_engine.max.MAXEngine",
    "vllm": "retrain.inference_engine.vllm.VLLMEngine",
    "sglang": "retrain.inference_engine.sglang.SGLangEngine",
    "mlx": "retrain.inference_engine.mlx.MLXEngine",
    "openai": "retrain.inference_engine.openai.OpenAIEngine",
}
"""The built-in engines: name -> class. The class holds all facts about its engine. retrain imports
it on demand, and its module imports no model library.
"""


def engine_kind(name: str) -> "type[InferenceEngine]":
    """Return the class of a built-in engine; for any other name the base class, whose facts hold
    for plugins.
    """
    if name not in ENGINES:
        return InferenceEngine
    found: type[InferenceEngine] = imported(ENGINES[name])
    return found


class Offers:
    """The answers of a backend or an engine to keys with needs (`config.section.Traits.needs`)."""

    lacks: ClassVar[Mapping[str, str]] = {}
    """A need that it lacks -> why, and what to do: the start refuses a key with this need."""

    @classmethod
    def decides(cls, config: "TrainConfig") -> Mapping[str, str]:  # noqa: ARG003 - shared
        """Return the needs that it decides about by itself -> why a key has no effect."""
        return {}

    @classmethod
    def problems(cls, config: "TrainConfig") -> Iterator[tuple[str, str]]:  # noqa: ARG003 - shared
        """Yield each key that it refuses at its value, with the reason and what to do."""
        yield from ()


class InferenceEngine(Offers, ABC):
    """retrain calls a plugin's constructor as `Engine(config, model=..., eos_ids=..., device=...)`.
    `model` is the learner's model with its adapter (transformers and peft), `eos_ids` the tokens
    that end a completion, and `device` the model's torch device. An engine that samples elsewhere
    ignores the model.
    """

    capabilities: EngineCapabilities
    about: ClassVar[Description]
    """The description of a built-in engine."""
    default_port: ClassVar[int] = 0
    """The port that its server uses by itself; 0 if `retrain serve` cannot start one."""
    needs_address: ClassVar[bool] = False
    """True if it samples on servers, and [inference] url must name them."""
    decodes_here: ClassVar[bool] = False
    """True if it computes on the learner's device, in a data type of that device."""
    supports_split: ClassVar[bool] = False
    """True if it samples from a model in shards, and on a second device of [backend] devices."""
    log: Callable[[str], None] = staticmethod(print)
    """Reports events of the engine during a run; the call may come from another thread."""
    check: Callable[[], None] = staticmethod(lambda: None)
    """The engine calls it during long waits. It raises if a signal asked the run to stop."""
    replicas = 1
    """Servers that share the requests. The parity gate asks each of them."""
    unchecked = False
    """A server woke up or came back since the parity gate last looked; the run checks it before it
    learns, and clears this."""

    layout_seconds = 0.0
    """Seconds that it has spent on laying out changed weights for its products."""

    rounds = False
    """The parity gate found that it computes in half precision, which no key says."""

    @classmethod
    def preflight(cls, config: "TrainConfig") -> str | None:  # noqa: ARG003 - part of the interface
        """Return a sentence saying why retrain can evaluate its completions but not train on them;
        "" or None if it can do both. Runs before retrain loads anything. Raises ConfigurationError
        or EnvironmentFailure if the engine could not work.
        """
        return ""

    @classmethod
    def server_command(
        cls,
        config: "TrainConfig",  # noqa: ARG003 - part of the interface
        needs: "ServerNeeds",  # noqa: ARG003
        python: str,  # noqa: ARG003
    ) -> "ServerCommand":
        """Return the command that starts its server, if it has a `default_port`. Raises
        ConfigurationError for a key that the server cannot follow.
        """
        raise ConfigurationError(f"{cls.__name__} has no server that retrain can start.")

    @abstractmethod
    def sample(self, requests: Sequence[SampleRequest]) -> Iterator[Completion]:
        """Yield every completion of every request once, as soon as it ends. Any order will do."""

    def sample_feed(self, feed: RequestFeed) -> Iterator[Completion]:
        """Sample as `sample` does, for the requests of a feed.

        `Completion.request` counts the requests in the order of the feed.

        An engine overrides this if new requests can join running ones. Otherwise they wait for the
        end of the round.
        """
        given = 0
        while requests := feed.more(idle=True):
            for completion in self.sample(requests):
                yield replace(completion, request=given + completion.request)
            given += len(requests)

    def sync(self, save_adapter: Callable[[Path], None], step: int) -> None:
        """Sample from the learner's adapter of this moment from now on.

        `save_adapter` writes it into a folder, in PEFT's format; an engine that shares the
        learner's weights does not call it. `step` counts the training steps behind it. retrain
        calls it before sampling if the adapter may have changed. The parity gate calls it twice
        with one `step`: for the trial adapter and for the restored adapter.
        """

    def sleep(self) -> None:
        """Give the device's memory to the learner until the next `sync`. Called when the sampling
        of a step has ended.
        """

    def why_it_differs(self) -> str:
        """Return why log-probs differ from the learner's, as a part of a sentence, or ""."""
        return ""

    def close(self) -> None:
        """Release servers, threads and memory. Safe to call twice."""
