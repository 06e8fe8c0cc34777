"""Loading: a file, environment variables and flags become a TrainConfig, or a list of all problems.

Later sources win: defaults, the recipe that algorithm_mode names, file, RETRAIN_<SECTION>_<KEY>,
flags. Loading imports no plugin.
"""

import os
import re
import secrets
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from retrain.config import mixture, moving
from retrain.config.algorithm_sections import gathered_schedule
from retrain.config.keys import (
    CONDITION_KEYS,
    condition_homes,
    flags,
    is_settable,
    key_meant,
    section_models,
)
from retrain.config.names import ALIASES, by_path, copied, is_recipe, moved_aliases, nearest
from retrain.config.needs import refusals
from retrain.config.overrides import (
    Override,
    Overrides,
    deep_merge,
    parse_overrides,
    variable_overrides,
)
from retrain.config.recipes import above_recipe_of_condition
from retrain.config.removed import farewell, removed_key, without_removed
from retrain.config.schema import Condition, Provenance, Schedule, TrainConfig
from retrain.config.section import Violation
from retrain.config.sentences import (
    KeyLocation,
    details_of,
    field_sentences,
    violations_of,
    wrong_paths,
)
from retrain.errors import ConfigurationError, RunFailed
from retrain.system import Json, ParseError, parse_toml, read_object

DEFAULT_FILE = "retrain.toml"
_SECTIONS_OF_A_SQUEEZE_JOB = {"squeeze", "model", "logging", "plugins"}
"""A file of these alone trains nothing on purpose."""
_MODE = "algorithm.algorithm_mode"
_REPLACED = {
    f"algorithm.{name}"
    for name in ("advantage_mode", "advantage_params", "transform_mode", "transform_params")
}
_SHOWN = 100
"""Characters of a line that an error quotes."""


def load_config(
    path: str | Path | None = None,
    overrides: Overrides | Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
) -> TrainConfig:
    """Load the configuration of a file (./retrain.toml by default), with variables and flags on
    top.

    `overrides` holds parsed flags, or the flags themselves (["--lr", "1e-4"]). `environ` defaults
    to the environment of the process. Raises ConfigurationError with one sentence for each problem
    of the file, the variables and the flags together.
    """
    file = Path(path or DEFAULT_FILE)
    data = read_toml(file, named=path is not None)
    given = _flags_only(overrides)
    variables = variable_overrides(os.environ if environ is None else environ)
    config = _build(data, [*variables, *given], file)
    if (
        config.is_set("squeeze")
        and not config.squeeze.adapter_path
        and config.model_fields_set <= _SECTIONS_OF_A_SQUEEZE_JOB
    ):
        raise ConfigurationError(
            f"{file}: [squeeze] needs adapter_path, the folder of an adapter, such as"
            " logs/lab/checkpoints/final. To train, leave [squeeze] out."
        )
    return config


def config_from_mapping(
    data: Mapping[str, Any],
    overrides: Overrides | Sequence[str] = (),
    *,
    provenance: Provenance | None = None,
) -> TrainConfig:
    """Build a configuration from sections in memory, without files and variables.

    `provenance` says where they came from, for errors and plugins.
    """
    if provenance:
        return _validate(dict(data), provenance)
    return _build(dict(data), [*_flags_only(overrides)], None)


def config_from_toml(text: str, path: Path | None = None) -> TrainConfig:
    """Build a configuration from a TOML text, without variables. Errors name `path`."""
    return _build(parse_named(text, str(path or "the configuration")), [], path)


def load_stored(path: str | Path, *, to_read: bool = False) -> TrainConfig:
    """Load the configuration stored in a run's folder; environment variables do not apply. Loading
    runs no code that the configuration names.

    With `to_read`, it also loads a configuration that today's rules would refuse, for runs of an
    earlier version.
    """
    file = Path(path)
    try:
        config = _build(read_toml(file), [], file, rules=not to_read)
    except ConfigurationError as error:
        raise ConfigurationError([*_other_version(file), *error.problems]) from error
    config._provenance = replace(config._provenance, foreign=True)
    return config


def _other_version(file: Path) -> Iterator[str]:
    """Yield a sentence if another version wrote the run of a stored configuration."""
    from retrain import __version__

    with suppress(OSError, RunFailed):
        writer = read_object(file.with_name("environment.json")).get("retrain", __version__)
        if writer != __version__:
            yield f"{file} is of retrain {writer}, and this is {__version__}; use that version."


def trusted(config: TrainConfig) -> TrainConfig:
    """Return a stored configuration whose code may be run."""
    config = replaced(config, {})
    config._provenance = replace(config._provenance, foreign=False)
    return config


def with_flags(config: TrainConfig, values: Mapping[str, Any]) -> TrainConfig:
    """Return a configuration with other values, each under its flag's name without dashes at its
    front and with underscores inside.
    """
    paths = {_argument(flag): path for flag, path in flags().items()}
    problems = []
    for name in values:
        if name not in paths:
            meant = key_meant(name)
            close = _argument(meant.flag) if meant else nearest(name, paths)
            hint = f"; did you mean {close}?" if close else ""
            problems.append(
                farewell(removed_key(name), f"with_({name}=...)")
                or f"with_({name}=...): no key of the configuration has the flag"
                f" --{name.replace('_', '-')}{hint}"
            )
    if problems:
        raise ConfigurationError(problems)
    return replaced(config, {paths[name]: value for name, value in values.items()})


def _argument(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


TrainConfig._changed = with_flags


def replaced(
    config: TrainConfig, values: Mapping[str, Any], origin: str = "set in Python"
) -> TrainConfig:
    """Return a configuration with some "section.key" values changed, validated again; keys that
    were unset stay unset.
    """
    values = {ALIASES.get(path, path): value for path, value in values.items()}
    given = [Override(path, value, origin) for path, value in values.items()]
    merged = _merge(given_values(config), given)
    origins = {**config._provenance.origins, **dict.fromkeys(values, origin)}
    return _validate(merged, replace(config._provenance, origins=origins))


def with_drawn_seed(config: TrainConfig) -> TrainConfig:
    """Return the configuration with seed = -1 replaced by a randomly drawn seed; any other seed
    stays.
    """
    if config.training.seed != -1:
        return config
    return replaced(config, {"training.seed": secrets.randbelow(2**32)}, origin="drawn")


def given_values(config: TrainConfig) -> Json:
    """Return the given values as TOML would hold them, without defaults, and with `from` under its
    TOML name.
    """
    values: Json = config.model_dump(exclude_unset=True, by_alias=True)
    return {name: section for name, section in values.items() if section is not None}


def read_toml(file: Path, named: bool = True) -> Json:
    """Read the sections of a file. Raises ConfigurationError with one sentence for an unreadable
    file.
    """
    return parse_named(read_text(file, named), str(file))


def read_text(file: Path, named: bool = True) -> str:
    """Read a configuration file with its line ends as they are. Raises ConfigurationError."""
    if not file.exists():
        advice = "check the path" if named else "make one with `retrain init`, or name a file"
        raise ConfigurationError(f"{file} does not exist; {advice}.")
    try:
        return file.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigurationError(
            f"{file} is not UTF-8 text (byte {error.start}); save it as UTF-8."
        ) from error
    except IsADirectoryError as error:
        raise ConfigurationError(f"{file} is a folder; name a TOML file.") from error
    except OSError as error:
        raise ConfigurationError(f"{file} is not readable: {error.strerror}.") from error


def parse_named(text: str, name: str) -> Json:
    """Parse a TOML text. Raises ConfigurationError with the name of its file."""
    try:
        return parse_toml(text)
    except ParseError as error:
        # The parser names no key, so the line itself shows which quote or comma is meant.
        found = re.search(r"\(at line (\d+), ", str(error))
        line = ""
        if found:
            line = f"; the line is `{text.split(chr(10))[int(found[1]) - 1].strip()[:_SHOWN]}`"
        raise ConfigurationError(f"{name} {error}{line}.") from error


def _flags_only(given: Overrides | Sequence[str]) -> Sequence[Override]:
    """Return the values of flags, and parse them if necessary. Raises ConfigurationError for an
    argument that is not a flag.
    """
    if isinstance(given, Overrides):
        return given.given
    parsed = parse_overrides(list(given))
    if parsed.rest:
        raise ConfigurationError(
            f'"{parsed.rest[0]}" is not a flag; flags start with --, such as --lr 1e-4.'
        )
    return parsed.given


def _build(
    data: Json, given: list[Override], file: Path | None, *, rules: bool = True
) -> TrainConfig:
    # Move aliases before the merge, so that a flag for the key wins over its alias in the file.
    data, _ = moved_aliases(data)
    given = [
        replace(override, path=ALIASES.get(override.path, override.path)) for override in given
    ]
    if isinstance(data.get("campaign"), dict):
        given = [_for_campaign(override) for override in given]
    else:
        # Variables for [campaign] may serve later campaigns; a flag needs its section.
        of_campaign = [override for override in given if override.path.startswith("campaign.")]
        for override in of_campaign:
            if override.origin.startswith("flag "):
                raise ConfigurationError(
                    f"{override.origin} belongs to a campaign, and the file has no [campaign]"
                    " section; add one or drop the flag."
                )
        given = [override for override in given if override not in of_campaign]
    # A recipe of the command line replaces the file's algorithm as a whole.
    if any(override.path == _MODE and is_recipe(str(override.value)) for override in given):
        data = _without(data, _REPLACED)
    origins = dict.fromkeys(by_path(data), "file")
    origins |= {override.path: override.origin for override in given}
    return _validate(_merge(data, given), Provenance(file, origins), rules=rules)


def _for_campaign(override: Override) -> Override:
    """Redirect --max-steps and --seed to the campaign's keys, if the file describes a campaign."""
    if override.path == "training.max_steps":
        return replace(override, path="campaign.max_steps")
    if override.path == "training.seed":
        return replace(override, path="campaign.seeds", value=[override.value])
    return override


def _merge(data: Json, given: Sequence[Override]) -> Json:
    merged = copied(data)
    for override in given:
        section, _, name = override.path.partition(".")
        keys = merged.setdefault(section, {})
        if not isinstance(keys, dict):
            continue  # the file has a value where a section belongs; validation says so
        value = override.value
        if override.adds and isinstance(keys.get(name), dict):
            value = deep_merge(keys[name], value)
        keys[name] = value
    return merged


def _validate(data: Json, provenance: Provenance, *, rules: bool = True) -> TrainConfig:
    data = _gather_conditions(without_removed(data, all_of_them=not rules))
    try:
        config = TrainConfig.model_validate(data, context={"rules": rules})
    except ValidationError as error:
        raise ConfigurationError(*_all_problems(error, data, KeyLocation(provenance))) from error
    config._provenance = provenance
    problems = _arm_problems(config) or _schedule_problems(config, provenance)
    if rules and not problems and not any(condition.sets_keys for condition in config.conditions):
        place = KeyLocation(provenance)
        problems = _mix_problems(config, provenance) or [
            place.sentence(Violation((key,), text)) for key, text in refusals(config)
        ]
    if problems:
        raise ConfigurationError(problems)
    return config


def _schedule_problems(config: TrainConfig, provenance: Provenance) -> list[str]:
    """Return one sentence for each impossible schedule, or for the first of its points at which the
    loader would refuse the configuration.
    """
    place = KeyLocation(provenance)
    found = [
        place.sentence(Violation(("schedule.points",), problem.rstrip(".")))
        for problem in moving.problems(config)
    ]
    if found or not config.schedule.points:
        return found
    fixed = config.model_copy(update={"schedule": Schedule()})
    for step, values in moving.extremes(config):
        data = given_values(moving.with_values(fixed, values))
        data.pop("schedule")
        try:
            _validate(data, provenance)
        except ConfigurationError as error:
            return [
                f"{problem.rstrip('.')}, by [schedule] at step {step}."
                for problem in error.problems
            ]
    return []


def _mix_problems(config: TrainConfig, provenance: Provenance) -> list[str]:
    """Return one sentence for each problem of `[[data.mix]]`: problems of its tables, then values
    that the loader would refuse for a single source.
    """
    found = list(map(KeyLocation(provenance).sentence, mixture.problems(config)))
    for number, table in enumerate([] if found else config.data.mix, start=1):
        given = [Override(path, value, "") for path, value in mixture.changes(table).items()]
        try:
            _validate(_merge(given_values(config), given), provenance)
        except ConfigurationError as error:
            parts = (problem.partition(": ") for problem in error.problems)
            found += [f"{where}: [[data.mix]] number {number}: {text}" for where, _, text in parts]
    return found


def _all_problems(error: ValidationError, data: Json, place: KeyLocation) -> tuple[list[str], int]:
    """Return sentences about wrong values and about broken rules between the remaining keys, and
    the number of unlisted problems.
    """
    details = details_of(error)
    sentences, unlisted = field_sentences(details, data, place)
    violations = violations_of(details)
    wrong = wrong_paths(details)
    if wrong:
        try:
            TrainConfig.model_validate(_without(data, wrong))
        except ValidationError as second:
            violations += violations_of(details_of(second))
    # Skip a rule if a key that it reads, or the whole section of a key, is wrong by itself.
    for violation in violations:
        if wrong.isdisjoint({*violation.keys, *(key.partition(".")[0] for key in violation.keys)}):
            sentences.append(place.sentence(violation))
    return list(dict.fromkeys(sentences)), unlisted


def _without(data: Json, paths: set[str]) -> Json:
    """Return the sections without some sections and keys."""
    kept = {section: keys for section, keys in data.items() if section not in paths}
    for section, keys in kept.items():
        if isinstance(keys, dict):
            kept[section] = {n: v for n, v in keys.items() if f"{section}.{n}" not in paths}
    return kept


# -- the conditions of a campaign ------------------------------------------------------------------


def arms(config: TrainConfig) -> tuple[TrainConfig, ...]:
    """Return one configuration per condition of a campaign: the base with the condition's keys on
    top, and that condition alone. A single run is its own only arm.

    Raises ConfigurationError for values and combinations that a condition makes wrong.
    """
    if config.campaign:
        return tuple(_arm(config, condition) for condition in config.conditions)
    return (config,)


def _arm(config: TrainConfig, condition: Condition) -> TrainConfig:
    sets = [Override(path, value, "") for path, value in mixture.over_base(condition.sets).items()]
    data = _merge(given_values(config), sets)
    dumped = condition.model_dump(exclude_unset=True)
    own = {name: dumped[name] for name in CONDITION_KEYS if name in dumped}
    mode = condition.algorithm_mode
    if is_recipe(mode):
        data = above_recipe_of_condition(data, mode)
        advantage, transform = condition.modes
        own |= {"algorithm_mode": "", "advantage_mode": advantage, "transform_mode": transform}
    alone = {"conditions": [own | {"label": condition.label}], "grid": {}}
    data["campaign"] = {**data["campaign"], **alone}
    return config_from_mapping(
        data, provenance=Provenance(config.source_path, config._provenance.origins)
    )


def _arm_problems(config: TrainConfig) -> list[str]:
    """Return the problems of every condition with a wrong setting, with the condition's number. A
    problem of all conditions appears once.
    """
    if not any(condition.sets_keys for condition in config.conditions):
        return []
    found = defaultdict[str, list[int]](list)
    for number, condition in enumerate(config.conditions, start=1):
        try:
            _arm(config, condition)
        except ConfigurationError as error:
            for problem in error.problems:
                found[problem].append(number)
    sentences = []
    for problem, numbers in found.items():
        place, _, sentence = problem.partition(": ")
        shared = len(numbers) == len(config.conditions) > 1
        named = f"{place}: {_numbered(config, numbers)}: {sentence}"
        sentences.append(problem if shared else named)
    return sentences


def _numbered(config: TrainConfig, numbers: Sequence[int]) -> str:
    """Conditions by their numbers in the file, or by their labels where a grid made them."""
    if config.campaign is not None and config.campaign.grid:
        labels = [config.conditions[number - 1].label for number in numbers]
        return f"[campaign.grid] {', '.join(labels)}"
    plural = "s" if len(numbers) > 1 else ""
    return f"[[campaign.conditions]] number{plural} {', '.join(map(str, numbers))}"


def _gather_conditions(data: Json) -> Json:
    """Move what each condition sets under its `sets`, by "section.key", and write the grid's keys
    alike. Names that are not a key of a run stay in place, and validation refuses them.
    """
    campaign = data.get("campaign")
    if not isinstance(campaign, dict):
        return data
    gathered: Json = {}
    if isinstance(campaign.get("conditions"), list):
        gathered["conditions"] = [
            _above_schedule(_gathered(table), data) if isinstance(table, dict) else table
            for table in campaign["conditions"]
        ]
    if isinstance(campaign.get("grid"), dict):
        own = _gathered(campaign["grid"])
        gathered["grid"] = {**own.pop("sets", {}), **own}
    return {**data, "campaign": {**campaign, **gathered}}


def _above_schedule(condition: Json, base: Json) -> Json:
    """Merge a condition's own scheduled keys ("schedule.loss.kl_coef") into the schedule of the
    base.
    """
    kept: Json = {}
    named: Json = {}
    for name, value in condition.items():
        path = name.removeprefix("schedule.")
        if path != name and ("." in path or isinstance(value, dict)):
            named[path] = value
        else:
            kept[name] = value
    if not named:
        return condition
    sets, shared = kept.get("sets", {}), base.get("schedule")
    if "schedule.points" in sets:
        shared = {"points": sets["schedule.points"]}
    whole = gathered_schedule({**(shared if isinstance(shared, dict) else {}), **named})
    return {**kept, "sets": {**sets, "schedule.points": whole["points"]}}


def _gathered(table: Mapping[str, Any]) -> Json:
    """Return one condition. It names a key dotted (`loss.mode = "ppo"`), as a table (`loss = { mode
    = "ppo" }`), or by its bare name where one section alone has it (`lr = 1e-4`).
    """
    own: Json = {}
    sets: Json = {}
    for name, setting in table.items():
        if name in (*CONDITION_KEYS, "sets"):
            own[name] = setting
            continue
        if name in section_models() and isinstance(setting, dict):
            settings = {f"{name}.{key}": value for key, value in setting.items()}
        else:
            homes = condition_homes(name)
            settings = {homes[0] if len(homes) == 1 else name: setting}
        for given, value in settings.items():
            path = ALIASES.get(given, given)
            (sets if is_settable(path) else own)[path] = value
    if sets:
        own["sets"] = {**own.get("sets", {}), **sets}
    return own
