"""Flags and environment variables that set keys, made from the schema: `--lr 1e-4`,
`--sepa-steps=10`, `--sepa.steps 10`, RETRAIN_TRAINING_LR.

A text becomes a value by the type of its key. A text that does not fit the type stays unchanged,
and the schema refuses it with the same sentence as a file's value. The functions import the schema,
so that `retrain --help` does not pay for it.
"""

import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from retrain.config.names import NAME_CUTOFF, instead, nearest
from retrain.errors import MAX_SENTENCES, ConfigurationError
from retrain.system import Json, ParseError, parse_toml, toml_value

if TYPE_CHECKING:
    from retrain.config.keys import Key


def deep_merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> Json:
    """Return a new table: `above` wins, and tables in both merge."""
    merged = dict(below)
    for name, value in above.items():
        old = merged.get(name)
        if isinstance(old, dict) and isinstance(value, dict):
            merged[name] = deep_merge(old, value)
        else:
            merged[name] = value
    return merged


VARIABLE_PREFIX = "RETRAIN_"

_INTEGER = re.compile(r"[+-]?\d+(_\d+)*")
MAX_DIGITS = 4300
"""Python converts no longer text to an integer."""
_BOOLEANS = ("true", "false", "yes", "no", "on", "off", "0", "1")
"""Words, in any case, that mean a switch's value; the schema refuses all but the first two."""
_TOML_STRUCTURE = ("[", "{", '"', "'")


@dataclass(frozen=True)
class Override:
    """One value from a flag or a variable."""

    path: str
    """ "section.key"."""
    value: Any
    origin: str
    """ "flag --lr" or "environment RETRAIN_TRAINING_LR"."""
    adds: bool = False
    """True if the value is a table to merge into the table below it instead of replacing it."""


@dataclass(frozen=True)
class Overrides:
    given: tuple[Override, ...] = ()
    rest: tuple[str, ...] = ()
    """Arguments that are not flags of the configuration, in their order: files, commands, the
    caller's own flags."""


def parse_overrides(argv: Sequence[str], own_flags: Mapping[str, bool] | None = None) -> Overrides:
    """Split arguments into values for keys and the remaining arguments.

    `own_flags` are the caller's flags, which go to the rest: name to whether a value follows.
    Raises one ConfigurationError for all unknown flags, which names the nearest flag of each.
    """
    return _Parser(argv, own_flags or {}).parse()


def variable_overrides(environ: Mapping[str, str]) -> list[Override]:
    """Return the values of the variables RETRAIN_<SECTION>_<KEY>. Refuses a variable of that form
    that names no key.
    """
    from retrain.config.keys import all_keys

    variables = {key.variable: key for key in all_keys()}
    found: list[Override] = []
    problems: list[str] = []
    for name, text in environ.items():
        key = variables.get(name)
        if key:
            found.append(Override(key.path, convert(key, text), f"environment {name}"))
        elif name.startswith(VARIABLE_PREFIX):
            problems += _unknown_variable(name, tuple(variables))
    if problems:
        raise ConfigurationError(problems)
    return found


def _unknown_variable(name: str, variables: tuple[str, ...]) -> Iterator[str]:
    """Yield a sentence for a RETRAIN_ variable that names or nearly names a section. Other programs
    may use any other variable.
    """
    from retrain.config.keys import key_meant, section_models
    from retrain.config.removed import farewell, removed_key

    gone = farewell(removed_key(name.removeprefix(VARIABLE_PREFIX)), f"environment {name}")
    if gone:
        yield f"{gone}."
        return
    section, _, rest = name.removeprefix(VARIABLE_PREFIX).lower().partition("_")
    ours = section in section_models()
    meant = key_meant(rest, section) if ours else None
    near = meant.variable if meant else nearest(name, variables, cutoff=0.6 if ours else 0.9)
    if near:
        yield f"environment {name} sets no key; did you mean {near}?"
    elif ours:
        yield f"environment {name} sets no key; variables are RETRAIN_<SECTION>_<KEY>."


def convert(key: "Key", text: str) -> Any:
    """Convert a text to a value of the key's type. Returns a text that does not fit the type
    unchanged.
    """
    kinds = key.kinds
    # A TOML inline table or list; a JSON object stays text, which environment.args reads by itself.
    if dict in kinds or (list in kinds and text.lstrip().startswith("[")):
        return (_toml(f"value = {text}") or {"value": text})["value"]
    # A key that also takes a string keeps one without commas.
    if list in kinds and not (
        str in kinds and ("," not in text or key.path == "planning.strategic_grams")
    ):
        return [_scalar(key.item_kinds, part.strip()) for part in text.split(",") if part.strip()]
    return _scalar(kinds, text)


def _scalar(kinds: frozenset[type], text: str) -> Any:
    if bool in kinds and text in ("true", "false"):
        return text == "true"
    if int in kinds and _INTEGER.fullmatch(text) and len(text) < MAX_DIGITS:
        return int(text)
    # An integer's key gets the number too, for a sentence that says how to write it.
    if float in kinds or (int in kinds and str not in kinds and not _INTEGER.fullmatch(text)):
        try:
            return float(text)
        except ValueError:
            return text
    return text


def _toml(text: str) -> Json | None:
    try:
        return parse_toml(text)
    except ParseError:
        return None


def table_entry(text: str, flag: str) -> Json:
    """Parse `key=value` into a table: TOML's types, and a bare word is a string. Dots in the key
    nest.
    """
    name, equals, value = text.partition("=")
    if not equals or not name.strip():
        example = "cap=0.1"
        if flag == "--schedule-points":
            example = "'training.lr=[[0, 1e-5], [200, 0]]'"
        raise ConfigurationError(
            f"flag {flag} takes key=value, such as {flag} {example}, and got {text!r}."
        )
    parsed = (_toml(f"value = {value}") or {"value": None})["value"]
    if parsed is None and value.lstrip().startswith(_TOML_STRUCTURE):
        raise ConfigurationError(
            f"flag {flag} {text!r} is not valid TOML; quote it if it is a string."
        )
    # A bare word is a string, and so is a date.
    if not isinstance(parsed, (str, int, float, bool, list, dict)):
        value = toml_value(value)
    table = _toml(f"{name} = {value}")
    if table is None:
        raise ConfigurationError(
            f"flag {flag} {text!r}: {name.strip()!r} is not a key; use letters, digits, _ and -."
        )
    return table


def _key_of(path: str) -> "Key":
    from retrain.config.keys import keys_by_path
    from retrain.config.names import ALIASES

    return keys_by_path()[ALIASES.get(path, path)]


class _Parser:
    """Walks over the arguments once."""

    def __init__(self, argv: Sequence[str], own_flags: Mapping[str, bool]) -> None:
        from retrain.config.keys import flags

        self._argv = deque(argv)
        self._own = own_flags
        self._flags = flags()
        self._values: dict[str, Override] = {}
        self._rest: list[str] = []
        self._problems: list[str] = []
        self._unnamed = 0

    def parse(self) -> Overrides:
        while self._argv:
            argument = self._argv.popleft()
            if argument == "--":
                self._rest.extend(self._argv)
                break
            name, equals, text = argument.partition("=")
            if name in self._own:
                self._rest.append(argument)
                if self._own[name] and not equals and self._argv:
                    self._rest.append(self._argv.popleft())
            elif not argument.startswith("--"):
                self._rest.append(argument)
            else:
                self._read(name, text if equals else None)
        if self._problems:
            raise ConfigurationError(self._problems, self._unnamed)
        return Overrides(tuple(self._values.values()), tuple(self._rest))

    def _read(self, flag: str, text: str | None) -> None:
        path, inside, negated = self._find(flag)
        if path is None:
            self._refuse_unknown(flag)
            return
        key = _key_of(path)
        if negated:
            if text is not None:
                self._problems.append(
                    f"flag {flag} takes no value, and got {text!r}; write"
                    f" --{flag.removeprefix('--no-')}={text}."
                )
            self._set(path, False, flag)
            return
        if text is None and (text := self._following(key, flag)) is None:
            return
        try:
            if inside:
                self._set(path, table_entry(f"{inside}={text}", flag), flag, adds=True)
            elif dict in key.kinds and not text.lstrip().startswith("{"):
                self._set(path, table_entry(text, flag), flag, adds=True)
            else:
                self._set(path, convert(key, text), flag)
        except ConfigurationError as error:
            self._problems.extend(error.problems)

    def _find(self, flag: str) -> tuple[str | None, str, bool]:
        """Return the key of a flag, the place inside of its table, and True for a --no- form."""
        if flag in self._flags:
            return self._flags[flag], "", False
        if flag.startswith("--no-"):
            path, inside, negated = self._find("--" + flag.removeprefix("--no-"))
            if path and not inside and not negated and bool in _key_of(path).kinds:
                return path, "", True
            return None, "", False
        from retrain.config.keys import keys_by_path
        from retrain.config.names import ALIASES

        # The dotted forms: --section.key, and --section.table.name for a value in a table.
        section, _, rest = flag.removeprefix("--").partition(".")
        leaf, _, inside = rest.partition(".")
        path = f"{section}.{leaf.replace('-', '_')}"
        known = path in keys_by_path() or path in ALIASES
        if not known or (inside and dict not in _key_of(path).kinds):
            return None, "", False
        return path, inside, False

    def _following(self, key: "Key", flag: str) -> str | None:
        """Return the next argument as this flag's value. A switch needs none; what follows it may
        be a file.
        """
        following = self._argv[0] if self._argv else "--"
        if bool in key.kinds and following.lower() not in (*_BOOLEANS, *key.choices):
            return "true"
        if following.startswith("--"):
            self._problems.append(f"flag {flag} needs a value: {key.allowed}.")
            return None
        return self._argv.popleft()

    def _set(self, path: str, value: Any, flag: str, adds: bool = False) -> None:
        before = self._values.get(path)
        if adds and before is not None and isinstance(before.value, dict):
            value, adds = deep_merge(before.value, value), before.adds
        self._values[path] = Override(path, value, f"flag {flag}", adds)

    def _refuse_unknown(self, flag: str) -> None:
        from retrain.config.keys import key_meant
        from retrain.config.removed import farewell, removed_key

        if len(self._problems) >= MAX_SENTENCES:
            self._unnamed += 1
            return
        word = flag.removeprefix("--")
        gone = farewell(removed_key(word), flag)
        if gone:
            self._problems.append(f"{gone}.")
            return
        section, _, leaf = word.rpartition(".")
        near, meant = _nearest_flag(word, [*self._flags, *self._own]), key_meant(leaf, section)
        # Behind a section a near flag is the better guess than a key that has the name elsewhere.
        if meant and not (section and near):
            near = meant.flag
        clause, hint = instead(leaf), "`retrain help config` lists them all."
        if near:
            hint = f"did you mean {near}?"
        if clause:
            hint = f"{clause}."
        self._problems.append(f"{flag} is not a flag; {hint}")


def _nearest_flag(word: str, flags: Sequence[str]) -> str | None:
    """Return the flag closest to a mistyped one without its dashes, which would make any two short
    words alike.
    """
    from retrain.config.keys import all_keys, homes_of

    # A key whose flag has no section is also known with its section: --training-batch-size.
    known = {key.path: key.flag for key in all_keys()}
    # If the flag begins with the section, the key alone counts too: --clip-hihg.
    known |= {key.name: key.flag for key in all_keys() if len(homes_of(key.name)) == 1}
    known |= {flag.removeprefix("--"): flag for flag in flags}
    spelled = {_dashed(name): flag for name, flag in known.items()}
    return spelled.get(nearest(_dashed(word), spelled, NAME_CUTOFF) or "")


def _dashed(name: str) -> str:
    return name.replace(".", "-").replace("_", "-")
