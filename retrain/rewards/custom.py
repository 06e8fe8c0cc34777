"""The user's own rewards: `score(response, reference)`, or `score(responses, reference)` for a
whole group. A worker process, which the pool can kill, calls them.

The function may also take the keywords prompt (the rendered text), example (a
`retrain.types.Example`), params, token_count and finish_reason. For a group it may take
token_counts and finish_reasons, lists as long as responses. It may be sync or async. It returns a
float, a bool, or None for "could not judge", and for a group a list of these. Only worker processes
import this file.
"""

import asyncio
import inspect
import math
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np

from retrain.config import TrainConfig
from retrain.config.schema import Provenance
from retrain.errors import RetrainError, RunFailed
from retrain.plugins import Plugin, describe, load_function, user_code
from retrain.records.redact import reason_of
from retrain.types import Example


@dataclass(frozen=True)
class UserReward:
    """A loaded function."""

    plugin: Plugin
    runner: asyncio.Runner
    """Kept for the life of the worker, so that HTTP clients of async rewards outlive a call."""

    @property
    def whole_group(self) -> bool:
        return self.plugin.form.whole_group

    def __call__(self, job: dict[str, Any]) -> dict[str, Any]:
        name, given = self.plugin.name, job["responses" if self.whole_group else "response"]
        optional = job | {"example": Example(**job["example"])}
        try:
            with user_code(name, RunFailed):
                value = self.plugin.call(given, job["reference"], optional=optional)
                if inspect.isawaitable(value):
                    value = self.runner.get_loop().run_until_complete(value)
                if isinstance(value, np.ndarray | tuple):
                    value = list(value)
        except (RetrainError, KeyboardInterrupt) as error:
            return _no_reward(str(error) or f"{name} raised KeyboardInterrupt")
        if not self.whole_group:
            return _reward(name, value)
        if isinstance(value, list) and len(value) == len(given):
            # A member that got None, or no number, leaves the others their rewards.
            return {"members": [_reward(name, each) for each in value]}
        what = f"{len(value)} rewards" if isinstance(value, list) else _kind_of(value)
        return _no_reward(f"{name} returned {what}, not a list of {len(given)} rewards")


def _reward(name: str, value: object) -> dict[str, Any]:
    if value is None:
        return _no_reward(f"{name} returned None")
    if not isinstance(value, Real | np.bool_):
        return _no_reward(f"{name} returned {_kind_of(value)}, not a float, a bool or None")
    try:
        number = float(value)
    except OverflowError:  # an integer of more than 308 digits
        number = math.inf
    except BaseException as error:  # noqa: BLE001 - the user's `__float__` may raise anything
        return _no_reward(f"{name} returned {_kind_of(value)}: {describe(error)}")
    if not math.isfinite(number):
        return _no_reward(f"{name} returned {number}, which is not finite")
    return {"value": number}


def _kind_of(value: object) -> str:
    return "None" if value is None else f"a value of type {type(value).__name__}"


def _no_reward(reason: str) -> dict[str, Any]:
    return {"value": None, "reason": reason_of(reason)}


def load_rewards(setup: dict[str, Any]) -> dict[str, UserReward]:
    """Load every function that the set-up of a worker names as a plugin.

    Raises ConfigurationError, one sentence, for a function that is missing, does not import, or is
    not callable as a reward.
    """
    config = TrainConfig.model_validate(
        {"plugins": setup["plugins"], "reward": {"params": setup["params"]}}
    )
    # retrain also looks for plugins in the folder of the file.
    config._provenance = Provenance(setup["source"] and Path(setup["source"]), setup["origins"])
    runner = asyncio.Runner()
    return {
        name: UserReward(load_function("reward", name, config), runner) for name in setup["rewards"]
    }
