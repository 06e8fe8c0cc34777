"""The contract of a training backend: rows in, one step of learning, state out."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from retrain.backends.losses import LOSSES
from retrain.distributed import ALONE, World
from retrain.inference_engine.base import (
    Description,
    EngineCapabilities,
    InferenceEngine,
    Offers,
    Truncation,
)
from retrain.model.budget import NO_LIMIT
from retrain.system import imported
from retrain.types import Float32Array, MachineChoices, Row, StepResult

if TYPE_CHECKING:
    from retrain.config import TrainConfig

ALL_LOSSES = tuple(LOSSES)
"""Built-in values of [loss] mode."""


@dataclass(frozen=True)
class BackendCapabilities:
    """The abilities that a backend declares on its class, so that retrain can check a configuration
    before it loads anything.
    """

    per_token_advantages: bool
    """True if each token's advantage reaches the loss. If False, only one advantage per completion
    does, so retrain refuses token-varying transforms.
    """
    synchronous_loss: bool
    """False if the reported loss is a placeholder."""
    exact_resume: bool
    """True if N steps equal k steps + resume + N - k steps, byte for byte."""
    samples_ahead: bool = False
    """True if the engine holds a copy of the weights, so that it can sample while the learner
    updates its own.
    """
    entropy: bool = True
    """True if the learner has the entropy of every distribution, which [loss] entropy_coef needs.
    """
    loss_reduction: Literal["any", "sum", "mean"] = "any"
    """"any" offers every [loss] aggregation. "sum" adds token losses up, and the backend scales
    advantages to make every aggregation of it. "mean" averages over the tokens of the batch, so it
    offers token_mean alone.
    """
    losses: tuple[str, ...] = ALL_LOSSES
    """Values of [loss] mode that it can train with; empty if another program sets the loss."""
    own_loss: bool = False
    """[loss] mode, correction and aggregation may be plugins."""
    scores_rows: bool = True
    """True if `logprobs` works. If False, the parity gate has nothing to compare the engine with,
    and retrain records no log-ratios.
    """
    moves_settings: bool = False
    """True if `use` works: the learner reads scheduled keys again in each step."""
    supervises: bool = False
    """True if `supervise` works: the learner takes steps of cross-entropy."""
    scores_reference: bool = False
    """True if `reference_logprobs` and `keep_start` work: the learner can score tokens as a
    teacher.
    """
    sampler: EngineCapabilities | None = None
    """Capabilities of the sampler that a backend brings along. It is None if [inference] engine
    samples, or if they are unknown.
    """


BACKENDS: dict[str, str] = {
    "local": "retrain.backends.local.Local",
    "tinker": "retrain.backends.tinker.Tinker",
    "prime_rl": "retrain.backends.prime_rl.PrimeRL",
}
"""The built-in backends: name -> class. The class holds all facts about its backend, and imports no
model library before retrain opens it.
"""


def backend_kind(name: str) -> "type[Backend]":
    """Return the class of a built-in backend; for any other name the base class, whose facts hold
    for plugins.
    """
    if name not in BACKENDS:
        return Backend
    found: type[Backend] = imported(BACKENDS[name])
    return found


@dataclass(frozen=True)
class FrozenWeights:
    """The base model as a step's arithmetic and memory traffic see it."""

    parameters: int
    size: int
    """Bytes that a pass over all layers reads."""


class TrialAdapter(ABC):
    """A seeded change of the adapter that the parity gate tries; entering saves its bytes, leaving
    restores them exactly.
    """

    @abstractmethod
    def __enter__(self) -> "TrialAdapter": ...

    @abstractmethod
    def __exit__(self, *_: object) -> None: ...

    @abstractmethod
    def set(self, strength: float) -> None:
        """Change every adapted layer. With `strength` 1 a layer's change is about as large as its
        input; 0 gives the adapter as it was.
        """


class Backend(Offers, ABC):
    """retrain calls a plugin's constructor as `Backend(config, choices, eos_ids=...)`. `choices`
    are the choices for the machine at an earlier start of the same run (None at its first).
    `eos_ids` are the tokens that end a completion.
    """

    capabilities: BackendCapabilities
    about: ClassVar[Description]
    """The description of a built-in backend."""
    address_flag: ClassVar[str] = "--inference-url"
    """The flag that gives its server another address."""
    in_process: ClassVar[bool] = False
    """True if it holds the model on a device of this machine, and [inference] engine samples for
    it.
    """
    loads_model: ClassVar[bool] = True
    """True if this process may have to import a model library for it."""
    throttled: ClassVar[bool] = False
    """[backend] max_concurrent bounds the calls that all runs of a campaign make at once."""
    temperature_note: ClassVar[str] = ""
    """A note at temperature 1 for a backend that can learn at no other."""
    only_temperature: ClassVar[float | None] = None
    """The only temperature that its learner knows, which an unset key means. It is None if the
    learner knows any temperature.
    """
    served_losses: ClassVar[Collection[str] | None] = None
    """Losses that its service computes, so that only other losses need torch here; It is None if
    this machine computes all losses.
    """
    has_reference: ClassVar[bool] = True
    """True if a loss may read the base model's log-probs."""
    engine: InferenceEngine
    """The sampler that serves this backend's adapter."""

    @classmethod
    def unavailable_reason(cls) -> str:
        """Say in a sentence what is missing on this machine, and how to get it; "" if nothing."""
        return ""

    @classmethod
    def open(
        cls,
        config: "TrainConfig",
        choices: MachineChoices | None,
        *,
        eos_ids: Sequence[int],
        log: Callable[[str], None],  # noqa: ARG003 - part of the interface
        world: World = ALONE,  # noqa: ARG003
    ) -> "Backend":
        """Build a built-in backend. `log` receives the lines that the start of a run prints."""
        return cls(config, choices, eos_ids=eos_ids)  # type: ignore[call-arg]

    @property
    @abstractmethod
    def choices(self) -> MachineChoices | None:
        """The choices made from the machine, or None for a remote backend."""

    @property
    @abstractmethod
    def device_name(self) -> str:
        """torch's name of the learner's device (cpu, mps, cuda:0), or a remote service's name."""

    @property
    @abstractmethod
    def half_precision(self) -> bool:
        """True if the learner or the sampler computes in 16 bits or fewer, so that the parity gate
        allows for the rounding.
        """

    @property
    @abstractmethod
    def num_trainable(self) -> int:
        """Parameters of the adapter."""

    @property
    def frozen_weights(self) -> FrozenWeights | None:
        """Size of the base model, for the roofline hint, or None if it lies elsewhere."""
        return None

    @property
    def recomputes(self) -> bool:
        """True if each backward pass computes the forward pass again (gradient checkpointing)."""
        return False

    @abstractmethod
    def train(self, rows: Sequence[Row], step: int) -> StepResult:
        """Take one step on the rows of one batch, with `updates_per_batch` passes of `minibatches`
        optimizer updates.

        `rows` are all judged completions of the step, since aggregation = "constant" divides by
        their number. Only `trained` rows need a forward pass. A non-finite loss, gradient or
        log-prob never changes the weights: the backend skips and counts that update.
        """

    def use(self, config: "TrainConfig") -> None:
        """Take the scheduled values of [loss] and [training] that the next call of `train` or
        `logprobs` reads.
        """
        raise NotImplementedError

    def supervise(self, config: "TrainConfig | None") -> None:
        """Take supervised steps with the settings of `config` from now on.

        `train` then minimizes the mean cross-entropy of the rows' actions. None: turn to
        reinforcement, with a new optimizer.

        Called before `load` where the stored state lies within the supervised stage.
        """
        raise NotImplementedError

    def trial_adapter(self, seed: int) -> TrialAdapter | None:
        """Return an adapter for the parity gate to set, or None without such an adapter. Then its
        effect stays unchecked.
        """
        return None

    @property
    def reach(self) -> tuple[int, int]:
        """(positions that the model knows, its shortest sliding window or 0).

        Both bound the length of the gate's long prompt.
        """
        return NO_LIMIT, 0

    @abstractmethod
    def logprobs(self, rows: Sequence[Row], temperature: float | None = None) -> list[Float32Array]:
        """Return the learner's log-probs of each row's action tokens, [T] each, without gradient.

        `temperature` defaults to the training temperature. It is 1 if the engine
        reports log-probs before the temperature.
        """

    def reference_logprobs(self, rows: Sequence[Row]) -> list[Float32Array]:
        """Return the log-probs as `logprobs` does, but of `[algorithm] teacher`, over the whole
        vocabulary. "answer" is the learner itself: the rows then hold the teacher's prompt.
        """
        raise NotImplementedError

    def rounded_logprobs(
        self, rows: Sequence[Row], temperature: float | None = None
    ) -> list[Float32Array] | None:
        """Return the log-probs as `logprobs` does, in bf16 for a float32 model, else in float32.

        None: the backend cannot. The difference shows the effect of rounding on this model.
        """
        return None

    def kept(self, rows: Sequence[Row], truncation: Truncation) -> list[Float32Array] | None:
        """Return how many logits `truncation` keeps for each token, [T] of each row, or None
        without logits.
        """
        return None

    def digest(self) -> str:
        """Return a hash of the trained weights, which all processes of a run share."""
        return ""

    @abstractmethod
    def save_adapter(self, folder: Path) -> None:
        """Write the trained weights alone, as a PEFT adapter with README.md or as a whole model."""

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Write the adapter and the backend's own state."""

    @abstractmethod
    def load(self, folder: Path) -> None:
        """Restore the adapter, optimizer and schedule that `save` wrote."""

    def keep_start(self, folder: Path) -> None:
        """Hold the weights that `save_adapter` wrote to `folder`, as the reference "start".

        The KL term and `reference_logprobs` use them.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Release the engine and the device. Safe to call twice."""


class RemoteBackend(Backend):
    """A backend whose model lies with a service: it chooses, stores and counts nothing on this
    machine.
    """

    @property
    def choices(self) -> None:
        return None

    @property
    def half_precision(self) -> bool:
        """A service does not say in what it computes; hosted ones use bf16."""
        return True

    @property
    def num_trainable(self) -> int:
        """Return 0: the service keeps the adapter, so retrain rehearses no save."""
        return 0
