"""The PRIME-RL backend: prompts, rewards and credit here; gradients in PRIME-RL's trainer,
completions from its inference servers.

Batch N, counted from 1, is retrain's step N - 1. It is sampled with policy v(N - 1), or with the
one before where the trainer is slower than `sync_wait_s`. Nothing here loads weights or imports
torch.
"""

import json
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from retrain.backends.base import Backend
from retrain.backends.prime_rl.broadcasts import Broadcasts, Policy
from retrain.backends.prime_rl.engine import DEFAULT_URL, PrimeEngine
from retrain.backends.prime_rl.facts import PrimeRLFacts
from retrain.backends.prime_rl.transport import BATCHES, build_sender
from retrain.backends.prime_rl.wire import encode, share_out, trained_samples
from retrain.config.load import replaced
from retrain.distributed import ALONE, World
from retrain.errors import Interrupted, RunFailed, ServerFailure
from retrain.model.text import load_model_config
from retrain.parsing import read_object
from retrain.types import Float32Array, MachineChoices, Row, StepResult

if TYPE_CHECKING:
    from retrain.config import TrainConfig, schema

STATE = "prime_rl.json"


class PrimeRLBackend(PrimeRLFacts):
    def __init__(
        self,
        config: "TrainConfig",
        choices: MachineChoices | None = None,  # noqa: ARG002 - every backend is given it
        *,
        eos_ids: Sequence[int],
    ) -> None:
        self.config, self._options = config, config.backend.prime_rl
        self.output_dir = output_dir(config.backend, config.logging)
        options = self._options
        folder = self.output_dir / "broadcasts"
        self._broadcasts = Broadcasts(
            folder, wait_s=options.sync_wait_s, poll_s=options.sync_poll_s, sleep=self._sleep
        )
        self._shipped = 0
        self._prepared = False
        self._lost = False
        self._sender = build_sender(options, self.output_dir)
        model = config.model
        try:
            self.engine = PrimeEngine(
                (
                    config
                    if config.inference.urls
                    else replaced(config, {"inference.url": DEFAULT_URL})
                ),
                model_config=load_model_config(
                    model.model, model.revision, model.trust_remote_code
                ),
                eos_ids=eos_ids,
                broadcasts=self._broadcasts,
                ready=self._prepare,
            )
        except (
            BaseException
        ):  # a signal too: no caller holds this backend yet, so none could close it
            self._sender.close()
            raise

    @classmethod
    def open(
        cls,
        config: "TrainConfig",
        choices: MachineChoices | None,
        *,
        eos_ids: Sequence[int],
        log: Callable[[str], None],
        world: World = ALONE,  # noqa: ARG003 - refused with several processes
    ) -> Backend:
        backend = cls(config, choices, eos_ids=eos_ids)
        for note in backend.notes:
            log(note)
        return backend

    @property
    def notes(self) -> list[str]:
        """Lines for the start of a run."""
        options, training = self._options, self.config.training
        to = (
            f"tcp://{options.zmq_host}:{options.zmq_port}"
            if options.transport == "zmq"
            else self.output_dir / BATCHES
        )
        lines = [
            (
                f"PRIME-RL: batches go to {to}, policies come from {self._broadcasts.folder},"
                " which its servers must see too."
            )
        ]
        if training.truncated:
            lines.append(
                "PRIME-RL: kept sets are sent as sampling_mask, which trainers read since September"
                " 2026 (#3431); v0.9.0 itself ignores them, and its ratios would be wrong."
            )
        return lines

    # -- what the start-up lines and the gate ask for ----------------------------------------------

    @property
    def device_name(self) -> str:
        return "PRIME-RL's trainer"

    def logprobs(self, rows: Sequence[Row], temperature: float | None = None) -> list[Float32Array]:
        raise NotImplementedError(
            "PRIME-RL's trainer does not return log-probs (`capabilities.scores_rows` is False)."
        )

    def _sleep(self, seconds: float) -> None:
        self.engine.check()
        time.sleep(seconds)

    # -- learning ----------------------------------------------------------------------------------

    def _prepare(self) -> None:
        """Make sure, before a step is sampled, that a trainer is there to learn from it."""
        if not self._prepared:
            self._sender.prepare(self._shipped)
            self._prepared = True
        self._sender.wait_for_trainer()

    def train(self, rows: Sequence[Row], step: int) -> StepResult:
        """Ship the batch. The trainer learns while this returns; its loss stays in its own log."""
        training = self.config.training
        shares = share_out(
            list(trained_samples(rows)), self._options.trainer_ranks, training.micro_batch_tokens
        )
        self._sender.send(step + 1, [encode(share, training.temperature) for share in shares])
        self._shipped = step + 1
        return StepResult(
            loss=None,
            grad_norm=None,
            ratio_mean=None,
            ratio_max=None,
            mismatch_k1=None,
            mismatch_k3=None,
            ess=None,
            updates=1,
            nonfinite_updates=0,
            loss_is_placeholder=True,
        )

    # -- files -------------------------------------------------------------------------------------

    def save_adapter(self, folder: Path) -> None:
        """Write PEFT's files of the newest policy; of a trainer without an adapter, a note where
        its weights are.
        """
        policy = self._newest()
        folder.mkdir(parents=True, exist_ok=True)
        if policy is not None and policy.is_adapter:
            for file in policy.folder.glob("adapter_*"):
                shutil.copyfile(file, folder / file.name)
        state = {
            "batches": self._shipped,
            "policy_version": None if policy is None else policy.version,
            "weights": (
                None if policy is None or policy.is_adapter else str(policy.folder.resolve())
            ),
        }
        (folder / STATE).write_text(json.dumps(state, indent=2) + "\n", encoding="utf-8")

    def save(self, folder: Path) -> None:
        self.save_adapter(folder)

    def _newest(self) -> Policy | None:
        """After the last batch the trainer's answer may never come, and a run whose trainer is gone
        must still be saved.
        """
        if not self._lost:
            try:
                return self._broadcasts.take(self._shipped)
            except (ServerFailure, Interrupted):
                self._lost = True
        return self._broadcasts.newest

    def load(self, folder: Path) -> None:
        """The trainer restores its own state; ours is how many batches it had been sent."""
        batches = read_object(folder / STATE).get("batches")
        if not isinstance(batches, int):
            raise RunFailed(
                f"{folder / STATE} does not say how many batches were sent: the file was changed."
            )
        self._shipped = batches

    def close(self) -> None:
        self.engine.close()
        self._sender.close()


def output_dir(backend: "schema.Backend", logging: "schema.Logging") -> Path:
    """Return the folder that retrain and the trainer share."""
    named = backend.prime_rl.output_dir or backend.adapter_path
    if named:
        return Path(named).expanduser()
    return Path(logging.log_dir) / "prime_rl"
