"""Opening a run's folder: whether it is ours, the lock of its one writer, the place of its
checkpoints, and the state of an earlier session.
"""

import json
import os
import re
import secrets
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from filelock import FileLock, Timeout

from retrain.config import (
    TrainConfig,
    config_from_toml,
    config_hash,
    dump_toml,
    load_stored,
    replaced,
    resume_differences,
    with_drawn_seed,
)
from retrain.config.schema import Backend
from retrain.errors import ConfigurationError, RetrainError, RunFailed
from retrain.parsing import expanded, is_path_text, read_object
from retrain.records.checkpoint import Checkpoint, CheckpointStore
from retrain.records.disk import put_back, remove_empty, replace_file
from retrain.records.jsonl import aside_of
from retrain.records.redact import Redactor
from retrain.records.run_folder import MARKER, RunFolder, kind_of, mark, read_marker
from retrain.records.state import TrainerState
from retrain.run.pressure import decided_by

_SAFE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+=-]{0,99}")


@dataclass(frozen=True)
class OpenedRun:
    """A locked run folder, with what an earlier session left in it."""

    config: TrainConfig
    """The configuration with the seed drawn, and with the log_dir of the resumed run."""
    folder: RunFolder
    store: CheckpointStore
    state: TrainerState
    checkpoint: Checkpoint | None
    """The checkpoint to load; with None the run starts at step 0."""
    notes: tuple[str, ...]
    decided_by: Mapping[int, float] = field(default_factory=dict)
    """Step -> seconds by which back pressure decided, for the steps that a resumed run makes
    again."""


@contextmanager
def open_run(config: TrainConfig, *, overwrite: bool) -> Iterator[OpenedRun]:
    """Hold the run folder's lock for as long as the context lasts.

    Raises ConfigurationError for a folder that may not be used, and for keys that may not change at
    resume.
    """
    if config.kind == "campaign":
        raise ConfigurationError(
            f"{config.source_path or 'the configuration'} is a campaign, not a single run; start it"
            " with `retrain FILE` or retrain.campaign.run_campaign."
        )
    resuming = bool(config.resume.from_)
    folder = RunFolder(Path(config.resume.from_ or config.logging.log_dir))
    kind = kind_of(folder.path)
    if kind == "campaign":
        raise ConfigurationError(
            f"{folder.path} holds a campaign, not a single run; resume it with the campaign's own"
            " file, or name another folder."
        )
    if kind not in ("", "run"):
        raise ConfigurationError(
            f"{folder.path} is a folder of {kind} made by retrain and contains no run; name another"
            " folder."
        )
    if resuming and not kind:
        around = next((parent for parent in folder.path.parents if kind_of(parent) == "run"), None)
        advice = f"it is a part of the run {around}: name that" if around else "name a run's folder"
        raise ConfigurationError(
            f"[resume] from = {str(folder.path)!r} holds no run of retrain (no {MARKER}); {advice}."
        )
    if not kind and (taken := [path.name for path in folder.written() if path.exists()]):
        raise ConfigurationError(
            f"{folder.path} holds {', '.join(taken)} and was not made by retrain (no {MARKER}), so"
            " nothing in it is overwritten; choose another [logging] log_dir or move them away."
        )
    elsewhere = (
        [expanded(config.backend.adapter_path, "[backend] adapter_path") / folder.path.name]
        if config.backend.adapter_path
        else []
    )
    missing = [list(_missing(place.resolve())) for place in (folder.path, *elsewhere)]
    folder.create()
    with writer_lock(folder), _no_trace_of_a_refusal(folder, *missing):
        if resuming and folder.holds_run():
            yield _reopen(config, folder)
        elif folder.holds_run() and not overwrite:
            raise ConfigurationError(
                f"{folder.path} already holds a run: continue it with `{folder.resume_command}`,"
                " start it anew with --overwrite, or choose another [logging] log_dir."
            )
        else:
            yield _open_new(config, folder, resuming, overwrite)


@contextmanager
def _no_trace_of_a_refusal(
    folder: RunFolder, made: Sequence[Path], elsewhere: Sequence[Path] = ()
) -> Iterator[None]:
    """Delete the folders `made` for a run that is refused before it begins, so that the corrected
    command is a first one.

    `elsewhere`: those of its checkpoints, outside of its folder.
    """
    try:
        yield
    except RetrainError as error:
        # A mistake in the configuration may show after the files are opened, but before the first
        # line of numbers.
        files = (
            (folder.metrics, folder.evaluation)
            if isinstance(error, ConfigurationError)
            else (folder.config,)
        )
        if made and not any(path.is_file() for path in files):
            if elsewhere and elsewhere[0].is_dir():
                CheckpointStore(elsewhere[0]).empty()
                (elsewhere[0] / MARKER).unlink(missing_ok=True)
                remove_empty(elsewhere)
            folder.empty()
            for path in (folder.marker, folder.lock_owner, folder.lock):
                path.unlink(missing_ok=True)
            remove_empty(made)
        raise


def _missing(path: Path) -> Iterator[Path]:
    """The folders that are made with `path`, each one before its parent."""
    while not path.exists():
        yield path
        path = path.parent


@contextmanager
def writer_lock(folder: RunFolder) -> Iterator[None]:
    """Hold the lock that makes this process the run's only writer. Raises ConfigurationError where
    another process holds it.
    """
    owner = folder.lock_owner
    lock = FileLock(folder.lock)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        who = owner.read_text(encoding="utf-8").strip() if owner.exists() else "another process"
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


def _open_new(config: TrainConfig, folder: RunFolder, resuming: bool, overwrite: bool) -> OpenedRun:
    config = with_drawn_seed(config)
    checkpoints = _checkpoint_folder(config.backend, folder, overwrite)
    folder.empty()
    if (
        checkpoints != folder.checkpoints
    ):  # elsewhere: marked as this run's, with a note in the run's folder where it is
        run_id = secrets.token_hex(8)
        if checkpoints.exists():
            CheckpointStore(checkpoints).empty()  # ours: _checkpoint_folder looked
        mark(checkpoints, "checkpoints")
        _sign(checkpoints, folder, run_id)
        replace_file(
            folder.checkpoint_pointer,
            json.dumps({"path": str(checkpoints), "run_id": run_id}) + "\n",
        )
    state = TrainerState(
        seed=config.training.seed,
        config_hash=config_hash(config),
        batch_size=config.training.batch_size,
    )
    notes = (f"{folder.path} has no checkpoint yet: starting at step 0.",) if resuming else ()
    return OpenedRun(
        config,
        folder,
        CheckpointStore(checkpoints, config.training.keep_checkpoints),
        state,
        None,
        notes,
    )


def _reopen(config: TrainConfig, folder: RunFolder) -> OpenedRun:
    """Open a folder to resume its run. Nothing in it changes before it is certain that the run can
    continue.
    """
    if links := folder.links():
        raise _not_resumable(
            folder,
            f"{links[0]} is a link, and nothing behind a link is changed",
            "put the file or folder itself there",
        )
    if blocked := folder.blocked():
        raise _not_resumable(
            folder,
            f"{blocked[0]} is a file, and a run keeps a folder of that name",
            "move the file away",
        )
    if not folder.config.is_file():
        raise _not_resumable(folder, f"{folder.config.name} is missing")
    stored = load_stored(folder.config)
    changes: dict[str, object] = {"logging.log_dir": str(folder.path)}
    if config.training.seed == -1:  # drawn when the run began
        changes["training.seed"] = stored.training.seed
    config = replaced(config, changes)
    masked = config_from_toml(
        dump_toml(Redactor().config(config))
    )  # config.toml masks credentials, so they must not count as a difference
    if differences := resume_differences(stored, masked):
        raise ConfigurationError(differences)
    notes: list[str] = []
    store = CheckpointStore(stored_checkpoints(folder), config.training.keep_checkpoints)
    checkpoint = _newest(store, folder, notes.append)
    if store.folder != folder.checkpoints:
        _sign(store.folder, folder)
    replayed = (
        decided_by(folder, checkpoint.step if checkpoint else 0)
        if config.backpressure.enabled
        else {}
    )
    if checkpoint:
        state = checkpoint.state()
        notes.append(f"Resuming {folder.path} after {state.step} steps.")
        if state.step >= (steps := config.training.max_steps):
            notes.append(
                f"No step is left: [training] max_steps = {steps} is reached; raise it to train on."
            )
        folder.cut_to(state, notes.append)
    else:
        state = TrainerState(
            seed=config.training.seed,
            config_hash=config_hash(config),
            batch_size=config.training.batch_size,
        )
        notes.append(f"{folder.path} has no checkpoint yet: starting at step 0.")
        folder.forget_steps()
    if (aside := aside_of(folder.metrics)).exists():
        notes.append(
            f"{aside} holds the rows of the steps that are made again, until the first of them is"
            " written."
        )
    store.make_room_after(state.step, notes.append)
    return OpenedRun(config, folder, store, state, checkpoint, tuple(notes), replayed)


def _newest(
    store: CheckpointStore, folder: RunFolder, say: Callable[[str], None]
) -> Checkpoint | None:
    """Return the checkpoint to resume from; None if none was made. Raises ConfigurationError if
    none of those made can be used.
    """
    put_back(store.folder)
    passed_over: list[str] = []
    found = store.newest(
        passed_over.append, lambda checkpoint: folder.missing_rows(checkpoint.state())
    )
    if found is None and passed_over:
        raise _not_resumable(
            folder, " ".join(passed_over).removesuffix("; trying the previous one.")
        )
    if found is None and folder.trainer_state.exists():
        raise _not_resumable(
            folder,
            f"{folder.trainer_state.name} says that a checkpoint was made, but {store.folder} holds"
            " none",
        )
    for line in passed_over:
        say(line)
    return found


def _not_resumable(
    folder: RunFolder, problem: str, remedy: str = "put back what is missing"
) -> ConfigurationError:
    return ConfigurationError(
        f"{folder.path} cannot be resumed and is left as it is: {problem}; {remedy}, start the run"
        " anew with --overwrite, which deletes what is there, or choose another [logging] log_dir."
    )


# -- checkpoints outside the run's folder ----------------------------------------------------------


def _checkpoint_folder(backend: Backend, folder: RunFolder, overwrite: bool) -> Path:
    """Return `<adapter_path>/<last part of log_dir>`, or the run's own folder. Raises
    ConfigurationError if it holds another run's.
    """
    if not backend.adapter_path:
        return folder.checkpoints
    name = folder.path.resolve().name
    if not _SAFE_NAME.fullmatch(name):
        raise ConfigurationError(
            f"[logging] log_dir ends in {name!r}, which cannot name a folder under [backend]"
            " adapter_path; use letters, digits and ._+=- in its last part."
        )
    target = (expanded(backend.adapter_path, "[backend] adapter_path") / name).resolve()
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return target
    marker = read_marker(target)
    if folder.checkpoint_pointer.is_file():
        foreign = bool(_foreign(target, _pointer(folder)[1], folder))
    else:  # the marker is made before the pointer, and the pointer goes first
        foreign = marker.get("kind") != "checkpoints" or marker.get("run") != str(
            folder.path.resolve()
        )
    if foreign:
        raise ConfigurationError(
            f"{target} holds the checkpoints of another run, so [backend] adapter_path ="
            f" {backend.adapter_path!r} cannot be used with this log_dir; give the run another"
            " log_dir or adapter_path."
        )
    if CheckpointStore(target).steps() and not overwrite:
        raise ConfigurationError(
            f"{target} holds checkpoints of {folder.path}, whose own files are gone: start the run"
            " anew with --overwrite, which deletes them, or choose another [logging] log_dir."
        )
    return target


def _sign(target: Path, folder: RunFolder, run_id: str = "") -> None:
    """Write the run's folder into the marker at `target`, so that a run that was moved is found
    under its new name.
    """
    here = {"run": str(folder.path.resolve())} | ({"run_id": run_id} if run_id else {})
    marker = read_marker(target)
    if marker | here != marker:
        replace_file(target / MARKER, json.dumps(marker | here) + "\n")


def stored_checkpoints(folder: RunFolder) -> Path:
    """Return the checkpoint folder of an existing run. Raises ConfigurationError if the pointer
    names another run's.
    """
    if not folder.checkpoint_pointer.is_file():
        return folder.checkpoints
    target, run_id = _pointer(folder)
    if problem := _foreign(target, run_id, folder):
        raise ConfigurationError(
            f"{folder.checkpoint_pointer} names {target}, {problem}, so nothing there is read or"
            f" changed; to make {folder.path} a run of its own, copy its checkpoints to"
            f" {folder.checkpoints} and delete {folder.checkpoint_pointer.name}."
        )
    return target


def _pointer(folder: RunFolder) -> tuple[Path, str]:
    """Read the path and run id in checkpoint_pointer. Raises RunFailed for a file without them."""
    content = read_object(folder.checkpoint_pointer)
    path, run_id = content.get("path"), content.get("run_id")
    if not is_path_text(path) or not isinstance(run_id, str):
        raise RunFailed(
            f"{folder.checkpoint_pointer} names no folder of checkpoints: the file was changed or"
            " another program wrote it."
        )
    return Path(str(path)), run_id


def _foreign(target: Path, run_id: str, folder: RunFolder) -> str:
    """Return the reason why the checkpoints at `target` do not belong to the run in `folder`; "" if
    they do.

    Their marker names the run's id and its folder. If it names another folder, the run was moved;
    if that folder still exists, this one is a copy.
    """
    marker = read_marker(target)
    if marker.get("kind") != "checkpoints" or marker.get("run_id") != run_id:
        return "which has no marker of this run"
    owner = RunFolder(Path(str(marker.get("run", folder.path.resolve()))))  # 0.1.0 named no folder
    if (
        owner.path == folder.path.resolve()
        or not owner.checkpoint_pointer.is_file()
        or _pointer(owner)[1] != run_id
    ):
        return ""
    return f"whose checkpoints belong to {owner.path}, of which {folder.path} is a copy"
