"""Compare the folders of two runs: the keys, data and versions that they record, and the first step
and field in which their records differ.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from retrain.analysis.arms import differing_environment, differing_keys
from retrain.analysis.runs import NO_TRAINING, StoredRun, object_or_empty
from retrain.records.checkpoint import FINAL, MANIFEST, CheckpointStore, step_folder
from retrain.records.checkpoint_place import stored_checkpoints
from retrain.records.entries import EvaluationRecord, renamed
from retrain.records.jsonl import read_jsonl
from retrain.system import toml_value
from retrain.types import WHOLE_MODEL

METRICS = "metrics.jsonl"
ORDER = (
    "sft.jsonl",
    "evaluation.jsonl",
    "the adapter",
    METRICS,
    "generations.jsonl",
    "the stored tokens",
)
"""The parts of a step to compare, in order. Held-out answers and the adapter belong to the number
of completed steps, so they come before the step's record. The supervised stage is before step 0.
"""
RecordKey = tuple[int, str]
"""A step, and a name of `ORDER`."""
_SHOWN = 4


@dataclass(frozen=True)
class FirstDifference:
    """The first difference between the records of two runs."""

    step: int
    """Steps completed before it."""
    record: str
    """A name of `ORDER`."""
    fields: tuple[str, ...]
    """The differing columns of metrics.jsonl or problems of evaluation.jsonl. Empty for a step that
    one run does not have, and for any other record.
    """

    @property
    def is_end(self) -> bool:
        """True if one run ends where the other goes on."""
        return self.record == METRICS and not self.fields


@dataclass(frozen=True)
class FolderComparison:
    parting: FirstDifference | None
    """The first difference; None if the shared records are equal, apart from values that a clock or
    the machine measured.
    """
    recorded: Sequence[str]
    """Each difference of the keys, the data, the versions and the machine, in words."""
    alone: Sequence[Sequence[str]]
    """Records that only the first run has, and records that only the second run has, in words."""


def compared(one: StoredRun, other: StoredRun, steps: range) -> FolderComparison:
    """Compare the records of `steps`, and the evaluation and adapter after the last of them."""
    ours, theirs = _records(one, steps), _records(other, steps)
    places = sorted({*ours, *theirs}, key=lambda place: (place[0], ORDER.index(place[1])))
    found: FirstDifference | None = None
    alone: tuple[list[str], list[str]] = ([], [])
    for place in places:
        mine, others = ours.get(place), theirs.get(place)
        if place[1] != METRICS and (mine is None or others is None):
            alone[mine is None].append(f"{place[1]} at step {place[0]}")
        elif not _equal(mine, others):
            found = FirstDifference(*place, _differing_fields(mine, others))
            break
    last = found.step if found else steps.stop
    recorded = _recorded(one, other, range(steps.start, last + 1))
    return FolderComparison(found, [*recorded], alone)


def _records(run: StoredRun, steps: range) -> dict[RecordKey, Any]:
    """Return a run's records of the steps: a table of fields, or values to compare for equality."""
    found: dict[RecordKey, Any] = {}
    sft, evaluation, adapter, metrics, answers, tokens = ORDER
    files = run.folder
    if run.sft_records and not steps.start:
        found[0, sft] = [(one.loss, one.grad_norm, one.lr, one.tokens) for one in run.sft_records]
    for record in EvaluationRecord.read(files.evaluation):
        if steps.start <= record.step <= steps.stop:
            # Data may repeat an id.
            problems = found.setdefault((record.step, evaluation), {})
            problems.setdefault(record.example_id, []).append(record)
    for step, path in _adapters(run):
        if steps.start <= step <= steps.stop:
            found.setdefault((step, adapter), set()).add(_hash(path))
    for line in read_jsonl(files.metrics):
        if line["step"] in steps:
            found[line["step"], metrics] = {
                name: value for name, value in renamed(line).items() if name not in NO_TRAINING
            }
    for line in read_jsonl(files.generations):
        if line["step"] in steps:
            found.setdefault((line["step"], answers), []).append(line)
    for step in steps:
        if files.step_tokens(step).is_file():
            found[step, tokens] = _hash(files.step_tokens(step))
    return found


def _adapters(run: StoredRun) -> Iterator[tuple[int, Path]]:
    """Yield the steps behind each stored adapter, and its file. The last adapter comes twice."""
    store = CheckpointStore(stored_checkpoints(run.folder))
    kept = [(step, store.folder / step_folder(step)) for step in store.steps()]
    last = store.folder / FINAL
    end = object_or_empty(last / MANIFEST).get("step")
    if isinstance(end, int):
        kept.append((end, last))
    for step, folder in kept:
        paths = (folder / name for name in ("adapter_model.safetensors", WHOLE_MODEL))
        yield from ((step, path) for path in paths if path.is_file())


def _hash(path: Path) -> bytes:
    return sha256(path.read_bytes()).digest()


def _equal(mine: Any, others: Any) -> bool:
    # Every copy of the adapter after a step is to be the same.
    return len(mine | others) == 1 if isinstance(mine, set) else bool(mine == others)


def _differing_fields(mine: Any, others: Any) -> tuple[str, ...]:
    if not (isinstance(mine, dict) and isinstance(others, dict)):
        return ()
    names = dict.fromkeys((*mine, *others))
    return tuple(name for name in names if mine.get(name) != others.get(name))


def _recorded(one: StoredRun, other: StoredRun, steps: range) -> Iterator[str]:
    keys = ["training.seed"] * (one.seed != other.seed) + differing_keys([(one, other)])
    if keys:
        shown = [f"{key} ({_value(one, key)}, {_value(other, key)})" for key in keys[:_SHOWN]]
        more = f" and {len(keys) - _SHOWN} more" if len(keys) > _SHOWN else ""
        yield f"keys of the configuration: {', '.join(shown)}{more}"
    yield from differing_environment(one, other, steps)
    for run in (one, other):
        for began, session in run.resumes:
            changed = session.get("changed")
            # config.toml has the keys of the last session.
            if isinstance(changed, list) and changed and steps.stop <= began:
                yield (
                    f"keys that {run.path} had otherwise before it was resumed at step {began}:"
                    f" {', '.join(map(str, changed[:_SHOWN]))}"
                )


def _value(run: StoredRun, key: str) -> str:
    value = run.config.value(key)
    return "unset" if value is None else toml_value(value)
