"""The whole configuration: every section, checked by the rules, with the source of each value."""

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from pydantic import (
    PrivateAttr,
    ValidationInfo,
    model_validator,
)

from retrain.config.algorithm_sections import Algorithm, Gtpo, Hicra, Planning, Schedule, Sepa
from retrain.config.data_sections import Data, Environment, Reward
from retrain.config.keys import is_settable, keys_by_path
from retrain.config.learning_sections import (
    BACKEND_OPTIONS,
    DEFAULT_CLIPS,
    Backend,
    Lora,
    Loss,
    Model,
    Optimizer,
    Plugins,
    PrimeRLOptions,
    TinkerOptions,
    Training,
)
from retrain.config.names import (
    ALIASES,
    bracketed,
    builtin_names,
    fixed_aggregation,
    is_recipe,
    moved_aliases,
    part_class,
)
from retrain.config.recipes import above_recipe, recipe
from retrain.config.removed import farewell
from retrain.config.run_sections import (
    Backpressure,
    Evaluation,
    Inference,
    Logging,
    Resume,
    Squeeze,
)
from retrain.config.section import RuleViolations, Violation, Violations
from retrain.config.sections import DEFAULT_CONDITIONS, AllSections, Campaign, Condition
from retrain.config.sft_section import Sft
from retrain.errors import RunFailed
from retrain.system import is_path_text, read_object, toml_value

__all__ = [
    "BACKEND_OPTIONS", "DEFAULT_CLIPS", "DEFAULT_CONDITIONS", "Algorithm", "Backend",
    "Backpressure", "Campaign", "Condition", "Data",
    "Environment", "Evaluation", "Gtpo", "Hicra", "Inference", "Logging", "Lora", "Loss", "Model",
    "Optimizer", "Planning", "Plugins",
    "PrimeRLOptions", "Provenance", "Resume", "Reward", "Schedule", "Sepa", "Sft", "Squeeze",
    "TinkerOptions", "TrainConfig", "Training",
]  # fmt: skip


_FULL_LR, _FULL_CHECKPOINTS = 1e-6, 2
"""Defaults of full training: the learning rate, and the number of checkpoints."""


@dataclass(frozen=True)
class Provenance:
    """The origin of a configuration: its file, and the source of each value."""

    path: Path | None = None
    origins: Mapping[str, str] = field(default_factory=dict)
    """ "section.key" to "file", "environment NAME" or "flag --name"; keys left to their default are
    absent."""
    foreign: bool = False
    """True if the configuration comes from a run's folder, which anyone may have made, so that
    retrain does not run code that it names.
    """


class TrainConfig(AllSections):
    """The whole configuration. Sections are attributes, and every key keeps its TOML name (`from`
    is `from_`).
    """

    _provenance: Provenance = PrivateAttr(default_factory=Provenance)
    _changed: ClassVar[Callable[["TrainConfig", Mapping[str, Any]], "TrainConfig"]]
    """Set by the loader, which reads this module."""

    @model_validator(mode="before")
    @classmethod
    def _canonical(cls, data: Any) -> Any:
        """Move aliases to their canonical keys, and put the given keys above a recipe's."""
        if not isinstance(data, dict):
            return data
        data, both_given = moved_aliases(data)
        if both_given:
            sentence = "{} is another name of {}, and the file has both; keep the second"
            pairs = [(alias, ALIASES[alias]) for alias in both_given]
            raise RuleViolations(
                [Violation(pair, sentence.format(*map(bracketed, pair))) for pair in pairs]
            )
        return above_recipe(data)

    @model_validator(mode="after")
    def _fill_in(self) -> "TrainConfig":
        """Fill in the values that another key decides. Such a key stays unset, so that it does not
        count as the user's choice.
        """
        for path, (value, _) in self._implied.items():
            section, _, name = path.partition(".")
            filled = getattr(self, section).model_copy()
            object.__setattr__(filled, name, value)  # for other code the models are immutable
            object.__setattr__(self, section, filled)
        return self

    @model_validator(mode="after")
    def _consistent(self, info: ValidationInfo) -> "TrainConfig":
        if info.context is None or info.context["rules"]:
            violations = self.broken_rules()
            if violations:
                raise RuleViolations(violations)
        return self

    def broken_rules(self) -> list[Violation]:
        return [*super().broken_rules(), *self._wrong_grid()]

    def _wrong_grid(self) -> Violations:
        for path, values in self.campaign.grid.items() if self.campaign else ():
            gone = farewell(path, f'[campaign.grid] "{path}"')
            if gone:
                yield Violation(("campaign.grid",), gone)
            elif not (is_settable(path) and values):
                why = "gives no value" if is_settable(path) else "names no key that a grid may vary"
                yield Violation(
                    ("campaign.grid",),
                    f'[campaign.grid] "{path}" = {toml_value(values)} {why}; name a key of a'
                    ' run and its values, such as "training.lr" = [1e-5, 4e-5]. Algorithms and'
                    " seeds belong to [[campaign.conditions]] and [campaign] seeds",
                )

    def __eq__(self, other: object) -> bool:
        """Compare the values; where they came from does not matter."""
        return isinstance(other, TrainConfig) and self.model_dump() == other.model_dump()

    __hash__ = None  # type: ignore[assignment]  # tables and lists are not hashable

    def __repr__(self) -> str:
        """Return one line: the model, the data, and the length of training."""
        training = self.training
        if self.kind == "squeeze":
            return f"TrainConfig(squeeze {self.squeeze.adapter_path})"
        length = f"{training.max_steps} step{'s' * (training.max_steps != 1)}"
        size = f"{length} of {training.batch_size} x {training.group_size}"
        source = self.environment.provider or self.data.path or self.data.source
        if self.data.mix:
            source = f"{len(self.data.mix)} sources"
        names = self.condition_label
        if self.campaign is not None:
            names = f"{len(self.conditions)} conditions x {len(self.campaign.seeds)} seeds"
        return f"TrainConfig({names}: {self.model.model} on {source}, {size})"

    __str__ = __repr__

    def with_(self, **values: Any) -> "TrainConfig":
        """Return the configuration with other values, as in `config.with_(reward_type="math")`.

        A value has the name of its flag. Raises ConfigurationError for an unknown name or a wrong
        value.
        """
        return self._changed(values)

    @property
    def _implied(self) -> dict[str, tuple[Any, str]]:
        """The unset keys that another key decides: "section.key" -> (value, the key that
        decides).
        """
        implied: dict[str, tuple[Any, str]] = {}
        aggregation = fixed_aggregation(self.algorithm.algorithm_mode)
        if aggregation:
            implied["loss.aggregation"] = (aggregation, "algorithm.algorithm_mode")
        temperature = part_class("backend", self.backend.backend).only_temperature
        if temperature is not None:
            implied["training.temperature"] = (temperature, "backend.backend")
        if self.model.train == "full":
            implied["training.lr"] = (_FULL_LR, "model.train")
            implied["training.keep_checkpoints"] = (_FULL_CHECKPOINTS, "model.train")
        return {path: row for path, row in implied.items() if not self.is_set(path)}

    @property
    def dropout(self) -> float:
        """The dropout rate of the adapter, if there is one."""
        return 0.0 if self.model.train == "full" else self.lora.dropout

    @property
    def reads_reference(self) -> bool:
        """True if a KL term, or a loss plugin, may read [loss] kl_reference."""
        loss = self.loss
        return (
            loss.mode not in builtin_names("loss")
            or loss.correction not in builtin_names("correction")
            or self.may_be_positive("loss.kl_coef")
        )

    @property
    def reads_base(self) -> bool:
        """True if the loss or a teacher may read the base."""
        return self._reads("base")

    @property
    def reads_start(self) -> bool:
        """True if the loss or a teacher may read the weights of the start."""
        return self._reads("start")

    def _reads(self, reference: str) -> bool:
        by_loss = self.reads_reference and self.loss.kl_reference == reference
        return by_loss or self.algorithm.teacher == reference

    @property
    def source_path(self) -> Path | None:
        """Its file, or None for a configuration from Python."""
        return self._provenance.path

    @property
    def folder(self) -> Path:
        """The folder of the run or campaign that this configuration begins or continues."""
        return Path(self.resume.from_ or self.logging.log_dir)

    @property
    def own_folders(self) -> list[Path]:
        """The current folder and the folder of the configuration's file."""
        return [Path.cwd(), *([self.source_path.resolve().parent] if self.source_path else [])]

    @property
    def search_folders(self) -> list[Path]:
        """The folders in which retrain looks for relative paths and plugins, in this order. They
        are `own_folders`. If its file lies in the folder of a run, the folders in which
        the run began come before the current folder.
        """
        own = self.own_folders
        with suppress(OSError, RunFailed):
            began = read_object(own[-1] / "environment.json").get("folders")
            if self.source_path and isinstance(began, list):
                folders = [
                    Path(name)
                    for name in filter(is_path_text, began)
                    if os.path.isdir(name) and os.access(name, os.X_OK)  # noqa: PTH112
                ]
                return [own[1], *folders, own[0]]
        return own

    def find(self, path: str, holds: Callable[[Path], bool] | None = None) -> Path:
        """Return a path in the first of `search_folders` that holds it, else the path itself. The
        folder of a run comes last, since its records may have the name of data.
        """
        folders = sorted(self.search_folders, key=lambda one: (one / "environment.json").exists())
        places = (folder / path for folder in folders)
        return next(filter(holds or Path.exists, places), Path(path))

    @property
    def origins(self) -> dict[str, str]:
        """The source of each value, by its "section.key".

        A source is "default", "recipe NAME", "file", "environment NAME", "flag --name" or "implied
        by KEY".
        """
        unset = {path: f"implied by {decides}" for path, (_, decides) in self._implied.items()}
        given = self._provenance.origins
        mode = self.algorithm.algorithm_mode
        if given and is_recipe(mode):
            given = dict.fromkeys(recipe(mode), f"recipe {mode}") | dict(given)
        return {
            path: given.get(path, "file") if self.is_set(path) else unset.get(path, "default")
            for path in keys_by_path()
        }
