"""The places of a run's files, and the marker without which nothing is ever deleted."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

from retrain.checkpoint import replace_file
from retrain.errors import ConfigurationError, EnvironmentFailure
from retrain.tracking.jsonl import truncate_to_step

MARKER = ".retrain.json"
"""Says that retrain made a folder. Its content names the kind of folder and the format."""
_FORMAT = 1


@dataclass(frozen=True)
class RunFolder:
    path: Path

    @property
    def marker(self) -> Path:
        return self.path / MARKER

    @property
    def lock(self) -> Path:
        return self.path / ".lock"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def evaluation(self) -> Path:
        return self.path / "evaluation.jsonl"

    @property
    def emergence_steps(self) -> Path:
        return self.path / "emergence" / "steps.jsonl"

    @property
    def generations(self) -> Path:
        return self.path / "emergence" / "generations.jsonl"

    @property
    def tokens(self) -> Path:
        return self.path / "tokens"

    def step_tokens(self, step: int) -> Path:
        return self.tokens / f"step_{step}.safetensors"

    @property
    def config(self) -> Path:
        return self.path / "config.toml"

    @property
    def environment(self) -> Path:
        return self.path / "environment.json"

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"

    @property
    def trainer_state(self) -> Path:
        return self.path / "trainer_state.json"

    @property
    def checkpoints(self) -> Path:
        """Where checkpoints go unless `[backend] adapter_path` says otherwise."""
        return self.path / "checkpoints"

    @property
    def curve(self) -> Path:
        """The learning curve, a picture."""
        return self.path / "curve.svg"

    def holds_run(self) -> bool:
        return self.marker.is_file() and self.metrics.exists()

    def create(self) -> None:
        """Make the folder ours. Raises ConfigurationError where a file stands in the way, EnvironmentFailure where it cannot be made."""
        create_marked(self.path, "run")

    def empty(self) -> None:
        """Delete everything inside, for --overwrite. Raises ConfigurationError for a folder that retrain did not make."""
        empty_marked(self.path)

    def cut_to_step(self, step: int) -> None:
        """Forget the steps from `step` on in every file, before a resumed run makes them again."""
        for path in (self.metrics, self.evaluation, self.emergence_steps, self.generations):
            truncate_to_step(path, step)
        for path in self.tokens.glob("step_*.safetensors"):
            number = path.stem.removeprefix("step_")
            if number.isdecimal() and int(number) >= step:
                path.unlink()


def create_marked(folder: Path, kind: str) -> None:
    """Create `folder` with our marker in it; an existing marker stays."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        marker = folder / MARKER
        if not marker.exists():
            replace_file(marker, json.dumps({"kind": kind, "format": _FORMAT}) + "\n")
    except (FileExistsError, NotADirectoryError) as error:
        raise ConfigurationError(f"{folder} cannot be a folder: a file of that name is in the way; choose another path.") from error
    except OSError as error:
        raise EnvironmentFailure(f"{folder} cannot be written: {error.strerror}; choose another path or change its permissions.") from error


def empty_marked(folder: Path) -> None:
    """Delete the content of a folder that carries our marker; a folder that is missing or empty is left as it is."""
    if not folder.exists() or not any(folder.iterdir()):
        return
    marker = folder / MARKER
    if not marker.is_file():
        raise ConfigurationError(
            f"{folder} holds files and was not made by retrain (no {MARKER}), so --overwrite does not empty it; "
            "choose another [logging] log_dir or delete it yourself."
        )
    for path in folder.iterdir():
        if path == marker:  # last, so that a deletion cut short can be repeated
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    marker.unlink()
