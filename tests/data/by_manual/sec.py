"""SEC (arXiv 2505.14970): a bandit over kinds of problems; an arm is worth its mean absolute advantage."""

from collections.abc import Sequence
from statistics import fmean
from typing import Any

import numpy as np

from retrain.data import PromptSampler
from retrain.types import Group


class Sec(PromptSampler):
    """A kind of problem is drawn by the softmax of its value, and each of its problems alike."""

    def __init__(self, examples: Sequence[Any], params: dict[str, Any]) -> None:
        super().__init__(examples, params)
        self.kinds = [example.task for example in examples]
        self.values = dict.fromkeys(self.kinds, 0.0)
        self.rate, self.temperature = params["rate"], params["temperature"]

    def choose(self, step: int, count: int, uniforms: Any) -> Sequence[int]:
        counts = {kind: self.kinds.count(kind) for kind in self.values}
        logits = [
            self.values[kind] / self.temperature - np.log(counts[kind]) for kind in self.kinds
        ]
        gumbel = -np.log(-np.log(uniforms))
        return np.argsort(-(np.array(logits) + gumbel))[:count].tolist()

    def observe(self, indices: Sequence[int], groups: Sequence[Group]) -> None:
        seen: dict[str, list[float]] = {}
        for index, group in zip(indices, groups):
            rewards = [member.score.reward for member in group.members]
            if rewards:
                mean = fmean(rewards)
                seen.setdefault(self.kinds[index], []).extend(abs(r - mean) for r in rewards)
        for kind, sizes in seen.items():
            self.values[kind] += self.rate * (fmean(sizes) - self.values[kind])

    def state(self) -> dict[str, Any]:
        return {"values": self.values}

    def load(self, state: dict[str, Any]) -> None:
        self.values = state["values"]
