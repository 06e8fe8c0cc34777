"""Dialogues of SmolLM2-135M-Instruct on real servers: a vocabulary of merged bytes and a tied head.
The lab's model writes single bytes, so that what a server does with text cannot show.

Only where RETRAIN_SMOLLM2 names its folder (scripts/get_smollm2.py): it takes minutes.
"""

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from real_servers import RealServer, largest_difference, started
from runs import lines, small

from retrain import train
from retrain.environments import Environment, Episode, Result
from retrain.types import ChatMessage, Example

pytestmark = [pytest.mark.servers, pytest.mark.timeout(1800)]


@pytest.fixture
def smollm2(request: Any) -> Iterator[RealServer]:
    """It computes in the precision that the test asks for."""
    if not (folder := os.environ.get("RETRAIN_SMOLLM2")):
        pytest.skip("RETRAIN_SMOLLM2 names no folder")
    flags = ("--max-model-len", "2048", "--dtype", request.param)
    with started("vllm", (Path(folder), flags)) as (one,):
        yield one


class Capitals(Environment):
    """Two questions that ask for a word each; the second has letters of several bytes."""

    def examples(self, split: str) -> list[Example]:
        return [
            Example(
                [ChatMessage(role="user", content=f"Name the capital of {one}. One word only.")], ""
            )
            for one in ("Poland", "Österreich", "中国")[: None if split == "train" else 1]
        ]

    def episode(self) -> Episode:
        return Answers()


class Answers(Episode):
    def reset(self, example: Example, seed: int) -> None:
        self.said: list[str] = []

    def step(self, reply: str) -> list[ChatMessage] | None:
        self.said.append(reply)
        if len(self.said) == 2:
            return None
        return [ChatMessage(role="user", content="Et celle de l'Équateur → ? Un seul mot.")]

    def result(self) -> Result:
        """Some right and some wrong, so that there is something to learn."""
        return Result(float(len("".join(self.said)) % 2))


def interviewed(folder: Path, server: RealServer, engine: str, **model: Any) -> Any:
    sections: dict[str, Any] = {
        "model": {"model": str(server.model)} | model,
        "inference": {"engine": engine, "url": server.url},
        "environment": {"provider": "servers.test_smollm2.Capitals", "max_turns": 2},
        "training": {"max_steps": 2, "batch_size": 1, "max_tokens": 40, "temperature": 0.8},
    }
    return train(small(folder, **sections), quiet=True)


def mean_turns(run: Any) -> list[float]:
    return [record["turns_mean"] for record in lines(run.folder / "metrics.jsonl")]


@pytest.mark.parametrize(
    ("smollm2", "dtype", "limit", "mean_limit"),
    [("float32", "fp32", 1e-3, 1e-3), ("bfloat16", "bf16", math.inf, 0.15)],
    indirect=["smollm2"],
)
def test_dialogues_are_on_policy(
    tmp_path: Path, smollm2: RealServer, dtype: str, limit: float, mean_limit: float
) -> None:
    run = interviewed(tmp_path, smollm2, "vllm", dtype=dtype)
    differences = [largest_difference(record) for record in run.records()]
    print("\nlargest differences, nats:", ", ".join(f"{value:.1e}" for value in differences))
    means = [record["logprob_diff_mean"] for record in lines(run.folder / "metrics.jsonl")]
    print("mean differences, nats:", ", ".join(f"{value:.1e}" for value in means))
    assert max(mean_turns(run)) > 1, "no second turn was sampled"
    assert len(differences) == 2 and max(differences) < limit and max(means) < mean_limit
