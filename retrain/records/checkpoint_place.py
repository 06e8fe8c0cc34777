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
from retrain.system import Json, is_path_text, read_object

_SAFE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+=-]{0,99}")


def take(target: Path, folder: RunFolder) -> None:
    """Empty and sign a folder of checkpoints outside of the run's own, and leave a pointer to it in
    the run's folder. Does nothing if the pointer exists. `checkpoint_folder` has checked the owner.
    """
    if target == folder.checkpoints or folder.checkpoint_pointer.is_file():
        return
    pointer = {"path": str(target), "run_id": secrets.token_hex(8)}
    CheckpointStore(target).empty()
    mark(target, "checkpoints")
    sign(target, folder, run_id=pointer["run_id"])
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
    if not (target.is_file() or any(target.glob("*"))):
        return target
    if _foreign(target, folder):
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
    target = Path(_pointer(folder)["path"])
    problem = _foreign(target, folder)
    if problem:
        raise ConfigurationError(
            f"{folder.checkpoint_pointer} names {target}, {problem}, so nothing there is read or"
            f" changed; to make {folder.path} a run of its own, copy its checkpoints to"
            f" {folder.checkpoints} and delete {folder.checkpoint_pointer.name}."
        )
    return target


def _pointer(folder: RunFolder) -> Json:
    """Read checkpoint_pointer. Raises RunFailed for a file without `path` and `run_id`."""
    content = read_object(folder.checkpoint_pointer)
    if not is_path_text(content.get("path")) or not isinstance(content.get("run_id"), str):
        raise RunFailed(
            f"{folder.checkpoint_pointer} names no folder of checkpoints: the file was changed or"
            " another program wrote it."
        )
    return content


def _foreign(target: Path, folder: RunFolder) -> str:
    """Return the reason why the checkpoints at `target` do not belong to the run in `folder`; "" if
    they do.

    Their marker names the run's id and its folder. If it names another folder, the user moved the
    run; if that folder still exists, this one is a copy.
    """
    marker = read_marker(target)
    owner = RunFolder(Path(str(marker.get("run"))))
    is_own, run_id = owner.path == folder.path.resolve(), marker.get("run_id")
    # Without a pointer the folder may still be the run's own: a run makes the marker before the
    # pointer, and deletes the pointer first.
    is_known = is_own
    if folder.checkpoint_pointer.is_file():
        is_known = run_id == _pointer(folder)["run_id"]
    if marker.get("kind") != "checkpoints" or not is_known:
        return "which has no marker of this run"
    if is_own or not owner.checkpoint_pointer.is_file() or _pointer(owner)["run_id"] != run_id:
        return ""
    return f"whose checkpoints belong to {owner.path}; {folder.path} is a copy of that run"
