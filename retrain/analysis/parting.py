"""Where two runs part: the first step, prompt, completion and token in which their records differ,
and what could have caused it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from retrain.analysis.arms import differing_environment, differing_keys
from retrain.analysis.runs import StoredRun
from retrain.records.checkpoint import FINAL, MANIFEST, CheckpointStore, step_folder
from retrain.records.checkpoint_place import stored_checkpoints
from retrain.records.entries import MEASURED, EvaluationRecord
from retrain.records.jsonl import read_jsonl
from retrain.records.terminal import counted
from retrain.system import Json, read_object, toml_value

if TYPE_CHECKING:
    from retrain.records.token_table import TokenTable

Stage = Literal[
    "prompts", "tokens", "log-probs", "rewards", "credit", "learning", "held-out", "end"
]
ROUNDING = 1e-3
"""Drift of a log-prob, in nats, up to which rounding alone explains a difference. It is far above
the rounding of 32-bit floats in one step, and half precision stays below it on most tokens."""
_SHOWN = 4
_ADAPTER = "adapter_model.safetensors"


@dataclass(frozen=True)
class TokenPlace:
    """The first token of a step that differs, in the order of prompts, samples and positions."""

    slot: int
    """The prompt's place in the step."""
    sample: int
    position: int
    ids: tuple[int | None, int | None]
    """The token in each run; None where a completion has ended, or the run has not drawn it."""
    drift: float
    """Largest |difference| of log-probs among the tokens before it, in nats."""


@dataclass(frozen=True)
class Parting:
    """The first difference between two runs."""

    step: int
    """Steps completed before it."""
    stage: Stage
    fields: tuple[str, ...]
    """The differing columns of metrics.jsonl, or the differing problem of an evaluation."""
    token: TokenPlace | None = None
    drift: float | None = None
    """Largest |difference| of the log-probs of equal tokens, in nats; None if none are stored."""


def parting(one: StoredRun, other: StoredRun, steps: range) -> Parting | None:
    """Return the first difference in `steps`, or in an evaluation after the last of them; None if
    all records are equal apart from measured times. A step's held-out answers are compared before
    its record, since they are made first.
    """
    ours, theirs = _rows(one, steps), _rows(other, steps)
    answers, others = _evaluations(one), _evaluations(other)
    for step in range(steps.start, steps.stop + 1):
        held_out = _different(answers.get(step), others.get(step))
        if held_out and step in answers and step in others:
            return Parting(step, "held-out", held_out)
        found = _different(ours.get(step), theirs.get(step))
        if found and not (step in ours and step in theirs):
            return Parting(step, "end", found)
        if found:
            return _in_step(one, other, step, found)
    return None


def _rows(run: StoredRun, steps: range) -> dict[int, Json]:
    """Map each step to its line of metrics.jsonl, without the fields that depend on the clock or
    the machine.
    """
    lines = read_jsonl(run.folder.metrics) if run.folder.metrics.is_file() else ()
    return {
        int(line["step"]): {name: value for name, value in line.items() if name not in MEASURED}
        for line in lines
        if line["step"] in steps
    }


def _evaluations(run: StoredRun) -> dict[int, dict[str, list[EvaluationRecord]]]:
    """Steps completed -> id -> the records of its problems, several where data repeats the id."""
    found: dict[int, dict[str, list[EvaluationRecord]]] = {}
    if run.folder.evaluation.is_file():
        for record in EvaluationRecord.read(run.folder.evaluation):
            found.setdefault(record.step, {}).setdefault(record.example_id, []).append(record)
    return found


def evaluated_alone(one: StoredRun, other: StoredRun, steps: range) -> list[int]:
    """The steps, up to the end of `steps`, after which `one` alone was evaluated."""
    alone = _evaluations(one).keys() - _evaluations(other).keys()
    return sorted(step for step in alone if steps.start <= step <= steps.stop)


def _different(one: Mapping[str, Any] | None, other: Mapping[str, Any] | None) -> tuple[str, ...]:
    if one is None or other is None:
        if one is other:
            return ()
        return ("step",)
    names = dict.fromkeys((*one, *other))
    return tuple(name for name in names if one.get(name) != other.get(name))


def _in_step(one: StoredRun, other: StoredRun, step: int, fields: tuple[str, ...]) -> Parting:
    """Look into the stored tokens of a step, where both runs have them."""
    paths = [run.folder.step_tokens(step) for run in (one, other)]
    if not all(path.is_file() for path in paths):
        return Parting(step, _stage_of(fields), fields)
    from retrain.records.token_table import read_tokens

    ours, theirs = (read_tokens(path) for path in paths)
    if not _equal(ours, theirs, "prompt_offsets", "prompt_token_ids"):
        return Parting(step, "prompts", fields)
    token, drift = _first_token(ours, theirs)
    if token:
        return Parting(step, "tokens", fields, token, drift)
    # Before the log-probs, since no drift of theirs explains why equal tokens are judged otherwise.
    if not _equal(ours, theirs, "rewards"):
        return Parting(step, "rewards", fields, drift=drift)
    if drift:
        return Parting(step, "log-probs", fields, drift=drift)
    stages = {*ours.advantages, *theirs.advantages}
    same_credit = all(
        stage in ours.advantages
        and stage in theirs.advantages
        and _same(ours.advantages[stage], theirs.advantages[stage])
        for stage in stages
    )
    return Parting(step, "learning" if same_credit else "credit", fields, drift=drift)


_SAMPLED = ("completion_tokens_mean", "num_datums", "max_token_hit_rate")


def _stage_of(fields: Sequence[str]) -> Stage:
    """Return the stage that a record's differing columns name. Sampled tokens come first, since all
    later columns follow from them.
    """
    if any(
        name in _SAMPLED or name.endswith(("entropy_mean", "surprisal_mean")) for name in fields
    ):
        return "tokens"
    if any("reward" in name or "correct" in name for name in fields):
        return "rewards"
    if "max_abs_advantage" in fields:
        return "credit"
    return "learning"


def _equal(ours: "TokenTable", theirs: "TokenTable", *names: str) -> bool:
    return all(_same(getattr(ours, name), getattr(theirs, name)) for name in names)


def _same(one: Any, other: Any) -> bool:
    if one is None or other is None:
        return one is other
    return bool(one.shape == other.shape and one.tobytes() == other.tobytes())


def _first_token(
    ours: "TokenTable", theirs: "TokenTable"
) -> tuple[TokenPlace | None, float | None]:
    """The first differing token, and the largest |difference| of log-probs up to it and up to the
    first of each later completion; None if no completion has an equal token.
    """
    place, drift, shared = None, 0.0, False
    one, other = _completions(ours), _completions(theirs)
    for slot, sample in sorted({*one, *other}):
        ids, logprobs = one.get((slot, sample), _ABSENT)
        other_ids, other_logprobs = other.get((slot, sample), _ABSENT)
        length = min(len(ids), len(other_ids))
        unequal = (ids[:length] != other_ids[:length]).nonzero()[0]
        if len(unequal):
            position = int(unequal[0])
        else:
            position = length
        before = abs(logprobs[:position] - other_logprobs[:position])
        drift, shared = max(drift, float(before.max(initial=0.0))), shared or position > 0
        if place is None and position < max(len(ids), len(other_ids)):
            tokens = _token_at(ids, position), _token_at(other_ids, position)
            place = TokenPlace(slot, sample, position, tokens, drift)
    if not shared:
        return place, None
    return place, drift


_ABSENT = (np.empty(0, np.int32), np.empty(0, np.float32))
"""The ids and log-probs of a completion that only the other run has, where its groups are
larger."""


def _completions(
    table: "TokenTable",
) -> dict[tuple[int, int], tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]]:
    """Slot and sample -> token ids and log-probs."""
    return {
        (int(slot), int(sample)): (table.token_ids[start:end], table.logprobs[start:end])
        for slot, sample, start, end in zip(
            table.slot, table.sample, table.offsets, table.offsets[1:], strict=False
        )
    }


def ids_until(run: StoredRun, step: int, place: TokenPlace) -> npt.NDArray[np.int32] | None:
    """Return the tokens of the prompt and of the completion, the one at the place being the last.
    None for a step with trajectories of several turns, or whose prompts were not stored.
    """
    from retrain.records.token_table import read_tokens

    table = read_tokens(run.folder.step_tokens(step))
    prompts, starts = table.prompt_token_ids, table.prompt_offsets
    if table.turns is not None or prompts is None or starts is None:
        return None
    number = int(np.searchsorted(np.unique(table.slot), place.slot))
    prompt = prompts[starts[number] : starts[number + 1]]
    ids, _ = _completions(table)[place.slot, place.sample]
    return np.append(prompt, ids[: place.position + 1]).astype(np.int32)


def _token_at(ids: npt.NDArray[np.int32], position: int) -> int | None:
    return int(ids[position]) if position < len(ids) else None


# -- causes ----------------------------------------------------------------------------------------


def causes(
    one: StoredRun, other: StoredRun, found: Parting | None, start: int = 0
) -> Iterator[str]:
    """Return the possible causes of a difference as clauses, the strongest first. They are the
    recorded differences between the runs, or without any the causes typical of the stage. The steps
    from `start` were compared.
    """
    stop = found.step if found else max(one.steps, other.steps)
    recorded = [*_recorded(one, other, range(start, stop + 1))]
    if found:
        recorded += [*_changed_later(one, found.step), *_changed_later(other, found.step)]
    yield from recorded
    if found is None or recorded:
        return
    if found.stage == "rewards":
        yield "a reward verdict: equal completions were judged otherwise"
    elif found.stage == "prompts":
        yield "the choice of prompts, which nothing recorded explains"
    elif found.stage == "end":
        yield "a run that was ended earlier, which nothing recorded explains"
    elif found.drift is not None and found.drift > ROUNDING:
        yield (
            f"other weights: log-probs of equal tokens differ by up to {found.drift:.2g} nats"
            " (the model's or the first adapter's files)"
        )
    elif found.drift is not None:
        equal = f"log-probs of equal tokens differ by up to {found.drift:.2g} nats"
        if not found.drift:
            equal = "tokens with equal log-probs come before the difference"
        yield f"rounding, or the last bits of a weight: {equal}"
    elif found.token:
        yield "other weights, or another draw: the first token of every completion is another"
    else:
        yield "nothing that was recorded: store tokens of the step with [logging] tokens_every"


def _recorded(one: StoredRun, other: StoredRun, steps: range) -> Iterator[str]:
    pair = [(one, other)]
    keys = []
    if one.seed != other.seed:
        keys = ["training.seed"]
    keys += differing_keys(pair)
    if keys:
        shown = [f"{key} ({_value(one, key)}, {_value(other, key)})" for key in keys[:_SHOWN]]
        more = ""
        if len(keys) > _SHOWN:
            more = f" and {len(keys) - _SHOWN} more"
        yield f"keys of the configuration: {', '.join(shown)}{more}"
    yield from differing_environment(one, other, steps)


def _changed_later(run: StoredRun, step: int) -> Iterator[str]:
    """A clause for each resume after `step` that changed keys: config.toml is of the last one."""
    for began, session in run.resumes:
        changed = session.get("changed")
        if isinstance(changed, list) and changed and step < began:
            yield (
                f"keys that {run.path} had otherwise before it was resumed at step {began}:"
                f" {', '.join(map(str, changed[:_SHOWN]))}"
            )


def _value(run: StoredRun, key: str) -> str:
    value = run.config.value(key)
    if value is None:
        return "unset"
    return toml_value(value)


def files_differ(one: StoredRun, other: StoredRun, steps: range) -> str:
    """Return the first file of `one` that holds other answers or tokens of `steps`, or another last
    adapter, than the file of `other`; "" if all are equal. Files that `one` does not have are
    skipped.
    """
    if one.folder.generations.is_file():
        ours, theirs = _answers(one, steps), _answers(other, steps)
        for step in steps:
            if ours.get(step) != theirs.get(step):
                return f"{one.folder.generations}, at step {step},"
    for step in steps:
        path, again = (run.folder.step_tokens(step) for run in (one, other))
        if path.is_file() and not (again.is_file() and path.read_bytes() == again.read_bytes()):
            return str(path)
    last = stored_checkpoints(one.folder) / FINAL
    if (last / MANIFEST).is_file() and (last / _ADAPTER).is_file():
        end = read_object(last / MANIFEST).get("step", -1)
        # A replay keeps its adapters by step, so the last one of `one` is looked up by its step.
        same = [path for step, path in _adapters(other).items() if step == end]
        if same and same[0].read_bytes() != (last / _ADAPTER).read_bytes():
            return str(last / _ADAPTER)
    return ""


def absent(one: StoredRun, other: StoredRun, steps: range) -> list[str]:
    """Return what could not be compared, in words: what `other`, a replay of `steps` of `one`, has
    and `one` lacks, and the evaluations of `one` that the replay could not make.
    """
    ours, theirs = _answers(one, steps), _answers(other, steps)
    found = [f"the answers of step {step}" for step in theirs if step not in ours]
    found += [f"the evaluation at step {step}" for step in evaluated_alone(other, one, steps)]
    found += [
        f"the evaluation at step {step} again (config.toml asks for none)"
        for step in evaluated_alone(one, other, steps)
    ]
    found += [
        f"the tokens of step {step}"
        for step in steps
        if other.folder.step_tokens(step).is_file() and not one.folder.step_tokens(step).is_file()
    ]
    kept = _adapters(one)
    found += [
        f"the adapter after {counted(step, 'step')}"
        for step in _adapters(other)
        if step not in kept
    ]
    return found


def _adapters(run: StoredRun) -> dict[int, Path]:
    """Step -> the adapter of its checkpoint, oldest first."""
    store = CheckpointStore(stored_checkpoints(run.folder))
    files = {step: store.folder / step_folder(step) / _ADAPTER for step in store.steps()}
    return {step: path for step, path in files.items() if path.is_file()}


def _answers(run: StoredRun, steps: range) -> dict[int, list[Json]]:
    """Step -> its lines of generations.jsonl."""
    found: dict[int, list[Json]] = {}
    if run.folder.generations.is_file():
        for line in read_jsonl(run.folder.generations):
            if line["step"] in steps:
                found.setdefault(line["step"], []).append(line)
    return found


def adapters_differ(one: StoredRun, other: StoredRun) -> int | None:
    """The first step whose checkpoints exist in both runs and hold other bytes; None if all are
    equal.
    """
    ours, theirs = _adapters(one), _adapters(other)
    for step in ours:
        if step in theirs and ours[step].read_bytes() != theirs[step].read_bytes():
            return step
    return None
