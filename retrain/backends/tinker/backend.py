"""Learning on a Tinker service: rows become datums, each update is one forward-backward pass and
one optimizer step.

The service runs the requests of one training client in the order of their making, whatever the
order of waiting. A step therefore requests all of its updates, and a sampler of the weights after
them, at once, and waits once. Everything stays on policy, and the service has no idle time between
two updates. A step's own sampling begins when the sampler is there, so older weights sample
nothing.
"""

import json
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

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
from retrain.backends.tinker.datums import ShiftedRow, action_logprobs, loss_of, ratio_bounds
from retrain.backends.tinker.engine import TinkerEngine
from retrain.backends.tinker.facts import TinkerFacts
from retrain.backends.tinker.service import Service, download_adapter, in_thread
from retrain.errors import EnvironmentFailure, RunFailed
from retrain.model.text import resolve_model
from retrain.system import read_object
from retrain.types import Float32Array, LogLine, Row, StepResult

if TYPE_CHECKING:
    from retrain.backends.tinker.own import LossCall
    from retrain.config import TrainConfig

STATE_FILE = "tinker.json"
"""A file in every checkpoint and in final/, which says where the service keeps the weights, and the
optimizer's state."""

Finish = Callable[[], tuple[Update, list[Float32Array]]]
"""Waits for an update under way; returns it with learner - sampler log-prob [T] of each row."""


class TinkerBackend(TinkerFacts):
    device_name = "tinker"

    def __init__(
        self,
        config: "TrainConfig",
        *,
        eos_ids: Sequence[int],
        log: Callable[[str], None],
        **_: Any,
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
        self._said_reduction = config.backend.tinker.loss_reduction != "sum"
        self.engine: TinkerEngine = TinkerEngine(
            self._service,
            list(eos_ids),
            lambda: self.trainer.save_weights_and_get_sampling_client(),  # noqa: PLW0108 - made at first use
        )

    @property
    def base_model(self) -> str:
        """The model's name at the service."""
        return self.config.backend.tinker.base_model or resolve_model(self.config.model.model)

    @property
    def trainer(self) -> Any:
        """The SDK's TrainingClient."""
        if self._trainer is None:
            name, rank = self.config.model.model, self.config.model.lora_rank
            self._log(LogLine(f"Creating LoRA training client (model={name}, rank={rank})..."))
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

    # -- learning ----------------------------------------------------------------------------------

    def train(self, rows: Sequence[Row], step: int) -> StepResult:
        check_rows(rows)
        training = self._settings.training
        batch = [
            ShiftedRow(row, number)
            for number, row in enumerate(rows)
            if row.trained and row.num_actions
        ]
        name = first_nonfinite(
            {
                "advantages": [row.row.advantages for row in batch],
                "sampler log-probs": [row.row.logprobs for row in batch],
            }
        )
        if name or not batch:
            skipped = [Update(nonfinite=name)] if name else []
            return step_result(skipped, [], [], training.max_tokens)
        completions = num_completions(rows) / training.minibatches
        # Request every pass before waiting for one, so that the service has no gap.
        with self._service.slot():
            requested = [
                (turn, self._request_update(part, step, completions))
                for turn in range(training.updates_per_batch)
                for part in minibatch_split(batch, training.minibatches, training.seed, step, turn)
            ]
            self.engine.expect_new_weights()
            done = [(turn, *finish()) for turn, finish in requested]
        updates = [update for _, update, _ in done]
        log_ratios = [one for turn, _, found in done if turn == 0 for one in found]
        # Later minibatches follow an update; only the rows of the first minibatch do not.
        result = step_result(updates, log_ratios, done[0][2], training.max_tokens)
        if result.grad_norm is None or np.isfinite(result.grad_norm):
            return result
        return replace(result, grad_norm=None)

    def _request_update(self, rows: Sequence[ShiftedRow], step: int, completions: float) -> Finish:
        """Request the gradient of one optimizer batch and the step with it."""
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
        computed = None
        if config.loss.mode in TINKER_LOSSES:
            ask = partial(self.trainer.forward_backward, *self._weighed(rows, weights))
        else:
            from retrain.backends.tinker.own import LossCall  # torch comes with it

            computed = LossCall(config.loss, self._own_loss, rows, weights)
            datums = [row.datum(weights=0.0) for row in rows]
            waits = partial(self.trainer.forward_backward_custom, datums, computed)
            ask = partial(in_thread, waits, self._service.timeout)
        try:
            with self._service.answering("an update"):
                passed, stepped = ask(), self.trainer.optim_step(adam)
        except FloatingPointError as problem:
            skipped = Update(nonfinite=str(problem))
            return lambda: (skipped, [])
        return lambda: self._finished(rows, passed, stepped, computed or weights)

    def _weighed(
        self, rows: Sequence[ShiftedRow], weights: Sequence[float]
    ) -> tuple[list[Any], str, dict[str, float] | None]:
        """Return the datums, the name and the bounds of a loss that the service has."""
        # A service that takes means divides each row's term, which is undone: the weights already
        # normalize the gradient.
        means = self.config.backend.tinker.loss_reduction != "sum"
        loss, datums = self._settings.loss, []
        for row, weight in zip(rows, weights, strict=True):
            own, factor = row.row, len(row) * len(rows) if means else 1
            given = own.advantages * np.float32(weight * factor)
            if self._supervised:
                datums.append(row.datum(weights=given))
            else:
                datums.append(row.datum(logprobs=own.logprobs, advantages=given))
        if self._supervised:
            return datums, "cross_entropy", None
        names = ("clip_low_threshold", "clip_high_threshold")
        return datums, loss.mode, dict(zip(names, ratio_bounds(loss) or (), strict=False)) or None

    def _finished(
        self, rows: Sequence[ShiftedRow], passed: Any, stepped: Any, loss: "LossCall | list[float]"
    ) -> tuple[Update, list[Float32Array]]:
        """Wait for an update, given its futures and its loss: computed here, or the weight of each
        row's tokens. The service has then changed the weights, so log-probs that are not finite end
        the run.
        """
        outputs = self._service.result("a forward-backward pass", lambda: passed).loss_fn_outputs
        metrics = self._service.result("an optimizer step", lambda: stepped).metrics or {}
        if not self._said_reduction and any(name.startswith("skyrl.ai/") for name in metrics):
            self._log(
                "This service is SkyRL, whose JAX backend divides the loss by positions"
                ' and rows. Set [backend.options] loss_reduction = "mean", or eps and'
                " max_grad_norm act on gradients that are far too small."
            )
        self._said_reduction = True
        asked = "a forward-backward pass, so neither its loss nor its ratios are known"
        new = action_logprobs(rows, outputs, asked)
        if first_nonfinite({"log-probs": new}):
            raise RunFailed(
                "Tinker's learner returned log-probs that are not finite, and has already changed"
                " the weights with them. Resume from the last checkpoint with a lower [training]"
                " lr or [loss] max_grad_norm = 1.0."
            )
        if isinstance(loss, list):
            update = loss_of(rows, loss, new, None if self._supervised else self._settings.loss)
        else:
            update = loss.result
        norms = (value for name, value in metrics.items() if name.endswith("grad_norm"))
        ratios = [one - row.row.logprobs for one, row in zip(new, rows, strict=True)]
        return replace(update, grad_norm=next(norms, np.nan)), ratios

    def logprobs(self, rows: Sequence[Row], temperature: float | None = None) -> list[Float32Array]:  # noqa: ARG002 - always 1
        """Return log-probs at temperature 1, the only temperature that the service's learner knows.
        The start of a run refuses any other.
        """
        check_rows(rows)
        shifted = [ShiftedRow(row) for row in rows if row.num_actions]
        found = []
        if shifted:
            datums = [row.datum(weights=0.0) for row in shifted]
            with self._service.slot():
                found = self._service.result(
                    "a forward pass", lambda: self.trainer.forward(datums, "cross_entropy")
                ).loss_fn_outputs
        asked = "a forward pass, so retrain cannot compare sampler and learner"
        return for_each_row(rows, action_logprobs(shifted, found, asked))

    # -- files -------------------------------------------------------------------------------------

    def save(self, folder: Path) -> None:
        """Save weights and optimizer at the service; the folder names the place."""
        self._write(folder, state=self._saved("checkpoint", "save_state"))

    def save_adapter(self, folder: Path) -> None:
        """Write the PEFT folder where the service hands adapters out, else the place at the service
        alone.
        """
        path = self._saved("adapter", "save_weights_for_sampler")
        try:
            download_adapter(self.config.model.base_url, path, folder, self._service.timeout)
        except EnvironmentFailure as error:
            self._log(f"The adapter stays with the service as {path}: {error}")
        self._write(folder, sampler=path)

    def _saved(self, kind: str, request: str) -> str:
        """Save at the service, by the request of this name; return the place. Its name there is
        unique within the training client, since retrain may try a save again.
        """
        self._saves += 1
        what = "an adapter" if kind == "adapter" else "a checkpoint"
        name = f"{kind}-{self._saves:04d}"
        with self._service.slot():
            save = getattr(self.trainer, request)
            path: str = self._service.result(what, lambda: save(name)).path
        return path

    def _write(self, folder: Path, **paths: str) -> None:
        content = {"base_model": self.base_model, "lora_rank": self.config.model.lora_rank} | paths
        (folder / STATE_FILE).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

    def load(self, folder: Path) -> None:
        """Go on from a checkpoint. Raises RunFailed for a folder without one."""
        file = folder / STATE_FILE
        content = read_object(file) if file.is_file() else {}
        path = str(content.get("state") or content.get("sampler"))
        if not path.startswith("tinker://"):
            raise RunFailed(
                f"{folder} names no weights of a Tinker service (no {STATE_FILE} with a tinker://"
                " path); name another checkpoint."
            )
        self._load(path, "_with_optimizer")

    def supervise(self, config: "TrainConfig | None") -> None:
        if config is None and self._trainer is not None:
            # The service keeps one optimizer for an adapter, so its weights move to another.
            self._load(self._saved("border", "save_state"), "")
        self._supervised, self._settings = config is not None, config or self.config

    def _load(self, path: str, optimizer: str) -> None:
        """Go on from a state at the service, by the requests of these names: "_with_optimizer", or
        "" for its weights alone.
        """
        import tinker

        seconds = self._service.timeout
        self._log(f"Creating training client from {path}...")
        client = self._service.client
        with self._service.answering(f"the state {path}"), warnings.catch_warnings():
            # The SDK announces that it will remove a request that older services need.
            warnings.simplefilter("ignore", FutureWarning)
            try:
                create = getattr(client, f"create_training_client_from_state{optimizer}")
                trainer = create(path).result(timeout=seconds)
            except tinker.APIStatusError as error:
                if error.status_code != 422:
                    raise
                # SkyRL 0.4.0 does not know this request: it loads a state into an adapter that
                # exists, as that one's first request.
                trainer = self._create().result(timeout=seconds)
                getattr(trainer, f"load_state{optimizer}")(path).result(timeout=seconds)
            self._trainer = trainer
        self._log(LogLine("Training client ready."))

    def close(self) -> None:
        self._service.close()
