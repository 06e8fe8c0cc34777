"""Keys that move while a run goes on: by `[schedule]`, and by a control, which reads the records of
earlier steps.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import fields
from math import isfinite
from typing import Any, ClassVar

from retrain.backends.declared import declared_backend, declared_engine
from retrain.config import TrainConfig, moving, replaced
from retrain.errors import ConfigurationError, RunFailed
from retrain.plugins import built, load_plugin, params_of, state_of, user_code, with_defaults
from retrain.records.entries import StepRecord

__all__ = ["Control"]  # for plugins; the rest is the run's


class Control(ABC):
    """Sets keys anew in each step. It is made as `Control(params)` of the table `[schedule]
    control_params`. `values` must be a function of the step and of what was observed; only
    `observe` and `load` may change the control.
    """

    keys: tuple[str, ...] = ()
    """The keys that it sets, as "section.key"; those that `[schedule]` may move."""

    def __init__(self, params: Mapping[str, Any]) -> None:
        """`params` is the table `[schedule] control_params`. Raise ValueError for one that is
        wrong.
        """
        self.params = dict(params)

    @abstractmethod
    def values(self, step: int) -> Mapping[str, float]:
        """Return the value of each of `keys` for a step. In split mode the newest step that was
        observed is step - 2, else step - 1.
        """

    def observe(self, record: Mapping[str, Any]) -> None:  # noqa: B027
        """Learn from a step: its line of metrics.jsonl."""

    def state(self) -> dict[str, Any]:
        """Return all that `observe` changed, as JSON can hold it."""
        return {}

    def load(self, state: dict[str, Any]) -> None:  # noqa: B027
        """Take over what `state` returned."""


class AdaptiveEntropy(Control):
    """The entropy bonus rises by `delta` after a step whose mean entropy lies below `target` nats,
    and falls by it otherwise, never below 0: Skywork-OR1 (arXiv 2505.22312).
    """

    keys = ("loss.entropy_coef",)
    defaults: ClassVar[Mapping[str, float]] = {"target": 0.2, "delta": 0.005, "start": 0.0}

    def __init__(self, params: Mapping[str, Any]) -> None:
        super().__init__(with_defaults(params, self.defaults))
        for name, value in self.params.items():
            if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
                raise ValueError(f"{name} = {value} is not a number of at least 0")
        self.coef = float(self.params["start"])

    def values(self, step: int) -> dict[str, float]:  # noqa: ARG002
        return {"loss.entropy_coef": self.coef}

    def observe(self, record: Mapping[str, Any]) -> None:
        entropy = record["exec_entropy_mean"]
        if entropy is not None:
            delta = self.params["delta"]
            if entropy >= self.params["target"]:
                delta = -delta
            self.coef = max(0.0, self.coef + delta)

    def state(self) -> dict[str, Any]:
        return {"coef": self.coef}

    def load(self, state: dict[str, Any]) -> None:
        self.coef = state["coef"]


CONTROLS: dict[str, type[Control]] = {"adaptive_entropy": AdaptiveEntropy}
"""`[schedule] control`."""


class MovingKeys:
    """The scheduled keys of a run, step by step."""

    def __init__(self, config: TrainConfig) -> None:
        """Raises ConfigurationError for a control that cannot be loaded or fails a trial."""
        self.config = config
        self.control = build_control(config)
        self._where = f'[schedule] control "{config.schedule.control}"'

    @property
    def moves(self) -> bool:
        return self.control is not None or bool(self.config.schedule.points)

    def values(self, step: int) -> dict[str, float]:
        """Ask the schedule and the control for a step. Raises RunFailed for values that a
        configuration cannot hold.
        """
        values = moving.scheduled(self.config, step)
        if self.control is None:
            return values
        where = f"{self._where} at step {step}"
        with user_code(where, RunFailed):
            given = self.control.values(step)
        problem = wrong_values(self.config, self.control.keys, given)
        if problem:
            raise RunFailed(f"{where} {problem}.")
        return {**values, **given}

    def observe(self, record: StepRecord) -> None:
        """Show the control a step's record."""
        if self.control is not None:
            with user_code(f"{self._where} after step {record.step}", RunFailed):
                self.control.observe(record.to_json())

    def state_dict(self) -> dict[str, Any]:
        """Return what the control keeps, through JSON; {} without one."""
        if self.control is None:
            return {}
        return state_of(self._where, self.control.state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.control is not None:
            with user_code(f"{self._where}: load()", RunFailed):
                self.control.load(state)


def build_control(config: TrainConfig) -> Control | None:
    """Return the configured control, tried on made-up records; None if there is none. Raises
    ConfigurationError.
    """
    name = config.schedule.control
    if not name:
        return None
    where = f'[schedule] control = "{name}"'
    plugin = load_plugin("control", name, config, CONTROLS)

    def make() -> Control:
        made: Control = built("control", where, lambda: plugin(params_of("control", config)))
        return made

    control = make()
    problem = _wrong_keys(config, control)
    if not problem:
        with user_code(f"{where}: its trial", ConfigurationError):
            problem = _trial_problem(config, make)
    if problem:
        raise ConfigurationError(f"{where} {problem}.")
    return control


def control_words(config: TrainConfig) -> str:
    """Name the control and the keys that it sets; the name alone for one that cannot be used."""
    try:
        control = build_control(config)
    except ConfigurationError:  # which explain says as a problem
        control = None
    keys = control.keys if control else ()
    return f"{config.schedule.control}: sets {', '.join(keys)}"


def _wrong_keys(config: TrainConfig, control: Control) -> str:
    """Return the fault of the keys that a control sets, as the end of a sentence; "" if none."""
    if isinstance(control.keys, str) or not control.keys:
        return 'names no keys; give the class keys = ("section.key", ...)'
    for path in control.keys:
        problem = moving.wrong_key(config, path)
        if problem:
            return f'sets "{path}", which {problem}'
        if path in config.schedule.points:
            return f'sets "{path}", which [schedule] moves already; drop one of the two'
        learners = path.partition(".")[0] in moving.LEARNERS
        if learners and not declared_backend(config).moves_settings:
            return (
                f'sets "{path}", and the learner of backend "{config.backend.backend}" keeps the'
                ' settings of its start; use backend = "local"'
            )
    sampler = declared_backend(config).sampler or declared_engine(config)
    if isinstance(control, AdaptiveEntropy) and sampler and not sampler.entropy:
        return (
            f'reads the entropy of each step, and engine "{config.inference.engine}" records none,'
            ' so the bonus would stay at its start; use engine = "pytorch"'
        )
    return ""


def wrong_values(config: TrainConfig, keys: tuple[str, ...], given: Any) -> str:
    """Return the fault of a control's values, as the end of a sentence; "" if none."""
    if not isinstance(given, Mapping):
        return f"gives {type(given).__name__}, and must give a table of its keys and their values"
    if set(given) != set(keys):
        names = ", ".join(map(str, given))
        return f"gives values of {names or 'nothing'}, and its keys are {', '.join(keys)}"
    for path, value in given.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
            return f'gives "{path}" = {value!r}, which is not a finite int or float of Python'
    try:
        _checked(config, given)
    except ConfigurationError as error:
        return f"gives what no configuration may hold: {error.problems[0].rstrip('.')}"
    return ""


def _checked(config: TrainConfig, values: Mapping[str, float]) -> None:
    """Raise ConfigurationError for values that the configuration refuses."""
    whole = moving.with_values(config, values)
    changed = {path.rsplit(".", path.count(".") - 1)[0] for path in values}
    replaced(config, {path: whole.value(path) for path in changed})


def _trial_problem(config: TrainConfig, make: Callable[[], Control]) -> str:
    """Return the fault of a control, tried for three steps; "" if none was found."""
    tried = make()
    for step in range(3):
        before = json.dumps(tried.state(), sort_keys=True)
        given = tried.values(step)
        problem = wrong_values(config, tried.keys, given)
        if problem:
            return problem
        if json.dumps(tried.state(), sort_keys=True) != before:
            return "changes its state in `values`, which `observe` alone may do"
        if tried.values(step) != given:
            return "gives other values when it is asked again"
        tried.observe(_record(step).to_json())
        # As in a resumed run: another control with the stored state goes on in the same way.
        again = make()
        after = json.dumps(tried.state(), sort_keys=True)
        again.load(json.loads(after))
        restored = json.dumps(again.state(), sort_keys=True) == after
        if not restored or again.values(step + 1) != tried.values(step + 1):
            return "does not restore in `load` what `state` returned, so a resumed run would differ"
    return ""


def _record(step: int) -> StepRecord:
    """Return a made-up record of a step, with a number in each field that holds one. The other
    fields are null, as where a step trains nothing.
    """
    known = {one.name: 0.5 / (step + 1) for one in fields(StepRecord) if "better" in one.metadata}
    return StepRecord(**{**known, "step": step, "condition": "made up"})  # type: ignore[arg-type]  # integers too
