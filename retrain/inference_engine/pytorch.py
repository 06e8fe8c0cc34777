"""The declarations of the built-in engine, without torch; `torch_engine.py` is the engine."""

from retrain.inference_engine.base import Description, EngineCapabilities, InferenceEngine


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
