"""Manage a run's folder: the places of its files and the marker that allows a deletion. A resume
cuts its logs here to the length that the checkpoint names. It also has the lock of the only writer,
and says whether the writing process is alive, if that runs on this machine.
"""

import json
import os
import re
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Self

from retrain.config import TrainConfig
from retrain.config.stored import run_command
from retrain.errors import ConfigurationError, RunFailed
from retrain.plugins import named_code
from retrain.records.disk import TEMPORARY, delete, path_error, remove_empty, replace_file
from retrain.records.jsonl import Extent, aside_of, truncate_to_size, truncate_to_step
from retrain.records.state import TrainerState
from retrain.system import Json, read_object

OUTPUT = "output.log"
"""Name of the file that keeps what a run prints."""
MARKER = ".retrain.json"
"""Name of the file that says that retrain made a folder; it holds the kind of folder and the
format."""
_FORMAT = 1
"""Format of a run folder. It grows when an older retrain could no longer read the new folders."""


class FolderEntry:
    """A file or folder that has a fixed name inside another, which has a `path`."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, folder: Any, kind: type) -> Path:
        path: Path = folder.path / self.name
        return path


@dataclass(frozen=True)
class RunFolder:
    path: Path
    marker = FolderEntry(MARKER)
    lock = FolderEntry(".lock")
    lock_owner = FolderEntry(".lock.owner")
    """The file that names the process with the lock. It is separate because taking a lock empties
    the lock's file.
    """
    metrics = FolderEntry("metrics.jsonl")
    evaluation = FolderEntry("evaluation.jsonl")
    sft = FolderEntry("sft.jsonl")
    """The steps of the supervised stage."""
    sft_evaluation = FolderEntry("sft_evaluation.jsonl")
    """The evaluations before and within the supervised stage."""
    emergence_steps = FolderEntry("emergence/steps.jsonl")
    generations = FolderEntry("emergence/generations.jsonl")
    tokens = FolderEntry("tokens")
    config = FolderEntry("config.toml")
    environment = FolderEntry("environment.json")
    summary = FolderEntry("summary.json")
    trainer_state = FolderEntry("trainer_state.json")
    checkpoints = FolderEntry("checkpoints")
    """The folder of checkpoints unless `[backend] adapter_path` names another."""
    checkpoint_pointer = FolderEntry("checkpoints.json")
    """The file that names the folder of the checkpoints if `[backend] adapter_path` put them
    elsewhere."""
    verdicts = FolderEntry("verdicts.jsonl")
    """The judge's verdict on each completion, by content."""
    evaluations = FolderEntry("evaluations")
    """The folders that `retrain eval` wrote."""
    output = FolderEntry(OUTPUT)
    """Every line that the run prints without a terminal, of all its sessions."""
    tensorboard = FolderEntry("tensorboard")
    wandb = FolderEntry("wandb")
    curve = FolderEntry("curve.svg")
    """The picture of the learning curve."""
    report = FolderEntry("report.html")
    """The page of `retrain report`; its pictures take its name."""
    _replacing = FolderEntry(f"{TEMPORARY}replacing")
    _replaced = FolderEntry(f"{TEMPORARY}replaced")
    _forgotten = FolderEntry(f"{TEMPORARY}forgotten")

    def step_tokens(self, step: int) -> Path:
        return self.tokens / f"step_{step}.safetensors"

    @property
    def resume_command(self) -> str:
        return run_command(self.path)

    @property
    def prints_to_output(self) -> bool:
        """True if this process's standard output is already `output`, as in a campaign."""
        try:
            return os.path.samestat(os.fstat(sys.stdout.fileno()), self.output.stat())
        except (OSError, ValueError):  # The file is absent, or the output has no descriptor.
            return False

    def written(self) -> tuple[Path, ...]:
        """Return every file and folder that a run or its report writes here, without the marker and
        the lock.
        """
        own_output = () if self.prints_to_output else (self.output,)
        return (
            *self.folders(),
            self.evaluations,
            self.tensorboard,
            self.wandb,
            *self.records(),
            self.config,
            self.environment,
            self.trainer_state,
            self.curve,
            self.summary,
            self.checkpoint_pointer,
            self.verdicts,
            self.report,
            *own_output,
            *map(aside_of, self.records()),
            *self.path.glob(f"{self.report.stem}-*.png"),
        )

    def folders(self) -> tuple[Path, ...]:
        """Return the folders whose content a resume cuts or continues."""
        return (self.emergence_steps.parent, self.tokens, self.checkpoints)

    def records(self) -> tuple[Path, ...]:
        """Return the logs of steps and evaluations, without which a run is not whole."""
        return (self.metrics, self.evaluation, self.sft, self.sft_evaluation)

    def lines(self) -> tuple[Path, ...]:
        """Return the files of JSON lines."""
        return (*self.records(), self.emergence_steps, self.generations)

    def present(self) -> list[Path]:
        """Return the existing files and folders with names that a run uses."""
        return [path for path in self.written() if os.path.lexists(path)]

    # -- whose it is: new, a run's, a campaign's, of another kind, or another program's ------------

    def holds_run(self, *before: Path) -> bool:
        """Return True if our marker and any of a run's files are there. Files from `before` its
        begin do not count. A single file may be missing, since damage may have removed it.
        """
        # retrain writes the pointer to checkpoints elsewhere before the run begins.
        early = {self.checkpoint_pointer, *before}
        return kind_of(self.path) == "run" and not early.issuperset(self.present())

    def outer_run(self) -> "RunFolder | None":
        """Return the run inside whose folder this one lies."""
        for parent in self.path.resolve().parents:
            try:
                if kind_of(parent) == "run":
                    return RunFolder(parent)
            except RunFailed:  # Another program made a file of that name.
                continue
        return None

    def refuse_run(self, *, resuming: bool) -> None:
        """Raise ConfigurationError unless a run may start here, or resume with `resuming`."""
        path, kind = self.path, kind_of(self.path)
        if kind == "campaign":
            raise ConfigurationError(
                f"{path} holds a campaign, not a single run; resume it with the campaign's own"
                " file, or name another folder."
            )
        if kind not in ("", "run"):
            raise ConfigurationError(
                f"{path} is a folder of {kind} made by retrain and contains no run; name another"
                " folder."
            )
        if resuming and not kind:
            advice, outer = "name a run's folder", self.outer_run()
            if outer:
                advice = f"it is a part of the run {outer.path}: name that"
            problem = f"holds no run of retrain (no {MARKER})"
            if not path.exists():
                problem = "does not exist"
            raise ConfigurationError(f"[resume] from = {str(path)!r} {problem}; {advice}.")
        present = () if kind else self.present()
        if present:
            names = ", ".join(taken.name for taken in present)
            raise ConfigurationError(
                f"{path} holds {names} and was not made by retrain (no {MARKER}), so nothing in it"
                " is overwritten; choose another [logging] log_dir or move them away."
            )
        inside = "" if kind else self.doomed()
        if inside:
            raise ConfigurationError(f"{inside}; choose another [logging] log_dir.")

    def doomed(self) -> str:
        """Say that the folder lies in a folder that the outer run deletes; "" if it does not."""
        path, outer = self.path, self.outer_run()
        if outer is None:
            return ""
        around = {path.resolve(), *path.resolve().parents}
        for part in around.intersection(outer.written()):
            return f"{path} lies in {part}, which the run {outer.path} deletes when it starts over"
        return ""

    def create(self) -> None:
        """Make the folder and mark it. Raises ConfigurationError if a file is in the way,
        EnvironmentFailure if the disk refuses the folder.
        """
        mark(self.path, "run")

    def empty(self) -> None:
        """Delete what a run wrote; other files in the folder stay."""
        for path in self.written():
            delete(path)

    def set_aside(self) -> None:
        """Move what a run wrote out of the way, until `forget` or `put_back`."""
        present = self.present()
        if present:
            self._replacing.mkdir()
            for path in present:
                path.rename(self._replacing / path.name)
            self._replacing.rename(self._replaced)

    def put_back(self) -> None:
        """Undo `set_aside`, also after the kill of another process."""
        if self._replaced.is_dir():
            self.empty()
            self._replaced.rename(self._replacing)
        for path in self._replacing.glob("*"):
            path.rename(self.path / path.name)
        remove_empty([self._replacing])

    def forget(self) -> None:
        """Delete what `set_aside` moved."""
        delete(self._forgotten)
        if self._replaced.is_dir():  # Rename it at once: `put_back` must not find a part of it.
            self._replaced.rename(self._forgotten)
            delete(self._forgotten)

    # -- beside a checkpoint -----------------------------------------------------------------------

    def cut_to(self, state: TrainerState, log: Callable[[str], None]) -> None:
        """Set the rows after `state` aside, and delete its token files: a resumed run is about to
        make them again. `sound.changed_log` has found the records whole.
        """
        for path in self.lines():
            name = path.relative_to(self.path).as_posix()
            extent = Extent(**state.files.get(name, {"size": 0, "sha256": ""}))
            problem = extent.problem(path)
            if problem:
                log(f"{name}: {problem}; the rest of it is kept, and the run continues.")
                truncate_to_step(path, state.step)
            else:
                truncate_to_size(path, extent.size)
        self._cut_tokens(state.step)
        # Most readers of folders need no safetensors.
        from retrain.records.token_table import damage_of

        for damage in filter(None, map(damage_of, sorted(self.tokens.glob("step_*.safetensors")))):
            log(f"{damage}; `retrain inspect` cannot show it, and the run continues.")

    def forget_steps(self) -> None:
        """Set every row aside, and delete the token files, for a run that has no checkpoint yet."""
        for path in self.lines():
            truncate_to_size(path, 0)
            path.unlink(missing_ok=True)
        self._cut_tokens(0)

    def _cut_tokens(self, step: int) -> None:
        for path in self.tokens.glob("step_*.safetensors"):
            number = path.stem.removeprefix("step_")
            if number.isdecimal() and int(number) >= step:
                path.unlink()


def read_marker(folder: Path) -> Json:
    """Read the content of our marker; empty if there is none. Raises RunFailed for a marker that is
    not a JSON object, and for a folder that a newer retrain wrote in its own format.
    """
    marker = folder / MARKER
    if not marker.is_file():
        return {}
    content = read_object(marker)
    written = content.get("format")
    if isinstance(written, int) and written > _FORMAT:
        raise RunFailed(
            f"{marker} has format {written}, and this retrain reads formats up to {_FORMAT}; use"
            " the retrain that wrote the folder, or a newer one."
        )
    return content


def kind_of(folder: Path) -> str:
    """Return the purpose of a folder that retrain made: run, checkpoints, campaign or squeeze.
    Return "" for any other folder.
    """
    return str(read_marker(folder).get("kind", ""))


def mark(folder: Path, kind: str) -> None:
    """Create `folder` with our marker in it; an existing marker stays."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not read_marker(folder):
            replace_file(folder / MARKER, json.dumps({"kind": kind, "format": _FORMAT}) + "\n")
    except OSError as error:
        # If several processes start, one may rename the file of another.
        if not (isinstance(error, FileNotFoundError) and read_marker(folder)):
            sentence = f"{folder} is not a place for a folder ({error.strerror}); check the path."
            raise path_error(error) or ConfigurationError(sentence) from error


def refuse_foreign_code(config: TrainConfig, doing: str) -> None:
    """Raise ConfigurationError if the configuration's file lies in a folder of a run or a campaign,
    which anyone may have made, and names code. `doing` names the command that would execute it.
    """
    path = config.source_path
    if path is None or not any(map(_is_a_runs, path.resolve().parents)):
        return
    named = named_code(config)
    if named:
        raise ConfigurationError(
            f"{path} is a run's and names Python code that {doing} would execute:"
            f" {'; '.join(named)}. Read the code first, then add --trust."
        )


def _is_a_runs(folder: Path) -> bool:
    """True if the folder has our marker, or lost it and still has a run's configuration and
    records.
    """
    run = RunFolder(folder)
    records = (run.metrics, run.evaluation, run.trainer_state, run.summary)
    return bool(kind_of(folder)) or (run.config.is_file() and any(map(os.path.lexists, records)))


# -- the one writer --------------------------------------------------------------------------------


_OWNER = re.compile(r"pid (\d{1,10}) on (.+)")
_CLOCK_SLACK_S = 5.0
"""Seconds by which the file system's clock and the kernel's may differ."""


class Liveness(Enum):
    ALIVE = "alive"
    GONE = "gone"
    ELSEWHERE = "elsewhere"
    """It runs on another machine, out of reach from here."""


@dataclass(frozen=True)
class Writer:
    """The process that holds a run folder's lock, or held it until a kill."""

    pid: int
    host: str
    since: float
    """Time when it took the lock, in seconds since 1970."""

    @classmethod
    def of(cls, folder: RunFolder) -> Self | None:
        """Return the process that holds a run's folder. Return None if no process does: a run that
        ends by itself removes its name.
        """
        try:
            text = folder.lock_owner.read_text(encoding="utf-8")
            since = folder.lock_owner.stat().st_mtime
        except (FileNotFoundError, IsADirectoryError, UnicodeDecodeError):
            return None
        match = _OWNER.fullmatch(text.strip())
        if match:
            return cls(int(match.group(1)), match.group(2), since)
        return None

    def __str__(self) -> str:
        return f"pid {self.pid} on {self.host}"

    def liveness(self) -> Liveness:
        if self.host != socket.gethostname():
            return Liveness.ELSEWHERE
        return Liveness.ALIVE if _runs(self.pid, self.since) else Liveness.GONE


def _runs(pid: int, since: float) -> bool:
    """Return True if `pid` is a process that already ran at `since`; a younger process only reuses
    the number.
    """
    import psutil

    try:
        process = psutil.Process(pid)
        started, status = process.create_time(), process.status()
    except psutil.NoSuchProcess:
        return False
    except psutil.AccessDenied:  # The process exists, and belongs to another user.
        return True
    ended = status in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    return not ended and started <= since + _CLOCK_SLACK_S


@contextmanager
def writer_lock(folder: RunFolder) -> Iterator[None]:
    """Hold the lock that makes this process the run's only writer. Raises ConfigurationError if
    another process holds it.
    """
    from filelock import FileLock, Timeout

    owner = folder.lock_owner
    lock = FileLock(folder.lock)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        who = "another process"
        with suppress(FileNotFoundError):  # It goes before the lock does.
            who = owner.read_text(encoding="utf-8").strip()
        raise ConfigurationError(
            f"{folder.path} is being written by {who}; wait for it, or choose another [logging]"
            " log_dir."
        ) from None
    try:
        owner.write_text(f"pid {os.getpid()} on {socket.gethostname()}\n", encoding="utf-8")
        yield
    finally:
        owner.unlink(missing_ok=True)
        lock.release()
