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
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from retrain.backends.prime_rl.facts import SERVERS, PrimeRLFacts
from retrain.backends.prime_rl.wire import (
    BATCHES,
    Broadcasts,
    FileSystemSender,
    Policy,
    ZmqSender,
    encode,
    share_out,
    trained_rows,
)
from retrain.backends.rows import step_result
from retrain.config.load import replaced
from retrain.errors import Interrupted, RunFailed, ServerFailure
from retrain.inference_engine.base import SampleRequest
from retrain.inference_engine.http import Json, Refusal, Server, TransientFailure
from retrain.inference_engine.served import ServedAdapter, ServedEngine
from retrain.inference_engine.vllm import NEUTRAL, VLLMDialect
from retrain.model.text import load_model_config
from retrain.system import read_object
from retrain.types import Completion, Float32Array, Row, StepResult

if TYPE_CHECKING:
    from retrain.config import TrainConfig


# -- its inference servers -------------------------------------------------------------------------


DEFAULT_URL = "http://localhost:8000"
"""Default address of PRIME-RL's inference server."""
_GENERATE = "/inference/v1/generate"
_UPDATE_S = 720.0
"""Reading a whole checkpoint can take minutes. Pausing waits for the requests under way."""
_PAUSE_S = 300.0
_SUM_TOLERANCE = 1e-3


class PrimeDialect(VLLMDialect):
    title = "PRIME-RL's inference server"

    def call(
        self, request: SampleRequest, adapter: ServedAdapter | None, server: Server
    ) -> tuple[str, Json]:
        assert isinstance(adapter, Policy)
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
        return _GENERATE, {
            "model": adapter.name or server.facts["base"],
            "token_ids": request.prompt_ids.tolist(),
            "sampling_params": settings,
            "cache_salt": adapter.salt,
        }

    async def load(self, server: Server, adapter: ServedAdapter) -> None:
        """Exchange an adapter in place. For whole weights the server pauses, and resumes even after
        a failure.
        """
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

    async def check_logprobs(self, server: Server, adapter: ServedAdapter) -> None:
        """Log-probs must be of the sampled distribution: of a request that keeps two tokens, the
        two probabilities add up to 1.

        Raises ServerFailure otherwise.
        """
        settings = {
            "max_tokens": 4,
            "temperature": self.config.training.temperature,
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

    broadcasts: Broadcasts
    ready: Callable[[], None]
    """Returns once a trainer would receive a batch."""
    _dialect: PrimeDialect

    def sync(self, save_adapter: Callable[[Path], None], step: int) -> None:  # noqa: ARG002 - the trainer has the weights
        """Wait for the policy after `step` batches and serve it."""
        self.ready()
        policy = self.broadcasts.take(step)
        if policy.version < step:
            self.log(
                f"Step {step} samples with policy v{policy.version}, since the trainer needs"
                f" longer than sync_wait_s for v{step}. So sampling and learning overlap by one"
                " step."
            )
        last, self._adapter = self._adapter, policy
        if policy != last:
            self._pool.run(self._pool.on_each(self._prepare))
        if last is None:
            self._pool.run(
                self._pool.on_each(lambda server: self._dialect.check_logprobs(server, policy))
            )

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
        return [
            replace(one, kept_ids=tuple(np.array(ids, "i4") for ids in choice["sampling_mask"]))
            for one, choice in zip(completions, answer["choices"], strict=True)
        ]

    def _leave(self) -> None:
        """Do nothing: the servers belong to PRIME-RL and keep their policy."""


# -- the backend -----------------------------------------------------------------------------------


STATE = "prime_rl.json"


class PrimeRLBackend(PrimeRLFacts):
    device_name = "PRIME-RL's trainer"

    def __init__(
        self,
        config: "TrainConfig",
        *,
        eos_ids: Sequence[int],
        log: Callable[[str], None],
        **_: Any,
    ) -> None:
        self.config = config
        options, model, folder = config.backend.prime_rl, config.model, output_dir(config)
        self._broadcasts = Broadcasts(
            folder / "broadcasts", options.sync_wait_s, options.sync_poll_s, self._sleep
        )
        self._shipped = 0
        self._lost = False
        zmq = options.transport == "zmq"
        self._sender = ZmqSender(options) if zmq else FileSystemSender(folder)
        if not config.inference.urls:
            config = replaced(config, {"inference.url": DEFAULT_URL})
        try:
            own = load_model_config(model.model, model.revision, model.trust_remote_code)
            self.engine = PrimeEngine(
                config, model=SimpleNamespace(config=own), eos_ids=eos_ids, device=None
            )
        # A signal too: no caller holds this backend yet, so none could close it.
        except BaseException:
            self._sender.close()
            raise
        self.engine.broadcasts = self._broadcasts
        self.engine.ready = lambda: self._sender.ready(self._shipped)
        to = f"tcp://{options.zmq_host}:{options.zmq_port}" if zmq else folder / BATCHES
        log(
            f"PRIME-RL: batches go to {to}, policies come from {self._broadcasts.folder},"
            " which its servers must see too."
        )
        if config.training.truncated:
            log(
                "PRIME-RL gets kept sets as sampling_mask, which trainers read since September"
                " 2026 (#3431). A trainer of v0.9.0 ignores them, so its ratios would be"
                " wrong."
            )

    def logprobs(self, rows: Sequence[Row], temperature: float | None = None) -> list[Float32Array]:
        raise NotImplementedError(
            "PRIME-RL's trainer does not return log-probs (`capabilities.scores_rows` is False)."
        )

    def _sleep(self, seconds: float) -> None:
        self.engine.check()
        time.sleep(seconds)

    # -- learning ----------------------------------------------------------------------------------

    def train(self, rows: Sequence[Row], step: int) -> StepResult:
        """Ship the batch. The trainer learns while this returns; its loss stays in its own log."""
        training, ranks = self.config.training, self.config.backend.prime_rl.trainer_ranks
        shares = share_out(trained_rows(rows), ranks, training.micro_batch_tokens)
        self._sender.send(step + 1, [encode(share, training.temperature) for share in shares])
        self._shipped = step + 1
        nothing = step_result([], [], [], training.max_tokens)
        return replace(nothing, updates=1, loss_is_placeholder=True)

    # -- files -------------------------------------------------------------------------------------

    def save_adapter(self, folder: Path) -> None:
        """Write PEFT's files of the newest policy; of a trainer without an adapter, a note where
        its weights are.
        """
        policy = self._newest()
        folder.mkdir(parents=True, exist_ok=True)
        if policy and policy.name:
            for file in policy.folder.glob("adapter_*"):
                shutil.copyfile(file, folder / file.name)
        state = {
            "batches": self._shipped,
            "policy_version": policy and policy.version,
            "weights": str(policy.folder) if policy and not policy.name else None,
        }
        (folder / STATE).write_text(json.dumps(state, indent=2) + "\n", encoding="utf-8")

    save = save_adapter

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


def output_dir(config: "TrainConfig") -> Path:
    """Return the folder that retrain and the trainer share."""
    named = config.backend.prime_rl.output_dir or config.backend.adapter_path
    return Path(named or f"{config.logging.log_dir}/prime_rl")
