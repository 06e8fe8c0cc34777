"""Download of an adapter from a Tinker service for its analysis."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from retrain.backends.tinker.archive import download_adapter
from retrain.config.outcomes import squeezes_remote_adapter
from retrain.errors import EnvironmentFailure
from retrain.records.disk import expanded

if TYPE_CHECKING:
    from retrain.config import TrainConfig


@contextmanager
def local_adapter(config: "TrainConfig") -> Iterator[Path]:
    """Yield the PEFT folder of `[squeeze] adapter_path`; a tinker:// path is downloaded from `[model] base_url` into a temporary one.

    Raises EnvironmentFailure where the service hands out no adapter.
    """
    path = config.squeeze.adapter_path
    if not squeezes_remote_adapter(config):
        yield expanded(path, "[squeeze] adapter_path")
        return
    with TemporaryDirectory(prefix="retrain-squeeze-") as folder:
        try:
            download_adapter(config.model.base_url, path, Path(folder), config.backend.tinker.timeout_s)
        except EnvironmentFailure as error:
            raise EnvironmentFailure(f"[squeeze] adapter_path = {path!r} cannot be analysed: {error}") from error
        yield Path(folder)
