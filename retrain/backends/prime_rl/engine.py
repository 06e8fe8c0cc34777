"""PRIME-RL's inference servers: they are moved to each policy that its trainer broadcasts, and
sampled from with a cache salt per version.

A server keeps its prefix cache over an update, so the salt is what keeps keys and values of an
older policy out.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from retrain.backends.prime_rl.broadcasts import Broadcasts, Policy
from retrain.backends.prime_rl.facts import SERVERS
from retrain.errors import ServerFailure
from retrain.inference_engine.base import SampleRequest
from retrain.inference_engine.http import Json, Refused, Server, Unavailable
from retrain.inference_engine.served import ServedAdapter, ServedEngine
from retrain.inference_engine.vllm import NEUTRAL, VLLMDialect
from retrain.types import Completion

if TYPE_CHECKING:
    from retrain.config import TrainConfig

DEFAULT_URL = "http://localhost:8000"
"""Where PRIME-RL's inference server listens unless it is told otherwise."""
_GENERATE = "/inference/v1/generate"
_ADAPTER_NAME = "retrain-policy"
_UPDATE_S = 720.0
"""Reading a whole checkpoint can take minutes. Pausing waits for the requests under way."""
_PAUSE_S = 300.0
_SUM_TOLERANCE = 1e-3


@dataclass(frozen=True)
class ServedPolicy(ServedAdapter):
    """A policy as servers know it; `name` is empty where the base model itself was updated."""

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
        """Exchange an adapter in place; for whole weights the server pauses, and is resumed even
        after a failure.
        """
        assert isinstance(adapter, ServedPolicy)
        if adapter.name:
            try:
                await server.post(
                    "/load_lora_adapter",
                    {"lora_name": adapter.name, "lora_path": str(adapter.folder)},
                )
            except Refused as error:
                if error.status in (404, 500):  # a network file system may show the folder later
                    raise Unavailable(
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
                    f"{self.title} {server.url} returns log-probs of another distribution than it"
                    f" samples from (two kept tokens have probabilities of {total:.3f} in all):"
                    " start it with logprobs_mode = processed_logprobs."
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
            self.say(
                f"Step {step} is sampled with policy v{policy.version}: the trainer needs longer"
                f" than sync_wait_s for v{step}, so sampling and learning overlap by one step."
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
            await self._dialect.look(server)
        if self._adapter is not None:
            await self._dialect.load(server, self._adapter)

    def _completions(
        self, index: int, request: SampleRequest, server: Server, answer: Any
    ) -> list[Completion]:
        """Return completions with the kept sets themselves, which the trainer renormalises over."""
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
        """The servers belong to PRIME-RL and keep the policy that they have."""
