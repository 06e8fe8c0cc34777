"""Values that move with the step: `[schedule] "loss.kl_coef" = [[0, 0.01], [200, 0.0]]` is linear
between its points, and constant before the first and after the last.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, pairwise
from math import isfinite
from typing import TYPE_CHECKING, Any

from retrain.config.keys import all_keys, keys_by_path
from retrain.config.names import nearest
from retrain.system import toml_value

if TYPE_CHECKING:
    from retrain.config.schema import TrainConfig

_LEARNERS = ("loss", "training")
"""Sections whose keys the learner reads."""
TABLES = ("algorithm.params", "algorithm.advantage_params", "algorithm.transform_params",
          "algorithm.uncertainty_params", "loss.params")  # fmt: skip
"""Tables whose numbers a schedule can move, as "section.table.name"."""


Points = Sequence[Sequence[float]]
"""[[step, value], ...] with rising steps."""


def movable() -> list[str]:
    """Return the keys that retrain reads again in each step."""
    return [key.path for key in all_keys() if key.traits.movable]


def value_at(points: Points, step: int) -> float:
    """Interpolate between the points [[step, value], ...]."""
    first, last = points[0], points[-1]
    if step <= first[0]:
        return first[1]
    for (start, before), (stop, after) in pairwise(points):
        if step < stop:
            return before + (after - before) * (step - start) / (stop - start)
    return last[1]


def scheduled(config: "TrainConfig", step: int) -> dict[str, float]:
    """Return the values of the scheduled keys at a step; a whole number in a table of parameters
    stays one.
    """
    values = {path: value_at(points, step) for path, points in config.schedule.points.items()}
    for path in values.keys() - keys_by_path():
        if isinstance(given(config, path), int):
            values[path] = round(values[path])
    return values


def with_values(config: "TrainConfig", values: Mapping[str, float]) -> "TrainConfig":
    """Return the configuration with these values, not validated again."""
    for path, value in values.items():
        section, name, *param = path.split(".", 2)
        given: Any = value
        if param:
            given = {**getattr(getattr(config, section), name), param[0]: value}
        changed = getattr(config, section).model_copy(update={name: given})
        config = config.model_copy(update={section: changed})
    return config


def problems(config: "TrainConfig") -> Iterator[str]:
    """Yield one sentence for each impossible schedule."""
    for path, points in config.schedule.points.items():
        problem = wrong_key(config, path) or wrong_points(points)
        if problem:
            yield f'[schedule] "{path}" {problem}.'


def wrong_key(config: "TrainConfig", path: str) -> str:
    """Return why a schedule cannot move a key, as the end of a sentence; "" if it can."""
    table, _, name = path.rpartition(".")
    if table in TABLES:
        value = config.value(table).get(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            section, _, key = table.partition(".")
            return (
                f"moves a number of [{section}.{key}], which holds none of that name; write it"
                " there"
            )
        return ""
    allowed = movable()
    if path not in allowed:
        close = nearest(path, allowed)
        hint = f'; did you mean "{close}"?' if close else ""
        return (
            f"is not a key that a schedule can move. It can move {', '.join(allowed)}, and the"
            f" numbers of {', '.join(TABLES)}{hint}"
        )
    training = config.training
    if path == "training.lr" and (training.lr_schedule != "constant" or training.lr_warmup_steps):
        return (
            "has a schedule already, [training] lr_schedule and lr_warmup_steps; leave those out,"
            " or this"
        )
    return ""


def wrong_points(points: Any) -> str:
    """Say what is wrong with a schedule, as the end of a sentence; "" for a right one."""
    if not isinstance(points, list):
        return (
            f"is {toml_value(points)}, and must be a list of points [step, value], such as [[0,"
            " 0.01], [200, 0.0]]. A value that does not move belongs into the key's section"
        )
    for point in points:
        if not (isinstance(point, list) and len(point) == 2 and all(map(_is_number, point))):
            return f"has the point {point}, and a point is [step, value]"
        if not isinstance(point[0], int) or point[0] < 0:
            return f"has a point at step {point[0]}, and a step is a whole number from 0 on"
    if not points or any(second[0] <= first[0] for first, second in pairwise(points)):
        return "needs points [step, value] with rising steps, such as [[0, 0.01], [200, 0.0]]"
    return ""


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)


def given(config: "TrainConfig", path: str) -> Any:
    """Return the value of a key or of a number in a table; None if there is none."""
    section, name, *param = path.split(".", 2)
    value = getattr(getattr(config, section), name)
    if param:
        return value.get(param[0])
    return value


def extremes(config: "TrainConfig") -> Iterator[tuple[int, dict[str, float]]]:
    """Yield (step, all values there) at every point of a schedule, then one step inside each
    interval's ends. A property that holds at all these steps holds between them. This includes keys
    that are off at 0 and otherwise have a minimum.
    """
    schedules = config.schedule.points.values()
    named = {step for points in schedules for step, _ in points}
    pairs = chain.from_iterable(pairwise(points) for points in schedules)
    beside = {step for (start, _), (stop, _) in pairs for step in (start + 1, stop - 1)}
    for step in (*sorted(named), *sorted(beside - named)):
        yield step, scheduled(config, step)


def moves_learner(config: "TrainConfig") -> bool:
    """Return True if a schedule moves a key that the learner reads."""
    return any(path.partition(".")[0] in _LEARNERS for path in config.schedule.points)


def words(config: "TrainConfig") -> Iterator[str]:
    """Yield a schedule in words, one key each: "loss.kl_coef 0.01 at step 0, 0 at step 200"."""
    for path, points in config.schedule.points.items():
        yield f"{path} {', '.join(f'{value:g} at step {step}' for step, value in points)}"
