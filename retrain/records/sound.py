"""Say whether the records of a run are whole. Every reader asks `sound` before it uses a number,
and a resume asks `changed_log` of each checkpoint.
"""

import re
from pathlib import Path
from typing import Any

from retrain.config import TrainConfig
from retrain.errors import RunFailed
from retrain.records.checkpoint import step_folder
from retrain.records.entries import StepRecord
from retrain.records.jsonl import CHANGED, Extent
from retrain.records.redact import MASK
from retrain.records.run_folder import RunFolder, Writer
from retrain.system import Json, read_object

_STEP = re.compile(rb'^\{"step": ?(\d{1,18})\b[^\n]*\n', re.MULTILINE)
"""A whole line of metrics.jsonl, whose first field is the step. It matches bytes, since status
looks at every line of every run.
"""


def sound(run: RunFolder, config: TrainConfig) -> str:
    """Return why the records of a run of `config` are not whole, as a sentence; "" if they are.

    Whole records agree on the seed and the condition. Their steps are 0, 1, 2, ... and as many as
    summary.json counts. Each log is as trainer_state.json recorded it; before the end of the run it
    may be longer.
    """
    try:
        summary, state = (
            read_object(path) if path.is_file() else {} for path in (run.summary, run.trainer_state)
        )
        ended = summary.get("status") == "done" and not Writer.of(run)
        problem = (
            _contradiction(run, config, summary, state)
            or _lost_steps(run.metrics, summary.get("steps"))
            or _broken_seal(run, state, ended)
        )
    except RunFailed as error:
        return str(error)
    return problem and problem + CHANGED


def _contradiction(run: RunFolder, config: TrainConfig, summary: Json, state: Json) -> str:
    for path, said in ((run.summary, summary), (run.trainer_state, state)):
        for name, own in (("seed", config.training.seed), ("condition", config.condition_label)):
            other = said.get(name)
            # A masked label may stand for any.
            if other not in (None, own) and MASK not in str(other):
                return f"{run.path} has {name} {own} in config.toml and {other} in {path.name}"
    return ""


def _lost_steps(path: Path, told: Any) -> str:
    counts = told if type(told) is int else 0
    if not path.is_file():
        return f"{path.parent}: {path.name} is missing" if counts else ""
    # Leave out a torn last line: it has no line end, and a crash may leave one.
    steps = [int(step) for step in _STEP.findall(path.read_bytes())]
    for step in range(max(len(steps), counts)):
        if steps[step : step + 1] != [step]:
            for _ in StepRecord.read(path):  # A line that fails to parse is the better reason.
                pass
            return f"{path}, line {step + 1}, does not hold step {step}"
    return ""


def _broken_seal(run: RunFolder, state: Json, ended: bool) -> str:
    path = run.trainer_state
    # The folder holds a copy of the checkpoint's state, so an edit of either file shows.
    copy = run.checkpoints / step_folder(state.get("step")) / path.name
    if ended and copy.is_file() and copy.read_bytes() != path.read_bytes():
        return f"{run.path}: {path.name} differs from the one in {copy.parent.name}"
    problem = changed_log(run, state, ended=ended) if state.get("files") else ""
    if problem.startswith("it "):  # `it` is the state.
        return f"{run.path}: {path.name}{problem.removeprefix('it')}"
    return problem and f"{run.path}: {problem}, as {path.name} recorded it"


def changed_log(run: RunFolder, state: Json, *, ended: bool = False) -> str:
    """Return how a log of steps or evaluations differs from its record in a state, "" if none does.
    A log may be longer than its record unless the run has `ended`.
    """
    try:
        files = state["files"]
        if state["step"] and run.metrics.name not in files:
            return f"it does not say how far {run.metrics.name} reached"
        for path in run.records():
            problem = f"{path.name} was not there" if ended and path.is_file() else ""
            if path.name in files:
                problem = Extent(**files[path.name]).problem(path, whole=ended)
            if problem:
                return problem
    except (TypeError, KeyError):
        return "it lacks the lengths of the logs"
    return ""
