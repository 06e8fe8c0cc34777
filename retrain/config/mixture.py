"""The tables of `[[data.mix]]`: what each may hold, and the keys in which a run on its source alone
differs from the file.
"""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from retrain.config.data_sections import Data
from retrain.config.keys import keys_by_path
from retrain.config.moving import Points, value_at, wrong_points
from retrain.config.names import bracketed, nearest, source_task
from retrain.config.section import Violation, Violations, repeated
from retrain.config.values import LABEL
from retrain.system import Json, listed, toml_value

if TYPE_CHECKING:
    from retrain.config.schema import Environment, TrainConfig

_OWN = ("name", "weight", "reward", "environment")
_OF_THE_RUN = ("mix", "sampler", "sampler_params", "chat_template_args")
"""Keys of [data] that hold for all sources."""
_KEYS = (*_OWN, *(name for name in Data.model_fields if name not in _OF_THE_RUN))
_ONE_SOURCE = ("data.source", "data.path", "data.params", "environment.provider")
"""Keys that name one source for the whole run."""


def task_of(table: Mapping[str, Any]) -> str:
    """Return the task of a table's problems: the table's name, or its source's task."""
    environment = table.get("environment", {})
    named = table.get("source") or environment.get("id") or environment.get("provider", "")
    return str(table.get("name") or source_task(str(named)))


def points_of(table: Mapping[str, Any]) -> Points:
    """Return a table's weight as points [step, weight]."""
    weight = table.get("weight", 1.0)
    if isinstance(weight, list):
        return weight
    return [[0, weight]]


def over_base(sets: Json) -> Json:
    """Return the keys of a condition. Its mixture takes the place of the base's source."""
    return (_no_source() if sets.get("data.mix") else {}) | sets


def _no_source() -> Json:
    return {path: keys_by_path()[path].default for path in _ONE_SOURCE}


def changes(table: Mapping[str, Any]) -> Json:
    """Return "section.key" -> value of a run on this source alone, over the file's own. A reward of
    another type has none of the file's weights and parameters.
    """
    reward = table.get("reward", {})
    if "type" in reward:
        reward = {"weights": [], "params": {}, "combine": "sum", **reward}
    sections = {"environment": table.get("environment", {}), "reward": reward}
    sections["data"] = {name: value for name, value in table.items() if name not in _OWN}
    own = {f"{section}.{name}": v for section in sections for name, v in sections[section].items()}
    return {"data.mix": [], **own}


def longest_environment(config: "TrainConfig") -> "Environment":
    """Return [environment], or the environment of a mixture's first source with several turns."""
    own = filter(None, (table.get("environment") for table in config.data.mix))
    several = (
        one for one in own if one["provider"] != "reasoning_gym" and one.get("max_turns") != 1
    )
    return config.environment.model_copy(update=next(several, {}))


def problems(config: "TrainConfig") -> Violations:
    """Yield what is wrong with the tables, apart from the values that they give to keys."""
    tables = config.data.mix
    for path, unset in _no_source().items() if tables else ():
        value = config.value(path)
        if value != unset:
            yield Violation(
                (path, "data.mix"),
                f"{bracketed(path)} = {toml_value(value)} does not go with [[data.mix]], whose"
                " tables name the sources of the run; write it into a table",
            )
    wrong = [(number, text) for number, table in enumerate(tables, 1) for text in _wrong(table)]
    for number, text in wrong:
        yield Violation(("data.mix",), f"[[data.mix]] number {number} {text}")
    if tables and not wrong:
        yield from _wrong_together(tables)


def _wrong(table: Json) -> Iterator[str]:
    """Yield the predicates of sentences about a table."""
    for name in table.keys() - _KEYS:
        near = nearest(name, _KEYS)
        advice = f"did you mean {near}?" if near else f"it takes {', '.join(_KEYS)}"
        if name in _OF_THE_RUN:
            advice = f"[data] {name} holds for all sources"
        yield f"has {name} = {toml_value(table[name])}, which is not a key of a source; {advice}"
    for name in ("reward", "environment"):
        if not isinstance(table.get(name, {}), dict):
            yield f"has {name} = {toml_value(table[name])}, and must have a table, {_A_TABLE[name]}"
            return
    environment, source = table.get("environment", {}), table.get("source", "")
    if bool(environment.get("provider")) == bool(source):
        yield (
            "names no source of problems"
            if not source
            else f'has source = "{source}" and an environment'
        ) + '; give it source, such as "math", or environment = { provider = ..., id = ... }'
    beside = [name for name in table if name not in ("name", "weight", "environment", "source")]
    if environment and beside:
        yield (
            f"has {listed(beside)} and an environment, which writes its prompts and has its own"
            " rubric; leave it out"
        )
    if "max_failure_rate" in table.get("reward", {}):
        yield "sets max_failure_rate, which [reward] sets for the whole run; leave it out"
    name = table.get("name", "")
    if not (isinstance(name, str) and (not name or LABEL.fullmatch(name))):
        yield (
            f"has name = {toml_value(name)}, and a name is at most 80 letters, digits and"
            " ._+=~-, a letter or digit first"
        )
    yield from _wrong_weight(table)


_A_TABLE = {
    "reward": 'such as { type = "math" }',
    "environment": 'such as { provider = "reasoning_gym", id = "chain_sum" }',
}


def _wrong_weight(table: Json) -> Iterator[str]:
    points = points_of(table)
    weight = table.get("weight")
    problem = wrong_points(points)
    if problem and points is not weight:
        problem = f"is {toml_value(weight)}, and must be a number or points [step, weight]"
    elif not problem and min(value for _, value in points) < 0:
        problem = f"is {toml_value(weight)}, and must be 0 or more"
    if problem:
        yield f"has a weight that {problem}"


def _wrong_together(tables: list[Json]) -> Violations:
    for name in repeated(map(task_of, tables)):
        yield Violation(
            ("data.mix",),
            f'[[data.mix]] has two sources called "{name}"; rename one',
        )
    schedules = [points_of(table) for table in tables]
    for step in sorted({int(step) for points in schedules for step, _ in points}):
        if not any(value_at(points, step) for points in schedules):
            yield Violation(
                ("data.mix",),
                f"[[data.mix]] has no weight above 0 at step {step}, so no source has a share of"
                " its prompts; raise a weight",
            )
            return
