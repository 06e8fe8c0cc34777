"""The declarations of the PRIME-RL backend, without the packages of its wire format."""

from retrain.backends.base import BackendCapabilities, RemoteBackend
from retrain.inference_engine.base import Description, EngineCapabilities
from retrain.install import install_hint, missing_package

SERVERS = EngineCapabilities(
    in_process=False, adapter_reload=True, logprobs="sampled", kept_set=True, prefix_cache=True
)
"""Capabilities of the inference servers that come with PRIME-RL."""


class PrimeRLFacts(RemoteBackend):
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
    about = Description(
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
