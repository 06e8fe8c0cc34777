"""The command that starts a server for a configuration, with the settings of all servers. Each
engine's class adds its own flags.
"""

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from retrain.errors import ConfigurationError, EnvironmentFailure
from retrain.system import toml_value

if TYPE_CHECKING:
    from retrain.config import TrainConfig
    from retrain.config.schema import Inference, Model, Training

Settings = Mapping[str, Mapping[str, Sequence[str]]]
"""A server's flags: key of [inference] -> value -> flags."""
_MAX_SEQUENCES = 256
"""Maximum number of sequences that a server runs at once; it queues the others."""


class Variable(str):
    """The name of an environment variable that stands for its value, so that a key is neither
    printed nor stored.
    """


@dataclass(frozen=True)
class ServerNeeds:
    """Facts that a server needs in addition to the configuration."""

    model: str
    """Folder or hub id."""
    dtype: str
    """float32 or bfloat16: the type of the learner's frozen weights, or [inference] dtype."""
    device: str
    """cpu or cuda."""
    context: int
    """Tokens of the longest prompt and completion together."""
    kv_bytes: int
    """Bytes of one token's keys and values."""
    share: float | None = None
    """Part of the GPU's memory that the learner leaves; None if it is not on this GPU, or not
    known.
    """


@dataclass
class ServerCommand:
    arguments: list[str]
    """The program, its flags and their values."""
    environment: dict[str, str] = field(default_factory=dict)

    def shell(self) -> str:
        """Write the command for a terminal or a script: the variables, the program, and one flag
        per line.
        """
        lines = [f"{name}={_quoted(value)}" for name, value in self.environment.items()]
        line = ""
        for argument in self.arguments:
            if argument.startswith("--") and line:
                lines.append(line)
                line = " "
            line += f" {_quoted(argument)}" if line else _quoted(argument)
        return " \\\n".join([*lines, line]) + "\n"

    def run(self) -> None:
        """Replace this process with the server. Raises EnvironmentFailure if its program or a
        variable is missing.
        """
        environment = os.environ | {
            name: _resolved(value) for name, value in self.environment.items()
        }
        arguments = [_resolved(argument) for argument in self.arguments]
        try:
            os.execvpe(arguments[0], arguments, environment)
        except OSError as error:
            raise EnvironmentFailure(
                f"{arguments[0]} does not start ({error.strerror}); name the Python of the"
                " server's environment with --python, or start the printed command there."
            ) from error


def _quoted(value: str) -> str:
    if isinstance(value, Variable):
        return f'"${value}"'
    return shlex.quote(value)


def _resolved(value: str) -> str:
    if not isinstance(value, Variable):
        return value
    if value not in os.environ:
        raise EnvironmentFailure(f"[inference] api_key_env names {value}, which has no value.")
    return os.environ[value]


# -- what all servers are told ---------------------------------------------------------------------


def address_flags(inference: "Inference", default_port: int) -> list[str]:
    """Return host and port of the first `[inference] url`, or this machine's loopback and the port
    that the server uses by itself.
    """
    urls = inference.urls
    parts = urlsplit(urls[0] if urls else "")
    host = parts.hostname or "127.0.0.1"
    if host == "localhost":
        host = "127.0.0.1"
    return ["--host", host, "--port", str(parts.port or default_port)]


def model_flags(config: "TrainConfig") -> list[str]:
    flags, model = [], config.model
    if config.inference.served_model:
        flags = ["--served-model-name", config.inference.served_model]
    if model.revision:
        flags += ["--revision", model.revision]
    if model.trust_remote_code:
        flags.append("--trust-remote-code")
    return flags


def concurrent_sequences(training: "Training") -> str:
    return str(min(training.batch_size * training.group_size, _MAX_SEQUENCES))


def setting_flags(engine: str, inference: "Inference", known: Settings) -> list[str]:
    """Return the flags for keys of `[inference]`; a default has none. Raises ConfigurationError for
    a value that is not in `known`.
    """
    found: list[str] = []
    for name, flags in known.items():
        value = getattr(inference, name)
        if value in ("auto", "default"):
            continue
        if value not in flags:
            default = "default" if name == "attention_kernel" else "auto"
            allowed = " or ".join(map(toml_value, [*flags, default]))
            raise ConfigurationError(
                f"[inference] {name} = {toml_value(value)} is not a setting of a {engine}"
                f" server; use {allowed}."
            )
        found += flags[value]
    return found


def refuse_four_bits(engine: str, model: "Model") -> None:
    if model.load_in_4bit:
        raise ConfigurationError(
            f"[model] load_in_4bit = true is not a setting of a {engine} server; leave it false."
        )
