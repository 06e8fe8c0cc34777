"""The declarations of the local backend, without torch."""

from retrain.backends.base import Backend, BackendCapabilities
from retrain.inference_engine.base import Description


class LocalFacts(Backend):
    capabilities = BackendCapabilities(
        per_token_advantages=True,
        synchronous_loss=True,
        exact_resume=True,
        own_loss=True,
        moves_settings=True,
        scores_reference=True,
    )
    about = Description(
        "PyTorch and PEFT on this machine", "this machine", ("torch", "transformers", "peft")
    )
    in_process = True
