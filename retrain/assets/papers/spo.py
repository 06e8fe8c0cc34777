"""SPO's advantage (arXiv 2509.13232): the baseline is the rate at which a prompt was solved."""

from typing import Any

import numpy as np

from retrain.advantages import StepAdvantageContext


class Tracked:
    """The reward minus the tracked rate of its prompt, standardized over the step."""

    step_level = True

    def __init__(self) -> None:
        self.counts: dict[str, tuple[float, float]] = {}

    def __call__(self, ctx: StepAdvantageContext) -> list[list[float]]:
        keep, surplus = ctx.params["keep"], []
        for group in ctx.groups:
            half = 0.5 / (1 - keep)
            right, wrong = self.counts.get(group.prompt_id, (half, half))
            surplus.append([reward - right / (right + wrong) for reward in group.rewards])
            new, size = sum(group.rewards), len(group.rewards)
            self.counts[group.prompt_id] = (keep * right + new, keep * wrong + size - new)
        every = np.concatenate(surplus)
        return [((np.array(one) - every.mean()) / (every.std() + 1e-6)).tolist() for one in surplus]

    def state(self) -> dict[str, Any]:
        return {"counts": self.counts}

    def load(self, state: dict[str, Any]) -> None:
        self.counts = {name: tuple(pair) for name, pair in state["counts"].items()}
