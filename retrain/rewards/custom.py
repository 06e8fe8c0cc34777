"""Rewards written by the user: `score(response, reference)`, called inside a worker process that can be killed.

The function may also take the keywords prompt (the rendered text), example (a `retrain.types.Example`) and params, may be sync
or async, and returns a float, a bool, or None for "could not judge". Only worker processes call what is in this file.
"""

import asyncio
import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np

from retrain.errors import ConfigurationError
from retrain.rewards.channel import Message
from retrain.types import Example

_OPTIONAL = ("prompt", "example", "params")
_REASON_LENGTH = 300


@dataclass(frozen=True)
class UserReward:
    """A loaded function and which of the optional keywords its signature takes."""

    name: str
    function: Callable[..., Any]
    keywords: frozenset[str]
    params: dict[str, Any]
    runner: asyncio.Runner
    """Kept for the life of the worker, so that HTTP clients of async rewards outlive a call."""

    def __call__(self, job: Message) -> Message:
        optional = {"prompt": job["prompt"], "example": Example(**job["example"]), "params": dict(self.params)}
        keywords = {name: value for name, value in optional.items() if name in self.keywords}
        try:
            value = self.function(job["response"], job["reference"], **keywords)
            if inspect.isawaitable(value):
                value = self.runner.run(_wait_for(value))
        except Exception as error:  # the border to user code: whatever it raises is the reason that there is no reward
            return _no_reward(f"{self.name} raised {type(error).__name__}: {error}")
        return self._reply(value)

    def _reply(self, value: object) -> Message:
        if value is None:
            return _no_reward(f"{self.name} returned None")
        if not isinstance(value, (bool, Real, np.bool_)):
            return _no_reward(f"{self.name} returned a value of type {type(value).__name__}, not a float, a bool or None")
        number = float(value)
        if not math.isfinite(number):
            return _no_reward(f"{self.name} returned {number}, which is not finite")
        return {"value": number}


async def _wait_for(value: Any) -> Any:
    return await value


def _no_reward(reason: str) -> Message:
    one_line = " ".join(reason.split())
    return {"value": None, "reason": one_line if len(one_line) <= _REASON_LENGTH else one_line[: _REASON_LENGTH - 3] + "..."}


def load_rewards(names: Sequence[str], params: dict[str, Any], plugins: dict[str, Any]) -> dict[str, UserReward]:
    """Load every named function; `plugins` is the [plugins] section. Raises ConfigurationError in one sentence."""
    from retrain.config import TrainConfig
    from retrain.plugins import load_plugin

    config = TrainConfig.model_validate({"plugins": plugins})
    runner = asyncio.Runner()
    rewards = {name: _inspected(name, load_plugin("reward", name, config), params, runner) for name in names}
    if params and not any("params" in reward.keywords for reward in rewards.values()):
        raise ConfigurationError(
            f"[reward] params holds {', '.join(sorted(params))}, but {' and '.join(names)} takes no params; "
            "add a keyword params to its signature or remove the table."
        )
    return rewards


def _inspected(name: str, function: object, params: dict[str, Any], runner: asyncio.Runner) -> UserReward:
    if not callable(function):
        raise ConfigurationError(f"The reward {name} is not a function; it must be score(response, reference) -> float, bool or None.")
    parameters = inspect.signature(function).parameters
    takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    keywords = frozenset(
        key for key in _OPTIONAL if takes_any or (key in parameters and parameters[key].kind is not inspect.Parameter.POSITIONAL_ONLY)
    )
    try:
        inspect.signature(function).bind("response", "reference", **dict.fromkeys(keywords))
    except TypeError as error:
        raise ConfigurationError(
            f"The reward {name}{inspect.signature(function)} cannot be called: {error}; it must take (response, reference) and, "
            "if it likes, the keywords prompt, example and params."
        ) from error
    return UserReward(name, function, keywords, params, runner)
