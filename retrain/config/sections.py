"""The only list of keys: every section is a class with its keys and the rules between them. Most
classes are in algorithm_sections.py, data_sections.py, learning_sections.py and run_sections.py.

These classes generate the flags, the manual, the documentation's tables, the JSON Schema,
examples/all_keys.toml and every error.
"""

import re
from collections.abc import Mapping, Sequence
from itertools import chain, product, starmap
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
)

from retrain.config.algorithm_sections import Algorithm, Gtpo, Hicra, Planning, Schedule, Sepa
from retrain.config.data_sections import Data, Environment, Reward
from retrain.config.learning_sections import (
    Backend,
    Lora,
    Loss,
    Model,
    Optimizer,
    Plugins,
    Training,
)
from retrain.config.names import condition_label, folder_name, is_recipe, replaces_modes
from retrain.config.recipes import modes_of
from retrain.config.run_sections import (
    Backpressure,
    Evaluation,
    Inference,
    Logging,
    Resume,
    Squeeze,
)
from retrain.config.section import Section, Seed, Traits, Violation, Violations, key, repeated
from retrain.config.sft_section import Sft
from retrain.config.values import LABEL, MAX_SEED, OpenName, check_grid, check_label
from retrain.system import Json, toml_value


def _open_condition(schema: Json) -> None:
    """Let the JSON Schema of a condition accept any key of a run, for editors."""
    schema["properties"].pop("sets")
    schema["additionalProperties"] = True


class Condition(Section):
    """A condition of a campaign: an advantage and a transform, or an algorithm instead, and any
    other keys that it sets.
    """

    model_config = ConfigDict(json_schema_extra=_open_condition)

    advantage_mode: Annotated[str, OpenName("advantage", may_be_empty=True)] = key(
        "", "Advantage of this condition."
    )
    transform_mode: Annotated[str, OpenName("transform", may_be_empty=True)] = key(
        "", "Transform of this condition."
    )
    algorithm_mode: Annotated[str, OpenName("algorithm", may_be_empty=True)] = key(
        "", "A whole algorithm instead of the two modes."
    )
    given_label: Annotated[str, AfterValidator(check_label)] = key(
        "",
        "Name of the condition; empty means {advantage}+{transform}, or the algorithm, and"
        " ~key=value for each key in which conditions differ.",
        alias="label",
    )
    sets: Json = Field(default={})
    """"section.key" -> value of every other key in the condition's table. The loader checks these
    values together with the base.
    """

    @model_serializer(mode="wrap")
    def _flat(self, handler: SerializerFunctionWrapHandler) -> Json:
        """Serialize the condition as a file holds it, with `loss.mode` and `label` in one table."""
        values: Json = handler(self)
        if "given_label" in values:
            values["label"] = values.pop("given_label")
        sets: Json = values.pop("sets", {})
        return values | sets

    @property
    def sets_keys(self) -> bool:
        """True if its runs differ from the base in other keys than the modes."""
        return bool(self.sets) or is_recipe(self.algorithm_mode)

    @property
    def modes(self) -> tuple[str, str]:
        """Return the advantage and the transform in use, or ("", "") for an algorithm plugin."""
        return modes_of(self.algorithm_mode, self.advantage_mode, self.transform_mode)

    @property
    def label(self) -> str:
        return self.given_label or condition_label(
            self.advantage_mode, self.transform_mode, self.algorithm_mode
        )


def told_apart(conditions: Sequence[Condition]) -> tuple[Condition, ...]:
    """Give conditions without a label the label NAME~key=value, of the keys in which the conditions
    differ.
    """
    return tuple(_told_apart(condition, conditions) for condition in conditions)


def crossed(conditions: Sequence[Condition], grid: Mapping[str, Sequence[Any]]) -> list[Condition]:
    """Return every condition with every combination of the grid's values; one that has a label
    carries the values behind it.
    """
    made = []
    for condition, combination in product(conditions, product(*grid.values())):
        values = dict(zip(grid, combination, strict=True))
        label = condition.given_label
        if label:
            label += "".join(starmap(_suffix, values.items()))
        changes = {"sets": {**condition.sets, **values}, "given_label": label}
        made.append(condition.model_copy(update=changes))
    return made


_NOT_IN_A_LABEL = re.compile(r"[^A-Za-z0-9._+=~-]+")


def _suffix(path: str, value: Any) -> str:
    """Return the form of a key's value in a label: `~lr=1e-05`, or for a table
    `~params=n=3-kind=hard`.
    """
    shown = _NOT_IN_A_LABEL.sub("-", re.sub(r' = ["[{]*', "=", bare_value(value))).strip("-")
    return f"~{path.rpartition('.')[2]}={shown}"


def bare_value(value: Any) -> str:
    """Return a value as TOML, but a string without its quotes."""
    return value if isinstance(value, str) else toml_value(value)


def _told_apart(condition: Condition, others: Sequence[Condition]) -> Condition:
    """Return a condition whose label has every key in which it differs from `others`. One with a
    label, or whose values give none, stays as it is.
    """
    label = condition.label
    for path, value in condition.sets.items():
        if any(other.sets.get(path) != value for other in others):
            label += _suffix(path, value)
    if condition.given_label or label == condition.label or not LABEL.fullmatch(label):
        return condition
    return condition.model_copy(update={"given_label": label})


DEFAULT_CONDITIONS = tuple(
    Condition(advantage_mode=advantage, transform_mode=transform)
    for advantage, transform in (
        ("grpo", "none"),
        ("maxrl", "none"),
        ("maxrl", "gtpo"),
        ("maxrl", "gtpo_hicra"),
        ("maxrl", "gtpo_sepa"),
    )
)
"""The progressive ablation from plain GRPO to MaxRL with GTPO and SEPA."""


class Campaign(Section):
    """Conditions times seeds."""

    traits = Traits(own_to_a_run=True, whole_campaign=True, acts_by_presence=True)

    seeds: Annotated[list[Seed], Field(min_length=1)] = key(
        [42, 101, 202, 303, 404, 505, 606, 707], "Seeds that each condition runs with."
    )
    max_steps: int | None = key(
        None,
        "Steps of each run; unset means [training] max_steps (500).",
        ge=0,
        meaningful_unset=True,
        example=500,
    )
    stop: Literal["seeds", "evidence"] = key(
        "seeds", "End after all seeds, or look after every seed and stop when the evidence decides."
    )
    max_seeds: int = key(
        0,
        'Maximum number of seeds with stop = "evidence"; seeds beyond those listed count up from'
        " the largest one. 0 is the number listed.",
        ge=0,
        applies_when="stop in (evidence)",
    )
    margin: float | None = key(
        None,
        "A difference in the held-out accuracy below this counts as equivalent; unset plans no"
        " such verdict.",
        gt=0,
        lt=1,
        meaningful_unset=True,
        example=0.02,
    )
    parallel: bool = key(False, "Run conditions simultaneously.")
    max_workers: int = key(
        0,
        "Maximum number of simultaneous runs; 0 starts all, on CUDA as many as the devices hold.",
        ge=0,
    )
    stagger_seconds: float = key(0.0, "Seconds between starts of runs.", ge=0)
    conditions: list[Condition] = key(
        [], "The conditions; empty means the five of the standard ablation."
    )
    grid: Annotated[dict[str, list[Any]], AfterValidator(check_grid)] = key(
        {},
        'Values of keys, such as "training.lr" = [1e-5, 4e-5]: each condition runs with every'
        " combination. Without conditions it varies the file's own algorithm.",
    )
    launcher: Literal["local", "ray", "array"] = key(
        "local",
        'Launcher; "array" is a cluster\'s job array, one run per task.',
    )
    ray_address: str = key(
        "",
        "Address of a Ray cluster; empty starts a local one.",
        applies_when="launcher in (ray)",
    )
    max_retries: int = key(
        2,
        "Restarts of a run after the loss of its worker (killed, or its machine gone).",
        ge=0,
    )
    devices_per_run: int = key(1, "Devices of one run; two sample and train at once.", ge=1, le=2)
    workers_per_device: int = key(1, "Runs that share one device.", ge=1)
    price_per_hour: float = key(0.0, "Price of one device hour, for the cost in reports.", ge=0)

    @property
    def correction(self) -> Literal["maxt", "evidence"]:
        """The adjustment of the p values of the planned comparison."""
        return "evidence" if self.stop == "evidence" else "maxt"

    def problems(self, config: "AllSections") -> Violations:
        if config.algorithm.algorithm_mode:
            yield Violation(
                ("algorithm.algorithm_mode", "campaign"),
                f'[algorithm] algorithm_mode = "{config.algorithm.algorithm_mode}" in a campaign\'s'
                " base would override every condition; put it into a [[campaign.conditions]]"
                " instead of the two modes",
            )
        yield from self._condition_problems()
        yield from self._grid_problems()
        yield from _label_problems(config.conditions)
        yield from self._seed_problems()

    def _condition_problems(self) -> Violations:
        for number, condition in enumerate(self.conditions, start=1):
            modes = ("advantage_mode", "transform_mode")
            missing = [name for name in modes if not getattr(condition, name)]
            if condition.algorithm_mode and len(missing) < 2:
                yield Violation(
                    ("campaign.conditions",),
                    f"[[campaign.conditions]] number {number} gives algorithm_mode ="
                    f' "{condition.algorithm_mode}" and a mode that it replaces; keep one',
                )
            elif not condition.algorithm_mode and missing:
                yield Violation(
                    ("campaign.conditions",),
                    f"[[campaign.conditions]] number {number} lacks {' and '.join(missing)}; "
                    "give advantage_mode and transform_mode, or algorithm_mode",
                )

    def _grid_problems(self) -> Violations:
        for path in self.grid:
            for number, condition in enumerate(self.conditions, start=1):
                if path in condition.sets:
                    yield Violation(
                        ("campaign.grid", "campaign.conditions"),
                        f'[campaign.grid] varies "{path}", which [[campaign.conditions]] number'
                        f" {number} sets too; leave it out of either",
                    )

    def _seed_problems(self) -> Violations:
        for seed in repeated(self.seeds):
            yield Violation(
                ("campaign.seeds",),
                f"[campaign] seeds names {seed} twice; a repeated seed is the same run, not"
                " another sample",
            )
        if self.stop != "evidence":
            return
        if self.launcher == "array":
            yield Violation(
                ("campaign.stop", "campaign.launcher"),
                '[campaign] stop = "evidence" looks between runs, which launcher = "array" trains'
                " apart; give up either",
            )
        if 0 < self.max_seeds < len(self.seeds):
            yield Violation(
                ("campaign.max_seeds", "campaign.seeds"),
                f"[campaign] max_seeds = {self.max_seeds} is below the {len(self.seeds)} seeds"
                " of the list; raise it, or name fewer",
            )
        if max(self.seeds) + max(0, self.max_seeds - len(self.seeds)) > MAX_SEED:
            yield Violation(
                ("campaign.max_seeds", "campaign.seeds"),
                f"[campaign] max_seeds = {self.max_seeds} goes from seed {max(self.seeds)} to"
                f" above {MAX_SEED}; name smaller seeds",
            )


def _label_problems(conditions: Sequence[Condition]) -> Violations:
    seen: dict[str, tuple[int, str]] = {}
    for number, condition in enumerate(conditions, start=1):
        # Many disks do not tell upper from lower case.
        folder = folder_name(condition.label).casefold()
        first, label = seen.setdefault(folder, (number, condition.label))
        if first != number:
            names = f'called "{label}" and "{condition.label}"'
            if label == condition.label:
                names = f'both called "{label}"'
            yield Violation(
                ("campaign.conditions",),
                f"[[campaign.conditions]] numbers {first} and {number} are {names}, "
                "so their runs would share folders; give one a label of its own, or drop it",
            )


EVALUATION_SECTIONS = frozenset(
    {
        "squeeze",
        "model",
        "data",
        "environment",
        "reward",
        "evaluation",
        "training",
        "inference",
        "backend",
        "plugins",
    }
)
"""The sections that a squeeze job with evaluate reads."""


class AllSections(Section):
    """The keys of a configuration, each allowed by itself."""

    backend: Backend = Field(default_factory=Backend)
    model: Model = Field(default_factory=Model)
    algorithm: Algorithm = Field(default_factory=Algorithm)
    plugins: Plugins = Field(default_factory=Plugins)
    training: Training = Field(default_factory=Training)
    optimizer: Optimizer = Field(default_factory=Optimizer)
    lora: Lora = Field(default_factory=Lora)
    sft: Sft = Field(default_factory=Sft)
    loss: Loss = Field(default_factory=Loss)
    schedule: Schedule = Field(default_factory=Schedule)
    evaluation: Evaluation = Field(default_factory=Evaluation)
    gtpo: Gtpo = Field(default_factory=Gtpo)
    hicra: Hicra = Field(default_factory=Hicra)
    sepa: Sepa = Field(default_factory=Sepa)
    planning: Planning = Field(default_factory=Planning)
    inference: Inference = Field(default_factory=Inference)
    data: Data = Field(default_factory=Data)
    environment: Environment = Field(default_factory=Environment)
    reward: Reward = Field(default_factory=Reward)
    backpressure: Backpressure = Field(default_factory=Backpressure)
    squeeze: Squeeze = Field(default_factory=Squeeze)
    resume: Resume = Field(default_factory=Resume)
    logging: Logging = Field(default_factory=Logging)
    campaign: Campaign | None = Field(default=None)

    def is_set(self, path: str) -> bool:
        """True if the user gave the section ("squeeze") or the key ("backend.devices")."""
        section, _, name = path.partition(".")
        if section not in self.model_fields_set or not name:
            return section in self.model_fields_set
        value = getattr(self, section)
        return value is not None and value.is_set(name)

    def value(self, path: str) -> Any:
        """Return the value of "section.key"; None for a key of an absent [campaign]."""
        section, _, name = path.partition(".")
        return getattr(getattr(self, section), "from_" if name == "from" else name, None)

    def may_be_positive(self, path: str) -> bool:
        """Return True if a key that is off at 0 may be above it in some step, by the file or by
        [schedule].
        """
        return self.value(path) > 0 or path in self.schedule.points

    @property
    def kind(self) -> Literal["run", "campaign", "squeeze"]:
        if self.campaign is not None:
            return "campaign"
        return "squeeze" if self.squeeze.adapter_path else "run"

    @property
    def condition_label(self) -> str:
        """The condition of a single run, as metrics and folders name it."""
        algorithm = self.algorithm
        return self.logging.label or condition_label(
            algorithm.advantage_mode, algorithm.transform_mode, algorithm.algorithm_mode
        )

    @property
    def conditions(self) -> tuple[Condition, ...]:
        """The conditions of a campaign; of a single run, its own algorithm."""
        if self.campaign is None:
            return (self._own_condition,)
        given: Sequence[Condition] = self.campaign.conditions
        if self.campaign.grid:
            given = crossed(given or [self._own_condition], self.campaign.grid)
        return told_apart(given) or DEFAULT_CONDITIONS

    @property
    def advantages(self) -> list[str]:
        """The advantage of each condition; "" of an algorithm plugin."""
        return [condition.modes[0] for condition in self.conditions]

    @property
    def transforms(self) -> list[str]:
        """The transform of each condition; "" of an algorithm plugin."""
        return [condition.modes[1] for condition in self.conditions]

    def reads(self, path: str) -> bool:
        """Return True if this kind of job reads the section of a key. A squeeze job does not train,
        so it reads few sections unless it evaluates.
        """
        if self.kind != "squeeze":
            return True
        read = frozenset({"squeeze"})
        if self.squeeze.evaluate and self.squeeze.output_path:
            read = EVALUATION_SECTIONS
        return path.partition(".")[0] in read

    def broken_rules(self) -> list[Violation]:
        """Return every violation once, in the order of the sections. The loader judges conditions
        with keys of their own one by one.
        """
        judged = [getattr(self, name) for name in type(self).model_fields]
        if any(condition.sets_keys for condition in self.conditions):
            judged = [self.campaign]
        found = chain.from_iterable(part.problems(self) for part in judged if part is not None)
        return [one for one in dict.fromkeys(found) if self.reads(one.keys[0])]

    @property
    def _own_condition(self) -> Condition:
        """The algorithm of [algorithm] as a condition."""
        if replaces_modes(self.algorithm.algorithm_mode):
            return Condition(algorithm_mode=self.algorithm.algorithm_mode)
        return Condition(
            advantage_mode=self.algorithm.advantage_mode,
            transform_mode=self.algorithm.transform_mode,
        )
