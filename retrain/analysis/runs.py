"""Read runs on disk: one run, a campaign's runs, or every run below a folder. `load_runs` gives
their metrics as a pandas frame.

A run is a folder with config.toml. A campaign is a folder with manifest.json, whose `runs` name
each run's folder, condition and seed. Properties read files on demand.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import chain, groupby, takewhile
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

import numpy as np
from pydantic import AfterValidator, StrictInt, TypeAdapter, ValidationError

from retrain.analysis.held_out import Answers
from retrain.analysis.statistics import Floats
from retrain.backends.base import backend_kind
from retrain.config import TrainConfig, load_stored
from retrain.config.moving import with_values, wrong_key
from retrain.config.schema import Training
from retrain.errors import ConfigurationError, RunFailed
from retrain.inference_engine.base import ENGINES, engine_kind
from retrain.records.entries import MEASURED, EvaluationRecord, SftRecord, StepRecord
from retrain.records.evaluation import Evaluation, is_evaluation
from retrain.records.jsonl import CHANGED, read_jsonl, read_jsonl_backwards
from retrain.records.run_folder import RunFolder, read_marker
from retrain.records.terminal import counted
from retrain.system import Json, is_path_text, read_object

if TYPE_CHECKING:
    import pandas as pd

MANIFEST = "manifest.json"


def _checked_path(text: str) -> str:
    if not is_path_text(text):
        raise ValueError("no file system holds such a name")
    return text


_PathText = Annotated[str, AfterValidator(_checked_path)]


@dataclass(frozen=True)
class PlannedRun:
    """A run's entry in its campaign's manifest."""

    condition: str
    seed: StrictInt
    name: _PathText
    status: str = ""
    reason: Any = ""
    """The reason of a failure or an interruption, which may quote half a character; else None."""
    attempts: int = 1
    """Number of attempts, without resumes after an interruption or a kill."""
    dir: _PathText = ""
    """The run's folder, relative to the campaign's; "" for runs/NAME."""


_ENTRIES = TypeAdapter(list[PlannedRun])


NO_TRAINING = {*MEASURED, "condition"}
"""Fields of a step that say nothing of its training: times, memory, and the condition's label."""
RECENT = 20
"""Steps at the end of a run that enter the medians of step time and throughput."""


@dataclass(frozen=True)
class StoredRun:
    """A run on disk. `planned` is None outside a campaign."""

    path: Path
    planned: PlannedRun | None = None

    @property
    def folder(self) -> RunFolder:
        return RunFolder(self.path)

    @property
    def name(self) -> str:
        """Its name in its campaign. A folder from the command line gives its path, since other
        folders may share its name.
        """
        return self.path.name if self.planned else str(self.path)

    @cached_property
    def config(self) -> TrainConfig:
        read_marker(self.path)  # a newer retrain may mean something else by its values
        return load_stored(self.folder.config, to_read=True)

    @property
    def condition(self) -> str:
        return self.planned.condition if self.planned else self.config.condition_label

    @property
    def seed(self) -> int:
        return self.planned.seed if self.planned else self.config.training.seed

    @cached_property
    def steps(self) -> int:
        """The number of steps completed; 0 before the first."""
        return next((line["step"] + 1 for line in read_jsonl_backwards(self.folder.metrics)), 0)

    @property
    def counted_steps(self) -> int:
        """The steps completed as summary.json counts them; without it, `steps`."""
        counted = self.summary.get("steps")
        return counted if type(counted) is int else self.steps

    @cached_property
    def summary(self) -> Json:
        """The content of summary.json, which a session writes at its end unless a kill ends it;
        empty without the file.
        """
        return object_or_empty(self.folder.summary)

    @cached_property
    def environment(self) -> Json:
        """The content of environment.json; empty if there is none."""
        return object_or_empty(self.folder.environment)

    @property
    def code(self) -> Json:
        """The code of the first session, as environment.json names it: `revision` of the package,
        and `plugins`, dotted name -> sha256 of its file.
        """
        return table_of(self.environment, "code")

    @cached_property
    def resumes(self) -> list[tuple[int, Json]]:
        """Return the step at which each later session began, and its record.

        It leaves out a session of an old version, which recorded no step.
        """
        listed = self.environment.get("resumed")
        return [
            (each["step"], each)
            for each in (listed if isinstance(listed, list) else ())
            if isinstance(each, dict) and isinstance(each.get("step"), int)
        ]

    def environment_at(self, step: int) -> Json:
        """Return environment.json as the session that took `step` would have written it."""
        sessions = [session for began, session in self.resumes if began <= step]
        return self.environment | (sessions[-1] if sessions else {})

    @property
    def has_counter_noise(self) -> bool:
        """True if the engine declared in environment.json that its noise depends on each token's
        coordinates alone.

        In a folder of a version before engines declared it, the built-in engine's name decides. It
        never runs a plugin's code.
        """
        recorded = self.environment.get("engine")
        if isinstance(recorded, dict):
            return recorded.get("noise") == "counter"
        settings = self.config
        if not backend_kind(settings.backend.backend).in_process:
            return False
        engine = settings.inference.engine
        return engine in ENGINES and engine_kind(engine).capabilities.noise == "counter"

    def has_status(self, status: str) -> bool:
        """True if its campaign's manifest gives it this status."""
        return self.planned is not None and self.planned.status == status

    @property
    def failed(self) -> bool:
        """True if the run failed, according to its summary or its campaign's manifest."""
        return self._failed_in_campaign or self.summary.get("status") == "failed"

    @cached_property
    def _failed_in_campaign(self) -> bool:
        """True if its campaign's manifest says that it failed, and no later session of the run
        alone has completed it.
        """
        return self.has_status("failed") and not self.is_whole

    @property
    def is_whole(self) -> bool:
        """True if its own summary has the status done, after its last step. A run that `[training]
        max_hours` ended before may have failed to go on.
        """
        done = self.summary.get("status") == "done"
        return done and self.took(self.config.training.max_steps)

    def took(self, planned: int) -> bool:
        """True if the run took `planned` steps, or with 0 its supervised stage."""
        if planned:
            return self.counted_steps >= planned
        return object_or_empty(self.folder.trainer_state).get("stage") == "rl"

    @property
    def skipped(self) -> bool:
        """True for a run that its campaign no longer needed: the evidence had decided."""
        return self.has_status("skipped")

    @cached_property
    def unfinished(self) -> str:
        """The reason why the run has no final result, as a predicate ("stopped after 3 of 9
        steps"); "" with a final result.
        """
        if self.planned and self._failed_in_campaign:
            return f"failed ({self.planned.reason or ''})".removesuffix(" ()")
        if not self.folder.config.is_file():
            return "has not started"
        status = self.summary.get("status")
        if self.summary and status != "done":
            reason = str(self.summary.get("reason") or "").rstrip(".")
            ended = "failed" if self.failed else f"was {status}"
            if status is None:
                ended = f"left a {self.folder.summary.name} without a status"
            return f"{ended} after {counted(self.steps, 'step')} ({reason})".removesuffix(" ()")
        # A campaign planned more steps than a run makes that [training] max_hours ended.
        if self.summary and not self.planned:
            return ""
        planned = self.config.training.max_steps
        if self.took(planned):
            return ""
        # Its own summary says done. The campaign's reason may be older than the run.
        if hours := self.used_hours(self.config.training):
            return f"was stopped ({hours})"
        return f"stopped after {self.counted_steps} of {counted(planned, 'step')}"

    def used_hours(self, training: Training) -> str:
        """Say that the max_hours of `training` came before its last step. Return "" if they did
        not, or if summary.json does not say how long the run took.
        """
        seconds, limit = self.summary.get("seconds"), training.max_hours * 3600
        if not (isinstance(seconds, int | float) and seconds >= limit > 0) or self.took(
            training.max_steps
        ):
            return ""
        after = "within the supervised stage"
        if training.max_steps:
            after = f"after {self.counted_steps} of {counted(training.max_steps, 'step')}"
        return (
            f"[training] max_hours = {training.max_hours:g} came {after}; give more hours, such as"
            f" {training.more_hours(seconds)}"
        )

    @cached_property
    def unsound(self) -> str:
        """The reason why its records are not whole, as a sentence; "" if they are."""
        from retrain.records.sound import sound

        return sound(self.folder, self.config)

    def check(self) -> Self:
        """Return the run. Raises RunFailed, with the reason, unless its records are whole."""
        if self.unsound:
            raise RunFailed(self.unsound)
        return self

    @cached_property
    def final_evaluation(self) -> Evaluation | None:
        """The last evaluation of trained weights; None if there was none."""
        path = self.folder.evaluation
        by_step = groupby(read_jsonl_backwards(path), itemgetter("step"))
        step, lines = next(by_step, (None, ()))
        if step is None or (step == 0 and not self.config.sft.is_on):
            return None
        records = [EvaluationRecord.from_json(line, path) for line in lines][::-1]
        return Evaluation(step, records, sorted({1, *self.config.evaluation.k}))

    @cached_property
    def answers(self) -> Answers | None:
        """The held-out answers of `final_evaluation`."""
        found = self.final_evaluation
        return Answers.of(found.problems) if found else None

    @property
    def heldout_sha256(self) -> Any:
        """The hashes of the examples of `final_evaluation`; None in folders of 0.9."""
        if self.final_evaluation is None:
            return None
        return self.environment_at(max(0, self.final_evaluation.step - 1)).get("heldout_sha256")

    @cached_property
    def sft_records(self) -> list[SftRecord]:
        """The steps of the supervised stage; empty without one."""
        return list(SftRecord.read(self.folder.sft))

    @property
    def sft_tokens(self) -> int:
        """Tokens of the supervised stage."""
        return sum(record.tokens for record in self.sft_records)

    def curve(self, name: str) -> Floats:
        """Return [2, steps] step numbers and values of a numeric field, without the steps that have
        no value.
        """
        points = np.stack([*read_metrics(self.folder.metrics, ("step", name)).values()])
        return points[:, ~np.isnan(points[1])]

    @cached_property
    def ending(self) -> str:
        """The record of the last step as text, without times and memory; "" before the first."""
        return next(map(_unmeasured, read_jsonl_backwards(self.folder.metrics)), "")

    @cached_property
    def numbers(self) -> str:
        """A hash of all steps and evaluations, without times and memory. Equal runs have equal
        hashes.
        """
        digest = hashlib.sha256()
        for line in read_jsonl(self.folder.metrics):
            digest.update(_unmeasured(line).encode())
        if self.folder.evaluation.is_file():
            digest.update(self.folder.evaluation.read_bytes())
        return digest.hexdigest()

    def config_at(self, step: int) -> TrainConfig:
        """Return the configuration with the values that `[schedule]` gave to a step; without a
        record of the step, the file's values.
        """
        config, records = self.config, StepRecord.read(self.folder.metrics)
        values = next((one.scheduled for one in records if one.step == step), None) or {}
        # Another program's record may name anything.
        known = {path: value for path, value in values.items() if not wrong_key(config, path)}
        return with_values(config, known)

    def last_metrics(self, window: int) -> list[StepRecord]:
        """Return the records of the last `window` step numbers, newest first."""
        recent = takewhile(
            lambda line: line["step"] >= self.steps - window,
            read_jsonl_backwards(self.folder.metrics),
        )
        return [StepRecord.from_json(line, self.folder.metrics) for line in recent]


def object_or_empty(path: Path) -> Json:
    return read_object(path) if path.is_file() else {}


def table_of(content: Json, name: str) -> Json:
    """Return a table inside a file's content; empty if there is none."""
    found = content.get(name)
    return found if isinstance(found, dict) else {}


Pair = tuple[StoredRun, StoredRun]
RunsBySeed = Mapping[int, StoredRun]


def _unmeasured(line: Json) -> str:
    return json.dumps({name: line[name] for name in line if name not in NO_TRAINING})


def seeds_words(seeds: Sequence[int]) -> str:
    """Write seeds in words, such as "seed 4" or "seeds 1 to 4, 8"."""
    return f"seed{'' if len(seeds) == 1 else 's'} {seed_ranges(seeds)}"


def seed_ranges(seeds: Sequence[int]) -> str:
    words = []
    # Consecutive seeds have one distance from their place.
    for _, group in groupby(enumerate(sorted(seeds)), key=lambda each: each[1] - each[0]):
        part = [str(seed) for _, seed in group]
        words.append(f"{part[0]} to {part[-1]}" if len(part) > 2 else ", ".join(part))
    return ", ".join(words)


def is_campaign(folder: Path) -> bool:
    """True for a folder whose manifest.json lists runs; a checkpoint's manifest.json does not."""
    manifest = folder / MANIFEST
    try:
        return manifest.is_file() and "runs" in read_object(manifest)
    except RunFailed:  # Another program's manifest.json may hold anything.
        return False


def unreadable_manifest(folder: Path) -> RunFailed | None:
    """Return the reason why manifest.json in a folder is unreadable, or None. It does not open a
    pipe, since that would wait for its writer.
    """
    manifest = folder / MANIFEST
    # A link to nothing counts: what it led to may be on a disk that is gone.
    if os.path.lexists(manifest) and not manifest.is_file():
        kind = "a folder" if manifest.is_dir() else "no regular file"
        return RunFailed(f"{manifest} is {kind}: put the campaign's manifest back from a copy.")
    try:
        object_or_empty(manifest)
    except RunFailed as error:
        return error
    return None


def no_campaign(folder: Path) -> str:
    """Say why a folder is not a campaign, as the beginning of a sentence. Raises RunFailed for a
    damaged manifest.
    """
    if damage := unreadable_manifest(folder):
        raise damage
    return f"{folder} is not a campaign (it has no {MANIFEST} with runs)"


def is_run(folder: Path) -> bool:
    """True for a folder with a configuration that `retrain eval` did not write."""
    if not RunFolder(folder).config.is_file():
        return False
    try:
        return not is_evaluation(folder)
    except RunFailed:  # The marker is unreadable.
        return True


def stored_run(folder: Path) -> StoredRun:
    """Open a run's folder. Raises ConfigurationError for any other folder."""
    if not is_run(folder):
        reason = "it is an evaluation's" if RunFolder(folder).config.is_file() else "no config.toml"
        raise ConfigurationError(
            f"{folder} holds no run of retrain ({reason}); name a run's folder."
        )
    return StoredRun(folder)


def no_campaigns_value(path: Path, error: ValidationError, *above: str) -> RunFailed:
    """Return the error that names the first wrong or absent value of a manifest, in its entry
    `above`.
    """
    first = error.errors()[0]
    place = ".".join(map(str, (*above, *first["loc"])))
    problem = f"{place} = {str(first['input'])[:80]}, which no campaign wrote ({first['msg']})"
    if first["type"] == "missing":
        problem = f"no {place}, which every campaign writes"
    return RunFailed(
        f"{path} has {problem}: the file was changed, or another version of retrain wrote it; put"
        " it back from a copy, or use that version."
    )


def campaign_runs(folder: Path) -> list[StoredRun]:
    """Return the runs of a campaign in the manifest's order, including runs that have not started.

    Raises ConfigurationError unless `folder` belongs to a campaign, RunFailed for a damaged
    manifest.
    """
    manifest = folder / MANIFEST
    if not is_campaign(folder):
        raise ConfigurationError(f"{no_campaign(folder)}; name a campaign's folder.")
    read_marker(folder)
    try:
        entries = _ENTRIES.validate_python(read_object(manifest)["runs"])
    except ValidationError as error:
        raise no_campaigns_value(manifest, error, "runs") from error
    return [StoredRun(folder / (one.dir or f"runs/{one.name}"), one) for one in entries]


def find_runs(folder: Path) -> list[StoredRun]:
    """Return every run in or below `folder`, ordered by path; a campaign's runs in its manifest's
    order.

    Raises ConfigurationError without a run, and RunFailed for a damaged manifest that may list
    them.
    """
    if not folder.is_dir():
        raise ConfigurationError(
            f"{folder} is not a folder; name the folder of a run or a campaign, or one above them."
        )
    if found := list(_walk(folder)):
        return found
    if damage := unreadable_manifest(folder):
        raise RunFailed(f"{folder} holds no run that is found without its manifest: {damage}")
    raise ConfigurationError(
        f"{folder} holds no run; name the folder of a run or a campaign, or one above them."
    )


def _walk(folder: Path) -> Iterator[StoredRun]:
    if is_run(folder):
        yield StoredRun(folder)
    elif is_campaign(folder):
        yield from (run for run in campaign_runs(folder) if is_run(run.path))
    else:
        for child in subfolders(folder):
            yield from _walk(child)


def subfolders(folder: Path) -> Iterator[Path]:
    """Yield the folders in `folder` that may hold runs, in order of their names, without links and
    hidden folders.
    """
    for child in sorted(folder.iterdir()):
        if child.is_dir() and not child.is_symlink() and not child.name.startswith("."):
            yield child


def read_metrics(path: Path, names: Iterable[str]) -> dict[str, Floats]:
    """Map numeric fields of metrics.jsonl to their values, [steps] each: NaN for a null, empty
    without a file. Raises RunFailed for a damaged line.
    """
    records = list(StepRecord.read(path))
    return {
        name: np.array([getattr(record, name) for record in records], dtype=np.float64)
        for name in names
    }


# -- as a frame ------------------------------------------------------------------------------------

_TYPES: dict[Any, str] = {
    int: "int64",
    int | None: "Int64",
    bool: "boolean",
    bool | None: "boolean",
    float | None: "float64",
}


def load_runs(folder: str | Path) -> "pd.DataFrame":
    """Return the metrics of every run in or below `folder`: one row per step, oldest first.

    Columns: `run` (path below `folder`), `condition`, `seed`, then the other fields of a
    StepRecord. A null in the file is missing in the frame, never 0. Times are in seconds, entropies
    and surprisals in nats. Raises ConfigurationError for a folder without runs, RunFailed for a
    damaged file.
    """
    import pandas as pd

    root = Path(folder)
    runs = find_runs(root)
    of_runs = [list(StepRecord.read(run.check().folder.metrics)) for run in runs]
    rows = [len(records) for records in of_runs]
    # The folder of a single run has no path below itself.
    names = [
        root.resolve().name
        if run.path == root
        else Path(os.path.relpath(run.path, root)).as_posix()
        for run in runs
    ]
    frame: dict[str, Any] = {
        "run": pd.Categorical(np.repeat(names, rows)),
        "condition": pd.Categorical(np.repeat([run.condition for run in runs], rows)),
        "seed": np.repeat([run.seed for run in runs], rows),
    }
    for field in fields(StepRecord):
        if field.name in frame or str(field.type).startswith(("dict", "list")):
            continue
        values = [getattr(record, field.name) for record in chain.from_iterable(of_runs)]
        try:
            frame[field.name] = pd.Series(values, dtype=_TYPES.get(field.type, "category"))
        except OverflowError as error:
            raise RunFailed(
                f"{root} has a {field.name} that no run records ({error}){CHANGED}"
            ) from error
    return pd.DataFrame(frame)
