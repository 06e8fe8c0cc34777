"""Write and read checkpoints: folders that a rename commits, and that retrain uses only if every
byte matches their manifest.

retrain writes a checkpoint as `.tmp-...`, with `manifest.json` last (name, size and sha256 of every
file). Then it syncs each file and the folder, renames the folder and syncs the parent. A crash at
any instant leaves the last good checkpoint. It uses no pickle: tensors are safetensors, the rest
JSON.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from retrain.errors import ConfigurationError, EnvironmentFailure, RunFailed
from retrain.records.disk import TEMPORARY, delete, replacing_folder
from retrain.records.jsonl import Extent
from retrain.records.state import SCHEMA_VERSION, TrainerState
from retrain.system import Json, parse_json
from retrain.types import WHOLE_MODEL

MANIFEST = "manifest.json"
STATE = "trainer_state.json"
FINAL = "final"
START = "start"
_OPTIMIZER = "optimizer."
_FOLDER = re.compile(r"(sft|step)_(\d{6,})")
_DAMAGED = "damaged-"
_OURS = re.compile(rf"({_FOLDER.pattern}|{FINAL}|{START})$|{_DAMAGED}|{re.escape(TEMPORARY)}")

Fill = Callable[[Path], None]
"""Writes files into the folder that it gets."""


@dataclass(frozen=True)
class Checkpoint:
    folder: Path
    step: int

    def state(self) -> TrainerState:
        path = self.folder / STATE
        return TrainerState.from_json(path.read_text(encoding="utf-8"), path)

    @property
    def holds_weights_alone(self) -> bool:
        """True after `keep_weights`."""
        has_optimizer = any(self.folder.glob(f"{_OPTIMIZER}*"))
        return (self.folder / WHOLE_MODEL).is_file() and not has_optimizer


def step_folder(step: Any) -> str:
    """Return the name of the checkpoint's folder after so many steps; "no step", which no folder
    has, for any other value.
    """
    return f"step_{step:06d}" if type(step) is int else "no step"


def place_folder(state: TrainerState) -> str:
    """Return the name of the checkpoint's folder of a state: `sft_000006` within the supervised
    stage.
    """
    stage, step = state.place
    return f"sft_{step:06d}" if stage == "sft" else step_folder(step)


def _order(folder: str) -> tuple[bool, int]:
    """Return the place of a checkpoint's folder among all folders of its run: the supervised stage
    is first.
    """
    stage, _, number = folder.partition("_")
    return stage == "step", int(number)


class CheckpointStore:
    """The checkpoints of one run. `step_000020/` is after 20 completed steps, `sft_000006/` after 6
    of the supervised stage, and `final/` has the last adapter. `start/` has the weights before the
    first step of reinforcement, if the run reads them.
    """

    def __init__(self, folder: Path, keep: int = 0) -> None:
        self.folder = folder
        self.keep = keep
        """Number of newest checkpoints to keep; 0 keeps all."""

    def save(self, state: TrainerState, write: Fill) -> Path:
        """Commit one checkpoint. `write` puts the backend's files into the given folder. Raises
        OSError.
        """
        if state.learning:
            raise ValueError(
                f"Step {state.step} is unfinished; a checkpoint holds the state between two steps."
            )
        target = self.folder / place_folder(state)

        def fill(folder: Path) -> None:
            write(folder)
            (folder / STATE).write_text(state.to_json(), encoding="utf-8")

        commit_folder(target, fill, step=state.step, config_hash=state.config_hash)
        for name in self._folders()[: -self.keep] if self.keep else ():
            delete(self.folder / name)
        return target

    def save_final(self, state: TrainerState, write: Fill) -> Path:
        """Commit the last weights, and replace earlier ones. The weights of a whole model are a
        hard link to the checkpoint of this step, if the file system has links. Raises OSError.
        """
        target = self.folder / FINAL

        def fill(folder: Path) -> None:
            _link(self.folder / step_folder(state.step) / WHOLE_MODEL, folder / WHOLE_MODEL)
            write(folder)

        commit_folder(target, fill, step=state.step, config_hash=state.config_hash)
        return target

    def save_start(self, state: TrainerState, write: Fill) -> None:
        """Commit the weights before the first step of reinforcement. Raises OSError."""
        commit_folder(self.folder / START, write, step=0, config_hash=state.config_hash)

    def start(self) -> Path:
        """Return the folder of `save_start`. Raises RunFailed if it does not verify."""
        folder = self.folder / START
        problem = verify(folder)
        if problem:
            raise RunFailed(
                f"{folder} cannot be used: {problem}; it holds the weights before the first step,"
                " which [loss] kl_reference or [algorithm] teacher reads: put it back, or start a"
                " new run."
            )
        return folder

    def keep_weights(self) -> None:
        """Keep only the newest whole model, and only the part of its checkpoint that an evaluation
        or an export reads.
        """
        *others, newest = self._folders()
        folder = self.folder / newest
        if not (folder / WHOLE_MODEL).is_file():
            return

        def fill(aside: Path) -> None:
            for path in folder.iterdir():
                kept = path.name != MANIFEST and not path.name.startswith(_OPTIMIZER)
                if kept and not _link(path, aside / path.name):
                    shutil.copyfile(path, aside / path.name)

        state = Checkpoint(folder, _order(newest)[1]).state()
        commit_folder(folder, fill, step=state.step, config_hash=state.config_hash)
        for name in (*others, START):
            delete(self.folder / name)

    def _folders(self) -> list[str]:
        """Return the names of the committed folders, oldest first, verified or not."""
        if not self.folder.is_dir():
            return []
        names = [path.name for path in self.folder.iterdir()]
        return sorted(filter(_FOLDER.fullmatch, names), key=_order)

    def steps(self) -> list[int]:
        """Return the step counts of the committed folders, oldest first, without the supervised
        stage.
        """
        return [step for is_step, step in map(_order, self._folders()) if is_step]

    def at(self, step: int) -> Checkpoint:
        """Return the checkpoint of `step` completed steps. Raises ConfigurationError for a step
        without a checkpoint, naming the existing steps, and RunFailed if it does not verify.
        """
        folder = self.folder / step_folder(step)
        steps = self.steps()
        have = ", ".join(map(str, steps)) or "none"
        if step not in steps:
            raise ConfigurationError(
                f"No checkpoint of step {step} is in {self.folder}; checkpoints here: {have}."
            )
        problem = verify(folder, STATE)
        if problem:
            raise RunFailed(
                f"Checkpoint {folder} cannot be used: {problem}; checkpoints here: {have}."
            )
        return Checkpoint(folder, step)

    def newest(
        self,
        log: Callable[[str], None],
        beside: Callable[[Checkpoint], str] = lambda _: "",
        *,
        until: float = float("inf"),
    ) -> Checkpoint | None:
        """Return the newest checkpoint that verifies, after at most `until` steps; `log` receives a
        line about each newer one that fails.

        `beside` returns a problem outside of a checkpoint's folder that makes it unusable, or "".
        """
        names = [name for name in self._folders() if _order(name) <= (True, until)]
        for name in reversed(names):
            is_step, step = _order(name)
            found = Checkpoint(self.folder / name, step if is_step else 0)
            problem = verify(found.folder, STATE) or beside(found)
            if not problem:
                return found
            further = "; trying the previous one" if name != names[0] else ""
            log(f"Checkpoint {found.folder.name} is not used: {problem}{further}.")
        return None

    def newest_to_read(self, log: Callable[[str], None]) -> Checkpoint | None:
        """Return the newest checkpoint that verifies; None if the run made none. Raises RunFailed
        if the run made some and none verifies: otherwise the untrained model would answer.
        """
        found = self.newest(log)
        if found is None and self._folders():
            raise RunFailed(
                f"No checkpoint in {self.folder} can be used; put back what is missing, or name"
                " another run."
            )
        return found

    def make_room_after(self, state: TrainerState, log: Callable[[str], None]) -> None:
        """Set the checkpoints after the step of `state` aside, and delete the remains of a killed
        save.

        A checkpoint after the resumed checkpoint was not usable. This renames it, since a person
        may still recover something from it.
        """
        here = _order(place_folder(state))
        for folder in [self.folder / name for name in self._folders() if _order(name) > here]:
            aside, number = folder.with_name(f"{_DAMAGED}{folder.name}"), 2
            while os.path.lexists(aside):
                aside, number = folder.with_name(f"{_DAMAGED}{folder.name}-{number}"), number + 1
            folder.rename(aside)
            log(f"{folder.name} is kept as {aside.name}.")
        for left in self.folder.glob(f"{TEMPORARY}*"):
            delete(left)

    def empty(self) -> None:
        """Delete every checkpoint and nothing else in the folder."""
        for path in [*self.folder.glob("*")]:
            if _OURS.match(path.name):
                delete(path)

    def rehearse(self, num_bytes: int) -> None:
        """Write and delete a file of a checkpoint's size, so that a full disk shows before step 1
        instead of after step 20.
        """
        path = self.folder / f"{TEMPORARY}rehearsal"
        block = 1 << 20
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with path.open("wb") as file:
                for start in range(0, num_bytes, block):
                    file.write(bytes(min(block, num_bytes - start)))
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise EnvironmentFailure(
                f"A checkpoint of {num_bytes / 2**20:.1f} MiB cannot be written to {self.folder}:"
                f" {error.strerror or error}; free space there, or set [backend] adapter_path to"
                " another volume."
            ) from error
        finally:
            if path.exists():
                path.unlink()


def _link(source: Path, target: Path) -> bool:
    """Make `target` a hard link; return False without a source, or if the file system has no
    links.
    """
    try:
        target.hardlink_to(source)
    except OSError:
        return False
    return True


def commit_folder(target: Path, fill: Fill, *, step: int, config_hash: str) -> None:
    """Let `fill` write a folder, seal it with a manifest, and put it in the place of `target`.
    Raises OSError.
    """
    with replacing_folder(target) as aside:
        fill(aside)
        manifest = {
            "schema_version": SCHEMA_VERSION,
            "step": step,
            "config_hash": config_hash,
            "files": [
                {"name": path.relative_to(aside).as_posix()} | asdict(Extent.of(path))
                for path in sorted(filter(Path.is_file, aside.rglob("*")))
            ],
        }
        manifest |= {"sha256": _digest(manifest)}
        (aside / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")


def _digest(manifest: Json) -> str:
    """Hash a manifest's content with sha256, so that damage to the manifest itself shows too."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def verify(folder: Path, *needed: str) -> str:
    """Return the first difference between `folder` and its manifest, or an absent file of `needed`;
    "" if every byte matches.
    """
    for name in (MANIFEST, *needed):
        if not (folder / name).is_file():  # This refuses a pipe too, which has no end to read to.
            return f"{name} is missing"
    try:
        manifest = parse_json((folder / MANIFEST).read_bytes())
        seal = manifest.pop("sha256")
        sealed = {
            folder / entry["name"]: Extent(entry["size"], entry["sha256"])
            for entry in manifest["files"]
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{MANIFEST} is damaged ({type(error).__name__})"
    if seal != _digest(manifest):
        return f"{MANIFEST} differs from its sha256"
    problems = (extent.problem(path, whole=True) for path, extent in sealed.items())
    return next(filter(None, problems), "")
