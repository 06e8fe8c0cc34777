"""Rewards written by the user: `score(response, reference)`, called inside a worker process that
can be killed.

The function may also take the keywords prompt (the rendered text), example (a
`retrain.types.Example`) and params. It may be sync or async, and returns a float, a bool, or None
for "could not judge". Only worker processes import this file.
"""

import asyncio
import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np

from retrain.config import TrainConfig
from retrain.config.schema import Provenance
from retrain.errors import RetrainError, RunFailed
from retrain.plugins import inspect_call, load_plugin, user_code
from retrain.records.redact import reason_of
from retrain.rewards.channel import Message
from retrain.types import Example


@dataclass(frozen=True)
class UserReward:
    """A loaded function and the optional keywords that its signature takes."""

    name: str
    function: Callable[..., Any]
    keywords: frozenset[str]
    params: dict[str, Any]
    runner: asyncio.Runner
    """Kept for the life of the worker, so that HTTP clients of async rewards outlive a call."""

    def __call__(self, job: Message) -> Message:
        optional = {
            "prompt": job["prompt"],
            "example": Example(**job["example"]),
            "params": dict(self.params),
        }
        keywords = {name: value for name, value in optional.items() if name in self.keywords}
        try:
            with user_code(self.name, RunFailed):
                value = self.function(job["response"], job["reference"], **keywords)
                if inspect.isawaitable(value):
                    value = self.runner.get_loop().run_until_complete(value)
        except RetrainError as error:
            return _no_reward(str(error))
        return self._reply(value)

    def _reply(self, value: object) -> Message:
        if value is None:
            return _no_reward(f"{self.name} returned None")
        if not isinstance(value, (bool, Real, np.bool_)):
            return _no_reward(
                f"{self.name} returned a value of type {type(value).__name__}, not a float, a bool"
                " or None"
            )
        number = float(value)
        if not math.isfinite(number):
            return _no_reward(f"{self.name} returned {number}, which is not finite")
        return {"value": number}


def _no_reward(reason: str) -> Message:
    return {"value": None, "reason": reason_of(reason)}


def load_rewards(
    names: Sequence[str], params: dict[str, Any], plugins: dict[str, Any], source: str | None
) -> dict[str, UserReward]:
    """Load every named function as a plugin. `plugins` is the [plugins] section and `source` the
    file of the configuration.

    Raises ConfigurationError, one sentence, for a function that cannot be found, imported, or
    called as a reward.
    """
    config = TrainConfig.model_validate({"plugins": plugins, "reward": {"params": params}})
    # Plugins are also looked for beside the file.
    config._provenance = Provenance(path=Path(source) if source else None)
    runner = asyncio.Runner()
    rewards = {}
    for name in names:
        function = load_plugin("reward", name, config)
        rewards[name] = UserReward(
            name, function, inspect_call("reward", function).keywords, params, runner
        )
    return rewards
