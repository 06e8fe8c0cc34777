"""Place the folder of a run's checkpoints. `[backend] adapter_path` may put it outside of the run's
own folder. Its marker there names the run, and a pointer in the run's folder names it.
"""

import json
import re
import secrets
from pathlib import Path

from retrain.config.schema import Backend
from retrain.errors import ConfigurationError, RunFailed
from retrain.records.checkpoint import CheckpointStore
from retrain.records.disk import replace_file
from retrain.records.run_folder import MARKER, RunFolder, mark, read_marker
from retrain.system import is_path_text, read_object

_SAFE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+=-]{0,99}")


def take(target: Path, folder: RunFolder) -> None:
    """Empty and sign a folder of checkpoints outside of the run's own, and leave a pointer to it in
    the run's folder. Does nothing if the pointer exists. `checkpoint_folder` has checked the owner.
    """
    if target == folder.checkpoints or folder.checkpoint_pointer.is_file():
        return
    run_id = secrets.token_hex(8)
    CheckpointStore(target).empty()
    mark(target, "checkpoints")
    sign(target, folder, run_id=run_id)
    pointer = {"path": str(target), "run_id": run_id}
    replace_file(folder.checkpoint_pointer, json.dumps(pointer) + "\n")


def checkpoint_folder(backend: Backend, folder: RunFolder, overwrite: bool) -> Path:
    """Return `<adapter_path>/<last part of log_dir>`, or the run's own folder. Raises
    ConfigurationError if that folder belongs to another run.
    """
    if not backend.adapter_path:
        return folder.checkpoints
    name = folder.path.resolve().name
    if not _SAFE_NAME.fullmatch(name):
        raise ConfigurationError(
            f"[logging] log_dir ends in {name!r}, which cannot name a folder under [backend]"
            " adapter_path; use letters, digits and ._+=- in its last part."
        )
    target = (Path(backend.adapter_path) / name).resolve()
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return target
    marker = read_marker(target)
    # Without a pointer the folder may still be the run's own: a run makes the marker before the
    # pointer, and deletes the pointer first.
    if folder.checkpoint_pointer.is_file():
        foreign = bool(_foreign(target, _pointer(folder)[1], folder))
    else:
        own = {"kind": "checkpoints", "run": str(folder.path.resolve())}
        foreign = marker | own != marker
    if foreign:
        raise ConfigurationError(
            f"{target} holds the checkpoints of another run, so [backend] adapter_path ="
            f" {backend.adapter_path!r} cannot be used with this log_dir; give the run another"
            " log_dir or adapter_path."
        )
    if CheckpointStore(target).steps() and not overwrite:
        raise ConfigurationError(
            f"{target} holds checkpoints of {folder.path}, whose own files are gone: start over"
            " with --overwrite, which deletes them, or choose another [logging] log_dir."
        )
    return target


def sign(target: Path, folder: RunFolder, **more: str) -> None:
    """Write the run's folder into the marker at `target`, so that retrain finds a moved run under
    its new name.
    """
    marker = read_marker(target)
    signed = marker | {"run": str(folder.path.resolve())} | more
    if signed != marker:
        replace_file(target / MARKER, json.dumps(signed) + "\n")


def stored_checkpoints(folder: RunFolder) -> Path:
    """Return the checkpoint folder of an existing run. Raises ConfigurationError if the pointer
    names the folder of another run.
    """
    if not folder.checkpoint_pointer.is_file():
        return folder.checkpoints
    target, run_id = _pointer(folder)
    problem = _foreign(target, run_id, folder)
    if problem:
        raise ConfigurationError(
            f"{folder.checkpoint_pointer} names {target}, {problem}, so nothing there is read or"
            f" changed; to make {folder.path} a run of its own, copy its checkpoints to"
            f" {folder.checkpoints} and delete {folder.checkpoint_pointer.name}."
        )
    return target


def _pointer(folder: RunFolder) -> tuple[Path, str]:
    """Read the path and the run id from checkpoint_pointer. Raises RunFailed for a file without
    these two.
    """
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

    Their marker names the run's id and its folder. If it names another folder, the user moved the
    run; if that folder still exists, this one is a copy.
    """
    marker = read_marker(target)
    if marker.get("kind") != "checkpoints" or marker.get("run_id") != run_id:
        return "which has no marker of this run"
    owner = RunFolder(Path(str(marker.get("run"))))
    if (
        owner.path == folder.path.resolve()
        or not owner.checkpoint_pointer.is_file()
        or _pointer(owner)[1] != run_id
    ):
        return ""
    return f"whose checkpoints belong to {owner.path}; {folder.path} is a copy of that run"
