"""Where environments come from: the built-in providers, and plugins."""

from importlib import import_module
from typing import TYPE_CHECKING

from retrain.environments.base import Environment
from retrain.environments.loading import environment_code
from retrain.plugins import load_plugin

if TYPE_CHECKING:
    from retrain.config import TrainConfig


PROVIDERS = {
    "verifiers": "retrain.environments.verifiers",
    "reasoning_gym": "retrain.environments.reasoning_gym",
    "textarena": "retrain.environments.textarena",
}
"""The built-in providers by the module whose `load` builds their environments; each needs its own extra, so it is imported when used."""


def load_environment(config: "TrainConfig") -> Environment:
    """Build the environment of `[environment]`.

    Raises ConfigurationError for one that cannot be loaded or built, EnvironmentFailure where its library or its data are not here.
    """
    settings = config.environment
    what = f'[environment] provider = "{settings.provider}": building it with args {sorted(settings.args)}'
    with environment_code(what, settings.timeout_s):
        if settings.provider in PROVIDERS:
            built_in: Environment = import_module(PROVIDERS[settings.provider]).load(settings)
            return built_in
        made: type[Environment] = load_plugin("environment", settings.provider, config)
        return made(**settings.args)
