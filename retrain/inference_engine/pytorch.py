"""The declarations of the built-in engine, without torch; `torch_engine.py` is the engine."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from retrain.inference_engine.base import Description, EngineCapabilities, InferenceEngine

if TYPE_CHECKING:
    from retrain.config import TrainConfig


class PyTorchEngine(InferenceEngine):
    """Samples in this process. The local backend builds it, from parts that it shares with it."""

    capabilities = EngineCapabilities(
        in_process=True,
        adapter_reload=True,
        logprobs="sampled",
        noise="counter",
        entropy=True,
        kept_set=True,
        prefix_cache=True,
    )
    about = Description("in this process, with the learner's weights", "this machine", ("torch",))
    decodes_here = True
    supports_split = True

    @classmethod
    def decides(cls, config: "TrainConfig") -> Mapping[str, str]:  # noqa: ARG003 - shared
        return {"server": 'engine "pytorch" samples in this process'}
