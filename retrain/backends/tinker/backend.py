"""Learning on a Tinker service: rows become datums, each update is one forward-backward pass and
one optimizer step.

The service runs the requests of one training client in the order of their making, whatever the
order of waiting. A step therefore requests all of its updates, and a sampler of the weights after
them, at once, and waits once. Everything stays on policy, and the service has no idle time between
two updates. A step's own sampling begins when the sampler is there, so older weights sample
nothing.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from retrain.backends.base import Backend
from retrain.backends.losses import TINKER_LOSSES
from retrain.backends.own_loss import aggregation_of, own_function
from retrain.backends.rows import (
    Update,
    check_rows,
    first_nonfinite,
    for_each_row,
    learning_rate,
    minibatch_split,
    num_completions,
    row_weights,
    step_result,
)
from retrain.backends.tinker.datums import (
    ShiftedRow,
    action_logprobs,
    clipped_tokens,
    policy_datum,
    policy_terms,
    ratio_bounds,
    scoring_datum,
)
from retrain.backends.tinker.engine import TinkerEngine
from retrain.backends.tinker.facts import TinkerFacts
from retrain.backends.tinker.service import Service, download_adapter, without_deprecations
from retrain.distributed import ALONE, World
from retrain.errors import EnvironmentFailure, RunFailed
from retrain.model.text import resolve_model
from retrain.system import read_object
from retrain.types import Float32Array, LogLine, MachineChoices, Row, StepResult

if TYPE_CHECKING:
    from retrain.backends.tinker.own import LossCall
    from retrain.config import TrainConfig

STATE_FILE = "tinker.json"
"""A file in every checkpoint and in final/, which says where the service keeps the weights, and the
optimizer's state."""


@dataclass(frozen=True)
class _TrainedRow:
    number: int
    """The row's place in the step."""
    row: Row
    shifted: ShiftedRow


@dataclass(frozen=True)
class _UpdateRequest:
    """An update under way."""

    rows: Sequence[_TrainedRow]
    weights: Sequence[float]
    """Weight of each row's tokens in the loss."""
    passed: Any
    stepped: Any
    """Futures of the pass and of the optimizer step."""
    computed: "LossCall | None" = None
    """The loss, if this machine computes it."""


def _logprobs_of_pass(rows: Sequence[_TrainedRow], outputs: Sequence[Any]) -> list[Float32Array]:
    """Return [T] log-probs of each row, from a completed forward-backward pass."""
    found = [
        action_logprobs(row.shifted, output) for row, output in zip(rows, outputs, strict=True)
    ]
    new = [logprobs for logprobs in found if logprobs is not None]
    if len(new) < len(found):
        raise RunFailed(
            "Tinker returned no log-probs for a forward-backward pass, so neither its loss nor"
            " its ratios are known."
        )
    if not all(np.isfinite(logprobs).all() for logprobs in new):
        raise RunFailed(
            "Tinker's learner returned log-probs that are not finite, and has already changed"
            " the weights with them. Resume from the last checkpoint with a lower [training]"
            " lr or [loss] max_grad_norm = 1.0."
        )
    return new


class TinkerBackend(TinkerFacts):
    def __init__(
        self, config: "TrainConfig", *, eos_ids: Sequence[int], log: Callable[[str], None]
    ) -> None:
        """Connect. The first use makes the training client, or `load` makes it from a checkpoint,
        and `log` reports it.
        """
        self.config = config
        self._settings = config
        """The settings of the stage under way."""
        self._supervised = False
        self._log = log
        log(LogLine("Connecting to Tinker..."))
        self._service = Service(config)
        self._own_loss, self._aggregation = own_function("loss", config), aggregation_of(config)
        self._trainer: Any = None
        self._saves = 0
        self._said_reduction = False
        self._sampler = TinkerEngine(self._service, eos_ids, self._request_sampler)
        self.engine = self._sampler

    @classmethod
    def open(
        cls,
        config: "TrainConfig",
        choices: MachineChoices | None,  # noqa: ARG003 - a service chooses for itself
        *,
        eos_ids: Sequence[int],
        log: Callable[[str], None],
        world: World = ALONE,  # noqa: ARG003 - refused with several processes
    ) -> Backend:
        return cls(config, eos_ids=eos_ids, log=log)

    @property
    def base_model(self) -> str:
        """The model's name at the service."""
        return self.config.backend.tinker.base_model or resolve_model(self.config.model.model)

    @property
    def trainer(self) -> Any:
        """The SDK's TrainingClient."""
        if self._trainer is None:
            rank = self.config.model.lora_rank
            self._log(
                LogLine(
                    f"Creating LoRA training client (model={self.config.model.model},"
                    f" rank={rank})..."
                )
            )
            self._trainer = self._service.result(
                f"a LoRA adapter of rank {rank} for {self.base_model}", self._create
            )
            self._log(LogLine("Training client ready."))
        return self._trainer

    def _create(self) -> Any:
        """Create the training client. The head has no adapter: an empty [lora] target_modules means
        the linear layers of the blocks, here as locally.
        """
        return self._service.client.create_lora_training_client(
            self.base_model,
            rank=self.config.model.lora_rank,
            seed=self.config.training.seed,
            train_unembed=False,
        )

    def _request_sampler(self) -> Any:
        return self.trainer.save_weights_and_get_sampling_client()

    # -- what a start asks for ---------------------------------------------------------------------

    @property
    def device_name(self) -> str:
        return "tinker"

    # -- learning ----------------------------------------------------------------------------------

    def train(self, rows: Sequence[Row], step: int) -> StepResult:
        check_rows(rows)
        training = self._settings.training
        batch = [
            _TrainedRow(number, row, ShiftedRow.of(row))
            for number, row in enumerate(rows)
            if row.trained and row.num_actions
        ]
        if not batch:
            return step_result([], [], [], training.max_tokens)
        name = first_nonfinite(
            {
                "advantages": [row.row.advantages for row in batch],
                "sampler log-probs": [row.row.logprobs for row in batch],
            }
        )
        if name:
            return step_result([Update(nonfinite=name)], [], [], training.max_tokens)
        completions = num_completions(rows) / training.minibatches
        # Request every pass before waiting for one, so that the service has no gap.
        with self._service.slot():
            requested = [
                (turn, self._request_update(part, step, completions))
                for turn in range(training.updates_per_batch)
                for part in minibatch_split(batch, training.minibatches, training.seed, step, turn)
            ]
            self._sampler.expect_new_weights()
            log_ratios: list[Float32Array] = []
            updates = [
                self._finished(update, log_ratios if turn == 0 else [])
                for turn, update in requested
            ]
        # Later minibatches follow an update; only the rows of the first minibatch do not.
        first = requested[0][1]
        unmoved = len(first.rows) if isinstance(first, _UpdateRequest) else 0
        result = step_result(updates, log_ratios, log_ratios[:unmoved], training.max_tokens)
        if result.grad_norm is None or np.isfinite(result.grad_norm):
            return result
        return replace(result, grad_norm=None)

    def _request_update(
        self, rows: Sequence[_TrainedRow], step: int, completions: float
    ) -> "_UpdateRequest | Update":
        """Request the gradient of one optimizer batch and the step with it. Returns an Update if
        there was nothing to request.
        """
        from tinker import types

        config, training = self._settings, self._settings.training
        own = [row.row for row in rows]
        counted = [row.num_counted for row in own]
        aggregation = "token_mean" if self._supervised else self._aggregation
        weights = row_weights(own, counted, aggregation, training.max_tokens, completions)
        adam = types.AdamParams(
            learning_rate=learning_rate(training, step),
            beta1=config.optimizer.beta1,
            beta2=config.optimizer.beta2,
            eps=config.optimizer.eps,
            weight_decay=training.weight_decay,
            grad_clip_norm=config.loss.max_grad_norm,
        )
        if config.loss.mode not in TINKER_LOSSES:
            return self._request_computed(rows, weights, adam)
        # A service that takes means divides each row's term, which is undone: the weights already
        # normalize the gradient.
        means = config.backend.tinker.loss_reduction != "sum"
        undone = [float(len(row.shifted) * len(rows)) if means else 1.0 for row in rows]
        scaled = [
            (row, row.row.advantages * np.float32(weight * factor))
            for row, weight, factor in zip(rows, weights, undone, strict=True)
        ]
        mode, bounds, clip = str(config.loss.mode), ratio_bounds(config.loss), None
        if self._supervised:
            mode = "cross_entropy"
            datums = [scoring_datum(row.shifted, values) for row, values in scaled]
        else:
            datums = [policy_datum(row.shifted, row.row.logprobs, own) for row, own in scaled]
        if bounds:
            clip = {"clip_low_threshold": bounds[0], "clip_high_threshold": bounds[1]}
        with self._service.answering("an update"):
            return _UpdateRequest(
                rows,
                weights,
                self.trainer.forward_backward(datums, mode, clip),
                self.trainer.optim_step(adam),
            )

    def _request_computed(
        self, rows: Sequence[_TrainedRow], weights: Sequence[float], adam: Any
    ) -> "_UpdateRequest | Update":
        """Ask for an update with a loss that the service does not have."""
        from retrain.backends.tinker.own import LossCall, NonfiniteError  # torch comes with it

        parts = [(row.shifted, row.row, weight) for row, weight in zip(rows, weights, strict=True)]
        computed = LossCall(self.config.loss, self._own_loss, parts)
        datums = [scoring_datum(row.shifted) for row in rows]
        try:
            passed = self._service.bounded(
                "an update", lambda: self.trainer.forward_backward_custom(datums, computed)
            )
        except NonfiniteError as problem:
            return Update(nonfinite=str(problem))
        with self._service.answering("an update"):
            return _UpdateRequest(rows, weights, passed, self.trainer.optim_step(adam), computed)

    def _finished(
        self, update: "_UpdateRequest | Update", log_ratios: list[Float32Array]
    ) -> Update:
        """Wait for an update. The service has then changed the weights, so log-probs that are not
        finite end the run.
        """
        if isinstance(update, Update):
            return update
        passed = self._service.result("a forward-backward pass", lambda: update.passed)
        stepped = self._service.result("an optimizer step", lambda: update.stepped)
        metrics = stepped.metrics or {}
        self._note_reduction(metrics)
        norm = next(
            (value for name, value in metrics.items() if name.endswith("grad_norm")), np.nan
        )
        new = _logprobs_of_pass(update.rows, passed.loss_fn_outputs)
        log_ratios += [
            logprobs - row.row.logprobs for logprobs, row in zip(new, update.rows, strict=True)
        ]
        if update.computed:
            clipped, clippable = update.computed.clip
            return Update(update.computed.loss, norm, clipped, clippable, update.computed.metrics)
        # The loss of a built-in mode, from the log-probs that the service returned.
        loss, rows = self._settings.loss, [row.row for row in update.rows]
        flat_new, old, advantages = (
            np.concatenate(values, dtype=np.float64)
            for values in (new, [r.logprobs for r in rows], [r.advantages for r in rows])
        )
        weights = np.repeat(update.weights, [row.num_actions for row in rows])
        if self._supervised:
            return Update(loss=-float((flat_new * weights).sum()), grad_norm=norm)
        counted = (advantages != 0) & (weights != 0)
        return Update(
            loss=float((policy_terms(flat_new, old, advantages, loss) * weights).sum()),
            grad_norm=norm,
            clipped=float((clipped_tokens(flat_new, old, advantages, loss) & counted).sum()),
            clippable=float(counted.sum()),
        )

    def _note_reduction(self, metrics: Mapping[str, float]) -> None:
        """Log once, after the first update, that SkyRL divides a loss assumed to be a sum."""
        if self.config.backend.tinker.loss_reduction == "sum" and not self._said_reduction:
            self._said_reduction = True
            if any(name.startswith("skyrl.ai/") for name in metrics):
                self._log(
                    "This service is SkyRL, whose JAX backend divides the loss by positions"
                    ' and rows. Set [backend.options] loss_reduction = "mean", or eps and'
                    " max_grad_norm act on gradients that are far too small."
                )

    def logprobs(self, rows: Sequence[Row], temperature: float | None = None) -> list[Float32Array]:  # noqa: ARG002 - always 1
        """Return log-probs at temperature 1, the only temperature that the service's learner knows.
        The start of a run refuses any other.
        """
        check_rows(rows)
        shifted = [ShiftedRow.of(row) for row in rows if row.num_actions]
        if not shifted:
            return [np.empty(0, np.float32) for _ in rows]
        datums = [scoring_datum(row) for row in shifted]
        with self._service.slot():
            found = self._service.result(
                "a forward pass", lambda: self.trainer.forward(datums, "cross_entropy")
            ).loss_fn_outputs
        read = [action_logprobs(row, output) for row, output in zip(shifted, found, strict=True)]
        values = [each for each in read if each is not None]
        if len(values) < len(shifted):
            raise RunFailed(
                "Tinker returned no log-probs for a forward pass, so retrain cannot compare"
                " sampler and learner."
            )
        return for_each_row(rows, values)

    # -- files -------------------------------------------------------------------------------------

    def save(self, folder: Path) -> None:
        """Save weights and optimizer at the service; the folder names the place."""
        with self._service.slot():
            path = self._service.result(
                "a checkpoint", lambda: self.trainer.save_state(self._name("checkpoint"))
            ).path
        self._write(folder, state=path)

    def save_adapter(self, folder: Path) -> None:
        """Write the PEFT folder where the service hands adapters out, else the place at the service
        alone.
        """
        with self._service.slot():
            path = self._service.result(
                "an adapter", lambda: self.trainer.save_weights_for_sampler(self._name("adapter"))
            ).path
        try:
            download_adapter(self.config.model.base_url, path, folder, self._service.timeout)
        except EnvironmentFailure as error:
            self._log(f"The adapter stays with the service as {path}: {error}")
        self._write(folder, sampler=path)

    def _name(self, kind: str) -> str:
        """Return a name that is unique within the training client, since retrain may try a save
        again.
        """
        self._saves += 1
        return f"{kind}-{self._saves:04d}"

    def _write(self, folder: Path, **paths: str) -> None:
        content = {"base_model": self.base_model, "lora_rank": self.config.model.lora_rank} | paths
        (folder / STATE_FILE).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

    def load(self, folder: Path) -> None:
        self._load(stored_path(folder), "_with_optimizer")

    def supervise(self, config: "TrainConfig | None") -> None:
        if config is None and self._trainer is not None:
            # The service keeps one optimizer for an adapter, so its weights move to another.
            with self._service.slot():
                path = self._service.result(
                    "a checkpoint", lambda: self.trainer.save_state(self._name("border"))
                ).path
            self._load(path, "")
        self._supervised, self._settings = config is not None, config or self.config

    def _load(self, path: str, optimizer: str) -> None:
        """Go on from a state at the service, by the requests of these names: "_with_optimizer", or
        "" for its weights alone.
        """
        import tinker

        seconds = self._service.timeout
        self._log(f"Creating training client from {path}...")
        client = self._service.client
        with self._service.answering(f"the state {path}"):
            try:
                create = getattr(client, f"create_training_client_from_state{optimizer}")
                trainer = create(path).result(timeout=seconds)
            except tinker.APIStatusError as error:
                if error.status_code != 422:
                    raise
                # SkyRL 0.4.0 does not know this request: it loads a state into an adapter that
                # exists, as that one's first request.
                trainer = self._create().result(timeout=seconds)
                with without_deprecations():
                    getattr(trainer, f"load_state{optimizer}")(path).result(timeout=seconds)
            self._trainer = trainer
        self._log(LogLine("Training client ready."))

    def close(self) -> None:
        self._service.close()


def stored_path(folder: Path) -> str:
    """Return the tinker:// path in a checkpoint. Raises RunFailed for a folder without one."""
    content = {}
    if (folder / STATE_FILE).is_file():
        content = read_object(folder / STATE_FILE)
    path = content.get("state") or content.get("sampler")
    if not isinstance(path, str) or not path.startswith("tinker://"):
        raise RunFailed(
            f"{folder} names no weights of a Tinker service (no {STATE_FILE} with a tinker://"
            " path); name another checkpoint."
        )
    return path
