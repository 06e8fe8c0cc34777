"""The declarations of the local backend, without torch."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from retrain.backends.base import Backend, BackendCapabilities
from retrain.inference_engine.base import Description

if TYPE_CHECKING:
    from retrain.config import TrainConfig


class LocalFacts(Backend):
    capabilities = BackendCapabilities(
        per_token_advantages=True,
        synchronous_loss=True,
        exact_resume=True,
        own_loss=True,
        moves_settings=True,
        supervises=True,
        scores_reference=True,
    )
    about = Description(
        "PyTorch and PEFT on this machine", "this machine", ("torch", "transformers", "peft")
    )
    in_process = True

    @classmethod
    def decides(cls, config: "TrainConfig") -> Mapping[str, str]:  # noqa: ARG003 - shared
        return {"service": "it belongs to the tinker backend"}

    @classmethod
    def problems(cls, config: "TrainConfig") -> Iterator[tuple[str, str]]:
        if config.model.train == "full":
            yield from _full_problems(config)
        whole = {
            "each run of a [campaign] is one process with the whole model; leave it false, or start"
            " single runs by torchrun": config.campaign is not None,
            "weights in 4 bits cannot be split; set [model] load_in_4bit = false, or leave it"
            " false": config.model.load_in_4bit,
            "an [inference] dtype unlike the weights' would hold a whole copy of the model in every"
            ' process; set dtype = "auto"': config.inference.dtype != "auto",
        }
        for because, holds in whole.items():
            if config.backend.shard_base and holds:
                yield "backend.shard_base", because


def _full_problems(config: "TrainConfig") -> Iterator[tuple[str, str]]:
    """Yield the keys, with reasons, that training all weights does not support."""
    full = '[model] train = "full"'
    if config.model.load_in_4bit:
        yield "model.load_in_4bit", f"{full} steps weights in float32; set it false"
    if config.lora.init_from:
        yield (
            "lora.init_from",
            f"{full} has no adapter; leave it out, and name where to start as [model] model",
        )
    if len(config.backend.device_list) > 1:
        yield (
            "backend.devices",
            f"split mode hands over an adapter, and {full} has none; use one device",
        )
    if config.backend.shard_base:
        yield (
            "backend.shard_base",
            f"{full} does not shard what it trains; leave it false, and start torchrun without it",
        )
    if config.algorithm.teacher not in ("", "base", "start", "answer"):
        yield (
            "algorithm.teacher",
            f'the teacher is an adapter, and {full} has none; use "base", "start" or "answer"',
        )
    if config.is_set("squeeze"):
        yield (
            "model.train",
            'train = "full" has no adapter to squeeze; leave [squeeze] out, or set "lora"',
        )
