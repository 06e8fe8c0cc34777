"""Take steps of a stored run again, from its nearest checkpoint, in another folder."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from retrain.config import TrainConfig, dump_toml, replaced
from retrain.records.checkpoint import START, CheckpointStore, step_folder
from retrain.records.checkpoint_place import stored_checkpoints
from retrain.records.jsonl import read_jsonl, truncate_to_step
from retrain.records.run_folder import RunFolder
from retrain.run.loop import next_step
from retrain.run.pressure import decided_by
from retrain.run.saver import Schedule
from retrain.run.session import Session
from retrain.run.start import with_prompt_date
from retrain.system import Json, read_object
from retrain.tracking.base import Verbosity


def nearest_checkpoint(folder: RunFolder, step: int, log: Callable[[str], None]) -> int:
    """Return the step of the newest usable checkpoint not after `step`, 0 without one; `log`
    receives a line about each newer unusable checkpoint.
    """
    found = CheckpointStore(stored_checkpoints(folder)).newest(log, until=step)
    return found.step if found else 0


@contextmanager
def replayed(
    folder: RunFolder, config: TrainConfig, start: int, stop: int, scratch: Path
) -> Iterator[Session]:
    """Take the steps from `start` to before `stop` again in `scratch`, an absent folder, and yield
    the run in that state. `start` is 0 or the step of a checkpoint. This only reads the run in
    `folder`, which has `config`.
    """
    # The run's configuration in another folder, without trackers of its own. It ends where it is
    # asked to: the clock is another, and a resume may have lowered max_steps below the steps taken.
    config = replaced(
        config,
        {
            "logging.log_dir": str(scratch),
            "logging.trackers": [],
            "logging.wandb_project": "",
            "backend.adapter_path": "",
            "training.keep_checkpoints": 0,
            "training.max_hours": 0.0,
            "training.max_steps": max(config.training.max_steps, stop),
            "resume.from": str(scratch) if start else "",
        },
    )
    dated = with_prompt_date(config, folder)
    if start:
        _copy(folder, RunFolder(scratch), dated, start)
    with Session.open(
        dated, overwrite=False, verbosity=Verbosity.SILENT, skip_parity=True
    ) as session:
        if session.state.gate_mismatch is None:
            session.state = replace(session.state, gate_mismatch=_gate_mismatch(folder))
        if session.pressure:
            session.pressure.replayed = decided_by(folder, start)
        # Repeat the evaluation at the checkpoint's step too: its copy would equal itself.
        if start:
            truncate_to_step(session.folder.evaluation, start)
        session.state = replace(session.state, last_evaluation=-1)
        evaluated = {line["step"] for line in read_jsonl(folder.evaluation)}
        session.schedule = Schedule(session.config, evaluated, _saved(folder))
        while True:
            session.evaluate_if_due()
            session.save_if_due()
            if session.state.step >= stop or session.is_finished:
                break
            next_step(session)
        yield session
    # The date is the run's own, and no key that somebody set.
    RunFolder(scratch).config.write_text(dump_toml(config), encoding="utf-8")


def _gate_mismatch(folder: RunFolder) -> float | None:
    """Return the mean difference that the run's first parity gate measured, None without one. The
    limit of later steps is a multiple of it.
    """
    means = (
        gate.get("mean_difference")
        for session in _sessions(folder)
        if isinstance(gate := session.get("parity_gate"), dict)
    )
    return next((mean for mean in means if isinstance(mean, float | int)), None)


def _saved(folder: RunFolder) -> set[int]:
    """Return the steps of the checkpoints that a run has, and the steps from which it resumed."""
    _, *later = _sessions(folder)
    resumed = {step for session in later if isinstance(step := session.get("step"), int)}
    return (resumed | {*CheckpointStore(stored_checkpoints(folder)).steps()}) - {0}


def _sessions(folder: RunFolder) -> list[Json]:
    """Return the sessions in environment.json, which anybody may have changed."""
    if not folder.environment.is_file():
        return [{}]
    first = read_object(folder.environment)
    later = first.get("resumed")
    if not isinstance(later, list):
        return [first]
    return [first, *(session for session in later if isinstance(session, dict))]


def _copy(source: RunFolder, target: RunFolder, config: TrainConfig, start: int) -> None:
    """Copy what a resume reads: the records, and one checkpoint. It leaves out environment.json, so
    that the replay describes its own environment.
    """
    target.create()
    for path in (*source.lines(), source.verdicts):
        if path.is_file():
            copy = target.path / path.relative_to(source.path)
            copy.parent.mkdir(exist_ok=True)
            shutil.copyfile(path, copy)
    target.config.write_text(dump_toml(config), encoding="utf-8")
    for name in (step_folder(start), START):
        if (folder := stored_checkpoints(source) / name).is_dir():
            shutil.copytree(folder, target.checkpoints / name)
