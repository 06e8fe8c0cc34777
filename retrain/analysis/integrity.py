"""Check a run against its campaign's plan and against its own files, before it counts for a
condition and a seed.

The manifest says which run a folder should hold. Its config.toml, its summary and its trainer state
say which run it does hold. Anybody can write all of them alike, so this finds accidents and
half-done edits, not forgery.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from retrain.analysis.runs import (
    MANIFEST,
    Pair,
    StoredRun,
    campaign_runs,
    is_campaign,
    is_run,
    seeds_words,
)
from retrain.config.keys import keys_by_path
from retrain.config.mixture import over_base
from retrain.config.names import ALIASES, RENAMED_VALUES, by_path
from retrain.config.schema import DEFAULT_CONDITIONS, Condition
from retrain.config.sections import crossed, told_apart
from retrain.errors import RunFailed
from retrain.records.redact import MASK
from retrain.system import Json, grouped, read_object

_MODES = ("advantage_mode", "transform_mode", "algorithm_mode")


def given_keys(campaign: Path) -> Mapping[str, Any]:
    """Return the sections of a campaign's configuration with the keys that the user gave, from its
    manifest. Raises RunFailed for a [campaign] section that no campaign wrote.
    """
    path = campaign / MANIFEST
    config = read_object(path).get("config")
    if not isinstance(config, dict):
        return {}
    try:
        _Section.model_validate(config.get("campaign", {}))
    except ValidationError as error:
        raise RunFailed(
            f"{path} holds a [campaign] section that cannot be read: the file was changed."
        ) from error
    return config


class _Section(BaseModel):
    """The conditions and the grid of a [campaign] section."""

    conditions: list[Json] | None = None
    grid: dict[str, list[Any]] | None = None


def problem_of(run: StoredRun, given: Mapping[str, Any]) -> str:
    """Return a predicate: how a run's stored configuration differs from its entry in the manifest
    and from the campaign's keys. Return "" without a difference, and for a run that has not begun.
    """
    planned = run.planned
    if planned is None or not is_run(run.path):
        return ""
    config = run.config
    if planned.status == "failed" and run.is_whole:
        return f"failed, says {MANIFEST}, and is done, says its own {run.folder.summary.name}"
    for what, own, wanted in (
        ("seed ", config.training.seed, planned.seed),
        ("", config.condition_label, planned.condition),
    ):
        if own != wanted:
            return f"holds a run of {what}{own}, and {what}{wanted} is planned"
    for path, value in planned_values(given, planned.condition).items():
        # Compare the value as JSON holds it.
        own = config.value(path)
        stored = json.loads(json.dumps(own, default=lambda item: item.model_dump()))
        # A masked value may stand for any other, so it contradicts nothing.
        if stored != value and MASK not in f"{stored}{value}":
            return (
                f"was trained with {path} = {json.dumps(stored)}, and {json.dumps(value)} is"
                " planned"
            )
    return ""


def problems_of(campaign: Path, runs: Iterable[StoredRun]) -> dict[Path, str]:
    """Map the folder of each run of a campaign with a problem to its `problem_of`."""
    given = given_keys(campaign)
    return {run.path: problem for run in runs if (problem := problem_of(run, given))}


def planned_values(given: Mapping[str, Any], condition: str) -> Json:
    """Map each key that a campaign's configuration gives to a condition, and that no resume may
    change, to its value.

    The result leaves out defaults, since another version of retrain may have others.
    """
    tables = {name: table for name, table in given.items() if isinstance(table, dict)}
    values = by_path(tables)
    own = _condition(tables, condition) if "campaign" in tables else {}
    # A condition's modes replace the file's as a whole: algorithm_mode goes with neither of the
    # others.
    for mode in _MODES if own else ():
        values.pop(f"algorithm.{mode}", None)
    values |= own
    return {
        path: RENAMED_VALUES.get((path, str(value)), value)
        for given_path, value in values.items()
        if _is_fixed(path := ALIASES.get(given_path, given_path))
    }


def _is_fixed(path: str) -> bool:
    key = keys_by_path().get(path)
    return key is not None and not (
        key.traits.may_change_at_resume or key.traits.own_to_a_run or key.traits.whole_campaign
    )


def _condition(tables: Mapping[str, Any], label: str) -> Json:
    """Return the keys of the campaign's condition of this label."""
    campaign = tables["campaign"]
    try:
        given = [
            Condition(
                **{name: table[name] for name in (*_MODES, "label") if table.get(name)},
                sets={path: value for path, value in table.items() if "." in path},
            )
            for table in campaign.get("conditions") or []
        ]
    except ValidationError as error:
        raise RunFailed(
            f"{MANIFEST} plans a condition that cannot be read ({error.errors()[0]['msg']}): the"
            " file was changed, or another version of retrain wrote it."
        ) from error
    # A grid without conditions varies the file's only algorithm.
    if grid := campaign.get("grid"):
        keys = keys_by_path()
        algorithm = tables.get("algorithm", {})
        modes = {name: algorithm.get(name, keys[f"algorithm.{name}"].default) for name in _MODES}
        given = crossed(given or [Condition(**modes)], grid)
    # Labels of 0.9 have fewer keys behind them than labels have today.
    found = [
        condition
        for condition in told_apart(given) or DEFAULT_CONDITIONS
        if {*label.split("~")} <= {*condition.label.split("~")}
    ]
    if not found:
        return {}
    condition = min(found, key=lambda one: len(one.label))
    modes = {f"algorithm.{name}": mode for name in _MODES if (mode := getattr(condition, name))}
    return modes | over_base(condition.sets)


# -- runs that repeat others, and runs that are not listed -----------------------------------------


def repeated_numbers(runs: Iterable[StoredRun]) -> Iterator[list[StoredRun]]:
    """Yield groups of finished runs of different seeds with equal numbers, which two seeds do not
    give.
    """
    ended = grouped((run.ending, run) for run in runs)
    # The hash of all numbers reads whole files, so only equal endings ask for it.
    alike = chain.from_iterable(same for end, same in ended.items() if end and len(same) > 1)
    groups = grouped((run.numbers, run) for run in alike)
    return (same for same in groups.values() if len({run.seed for run in same}) > 1)


def are_the_same(pairs: Sequence[Pair]) -> int:
    """Return the number of pairs that hold one run twice: equal numbers in every step and every
    evaluation, apart from times.
    """
    return sum(
        bool(one.ending) and one.ending == other.ending and one.numbers == other.numbers
        for one, other in pairs
    )


def not_listed(campaign: Path, runs: Iterable[StoredRun]) -> list[str]:
    """Return the names of the runs in the campaign's folder that its manifest does not list."""
    listed = {run.path.resolve() for run in runs}
    folders = sorted((campaign / "runs").glob("*"))
    return [folder.name for folder in folders if is_run(folder) and folder.resolve() not in listed]


# -- runs that are given by folder -----------------------------------------------------------------


def campaigns_of(runs: Iterable[StoredRun]) -> dict[Path, list[StoredRun]]:
    """Map each campaign in whose `runs` folder these runs lie to its listed runs."""
    above = dict.fromkeys(run.path.resolve().parent.parent for run in runs)
    return {folder: campaign_runs(folder) for folder in above if is_campaign(folder)}


def as_planned(
    runs: Iterable[StoredRun], campaigns: Mapping[Path, Sequence[StoredRun]]
) -> tuple[list[StoredRun], dict[Path, str]]:
    """Return the runs with their campaign's entry, and why some of them do not count (folder ->
    predicate).
    """
    entries = {run.path.resolve(): run.planned for run in chain.from_iterable(campaigns.values())}
    known = [replace(run, planned=entries.get(run.path.resolve(), run.planned)) for run in runs]
    problems: dict[Path, str] = {}
    for folder in campaigns:
        own = [run for run in known if run.path.resolve().parent.parent == folder]
        problems |= problems_of(folder, own)
    return known, problems


def absent_line(runs: Sequence[StoredRun], campaigns: Mapping[Path, Sequence[StoredRun]]) -> str:
    """Return a sentence that names the campaigns of runs from the command line, and their absent
    seeds; "" for runs of no campaign.
    """
    sentences = []
    for folder, listed in campaigns.items():
        given = {run.path.resolve() for run in runs}
        shown = {run.condition for run in listed if run.path.resolve() in given}
        absent = grouped(
            (run.condition, run.seed)
            for run in listed
            if run.condition in shown and run.path.resolve() not in given and not run.skipped
        )
        sentences.append(
            f"Exploratory: these runs belong to the campaign {folder.name}, which `retrain compare`"
            " takes as a whole."
        )
        if absent:
            sentences.append(
                f"Absent here: {absent_words(absent)}; a choice of seeds makes p too small."
            )
    return " ".join(sentences)


def absent_words(absent: Mapping[str, Sequence[int]]) -> str:
    """List absent seeds by condition, such as "seeds 3, 7 of maxrl+none; seed 2 of grpo+none"."""
    return "; ".join(f"{seeds_words(seeds)} of {condition}" for condition, seeds in absent.items())
