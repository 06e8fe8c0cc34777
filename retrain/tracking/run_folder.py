"""The places of a run's files, and the marker without which nothing is ever deleted."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

from retrain.checkpoint import replace_file
from retrain.errors import ConfigurationError, EnvironmentFailure
from retrain.parsing import read_object
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
    def lock_owner(self) -> Path:
        """Names the process that holds the lock; a file of its own, since taking a lock empties the lock's file."""
        return self.path / ".lock.owner"

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
    def checkpoint_pointer(self) -> Path:
        """Names the folder of the checkpoints where `[backend] adapter_path` put them elsewhere."""
        return self.path / "checkpoints.json"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def wandb(self) -> Path:
        return self.path / "wandb"

    @property
    def curve(self) -> Path:
        """The learning curve, a picture."""
        return self.path / "curve.svg"

    @property
    def report(self) -> Path:
        """The page of `retrain report`; its pictures are named after it."""
        return self.path / "report.html"

    def written(self) -> tuple[Path, ...]:
        """Every file and folder that a run, or a look at it, writes here; its marker and lock aside."""
        folders = (self.emergence_steps.parent, self.tokens, self.checkpoints, self.tensorboard, self.wandb)
        files = (self.metrics, self.evaluation, self.config, self.environment, self.trainer_state, self.curve, self.summary)
        return (*folders, *files, self.checkpoint_pointer, self.report, *self.path.glob(f"{self.report.stem}-*.png"))

    def holds_run(self) -> bool:
        return self.marker.is_file() and self.metrics.exists()

    def create(self) -> None:
        """Make the folder ours. Raises ConfigurationError where a file stands in the way, EnvironmentFailure where it cannot be made."""
        mark(self.path, "run")

    def empty(self) -> None:
        """Delete what a run wrote, and nothing else: another file that lies in the folder stays."""
        for path in self.written():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)

    def cut_to_step(self, step: int) -> None:
        """Forget the steps from `step` on in every file, before a resumed run makes them again."""
        for path in (self.metrics, self.emergence_steps, self.generations):
            truncate_to_step(path, step)
        truncate_to_step(self.evaluation, step + 1)  # it counts completed steps, so the one at `step` was made of this checkpoint
        for path in self.tokens.glob("step_*.safetensors"):
            number = path.stem.removeprefix("step_")
            if number.isdecimal() and int(number) >= step:
                path.unlink()


def kind_of(folder: Path) -> str:
    """What retrain made a folder for: run, checkpoints, campaign; "" where it did not."""
    marker = folder / MARKER
    return str(read_object(marker).get("kind", "")) if marker.is_file() else ""


def mark(folder: Path, kind: str, **content: str) -> None:
    """Create `folder` with our marker in it; an existing marker stays."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        marker = folder / MARKER
        if not marker.exists():
            replace_file(marker, json.dumps({"kind": kind, "format": _FORMAT} | content) + "\n")
    except (FileExistsError, NotADirectoryError) as error:
        raise ConfigurationError(f"{folder} cannot be a folder: a file of that name is in the way; choose another path.") from error
    except OSError as error:
        raise EnvironmentFailure(f"{folder} cannot be written: {error.strerror}; choose another path or change its permissions.") from error
