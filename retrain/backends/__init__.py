"""Training backends: their contract, what each declares that it can do, and the local one."""

from retrain.backends.base import Backend, BackendCapabilities
from retrain.backends.losses import ActionTokens

__all__ = ["ActionTokens", "Backend", "BackendCapabilities"]
