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
    """What training all weights does not know."""
    full, reference = '[model] train = "full"', config.algorithm.reference
    problems = {
        "model.load_in_4bit": (
            config.model.load_in_4bit,
            f"{full} steps weights in float32; set load_in_4bit = false",
        ),
        "lora.init_from": (
            config.lora.init_from,
            f"{full} has no adapter; leave it out, and name the model to start from as [model]"
            " model",
        ),
        "backend.devices": (
            len(config.backend.device_list) > 1,
            f"split mode hands over an adapter, and {full} has none; use one device",
        ),
        "backend.shard_base": (
            config.backend.shard_base,
            f"weights that {full} trains are not sharded; leave it false, and start one process"
            " for each GPU by torchrun",
        ),
        "algorithm.reference": (
            reference not in ("", "base", "gold"),
            f'the teacher is an adapter, and {full} has none; use "base" or "gold"',
        ),
        "model.train": (
            config.is_set("squeeze"),
            'there is no adapter to squeeze; leave [squeeze] out, or set train = "lora"',
        ),
    }
    for path, (holds, because) in problems.items():
        if holds:
            yield path, because
