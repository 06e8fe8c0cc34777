"""The declarations of the PRIME-RL backend, without the packages of its wire format."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, ClassVar

from retrain.backends.base import BackendCapabilities, RemoteBackend
from retrain.inference_engine.base import Description, EngineCapabilities
from retrain.install import install_hint, missing_package

if TYPE_CHECKING:
    from retrain.config import TrainConfig

SERVERS = EngineCapabilities(
    in_process=False, adapter_reload=True, logprobs="sampled", kept_set=True, prefix_cache=True
)
"""Capabilities of the inference servers that come with PRIME-RL."""


_TRAINERS_OWN = ("optimizer", "scale", "adapter", "clips", "dual_clip", "log_ratios")


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

    lacks: ClassVar = {
        "all_weights": (
            'PRIME-RL trains full weights itself; leave it "lora" here, and leave the adapter out'
            " of the trainer's configuration"
        ),
        "shards": "PRIME-RL's trainer holds the model; leave it false",
        "supervision": (
            "PRIME-RL's trainer has a supervised entry point of its own, `sft`; leave it out here,"
            " run that first, and name its result as [model] model"
        ),
        "updates": "PRIME-RL's trainer makes one update per batch; leave it at 1",
        "loss": (
            "PRIME-RL's trainer has its own loss; leave it out here and set that in the trainer's"
            " configuration"
        ),
        "kl": "the KL term belongs to the configuration of PRIME-RL's trainer; leave it at 0",
        "entropy_bonus": "PRIME-RL's trainer has no entropy term; leave it at 0",
        "correction": (
            "PRIME-RL's ratio is against the sampler's log-probs; leave out [loss] correction and"
            " old_logprobs"
        ),
    }

    @classmethod
    def decides(cls, config: "TrainConfig") -> Mapping[str, str]:  # noqa: ARG003 - shared
        return {
            "service": "it belongs to the tinker backend",
            "weights": "PRIME-RL's trainer holds the model",
            "engine": "PRIME-RL's own inference server samples",
            "log_ratios_recorded": "PRIME-RL's trainer reports no log-ratios",
        } | dict.fromkeys(_TRAINERS_OWN, "the configuration of PRIME-RL's trainer says it")

    @classmethod
    def problems(cls, config: "TrainConfig") -> Iterator[tuple[str, str]]:
        if config.campaign is not None:
            because = (
                "all runs of a campaign would feed one trainer; start each run with a trainer of"
                ' its own, or use backend = "local"'
            )
            yield "backend.backend", because

    @classmethod
    def unavailable_reason(cls) -> str:
        missing = missing_package("msgspec", "zmq")
        if not missing:
            return ""
        return (
            f'[backend] backend = "prime_rl" needs {missing}: {install_hint("prime_rl")}, or use'
            ' backend = "local".'
        )
