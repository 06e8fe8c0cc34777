"""The mlx engine against MLX-LM's server on the CPU: parity, learning beside the local engine, a
stale adapter.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from real_servers import RealServer, largest_difference, started
from runs import small

from retrain import train
from retrain.backends.local.backend import LocalBackend
from retrain.errors import RunFailed
from retrain.inference_engine.base import NoiseKey, SampleRequest
from retrain.inference_engine.http import Server
from retrain.inference_engine.mlx import MLXDialect, MLXEngine
from retrain.inference_engine.served import ServedAdapter

pytestmark = [pytest.mark.servers, pytest.mark.timeout(900)]

LEARNING: dict[str, Any] = {
    "model": {"lora_rank": 16},
    "reward": {"type": "match"},
    # At this temperature raw log-probs are not those of the policy.
    "training": {
        "seed": 0,
        "max_steps": 10,
        "batch_size": 4,
        "group_size": 4,
        "max_tokens": 64,
        "temperature": 0.8,
        "lr": 1e-3,
    },
    "loss": {"max_grad_norm": 1.0},
}


@pytest.fixture(scope="module")
def server() -> Iterator[RealServer]:
    with started("mlx") as (one,):
        yield one


def through(folder: Path, server: RealServer, engine: str = "mlx") -> Any:
    return small(folder, inference={"engine": engine, "url": server.url}, **LEARNING)


def test_ten_steps_learn_as_the_local_engine_does(tmp_path: Path, server: RealServer) -> None:
    """Prints a table of both."""
    served = train(through(tmp_path / "mlx", server), quiet=True).records()
    local = train(small(tmp_path / "local", **LEARNING), quiet=True).records()
    print(
        "\n| step | largest difference, nats | correct, mlx | correct, pytorch | seconds sampling,"
        " mlx | pytorch |"
    )
    print("|---|---|---|---|---|---|")
    for mine, other in zip(served, local, strict=True):
        print(
            f"| {mine.step} | {largest_difference(mine):.1e} | {mine.correct_rate:.1%} |"
            f" {other.correct_rate:.1%} | {mine.time_sample_s:.1f} | {other.time_sample_s:.1f} |"
        )
    assert len(served) == 10 and max(map(largest_difference, served)) < 1e-3
    gate = json.loads((tmp_path / "mlx" / "environment.json").read_text())["parity_gate"]
    assert (
        gate["max_difference"] < 1e-3
        and gate["adapter_effect"] > 5 * gate["max_difference"]
        and gate["longest_prompt"] > 256
    )


def test_the_server_samples_at_the_temperature_that_it_is_asked_for(
    tmp_path: Path, server: RealServer
) -> None:
    """Raw log-probs do not show it. The sum of log p + H over the tokens, divided by its standard
    deviation, is about normal.
    """
    learner = LocalBackend(small(tmp_path, **LEARNING))
    engine = MLXEngine(
        through(tmp_path, server),
        model=learner._base.model,
        eos_ids=learner._eos_ids(),
        device=learner._base.device,
    )
    engine.sync(learner.save_adapter, 0)
    prompts = [np.array([258, *range(40 + k, 52 + k)], np.int32) for k in range(16)]
    drawn = list(
        engine.sample(
            [
                SampleRequest(prompt, 8, 40, 0.5, NoiseKey(0, 0, 0, k))
                for k, prompt in enumerate(prompts)
            ]
        )
    )
    engine.close()
    scores = {}
    for temperature in (0.5, 1.0):
        excess = variance = 0.0
        for one in drawn:
            ids = torch.tensor(
                np.concatenate([prompts[one.request], one.token_ids]).astype(np.int64)
            )
            with torch.no_grad():
                logits = (
                    learner._base.model(input_ids=ids[None])
                    .logits[0, -len(one.token_ids) - 1 : -1]
                    .double()
                )
            policy = torch.log_softmax(logits / temperature, -1)
            entropy = -(policy.exp() * policy).sum(-1, keepdim=True)
            excess += float((policy.gather(1, ids[-len(one.token_ids) :, None]) + entropy).sum())
            variance += float((policy.exp() * (policy + entropy).square()).sum())
        scores[temperature] = excess / variance**0.5
    learner.close()
    assert abs(scores[0.5]) < 4 < scores[1.0], scores


class OneFolder(MLXDialect):
    """Gives every version of the adapter in the same folder."""

    async def load(self, server: Server, adapter: ServedAdapter) -> None:
        constant = adapter.folder.parent / "constant"
        await super().load(server, ServedAdapter(adapter.name, adapter.folder))
        if not constant.exists():
            (adapter.folder / "mlx").rename(constant)
        else:
            for file in (adapter.folder / "mlx").iterdir():
                file.replace(constant / file.name)
            (adapter.folder / "mlx").rmdir()
        (adapter.folder / "mlx").symlink_to(constant)

    def _completion(self, prompt: str, settings: Any, adapter: ServedAdapter | None = None) -> Any:
        path, body = super()._completion(prompt, settings, adapter)
        if adapter and (adapter.folder.parent / "constant").exists():
            body["adapters"] = str(adapter.folder.parent / "constant")
        return path, body


class StaleMLX(MLXEngine):
    dialect_class = OneFolder


def test_new_weights_in_a_folder_that_the_server_knows_are_stopped_by_the_gate(
    tmp_path: Path, server: RealServer
) -> None:
    with pytest.raises(RunFailed, match="Parity gate"):
        train(through(tmp_path / "run", server, engine=f"{__name__}.StaleMLX"), quiet=True)
