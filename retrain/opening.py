"""The run's folder at start: whose it is, who writes it, where its checkpoints lie, and what an earlier session left in it."""

import json
import os
import re
import secrets
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from retrain.checkpoint import Checkpoint, CheckpointStore, TrainerState, replace_file
from retrain.config import TrainConfig, config_hash, dump_toml, load_stored, load_text, replaced, resume_differences, with_drawn_seed
from retrain.disk import expanded
from retrain.errors import ConfigurationError, RunFailed
from retrain.parsing import is_path_text, read_object
from retrain.tracking.redact import Redactor
from retrain.tracking.run_folder import MARKER, RunFolder, kind_of, mark

_SAFE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+=-]{0,99}")


@dataclass(frozen=True)
class Opening:
    """A run folder that is ours, with what an earlier session left in it."""

    config: TrainConfig
    """With the seed drawn, and with the log_dir of the run that is gone on with."""
    folder: RunFolder
    store: CheckpointStore
    state: TrainerState
    checkpoint: Checkpoint | None
    """What to load; None starts from step 0."""
    notes: tuple[str, ...]


@contextmanager
def open_run(config: TrainConfig, *, overwrite: bool) -> Iterator[Opening]:
    """Hold the run folder's lock for as long as the context lasts.

    Raises ConfigurationError for a folder that may not be used, and for keys that may not change at resume.
    """
    if config.kind == "campaign":
        raise ConfigurationError(
            f"{config.source_path or 'the configuration'} is a campaign and no single run; start it by `retrain FILE` or "
            "retrain.campaign.run_campaign."
        )
    resuming = bool(config.resume.from_)
    folder = RunFolder(Path(config.resume.from_ or config.logging.log_dir))
    if kind_of(folder.path) == "campaign":
        raise ConfigurationError(
            f"{folder.path} holds a campaign and no single run; go on with it by its own file, or name another folder."
        )
    if resuming and not folder.marker.is_file():
        raise ConfigurationError(f"[resume] from = {str(folder.path)!r} holds no run of retrain (no {MARKER}); name a run's folder.")
    if not resuming:
        _check_free(folder, overwrite)
    folder.create()
    with writer_lock(folder):
        if resuming and folder.config.is_file():
            yield _reopen(config, folder)
        else:
            yield _open_new(config, folder, resuming)


def _check_free(folder: RunFolder, overwrite: bool) -> None:
    if folder.holds_run() and not overwrite:
        raise ConfigurationError(
            f"{folder.path} already holds a run: go on with it by --resume {folder.path}, start it anew with --overwrite, "
            "or choose another [logging] log_dir."
        )
    if not folder.marker.is_file() and (taken := [path.name for path in folder.written() if path.exists()]):
        raise ConfigurationError(
            f"{folder.path} holds {', '.join(taken)} and was not made by retrain (no {MARKER}), so nothing there is overwritten; "
            "choose another [logging] log_dir or move them away."
        )


@contextmanager
def writer_lock(folder: RunFolder) -> Iterator[None]:
    """One writer a run."""
    owner = folder.lock_owner
    lock = FileLock(folder.lock)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        who = owner.read_text(encoding="utf-8").strip() if owner.exists() else "another process"
        raise ConfigurationError(f"{folder.path} is being written by {who}; wait for it, or choose another [logging] log_dir.") from None
    try:
        owner.write_text(f"pid {os.getpid()} on {socket.gethostname()}\n", encoding="utf-8")
        yield
    finally:
        owner.unlink(missing_ok=True)
        lock.release()


def _open_new(config: TrainConfig, folder: RunFolder, resuming: bool) -> Opening:
    config = with_drawn_seed(config)
    checkpoints = _checkpoint_folder(config, folder)
    folder.empty()
    if checkpoints != folder.checkpoints:
        _claim(checkpoints, folder)
    state = TrainerState(seed=config.training.seed, config_hash=config_hash(config), batch_size=config.training.batch_size)
    notes = (f"{folder.path} has no checkpoint yet: starting at step 0.",) if resuming else ()
    return Opening(config, folder, CheckpointStore(checkpoints, config.training.keep_checkpoints), state, None, notes)


def _reopen(config: TrainConfig, folder: RunFolder) -> Opening:
    stored = load_stored(folder.config)
    changes: dict[str, object] = {"logging.log_dir": str(folder.path)}
    if config.training.seed == -1:  # drawn when the run began
        changes["training.seed"] = stored.training.seed
    config = replaced(config, changes)
    differences = resume_differences(stored, _as_stored(config))
    if differences:
        raise ConfigurationError(differences)
    notes: list[str] = []
    store = CheckpointStore(stored_checkpoints(folder), config.training.keep_checkpoints)
    checkpoint = store.newest(notes.append)
    if checkpoint:
        state = checkpoint.state()
        notes.append(f"Resuming {folder.path} after {state.step} steps.")
    else:
        state = TrainerState(seed=config.training.seed, config_hash=config_hash(config), batch_size=config.training.batch_size)
        notes.append(f"{folder.path} has no checkpoint yet: starting at step 0.")
    store.drop_after(state.step)
    folder.cut_to_step(state.step if checkpoint else -1)
    return Opening(config, folder, store, state, checkpoint, tuple(notes))


def _as_stored(config: TrainConfig) -> TrainConfig:
    """The configuration as config.toml holds it: credentials in it are masked there, so they must not count as a difference."""
    return load_text(Redactor().text(dump_toml(config)))


# -- checkpoints outside the run's folder --------------------------------------------------------------------------------


def _checkpoint_folder(config: TrainConfig, folder: RunFolder) -> Path:
    """`<adapter_path>/<last part of log_dir>`, or the run's own folder. Raises ConfigurationError if another run's marker is there."""
    if not config.backend.adapter_path:
        return folder.checkpoints
    name = folder.path.resolve().name
    if not _SAFE_NAME.fullmatch(name):
        raise ConfigurationError(
            f"[logging] log_dir ends in {name!r}, which cannot name a folder under [backend] adapter_path; "
            "use letters, digits and ._+=- there."
        )
    target = (expanded(config.backend.adapter_path, "[backend] adapter_path") / name).resolve()
    if target.exists() and any(target.iterdir()) and _owner(target / MARKER) not in _own_ids(folder):
        raise ConfigurationError(
            f"{target} holds the checkpoints of another run, so [backend] adapter_path = {config.backend.adapter_path!r} cannot be used "
            "with this log_dir; give the run another log_dir or adapter_path."
        )
    return target


def _claim(target: Path, folder: RunFolder) -> None:
    """Empty `target`, mark it as this run's, and note in the run's folder where it is."""
    run_id = secrets.token_hex(8)
    if target.exists():
        shutil.rmtree(target)  # ours: _checkpoint_folder compared the ids
    mark(target, "checkpoints", run_id=run_id)
    replace_file(folder.checkpoint_pointer, json.dumps({"path": str(target), "run_id": run_id}) + "\n")


def stored_checkpoints(folder: RunFolder) -> Path:
    """Where the checkpoints of an existing run lie."""
    if not folder.checkpoint_pointer.is_file():
        return folder.checkpoints
    path = read_object(folder.checkpoint_pointer).get("path")
    if not is_path_text(path):
        raise RunFailed(f"{folder.checkpoint_pointer} names no folder of checkpoints: the file was changed or another program wrote it.")
    return Path(str(path))


def _owner(marker: Path) -> str | None:
    return str(read_object(marker).get("run_id") or "") or None if marker.is_file() else None


def _own_ids(folder: RunFolder) -> set[str | None]:
    return {_owner(folder.checkpoint_pointer)} - {None}
