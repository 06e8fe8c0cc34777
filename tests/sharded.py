"""What a run with parts of a base in every process samples and learns; torchrun starts this file,
and tests/test_sharding.py imports it.
"""

import sys
from pathlib import Path
from typing import Any

import torch

from retrain.backends.local.backend import LocalBackend
from retrain.distributed import World, joined
from retrain.inference_engine.base import NoiseKey, SampleRequest
from retrain.model.footprint import footprint
from retrain.model.load import is_sharded, layers
from retrain.model.memory import predict_memory
from tests.learner_models import EOS, config_for, make_rows, model_folder

SMALL_PASSES = {"micro_batch_tokens": 24, "lr": 0.02}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "tied": (
        "qwen3",
        {
            "training": SMALL_PASSES | {"updates_per_batch": 2, "minibatches": 2},
            "loss": {"kl_coef": 0.1, "mode": "ppo"},
        },
    ),
    "checkpointed": ("gemma2", {"training": SMALL_PASSES | {"gradient_checkpointing": True}}),
    "dropout": ("llama", {"training": SMALL_PASSES, "lora": {"dropout": 0.2}}),
    "bf16": ("llama", {"training": SMALL_PASSES, "model": {"dtype": "bf16"}}),
}


def observe(case: str, world: World) -> dict[str, Any]:
    """Tokens of every completion, results and adapter of three steps. In the first pass and in the
    last step one process has no work.
    """
    family, sections = CASES[case]
    config = config_for(family, **sections, backend={"shard_base": world.size > 1})
    backend = LocalBackend(config, eos_ids=[EOS], world=world)
    seen: dict[str, Any] = {"held": held(backend)}
    if world.size > 1:
        seen["footprint"] = (
            footprint(backend._base, config),
            predict_memory(config, shards=world).size,
        )
    first, batches = (
        [sample(backend, world, requests=1, step=0)],
        [make_rows(7, seed=1), make_rows(7, seed=2), make_rows(1)],
    )
    results = [backend.train(rows, step) for step, rows in enumerate(batches)]
    seen["tokens"] = [*first, sample(backend, world, requests=3, step=1)]
    seen["results"] = [(result.loss, result.grad_norm, result.ratio_mean) for result in results]
    seen["logprobs"] = backend.logprobs(batches[0])
    seen["adapter"] = {
        name: parameter.detach().clone() for name, parameter in backend._weights.parameters.items()
    }
    return seen


def sample(
    backend: LocalBackend, world: World, *, requests: int, step: int
) -> dict[tuple[int, int], list[int]]:
    """Completions of ragged lengths by request and sample; every process draws its share of the
    requests and gets all of them.
    """
    own = world.share(range(requests))
    asked = [
        SampleRequest(
            torch.arange(5, 9 + slot).numpy().astype("int32"),
            3,
            (4, 30, 11)[slot],
            0.7,
            NoiseKey(11, 0, step, slot),
        )
        for slot in own
    ]
    drawn = {
        (own[one.request], one.sample): one.token_ids.tolist()
        for one in backend.engine.sample(asked)
    }
    return {key: tokens for part in world.gather(drawn) for key, tokens in part.items()}


def held(backend: LocalBackend) -> list[tuple[int, int]]:
    """(elements here, elements in all) of every frozen weight of the layers."""
    frozen = [
        weight
        for layer in layers(backend._base.decoder)
        for weight in layer.parameters()
        if not weight.requires_grad
    ]
    return [
        (weight.to_local().numel() if is_sharded(weight) else weight.numel(), weight.numel())
        for weight in frozen
    ]  # type: ignore[operator]


if __name__ == "__main__":
    folder, case = sys.argv[1:]
    model_folder(
        CASES[case][0]
    )  # transformers writes a model in the first of several processes only
    with joined() as world:
        torch.save(observe(case, world), Path(folder) / f"{world.rank}.pt")
