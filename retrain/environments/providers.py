"""Where environments come from: the built-in providers, and plugins."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from retrain.environments.base import Environment
from retrain.environments.loading import environment_code
from retrain.plugins import load_plugin

if TYPE_CHECKING:
    from retrain.config import TrainConfig
    from retrain.config.schema import Environment as Settings


def _verifiers(settings: "Settings") -> Environment:
    from retrain.environments.verifiers import load_verifiers

    return load_verifiers(settings)


def _reasoning_gym(settings: "Settings") -> Environment:
    from retrain.environments.reasoning_gym import ReasoningGym

    return ReasoningGym(settings.id, settings.args)


def _textarena(settings: "Settings") -> Environment:
    from retrain.environments.textarena import TextArena

    return TextArena(settings.id, settings.args)


PROVIDERS: dict[str, Callable[["Settings"], Environment]] = {
    "verifiers": _verifiers,
    "reasoning_gym": _reasoning_gym,
    "textarena": _textarena,
}
"""The built-in providers; each needs its own extra."""


def load_environment(config: "TrainConfig") -> Environment:
    """The environment of `[environment]`.

    Raises ConfigurationError for one that cannot be loaded or built, EnvironmentFailure where its library or its data are not here.
    """
    settings = config.environment
    what = f'[environment] provider = "{settings.provider}": building it with args {sorted(settings.args)}'
    with environment_code(what, settings.timeout_s):
        if settings.provider in PROVIDERS:
            return PROVIDERS[settings.provider](settings)
        made: type[Environment] = load_plugin("environment", settings.provider, config)
        return made(**settings.args)
