"""The local backend: one model on one device, shared by the learner and the sampler."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from retrain.backends.base import Backend, FrozenWeights, TrialAdapter
from retrain.backends.declared import engine_class, is_raw
from retrain.backends.local.changes import LocalTrialAdapter
from retrain.backends.local.facts import LocalFacts
from retrain.backends.local.learner import Learner, old_logprobs_note, rounds
from retrain.backends.local.optimizer import STATE_FILE
from retrain.distributed import ALONE, World
from retrain.errors import ConfigurationError
from retrain.inference_engine.base import InferenceEngine, Truncation
from retrain.inference_engine.pytorch import PyTorchEngine
from retrain.model.adapter import Adapter
from retrain.model.attention import refuse_undecodable
from retrain.model.budget import context_length
from retrain.model.devices import choose_device, engine_options, half_precision_note
from retrain.model.full import trained_weights
from retrain.model.fused import FusedDecoder
from retrain.model.load import BaseModel, load_base_model
from retrain.model.machine import budget_of, choose
from retrain.model.pool import Pool
from retrain.model.precision import other_precision
from retrain.model.text import eos_token_ids, load_tokenizer, resolve_model
from retrain.model.weights import TrainedWeights
from retrain.plugins import user_code
from retrain.types import Float32Array, LogLine, MachineChoices, Row, StepResult

if TYPE_CHECKING:
    from retrain.config import TrainConfig


class LocalBackend(LocalFacts):
    """Loads the model, attaches the adapter, and builds the engine that samples from both.

    `choices` come from an earlier start of the same run; without them the backend chooses for this
    machine. The backend prints nothing: the caller prints `notes`, `device_name` and
    `trainable_parameters_line`.
    """

    _sampler_adapter: Adapter | None = None
    """The sampler's own copy in split mode."""

    def __init__(
        self,
        config: "TrainConfig",
        choices: MachineChoices | None = None,
        *,
        eos_ids: Sequence[int] | None = None,
        world: World = ALONE,
    ) -> None:
        """`eos_ids` are the tokens that end a completion. If None, the backend loads the tokenizer
        for them.
        """
        self.config = config
        device, _, sampler_device = choose_device(config.backend, world)
        _choose_kernels(config.inference.attention_kernel)
        path = resolve_model(config.model.model)
        self._base = load_base_model(config, path, device, world)
        if engine_class(config) is PyTorchEngine:
            # Check this before peft can refuse the layers, because the user sees the first reason.
            refuse_undecodable(self._base.model)
        self._weights = trained_weights(self._base, config)
        budget = budget_of(config, self._base)
        # A measurement decides one choice, so ranks could choose differently.
        self._choices = world.broadcast(choose(budget, self._base, world, choices))
        self._bytes_left_for_kv_pages = budget.left_for_pages(self._choices)
        self._threads_before = torch.get_num_threads()
        torch.set_num_threads(self._choices.threads)
        notes: list[str] = []
        self._fused = FusedDecoder.of(
            self._base.model, merge=self._choices.merge_adapter, log=notes.append
        )
        notes.append(old_logprobs_note(config.loss, rounded=self.half_precision))
        self.notes: tuple[str, ...] = tuple(filter(None, notes))
        """Sentences about the loaded model that the user should see at the start."""
        self._pool = Pool(self._choices.workers, list(self._weights.parameters.values()))
        self._learner = Learner(
            self._base, self._weights, config, self._choices, self._fused, world, self._pool
        )
        self._teaching = self._teacher()
        if sampler_device is None:
            self.engine = self._build_engine(eos_ids, self._base, self._weights, self._fused)
        else:
            self.engine = self._engine_of_copy(eos_ids, sampler_device)

    @classmethod
    def open(
        cls,
        config: "TrainConfig",
        choices: MachineChoices | None,
        *,
        eos_ids: Sequence[int],
        log: Callable[[str], None],
        world: World = ALONE,
    ) -> Backend:
        device, note, sampler = choose_device(config.backend, world)
        precision = half_precision_note(config.model, config.inference, device)
        for line in filter(None, (note, precision)):
            log(line)
        log(LogLine(f"Loading train model: {config.model.model} on {device}..."))
        backend = cls(config, choices, eos_ids=eos_ids, world=world)
        for line in backend.notes:
            log(line)
        trained = f"{backend.num_trainable:,} weights trained"
        log(LogLine(backend.trainable_parameters_line(), trained))
        log(
            LogLine(
                f"LocalTrainHelper ready (engine={config.inference.engine},"
                f" split_mode={sampler is not None})."
            )
        )
        return backend

    def _engine_of_copy(
        self, eos_ids: Sequence[int] | None, device: torch.device
    ) -> InferenceEngine:
        """Load a second copy of the model on the sampler's device, and build its engine."""
        config = self.config
        copy = load_base_model(config, resolve_model(config.model.model), device)
        self._sampler_adapter = Adapter(copy, config.model, config.lora, config.training.seed)
        self.capabilities = replace(self.capabilities, samples_ahead=True)
        fused = FusedDecoder.of(copy.model, merge=self._choices.merge_adapter)
        return self._build_engine(eos_ids, copy, self._sampler_adapter, fused)

    def _build_engine(
        self,
        eos_ids: Sequence[int] | None,
        base: BaseModel,
        weights: TrainedWeights,
        fused: FusedDecoder | None,
    ) -> InferenceEngine:
        from retrain.inference_engine.torch_engine import TorchEngine

        inference, eos_ids = self.config.inference, eos_ids or self._eos_ids()
        make: Any = engine_class(self.config)  # a subclass's constructor has these arguments
        if make is not PyTorchEngine:
            with user_code(
                f'building [inference] engine = "{inference.engine}"', ConfigurationError
            ):
                engine: InferenceEngine = make(
                    self.config, model=weights.model, eos_ids=eos_ids, device=base.device
                )
                return engine
        return TorchEngine(
            weights.model,
            eos_ids,
            base.device,
            decode_rows=self._choices.decode_rows,
            decode_tokens=self._choices.decode_tokens,
            options=engine_options(inference, base.device.type, base.dtype),
            fused=fused,
            shards=base.shards,
            follow=self._copy_to_sampler if weights is not self._weights else None,
            pool=self._pool,
        )

    def _eos_ids(self) -> tuple[int, ...]:
        model = self.config.model
        tokenizer = load_tokenizer(model.model, model.revision, model.trust_remote_code)
        return eos_token_ids(tokenizer, self._base.model.config, self._base.model.generation_config)

    # -- what the start-up lines say ---------------------------------------------------------------

    @property
    def choices(self) -> MachineChoices:
        return self._choices

    @property
    def device_name(self) -> str:
        """torch's name: cpu, mps, cuda:0."""
        return str(self._base.device)

    @property
    def half_precision(self) -> bool:
        return rounds(self.config.inference, self._base.dtype)

    @property
    def num_trainable(self) -> int:
        return sum(parameter.numel() for parameter in self._weights.parameters.values())

    @property
    def frozen_weights(self) -> FrozenWeights:
        beside = set(map(id, self._weights.beside))
        base = [one for one in self._base.model.parameters() if id(one) not in beside]
        return FrozenWeights(
            sum(weight.numel() for weight in base), sum(weight.nbytes for weight in base)
        )

    @property
    def recomputes(self) -> bool:
        return self._choices.gradient_checkpointing

    def _teacher(self) -> Callable[[], AbstractContextManager[None]]:
        """Read the teacher's adapter, if the teacher is an adapter. It acts inside the returned
        context.
        """
        named = self.config.algorithm.teacher
        if named == "start":
            return self._weights.started
        if named in ("", "base", "answer") or not isinstance(self._weights, Adapter):
            return nullcontext
        teacher = self._weights.fitting(Path(named), f'[algorithm] teacher = "{named}"')
        return partial(self._weights.holding, teacher)

    def trainable_parameters_line(self) -> str:
        """Return peft's line: "trainable params: 66,060,288 || all params: 4,088,528,384 ||
        trainable%: 1.6157".
        """
        return self._weights.trainable_line()

    def _copy_to_sampler(self) -> None:
        assert self._sampler_adapter is not None
        self._sampler_adapter.set(self._weights.parameters)

    # -- what the parity gate asks for -------------------------------------------------------------

    def trial_adapter(self, seed: int) -> TrialAdapter:
        return LocalTrialAdapter(self._weights, seed)

    @property
    def reach(self) -> tuple[int, int]:
        text: Any = self._base.model.config.get_text_config()
        layers = getattr(text, "layer_types", None)
        windowed = getattr(text, "use_sliding_window", True) and (
            layers is None or "sliding_attention" in layers
        )
        window = windowed and getattr(text, "sliding_window", None)
        return context_length(text), int(window or 0)

    # -- learning ----------------------------------------------------------------------------------

    def use(self, config: "TrainConfig") -> None:
        self.config = config
        self._learner.use(config)

    def supervise(self, config: "TrainConfig | None") -> None:
        self._learner.begin(config or self.config, supervised=config is not None)

    def train(self, rows: Sequence[Row], step: int) -> StepResult:
        engine = self.engine.capabilities
        raw = is_raw(engine, self.config.training.temperature)
        raw &= not self._learner.supervised
        self._make_room()
        with _current(self._base.device), _deterministic(self._base.device):
            return self._learner.train(rows, step, sampler_is_raw=raw, entropy=not engine.entropy)

    def _make_room(self) -> None:
        from retrain.inference_engine.torch_engine import TorchEngine

        if (
            isinstance(self.engine, TorchEngine)
            and self._sampler_adapter is None
            and self.engine.held_bytes > self._bytes_left_for_kv_pages
        ):
            # Free the sampler's pages if activations do not fit with them in memory. Their contents
            # come from the weights before this step.
            self.engine.free_pages()

    def logprobs(self, rows: Sequence[Row], temperature: float | None = None) -> list[Float32Array]:
        with _current(self._base.device):
            return self._learner.logprobs(rows, temperature)

    def reference_logprobs(self, rows: Sequence[Row]) -> list[Float32Array]:
        self._make_room()
        is_base = self.config.algorithm.teacher == "base"
        whole = [replace(row, kept=None) for row in rows]  # over the whole vocabulary
        with _current(self._base.device), _deterministic(self._base.device), self._teaching():
            return self._learner.logprobs(whole, reference=is_base)

    def rounded_logprobs(
        self, rows: Sequence[Row], temperature: float | None = None
    ) -> list[Float32Array] | None:
        dtype = other_precision(self._base)
        if dtype is None:
            return None
        with _current(self._base.device):
            return self._learner.logprobs(rows, temperature, dtype=dtype)

    def kept(self, rows: Sequence[Row], truncation: Truncation) -> list[Float32Array]:
        with _current(self._base.device):
            return self._learner.kept(rows, truncation)

    # -- files -------------------------------------------------------------------------------------

    def digest(self) -> str:
        return self._weights.digest()

    def save_adapter(self, folder: Path) -> None:
        self._weights.save(folder)

    def save(self, folder: Path) -> None:
        self.save_adapter(folder)
        self._learner.optimizer.save(folder)

    def load(self, folder: Path) -> None:
        self._weights.load(folder)
        if (folder / STATE_FILE).is_file():  # Only an evaluation loads weights alone.
            self._learner.optimizer.load(folder)

    def keep_start(self, folder: Path) -> None:
        self._weights.keep_start(folder)

    def close(self) -> None:
        self.engine.close()
        self._pool.close()
        torch.set_num_threads(self._threads_before)


def _choose_kernels(attention: str) -> None:
    """Set the CUDA kernels for this process. Call it before the first matrix product; CPU runs
    ignore it.
    """
    # Without it cuBLAS may sum in another order.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # cuDNN's attention plans again for every length, and with a mask its backward can give NaN
    # (pytorch issue 196678).
    torch.backends.cuda.enable_cudnn_sdp(False)
    # only CUTLASS's kernel remains
    torch.backends.cuda.enable_flash_sdp(attention != "cutlass")
    # Sum the parts of a product in float32, because sums in bf16 would add to the difference
    # between sampler and learner.
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False


def _current(device: torch.device) -> AbstractContextManager[object]:
    """Make a CUDA device the current device of this thread. Torch's operators run on the device of
    their tensors, but a model's own kernels, such as Triton kernels, run on the current device.
    """
    if device.type == "cuda":
        return torch.cuda.device(device)
    return nullcontext()


@contextmanager
def _deterministic(device: torch.device) -> Iterator[None]:
    """Use, on CUDA, kernels whose sums do not depend on the order in which threads arrive. CPU
    kernels already have this property.

    `warn_only` would leave the backward pass of torch's attention non-deterministic. The flag
    applies to the process. A sampler in another thread (split mode) has no operator that raises
    under it, but its cache's `index_copy_` is slower meanwhile.
    """
    if device.type != "cuda":
        yield
        return
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    filled = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]  # not in torch's stubs
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # not in torch's stubs
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.utils.deterministic.fill_uninitialized_memory = filled  # type: ignore[attr-defined]  # not in torch's stubs
