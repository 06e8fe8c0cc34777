"""The PRIME-RL backend. retrain computes prompts, rewards and credit; PRIME-RL's trainer computes
gradients, and its inference servers sample completions.

Batch N, counted from 1, is retrain's step N - 1. The servers sample it with policy v(N - 1), or
with the previous policy if the trainer is slower than `sync_wait_s`. The backend moves the servers
to each policy that the trainer broadcasts. A server keeps its prefix cache over an update. A cache
salt per version therefore keeps keys and values of an older policy out. This backend loads no
weights and does not import torch.
"""

import json
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from retrain.backends.base import Backend
from retrain.backends.prime_rl.facts import SERVERS, PrimeRLFacts
from retrain.backends.prime_rl.wire import (
    BATCHES,
    Broadcasts,
    Policy,
    build_sender,
    encode,
    share_out,
    trained_samples,
)
from retrain.config.load import replaced
from retrain.distributed import ALONE, World
from retrain.errors import Interrupted, RunFailed, ServerFailure
from retrain.inference_engine.base import SampleRequest
from retrain.inference_engine.http import Json, Refusal, Server, TransientFailure
from retrain.inference_engine.served import ServedAdapter, ServedEngine
from retrain.inference_engine.vllm import NEUTRAL, VLLMDialect
from retrain.model.text import load_model_config
from retrain.system import read_object
from retrain.types import Completion, Float32Array, MachineChoices, Row, StepResult

if TYPE_CHECKING:
    from retrain.config import TrainConfig, schema


# -- its inference servers -------------------------------------------------------------------------


DEFAULT_URL = "http://localhost:8000"
"""Default address of PRIME-RL's inference server."""
_GENERATE = "/inference/v1/generate"
_ADAPTER_NAME = "retrain-policy"
_UPDATE_S = 720.0
"""Reading a whole checkpoint can take minutes. Pausing waits for the requests under way."""
_PAUSE_S = 300.0
_SUM_TOLERANCE = 1e-3


@dataclass(frozen=True)
class ServedPolicy(ServedAdapter):
    """A policy as servers know it; `name` is empty if the trainer updates the base model itself."""

    salt: str
    """Separates the prefix caches of policies."""

    @classmethod
    def of(cls, policy: Policy) -> "ServedPolicy":
        return cls(
            _ADAPTER_NAME if policy.is_adapter else "",
            policy.folder.resolve(),
            f"v{policy.version}.{policy.receipt}",
        )


class PrimeDialect(VLLMDialect):
    title = "PRIME-RL's inference server"

    def call(
        self, request: SampleRequest, adapter: ServedAdapter | None, server: Server
    ) -> tuple[str, Json]:
        assert isinstance(adapter, ServedPolicy)
        cut = request.truncation
        settings = {
            "n": request.count,
            "max_tokens": request.max_tokens,
            "temperature": request.temperature,
            "top_p": cut.top_p,
            "top_k": cut.top_k or -1,
            "min_p": cut.min_p,
            **NEUTRAL,
            "logprobs": 1,
            "ignore_eos": True,  # our own list of end-of-sequence tokens instead
            "stop_token_ids": self.eos_ids,
            "skip_special_tokens": False,
        }
        model = adapter.name or server.facts["base"]
        prompt = request.prompt_ids.tolist()
        return _GENERATE, {
            "model": model,
            "token_ids": prompt,
            "sampling_params": settings,
            "cache_salt": adapter.salt,
        }

    async def load(self, server: Server, adapter: ServedAdapter) -> None:
        """Exchange an adapter in place. For whole weights the server pauses, and resumes even after
        a failure.
        """
        assert isinstance(adapter, ServedPolicy)
        if adapter.name:
            try:
                await server.post("/load_lora_adapter", adapter.fields)
            except Refusal as error:
                if error.status in (404, 500):  # a network file system may show the folder later
                    raise TransientFailure(
                        f"{server.url}: {error.status} {error}", gone=False
                    ) from error
                raise
            return
        try:
            await server.post("/pause?mode=keep&clear_cache=false", timeout=_PAUSE_S)
            await server.post(
                "/update_weights", {"weight_dir": str(adapter.folder)}, timeout=_UPDATE_S
            )
        finally:
            await server.post("/resume", timeout=_PAUSE_S)

    async def check_logprobs(
        self, server: Server, adapter: ServedAdapter, temperature: float
    ) -> None:
        """Log-probs must be of the sampled distribution: of a request that keeps two tokens, the
        two probabilities add up to 1.

        Raises ServerFailure otherwise.
        """
        settings = {
            "max_tokens": 4,
            "temperature": temperature,
            "top_k": 2,
            "logprobs": 2,
            "ignore_eos": True,
        }
        model = adapter.name or server.facts["base"]
        answer = await server.post(
            _GENERATE, {"model": model, "token_ids": self.eos_ids[:1], "sampling_params": settings}
        )
        for token in answer["choices"][0]["logprobs"]["content"]:
            total = sum(np.exp(sorted(one["logprob"] for one in token["top_logprobs"])[-2:]))
            if abs(total - 1) > _SUM_TOLERANCE:
                raise ServerFailure(
                    f"{self.title} {server.url} returns log-probs of another distribution than"
                    f" it samples from (two kept tokens add up to {total:.3f}). Start it with"
                    " logprobs_mode = processed_logprobs."
                )


class PrimeEngine(ServedEngine):
    """Samples from the policy that the trainer broadcast last."""

    capabilities = SERVERS
    dialect_class = PrimeDialect

    def __init__(
        self,
        config: "TrainConfig",
        *,
        model_config: Any,
        eos_ids: Sequence[int],
        broadcasts: Broadcasts,
        ready: Callable[[], None],
    ) -> None:
        """`ready` returns once a trainer would receive a batch."""
        self._broadcasts, self._ready = broadcasts, ready
        self._temperature = config.training.temperature
        self._checked = False
        self._dialect: PrimeDialect
        super().__init__(
            config, model=SimpleNamespace(config=model_config), eos_ids=eos_ids, device=None
        )

    def sync(self, save_adapter: Callable[[Path], None], step: int) -> None:  # noqa: ARG002 - the trainer has the weights
        """Wait for the policy after `step` batches and serve it."""
        self._ready()
        policy = self._broadcasts.take(step)
        if policy.version < step:
            self.log(
                f"Step {step} samples with policy v{policy.version}, since the trainer needs"
                f" longer than sync_wait_s for v{step}. So sampling and learning overlap by one"
                " step."
            )
        served = ServedPolicy.of(policy)
        if served == self._adapter:
            return
        self._adapter = served
        self._pool.run(self._pool.on_each(self._prepare))
        if not self._checked:
            dialect = self._dialect
            assert isinstance(dialect, PrimeDialect)
            self._pool.run(
                self._pool.on_each(
                    lambda server: dialect.check_logprobs(server, served, self._temperature)
                )
            )
            self._checked = True

    async def _prepare(self, server: Server) -> None:
        if "looked" not in server.facts:
            await self._look(server)
        if self._adapter is not None:
            await self._dialect.load(server, self._adapter)

    def _completions(
        self, index: int, request: SampleRequest, server: Server, answer: Any
    ) -> list[Completion]:
        """Return completions with the kept sets themselves, over which the trainer renormalizes."""
        completions = super()._completions(index, request, server, answer)
        if any(completion.kept is None for completion in completions):
            return completions
        sets = [
            tuple(np.array(ids, np.int32) for ids in choice["sampling_mask"])
            for choice in answer["choices"]
        ]
        return [
            replace(completion, kept_ids=kept)
            for completion, kept in zip(completions, sets, strict=True)
        ]

    def _leave(self) -> None:
        """Do nothing: the servers belong to PRIME-RL and keep their policy."""


# -- the backend -----------------------------------------------------------------------------------


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
        if not config.inference.urls:
            config = replaced(config, {"inference.url": DEFAULT_URL})
        try:
            self.engine = PrimeEngine(
                config,
                model_config=load_model_config(
                    model.model, model.revision, model.trust_remote_code
                ),
                eos_ids=eos_ids,
                broadcasts=self._broadcasts,
                ready=self._prepare,
            )
        # A signal too: no caller holds this backend yet, so none could close it.
        except BaseException:
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
        to = str(self.output_dir / BATCHES)
        if options.transport == "zmq":
            to = f"tcp://{options.zmq_host}:{options.zmq_port}"
        lines = [
            (
                f"PRIME-RL: batches go to {to}, policies come from {self._broadcasts.folder},"
                " which its servers must see too."
            )
        ]
        if training.truncated:
            lines.append(
                "PRIME-RL gets kept sets as sampling_mask, which trainers read since September"
                " 2026 (#3431). A trainer of v0.9.0 ignores them, so its ratios would be"
                " wrong."
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
        """Make sure, before the servers sample a step, that a trainer is there to learn from it."""
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
        """Return the newest policy. After the last batch the trainer's answer may never come, and
        retrain must still save a run whose trainer is gone.
        """
        if not self._lost:
            try:
                return self._broadcasts.take(self._shipped)
            except (ServerFailure, Interrupted):
                self._lost = True
        return self._broadcasts.newest

    def load(self, folder: Path) -> None:
        """Restore the number of sent batches, which is our only state. The trainer restores its
        own.
        """
        batches = read_object(folder / STATE).get("batches")
        if not isinstance(batches, int):
            raise RunFailed(
                f"{folder / STATE} lacks the number of sent batches; put it back from a copy."
            )
        self._shipped = batches

    def close(self) -> None:
        self.engine.close()
        self._sender.close()


def output_dir(backend: "schema.Backend", logging: "schema.Logging") -> Path:
    """Return the folder that retrain and the trainer share."""
    named = backend.prime_rl.output_dir or backend.adapter_path
    if named:
        return Path(named)
    return Path(logging.log_dir) / "prime_rl"
