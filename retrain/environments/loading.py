"""Where environments come from, the built-in providers and plugins, and how their code runs before its first episode."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING

from retrain.environments.base import Environment
from retrain.errors import ConfigurationError, RetrainError
from retrain.plugins import describe, load_plugin

if TYPE_CHECKING:
    from retrain.config import TrainConfig

PROVIDERS = {
    "verifiers": "retrain.environments.verifiers",
    "reasoning_gym": "retrain.environments.reasoning_gym",
    "textarena": "retrain.environments.textarena",
}
"""The built-in providers by the module whose `load` builds their environments; each needs its own extra, so it is imported when used."""
LEAST_LIMIT_S = 600.0
"""Seconds that each call of an environment's code may take where `[environment] timeout_s` is less: data may have to be downloaded."""
_AGAIN_S = 5.0
"""Seconds until the alarm rings again, for code that catches whatever is raised."""


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


class _TookTooLong(BaseException):
    """Raised by the alarm; it is not an Exception, so that an environment's own retries do not take it for a failure."""


@contextmanager
def environment_code(what: str, timeout_s: float) -> Iterator[None]:
    """Run code of an environment. Whatever it raises, SystemExit included, and a call that hangs becomes a ConfigurationError whose
    sentence begins with `what`.

    `timeout_s` is that of [environment]. Outside the main thread, where Python sets no signal handlers, the time is not limited.
    """
    limit = max(LEAST_LIMIT_S, timeout_s)
    try:
        with _limited(limit):
            yield
    except (RetrainError, KeyboardInterrupt):
        raise
    except _TookTooLong:
        raise ConfigurationError(
            f"{what} took longer than {limit:g} s; look at what it waits for, or allow it more with [environment] timeout_s."
        ) from None
    except BaseException as error:  # the code is not ours, and its SystemExit would end the run without a word
        raise ConfigurationError(f"{what} failed with {describe(error)}.") from error


@contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """Raise _TookTooLong in the block after `seconds`. Signal handlers that the block sets are taken back: verifiers before 0.4 sets its
    own, with which a run would no longer save itself when it is stopped.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ring(*_: object) -> None:
        raise _TookTooLong

    handlers = {number: signal.getsignal(number) for number in (signal.SIGALRM, signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds, _AGAIN_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in handlers.items():
            if handler is not None:  # None: set by another language, and not to be set from here
                signal.signal(number, handler)
