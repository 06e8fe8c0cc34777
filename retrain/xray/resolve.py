"""The advantage of a configuration or of a name, as a function of a step's rewards alone."""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from retrain.advantages.algorithms import NotInStep
from retrain.advantages.resolve import episode_stage
from retrain.advantages.step import Segments, StepTokens
from retrain.config.names import builtin_names
from retrain.config.plan import Plan
from retrain.errors import ConfigurationError, RunFailed
from retrain.plugins import describe, params_of
from retrain.records.run_folder import refuse_foreign_code
from retrain.xray.binary import MAX_GROUP, Xray, xray
from retrain.xray.text import headline

if TYPE_CHECKING:
    from retrain.config import TrainConfig

_PLAIN = {"transform_mode": "none"}
_TOKENS = 8
"""Tokens of every completion that a plugin's context shows; all are equally likely and equally
long."""


def read_xray(
    name: str,
    group: int | None = None,
    *,
    trust: bool = False,
) -> list[Xray]:
    """Return the X-rays of a TOML file (one a condition) or of an advantage's name.

    Without `group`, the file gives a group's size, and a name has the default. Raises
    ConfigurationError for a file or plugin that does not load, and for an algorithm plugin, whose
    token advantages follow from more than rewards. With `trust` alone, retrain executes code that a
    file in a run's folder names.
    """
    config = _named(name, trust)
    size = group or config.training.group_size
    if size < 2:
        raise ConfigurationError(
            f"{name}: [training] group_size = {size} leaves nothing to compare within a prompt."
            " Use 2 or more, such as --group 8."
        )
    if size > MAX_GROUP:
        raise ConfigurationError(
            f"{name}: [training] group_size = {size} is above the {MAX_GROUP} of an X-ray. Name"
            " a smaller group, such as --group 8."
        )
    return [_read(label, arm, size) for label, arm in _arms(config)]


def _named(name: str, trust: bool) -> "TrainConfig":
    """Return the configuration of a file, or a configuration with the advantage or algorithm
    `name`.
    """
    from retrain.config import config_from_mapping, load_config

    if name.endswith(".toml") or Path(name).is_file():
        config = load_config(Path(name))
        if not trust:
            refuse_foreign_code(config, "its X-ray")
        return config
    if name in builtin_names("algorithm") and name not in builtin_names("advantage"):
        return config_from_mapping({"algorithm": {"algorithm_mode": name}})
    return config_from_mapping({"algorithm": {"advantage_mode": name} | _PLAIN})


def _arms(config: "TrainConfig") -> list[tuple[str, "TrainConfig"]]:
    """Return the configurations of a file by what distinguishes them: one, or a campaign's
    conditions.
    """
    if not config.is_set("campaign"):
        modes = config.algorithm
        return [(modes.algorithm_mode or modes.advantage_mode, config)]
    from retrain.campaign.plan import plan_campaign

    runs = plan_campaign(config, Path("campaign")).runs
    return list({run.condition: run.config for run in runs}.items())


def headline_of(config: "TrainConfig") -> str:
    """Return a line about a run's advantage; "" if it has no X-ray or its plugin is unusable."""
    try:
        one = _read("", config, config.training.group_size)
    except (ConfigurationError, RunFailed):  # explain says it as a problem
        return ""
    return f"{headline(one)} {one.name}".rstrip()


def _read(label: str, config: "TrainConfig", group: int) -> Xray:
    """X-ray an advantage with the values that [schedule] gives to the first step, since no step may
    have the values of the file. The label names the step if a schedule moves a parameter.
    """
    plan = Plan.of(config)
    if any(path.startswith("algorithm.advantage_params.") for path in plan.moved(0)):
        label = f"{label} at step 0".lstrip()
    if not plan.advantage:
        raise ConfigurationError(
            f'[algorithm] algorithm_mode = "{config.algorithm.algorithm_mode}" computes token'
            " advantages from more than rewards, which an X-ray does not see; name an"
            " advantage_mode instead."
        )
    first = plan.at(0)
    stage = episode_stage(plan.advantage, first, [], params_of("advantage", first))

    def advantages(groups: list[list[float]]) -> list[list[float]]:
        try:
            return stage(_step(groups), 0)
        except NotInStep as missing:
            raise ConfigurationError(
                f'[algorithm] advantage_mode = "{plan.advantage}" reads `{missing.name}`, and an'
                " X-ray knows only the rewards of completions; name an advantage of rewards."
            ) from missing

    try:
        return xray(label, advantages, group)
    except ConfigurationError:  # says itself what an X-ray does not see
        raise
    except ValueError as error:
        raise ConfigurationError(
            f'[algorithm] advantage_mode = "{plan.advantage}" fails on right-or-wrong rewards'
            f" ({describe(error)}); correct it."
        ) from error


def _step(groups: list[list[float]]) -> StepTokens:
    """Return a step of completions that only their rewards tell apart."""
    segments = Segments([_TOKENS] * sum(map(len, groups)))
    return StepTokens(
        rewards=groups,
        segments=segments,
        logprobs=np.full(segments.total, -0.5),
        entropies=np.full(segments.total, 0.5),
        planning=np.zeros(segments.total, dtype=np.bool_),
        in_loss=np.ones(len(segments), dtype=np.bool_),
    )
