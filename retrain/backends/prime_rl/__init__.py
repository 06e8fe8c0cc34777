"""The PRIME-RL backend: gradients in PRIME-RL's trainer, completions from its servers. Here is what
it declares, without the packages of its wire format.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from retrain.backends.base import Backend, BackendCapabilities, RemoteBackend
from retrain.distributed import ALONE, World
from retrain.inference_engine.base import About, EngineCapabilities
from retrain.install import install_hint, missing_package
from retrain.types import MachineChoices

if TYPE_CHECKING:
    from retrain.config import TrainConfig

SERVERS = EngineCapabilities(
    in_process=False, adapter_reload=True, logprobs="sampled", kept_set=True, prefix_cache=True
)
"""Capabilities of the inference servers that come with PRIME-RL."""


class PrimeRL(RemoteBackend):
    capabilities = BackendCapabilities(
        per_token_advantages=True,
        synchronous_loss=False,
        exact_resume=False,
        entropy=False,
        loss_reduction="mean",
        losses=(),
        scores_rows=False,
        sampler=SERVERS,
    )
    about = About(
        "PRIME-RL's trainer and inference server",
        "contract (v0.9.0); its receivers at commit 559b447",
        ("msgspec", "pyzmq"),
        extra="prime_rl",
    )

    @classmethod
    def unavailable_reason(cls) -> str:
        missing = missing_package("msgspec", "zmq")
        if not missing:
            return ""
        return (
            f'[backend] backend = "prime_rl" needs {missing}: {install_hint("prime_rl")}, or use'
            ' backend = "local".'
        )

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
        from retrain.backends.prime_rl.backend import PrimeRLBackend

        backend = PrimeRLBackend(config, choices, eos_ids=eos_ids)
        for note in backend.notes:
            log(note)
        return backend
