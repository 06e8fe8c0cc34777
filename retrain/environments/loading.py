"""Loading of an environment: the built-in providers and plugins, the guard around their code, and
their problems as examples of a run.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from numbers import Integral
from typing import TYPE_CHECKING

from retrain.data.chat import rendering
from retrain.data.prompts import subset
from retrain.data.sources import NoHeldOutSplit, ReadResult, has_utf8_form
from retrain.environments.base import Environment, Split, is_conversation
from retrain.errors import ConfigurationError, EnvironmentFailure
from retrain.install import install_hint
from retrain.plugins import load_plugin, user_code
from retrain.types import Example

if TYPE_CHECKING:
    from retrain.config import TrainConfig
    from retrain.config.schema import Environment as Settings

PROVIDERS = {
    "verifiers": "retrain.environments.verifiers",
    "reasoning_gym": "retrain.environments.reasoning_gym",
}
"""The built-in providers by the module whose `load` builds their environments. Each needs its own
extra, so retrain imports it at use.
"""
_PACKAGES = {
    "verifiers": ("verifiers", "verifiers"),
    "reasoning_gym": ("reasoning_gym", "reasoning-gym"),
}
"""Provider -> the module that it imports, and the package, which is also the extra."""
MIN_LIMIT_S = 600.0
"""Minimum limit in seconds for each call of an environment's code, also if `[environment]
timeout_s` is less: the call may download data.
"""
_AGAIN_S = 5.0
"""Seconds until the alarm rings again, for code that catches every exception."""


def check_package(provider: str) -> None:
    """Raise EnvironmentFailure if the package of a built-in provider is missing."""
    module, extra = _PACKAGES.get(provider, ("", ""))
    if not module or find_spec(module):
        return
    raise EnvironmentFailure(
        f'[environment] provider = "{provider}" needs the package {extra}; install it with'
        f" {install_hint(extra)}."
    )


def load_environment(config: "TrainConfig") -> Environment:
    """Build the environment of `[environment]`.

    Raises ConfigurationError if it does not load or build, EnvironmentFailure if its library or
    data are missing.
    """
    settings = config.environment
    what = (
        f'[environment] provider = "{settings.provider}": building it with args'
        f" {sorted(settings.args)}"
    )
    check_package(settings.provider)
    with environment_code(what, settings.timeout_s):
        if settings.provider in PROVIDERS:
            built_in: Environment = import_module(PROVIDERS[settings.provider]).load(settings)
            return built_in
        made: type[Environment] = load_plugin("environment", settings.provider, config)
        environment = made(**settings.args)
        if not isinstance(environment.max_turns, Integral):
            raise TypeError(f"max_turns = {environment.max_turns!r} is not a whole number")
        return environment


class _TookTooLong(BaseException):
    """Raised by the alarm; it is not an Exception, so that an environment's own retries do not take
    it for a failure.
    """


@contextmanager
def environment_code(what: str, timeout_s: float) -> Iterator[None]:
    """Run code of an environment. Whatever it raises, SystemExit included, and a call that hangs
    becomes a ConfigurationError whose sentence begins with `what`.

    `timeout_s` is [environment] timeout_s. Outside the main thread, where Python sets no signal
    handlers, the call has no time limit.
    """
    limit = max(MIN_LIMIT_S, timeout_s)
    try:
        with _limited(limit), user_code(what, ConfigurationError):
            yield
    except _TookTooLong:
        raise ConfigurationError(
            f"{what} took longer than {limit:g} s; look at what it waits for, or allow it more with"
            " [environment] timeout_s."
        ) from None


@contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """Raise _TookTooLong in the block after `seconds`. Restore the signal handlers that the block
    changes, since with the block's handlers a stopped run would no longer save itself.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ring(*_: object) -> None:
        raise _TookTooLong

    handlers = {
        number: signal.getsignal(number)
        for number in (signal.SIGALRM, signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }
    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds, _AGAIN_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in handlers.items():
            if handler is not None:  # None: another language set it, and Python cannot
                signal.signal(number, handler)


def environment_name(settings: "Settings") -> str:
    """Return the environment's name in sentences: verifiers "my-env"."""
    if settings.id:
        return f'{settings.provider} "{settings.id}"'
    return f'"{settings.provider}"'


def _is_problem(example: object) -> bool:
    """Return True for an example with a prompt that a chat template can write, and a reference."""
    if not (isinstance(example, Example) and isinstance(example.reference, str)):
        return False
    prompt = example.prompt
    has_prompt = isinstance(prompt, str) or bool(prompt and is_conversation(prompt))
    return has_prompt and has_utf8_form(example)


def load_problems(environment: Environment, config: "TrainConfig", split: Split) -> ReadResult:
    """Return the problems of one split, the training ones cut to `[training] max_examples`.

    Raises ConfigurationError if there are none, NoHeldOutSplit if the environment has no evaluation
    set.
    """
    name = environment_name(config.environment)
    with environment_code(
        f"[environment] {name}: reading its {split} set", config.environment.timeout_s
    ):
        examples = list(environment.examples(split))
    if not examples and split == "evaluation":
        raise NoHeldOutSplit(
            f"[environment] {name} has no evaluation set. Switch off every, at_start and at_end"
            " in [evaluation], or choose an environment that has one."
        )
    if not examples:
        raise ConfigurationError(
            f"[environment] {name} has no training set, so it can only evaluate. Choose another"
            " environment, or look among its args for one that selects a training split."
        )
    for example in examples:
        if not _is_problem(example):
            shown = " ".join(repr(example).split())[:80]
            raise ConfigurationError(
                f"[environment] {name}: its {split} set holds {shown}. It must hold"
                " retrain.types.Example. Reference and prompt are UTF-8 text; a prompt may also be"
                " messages {role, content}."
            )
    # Number them before the cut, so that ids do not depend on max_examples.
    named = [
        example if example.example_id else replace(example, example_id=f"{split}-{i}")
        for i, example in enumerate(examples)
    ]
    return ReadResult(
        rendering(config), subset(named, config.training.max_examples if split == "train" else 0)
    )
