"""Training backends: their contract, what each declares that it can do, and the local one."""

from retrain.backends.base import Backend, BackendCapabilities

__all__ = ["Backend", "BackendCapabilities"]
