"""`retrain version`: the installed versions."""

from retrain import __version__


def command() -> None:
    """Print the version."""
    print(f"retrain {__version__}")
