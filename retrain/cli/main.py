"""The command line: `retrain FILE` trains, and `retrain COMMAND` does everything else.

This module imports nothing heavy: calling a command imports the module of that command.
"""

import io
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from types import TracebackType

from retrain.cli.usage import COMMANDS, usage
from retrain.errors import (
    ConfigurationError,
    EnvironmentFailure,
    Interrupted,
    RetrainError,
    StoppedAtOnce,
)
from retrain.records.disk import path_error
from retrain.system import prepare_torch


def _absent(error: ModuleNotFoundError | AttributeError) -> str:
    """Return the package of the local trainer whose absence an error shows, or "" for another
    error. The text includes a folder of the same name that Python took for the package.
    """
    if isinstance(error, ModuleNotFoundError) and error.name in _LOCAL_TRAINER:
        return error.name
    for name in _LOCAL_TRAINER & sys.modules.keys():
        package = sys.modules[name]
        if getattr(package, "__file__", None) is None:
            return f"{name} (the folder {next(iter(package.__path__))} is not it)"
    return ""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. An exception from a bug propagates: Python prints
    it and exits with 1.
    """
    _replace_missing_streams()
    for stream in (sys.stdout, sys.stderr):
        # A character that the encoding lacks is shown as its escape, and ends no run.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    prepare_torch()
    # To look for pydantic's plugins reads the entry points of every installed package.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    sys.excepthook = _masked_traceback
    try:
        code = _answer(list(sys.argv[1:] if argv is None else argv))
        if argv is None and code > 128:  # A signal ended it; another one must not change the code.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        return code
    # A second Ctrl-C may come during the print of the first sentence.
    except KeyboardInterrupt:
        return 130


def _answer(arguments: list[str]) -> int:
    """Run one command and return its exit code; a failure prints its sentence."""
    try:
        try:
            Path.cwd()
        except FileNotFoundError:  # In a deleted folder libraries end the process.
            raise ConfigurationError(
                "the current folder no longer exists; change to another one with `cd`."
            ) from None
        code = _dispatch(arguments)
        # Flush here, where this function expects a reader that went away.
        sys.stdout.flush()
        return code
    except (RetrainError, StoppedAtOnce) as error:
        return _ended_by(error, arguments)
    except KeyboardInterrupt:  # The process has no handler yet, and no state to save.
        return _ended_by(Interrupted("Interrupted by SIGINT.", signal.SIGINT), arguments)
    except (ModuleNotFoundError, AttributeError) as error:
        absent = _absent(error)
        if not absent:
            raise
        from retrain.install import install_hint

        sentence = (
            f"this needs {absent}, which retrain-core leaves out. Install retrain itself with"
            f' `{install_hint()}`, or train on a service with [backend] backend = "tinker".'
        )
        return _ended_by(EnvironmentFailure(sentence), arguments)
    # `retrain help config | head`: the reader has what it wanted.
    except BrokenPipeError:
        return 0
    except RuntimeError as error:  # Before Python 3.13, pathlib raises this.
        if not str(error).startswith("Symlink loop"):
            raise
        sentence = f"{error}: fix these links, or name another folder."
        return _ended_by(ConfigurationError(sentence), arguments)
    except OSError as error:
        known = path_error(error)
        if known is None:
            raise
        return _ended_by(known, arguments)
    finally:
        _let_go_of_closed_streams()


_LOCAL_TRAINER = ("torch", "peft")
"""The packages that retrain-core leaves out: every command runs without them until it needs a model
on this machine."""


def _dispatch(arguments: list[str]) -> int:
    first = arguments[0] if arguments else ""
    if first == "--version":
        first = "version"
    if first in COMMANDS:
        from retrain.cli.parameters import run_command

        return run_command(first, arguments[1:])
    if not first.startswith("-"):
        from retrain.config.removed import farewell

        gone = farewell(first, f"`retrain {first}`")
        if gone:
            raise ConfigurationError(f"{gone}.")
    if "--help" in arguments or "-h" in arguments:
        sys.stdout.write(usage())
        return 0
    from retrain.cli.first_words import TRAIN, advice

    # A word such as `run`, or a file name without its .toml, may also name a folder.
    is_word = Path(first).is_dir() and (first in TRAIN or Path(f"{first}.toml").is_file())
    if not first or first.startswith("-") or (is_path(first) and not is_word):
        from retrain.cli.run import run_file

        return run_file(arguments)
    raise ConfigurationError(
        f"{shortened(first)!r} is not a command or a file; {advice(arguments)}"
    )


def is_path(argument: str) -> bool:
    """Return True if a first argument that is not a command looks like a file or is one."""
    if argument.startswith(("~", "$")) or "/" in argument or argument.endswith(".toml"):
        return True
    try:
        return Path(argument).exists()
    except OSError:  # The text is too long for a path.
        return False


def _ended_by(error: RetrainError | StoppedAtOnce, arguments: Sequence[str]) -> int:
    """Print an error, for a caller that asked for JSON on standard output too, and return the exit
    code.
    """
    from retrain.records.redact import Redactor
    from retrain.records.terminal import clean

    mask = Redactor().text
    problems: Sequence[str] = (str(error),)
    if isinstance(error, ConfigurationError):
        problems = error.problems
    sentences = [shortened(clean(mask(one)).replace("\n", "\\n")) for one in problems]
    with suppress(OSError):  # The terminal may be gone, and the exit code says it too.
        for sentence in sentences:
            print(f"retrain: {sentence}", file=sys.stderr)
        if any(
            one in ("--json", "--format=json") or (one, two) == ("--format", "json")
            for one, two in pairwise([*arguments, ""])
        ):
            import json

            found = {"error": " ".join(sentences), "exit_code": error.exit_code}
            print(json.dumps(found, indent=2))
    return error.exit_code


_MAX_SENTENCE = 1200


def shortened(sentence: str) -> str:
    """Shorten a sentence that quotes a long value. Its beginning says what is wrong and its end
    what to do, so it keeps both.
    """
    if len(sentence) <= _MAX_SENTENCE:
        return sentence
    return f"{sentence[: _MAX_SENTENCE - 200]} ... {sentence[-195:]}"


def _replace_missing_streams() -> None:
    """Open /dev/null for each standard stream that the caller closed (`retrain my.toml >&-`), which
    Python sets to None.

    In this order each takes the lowest free descriptor, so that no file of the run becomes
    descriptor 1 or 2, where libraries print.
    """
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(
                sys,
                name,
                os.fdopen(
                    os.open(os.devnull, os.O_RDWR),
                    "r" if name == "stdin" else "w",
                    encoding="utf-8",
                ),
            )


def _let_go_of_closed_streams() -> None:
    """Discard the remaining text for a closed pipe or terminal, or a full disk: Python's last
    attempt to write it would change the exit code.
    """
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _masked_traceback(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    from retrain.records.redact import Redactor
    from retrain.records.terminal import clean

    lines = traceback.format_exception(kind, error, trace)
    sys.stderr.write(clean(Redactor().text("".join(lines))))
    sys.stderr.write("This is a bug in retrain, not in your configuration.\n")
