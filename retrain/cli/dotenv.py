"""`.env` of the working directory: keys for hubs and trackers. A variable that is already set wins; values are never stored."""

from pathlib import Path

from retrain.errors import ConfigurationError


def load_dotenv() -> bool:
    """True if there was a file."""
    path = Path(".env")
    if not path.is_file():
        return False
    from dotenv import load_dotenv as load

    try:
        load(path, override=False)
    except (UnicodeDecodeError, OSError) as error:
        raise ConfigurationError(f"{path} cannot be read ({error}): it holds lines NAME=value in UTF-8; mend or remove it.") from error
    return True
