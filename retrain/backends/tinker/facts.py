"""The declarations of the Tinker backend, without the service's SDK."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, ClassVar

from retrain.backends.base import BackendCapabilities, RemoteBackend
from retrain.backends.losses import TINKER_LOSSES
from retrain.inference_engine.base import Description, EngineCapabilities
from retrain.install import install_hint, missing_package
from retrain.system import listed

if TYPE_CHECKING:
    from retrain.config import TrainConfig

SAMPLER = EngineCapabilities(in_process=False, adapter_reload=True, logprobs="raw")
"""Log-probs are of softmax(logits), without the requested temperature."""


class TinkerFacts(RemoteBackend):
    capabilities = BackendCapabilities(
        per_token_advantages=True,
        synchronous_loss=True,
        exact_resume=False,
        entropy=False,
        loss_reduction="sum",
        losses=("importance_sampling", "ppo", "cispo", "sapo", "gmpo", "dppo"),
        own_loss=True,
        supervises=True,
        sampler=SAMPLER,
    )
    about = Description(
        "a Tinker service",
        "tinker 0.38.0 with skyrl 0.4.0 on a CPU",
        ("tinker",),
        extra="tinker",
    )
    address_flag = "--base-url"
    loads_model = False
    throttled = True
    only_temperature = 1.0
    served_losses = TINKER_LOSSES
    has_reference = False
    temperature_note = (
        "Tinker's learner knows log-probs at temperature 1 only, so retrain samples and trains"
        " at temperature 1."
    )

    lacks: ClassVar = {
        "all_weights": 'the service trains an adapter; leave it "lora", or use backend = "local"',
        "shards": "the service holds the model; leave it false",
        "adapter": (
            "Tinker adapts all linear layers of the blocks, at its own scale, without dropout and"
            " from its own checkpoints; leave it out"
        ),
        "dual_clip": "Tinker's ppo has no second clip; leave it at 0",
        "kl": "Tinker's losses have no KL term; leave it at 0",
        "entropy_bonus": "Tinker's losses have no entropy term; leave it at 0",
        "correction": (
            "Tinker's ratio is against the sampler's log-probs; leave out [loss] correction and"
            " old_logprobs"
        ),
        "kept_sets": (
            "Tinker's losses are over the whole vocabulary, so it cannot train a truncated"
            " policy; leave it off"
        ),
    }

    @classmethod
    def decides(cls, config: "TrainConfig") -> Mapping[str, str]:
        holds, samples = "Tinker holds the model", "Tinker samples by itself"
        decided = {
            "weights": holds,
            "micro_batches": holds,
            "scale": "the service chooses the scale of the adapter",
            "engine": samples,
            "server": samples,
        }
        if config.loss.mode not in ("sapo", "gmpo", "dppo"):
            decided["log_ratios"] = "Tinker computes the ratio"
        return decided

    @classmethod
    def problems(cls, config: "TrainConfig") -> Iterator[tuple[str, str]]:
        if config.training.temperature != cls.only_temperature:
            because = (
                "Tinker's learner knows log-probs at temperature 1 only, so it would train"
                " another policy; leave it out (remove [training] temperature), or write 1.0"
            )
            yield "training.temperature", because
        mean = config.backend.tinker.loss_reduction == "mean"
        if mean and config.loss.mode not in TINKER_LOSSES:
            because = (
                'a service with [backend.options] loss_reduction = "mean" divides by the'
                " weights that carry the gradient of retrain's own loss; use"
                f" {listed(TINKER_LOSSES, 'or')}"
            )
            yield "loss.mode", because

    @classmethod
    def unavailable_reason(cls) -> str:
        if not missing_package("tinker"):
            return ""
        return (
            f'[backend] backend = "tinker" needs the Tinker SDK; {install_hint("tinker")}, or'
            " without torch as docs/tinker.md describes."
        )
