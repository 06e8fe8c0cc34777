"""Every error that a user can meet, with the exit code that the command line gives for it.

A message is one sentence: what is wrong, where (file, section, key, value), which values are valid,
what to do next.
"""

from collections.abc import Sequence

MAX_SENTENCES = 20
"""Most problems reported at once."""


class RetrainError(Exception):
    """Base class of retrain's errors; a plain one means that the run failed (exit 1)."""

    exit_code = 1


class ConfigurationError(RetrainError, ValueError):
    """Wrong usage or configuration: anything the user can fix in a file or flag before step 0 (exit
    2).

    `problems` holds one sentence each, to report the mistakes of a file together: MAX_SENTENCES of
    them, then how many more there are. `unlisted` counts further problems without a sentence.
    """

    exit_code = 2

    def __init__(self, problems: str | Sequence[str], unlisted: int = 0) -> None:
        found = (problems,) if isinstance(problems, str) else tuple(problems)
        unlisted += len(found[MAX_SENTENCES:])
        rest = (f"There are {unlisted:,} more problems; fix these first.",) if unlisted else ()
        self.problems: tuple[str, ...] = (*found[:MAX_SENTENCES], *rest)
        super().__init__("\n".join(self.problems))


class UntrainedAdapter(ConfigurationError):
    """The adapter has no training: every update is zero, so it has no rank to analyze."""


class EnvironmentFailure(RetrainError, RuntimeError):
    """The machine lacks something: a device, an extra, disk, the network, a server (exit 3)."""

    exit_code = 3


class ServerFailure(EnvironmentFailure):
    """A server that the run depends on does not answer, or refuses. Between two steps retrain saves
    the run first.
    """


class NotReached(ServerFailure):
    """retrain could not connect to a service. The service received no byte of the request, so the
    request had no effect.
    """


class RunFailed(RetrainError, RuntimeError):
    """The run started and cannot continue (exit 1): a failed parity gate, completions without a
    verdict, non-finite updates.
    """


class ResumableFailure(RunFailed):
    """A failure whose cause the user can fix, after which the same run continues; `train` adds the
    command that continues it.
    """


class Interrupted(RetrainError):
    """A signal asked the run to stop; retrain has saved its state. Exit 130 for SIGINT, 143 for
    SIGTERM, 129 for SIGHUP.
    """

    def __init__(self, message: str, signal_number: int) -> None:
        super().__init__(message)
        self.exit_code = 128 + signal_number


class StoppedAtOnce(KeyboardInterrupt):
    """A second signal arrived: the run ends where it stands and saves nothing. The exit codes equal
    those from Interrupted.

    It can occur between any two bytecodes. It is not an Exception, so that code which catches a
    plugin's exceptions lets it pass.
    """

    def __init__(self, signal_number: int) -> None:
        super().__init__("Stopped at once, without another save.")
        self.exit_code = 128 + signal_number


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's text, for the middle of a sentence, or its type if it
    has no text.
    """
    return str(error).strip().split("\n", 1)[0] or type(error).__name__
