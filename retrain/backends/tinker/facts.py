"""The declarations of the Tinker backend, without the service's SDK."""

from retrain.backends.base import BackendCapabilities, RemoteBackend
from retrain.backends.losses import TINKER_LOSSES
from retrain.inference_engine.base import Description, EngineCapabilities
from retrain.install import install_hint, missing_package

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
        "Tinker's learner knows log-probs at temperature 1 only, so the model is sampled and"
        " trained at temperature 1."
    )

    @classmethod
    def unavailable_reason(cls) -> str:
        if not missing_package("tinker"):
            return ""
        return (
            '[backend] backend = "tinker" needs the Tinker SDK, which is not installed;'
            f" {install_hint('tinker')}, or without torch as docs/tinker.md describes."
        )
