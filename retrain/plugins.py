"""Plugins: one way to find, load and check every kind.

A name means a built-in object, an installed entry point (group `retrain.plugins`), or a dotted path
"module.function". For a dotted path retrain first tries the prefixes of `[plugins] search_paths`;
the current folder and the folder of the TOML file are importable.
"""

import hashlib
import importlib
import inspect
import json
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import EntryPoint
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from retrain.config.names import (
    OWN_PLUGINS,
    bracketed,
    installed_plugins,
    is_data_location,
    is_dotted,
    nearest,
)
from retrain.errors import ConfigurationError, RetrainError, RunFailed
from retrain.system import imported, toml_value

if TYPE_CHECKING:
    from retrain.config import TrainConfig


@dataclass(frozen=True)
class Kind:
    """The requirements on a plugin of one kind."""

    key: str
    """The key of the configuration that names it."""
    inputs: tuple[str, ...]
    """Names of the positional inputs of the plain form `f(...)`."""
    keywords: tuple[str, ...] = ()
    """Optional inputs, passed by name if the signature takes them."""
    context: bool = False
    """True if the kind also accepts a function of one context object, `f(ctx)`."""
    params_key: str = ""
    """The table whose values the plugin takes."""
    base: str = ""
    """The class that a plugin must derive from, as "module.Class"; "" for a function."""
    group: "Kind | None" = None
    """The form for a whole group, chosen by the name of its first input; None if there is none."""

    @property
    def path(self) -> str:
        """The key as "section.key"."""
        return _path(self.key)

    @property
    def forms(self) -> str:
        """The allowed signatures, for a message."""
        if self.base:
            return "a class"
        if not self.inputs:
            return "f(**params)" if not self.context else "f(), f(params) or f(ctx)"
        plain = ", ".join([*self.inputs, *(f"{keyword}=..." for keyword in self.keywords)])
        whole = f" or {self.group.forms}" if self.group else ""
        return f"f({plain})" + (" or f(ctx)" if self.context else "") + whole


def _path(key: str) -> str:
    return key.replace("] ", ".").strip("[]")


KINDS: dict[str, Kind] = {
    "advantage": Kind(
        "[algorithm] advantage_mode",
        ("rewards",),
        ("params",),
        True,
        "[algorithm.advantage_params]",
    ),
    "transform": Kind(
        "[algorithm] transform_mode", (), ("params",), True, "[algorithm.transform_params]"
    ),
    "uncertainty": Kind(
        "[algorithm] uncertainty_kind",
        ("logprobs",),
        ("params",),
        True,
        "[algorithm.uncertainty_params]",
    ),
    "algorithm": Kind(
        "[algorithm] algorithm_mode", ("ctx",), ("params",), True, "[algorithm.params]"
    ),
    "reward": Kind(
        "[reward] type",
        ("response", "reference"),
        ("prompt", "example", "params", "token_count", "finish_reason"),
        False,
        "[reward] params",
        group=Kind(
            "[reward] type",
            ("responses", "reference"),
            ("prompt", "example", "params", "token_counts", "finish_reasons"),
        ),
    ),
    "data": Kind("[data] source", (), (), False, "[data] params"),
    "sampler": Kind(
        "[data] sampler",
        (),
        params_key="[data] sampler_params",
        base="retrain.data.samplers.PromptSampler",
    ),
    "engine": Kind("[inference] engine", (), base="retrain.inference_engine.base.InferenceEngine"),
    "backend": Kind("[backend] backend", (), base="retrain.backends.base.Backend"),
    "environment": Kind("[environment] provider", (), base="retrain.environments.base.Environment"),
    "loss": Kind("[loss] mode", ("tokens",), ("params",), False, "[loss] params"),
    "correction": Kind("[loss] correction", ("tokens",)),
    "aggregation": Kind("[loss] aggregation", ("counts", "group")),
}


@dataclass(frozen=True)
class Call:
    """The call that a plugin function expects."""

    takes_context: bool
    keywords: frozenset[str]
    """The optional inputs of its kind that its signature has."""
    whole_group: bool = False
    """True if it takes the completions of a whole group."""


@dataclass(frozen=True)
class Plugin:
    """A function of one kind with its table of parameters, called in the form that its signature
    asks for.
    """

    kind: str
    name: str
    function: Callable[..., Any]
    params: dict[str, Any]

    @property
    def where(self) -> str:
        """The key that names it, for messages."""
        return f'{KINDS[self.kind].key} = "{self.name}"'

    @cached_property
    def form(self) -> Call:
        return inspect_call(self.kind, self.function)

    def call(
        self, *plain: Any, context: Any = None, optional: Mapping[str, Any] | None = None
    ) -> Any:
        """Call it with the plain inputs, or with the context if it takes that; of `optional` and
        `params` it gets what it takes. Its own exceptions come through.
        """
        if self.form.takes_context:
            plain = (context,)
        given = {"params": copy(self.params), **(optional or {})}
        return self.function(*plain, **{name: given[name] for name in self.form.keywords})

    def __call__(self, *plain: Any, context: Any = None, place: str = "") -> Any:
        """Call it in a run. Raises RunFailed naming the `place` for whatever it raises."""
        with user_code(f"{self.where}{place}", RunFailed):
            return self.call(*plain, context=context)


class ForeignCode(ConfigurationError):
    """A run's folder names the code, and nobody said that it may be run."""


class Fault(Exception):
    """A plugin lacks a property; the message is the predicate of a sentence about the plugin."""


def load_plugin(
    kind: str,
    name: str,
    config: "TrainConfig",
    builtins: Mapping[str, Any] | None = None,
    key: str = "",
) -> Any:
    """Return the callable, class or built-in object that `name` means for this kind.

    `builtins` holds the kind's own names, and `key` is the key with the name unless the kind has
    one. Raises ConfigurationError, one sentence naming the
    attempts, for a missing or ambiguous name. It does so too for code that does not load, a
    signature of another kind, or params that it cannot take.
    """
    where = _placed(config, key or f'{KINDS[kind].key} = "{name}"')
    installed = installed_plugins()
    own, points = builtins or {}, [point for point in installed if point.name == name]
    places = ["built in"] * (name in own) + [f"entry point {place_of(point)}" for point in points]
    if len(places) > 1:
        raise ConfigurationError(
            f"{where} exists twice ({' and '.join(places)}); rename or uninstall one."
        )
    if name in own:
        return own[name]
    if points:
        with user_code(f"{where}: loading {places[0]}", ConfigurationError):
            plugin = points[0].load()
    elif "." in name:
        if config._provenance.foreign and not name.startswith(OWN_PLUGINS):
            raise ForeignCode(
                f"{where} is code that a run's folder names, and looking at a run does not"
                " execute it. Read the code first, then add --trust."
            )
        plugin = _load_dotted(name, where, config)
    else:
        names = [*own, *(point.name for point in installed)]
        close = nearest(name, names)
        hint = f'; did you mean "{close}"?' if close else "."
        raise ConfigurationError(
            f"{where} is not known; it can be {', '.join(sorted(names))}, or a dotted path such as"
            f" my_module.my_function{hint}"
        )
    if kind == "advantage" and inspect.isclass(plugin):  # a stateful plugin
        with user_code(where, ConfigurationError):
            plugin = plugin()
    _check(kind, plugin, where, config)
    return plugin


def load_function(
    kind: str,
    name: str,
    config: "TrainConfig",
    builtins: Mapping[str, Any] | None = None,
    params: dict[str, Any] | None = None,
) -> Any:
    """Return the built-in object that `name` means, or a Plugin. `params` replace the configured
    parameters; the plugin reads them at every call. Raises ConfigurationError as `load_plugin`
    does, and for parameters that the built-in object does not know.
    """
    found = load_plugin(kind, name, config, builtins)
    if name in (builtins or {}):
        refuse_unknown_params(kind, name, getattr(found, "parameters", ()), config)
        return found
    return Plugin(kind, name, found, params_of(kind, config) if params is None else params)


def place_of(point: EntryPoint) -> str:
    """Say what an entry point names, and of which package."""
    return f"{point.value} of {point.dist.name if point.dist else 'an installed package'}"


def _dotted_names(config: "TrainConfig") -> list[tuple[str, str]]:
    """Return ("section.key", dotted name) of every plugin that a configuration names by path."""
    from retrain.config.keys import all_keys

    reward = config.reward
    values = [(key.path, config.value(key.path)) for key in all_keys() if key.takes_plugin]
    given = [
        (path, name)
        for path, value in values
        for name in (value if isinstance(value, list) else [value])
    ]
    given += [
        (f"algorithm.{mode}", str(getattr(condition, mode)))
        for condition in config.conditions
        for mode in ("advantage_mode", "transform_mode", "algorithm_mode")
    ]
    given += [("reward.custom_module", f"{reward.custom_module}.{reward.custom_function}")] * (
        "custom" in reward.types
    )
    return [(path, name) for path, name in given if is_dotted(name) and not is_data_location(name)]


def plugin_hashes(config: "TrainConfig") -> dict[str, str]:
    """Return dotted name -> sha256 (hex) of the file with the plugin, for every plugin that the
    configuration names by its path.

    This runs no code: only the workers load a reward. A name without a file has no entry.
    """
    from retrain.config.plan import sources_of

    places = [*map(str, config.search_folders), *sys.path]
    every = (config, *(source.config for source in sources_of(config)))
    hashes = {}
    for _, name in chain.from_iterable(map(_dotted_names, every)):
        files = [file for one in _modules_of(name, config) for file in _files_of(one, places)]
        for file in files[:1]:
            hashes[name] = hashlib.sha256(file.read_bytes()).hexdigest()
    return hashes


def _files_of(module: str, places: Iterable[str]) -> list[Path]:
    """Find the files of a module. importlib.util.find_spec would import its parents, which is to
    run them.
    """
    relative = Path(*module.split("."))
    tails = (relative / "__init__.py", relative.with_suffix(".py"))
    files = [Path(place, tail) for place in places for tail in tails]
    return [file for file in files if file.is_file()]


def _modules_of(name: str, config: "TrainConfig") -> list[str]:
    """Return the modules that may hold a dotted name, in the order of trial."""
    module = name.rpartition(".")[0]
    if name.startswith(OWN_PLUGINS):
        return [module]
    prefixes = [f"{prefix}." if prefix else "" for prefix in config.plugins.search_paths]
    return [f"{prefix}{module}" for prefix in [*prefixes, ""]]


def named_code(config: "TrainConfig") -> list[str]:
    """List, as `[section] key = value`, the keys of a configuration and its conditions that name
    Python code outside of retrain and installed plugins.
    """
    from retrain.config.load import arms
    from retrain.config.plan import sources_of

    conditions = arms(config)
    alone = (source.config for one in conditions for source in sources_of(one))
    every = (config, *conditions, *alone)
    return list(dict.fromkeys(chain.from_iterable(map(_code_of, every))))


def _code_of(config: "TrainConfig") -> list[str]:
    model, environment = config.model, config.environment
    named = [
        (path, name) for path, name in _dotted_names(config) if not name.startswith(OWN_PLUGINS)
    ]
    # The id of a verifiers environment is a module's name, or what auto_install fetches from a hub.
    if environment.provider == "verifiers":
        named.append(("environment.id", environment.id))
    sentences = [f"{bracketed(path)} = {toml_value(name)}" for path, name in named]
    remote = [f"[model] trust_remote_code = true (of {model.model})"] * model.trust_remote_code
    return remote + sentences


def inspect_call(kind: str, function: Callable[..., Any]) -> Call:
    """Determine the call of a plugin function of this kind. Raises ValueError naming the valid
    signatures.
    """
    expected, signature = KINDS[kind], _signature(function)
    parameters = list(signature.parameters.values())
    names = [*signature.parameters]
    # The name of the first parameter decides between one completion and a group of completions.
    group = expected.group
    if group is not None and names[:1] != [group.inputs[0]]:
        group = None
    expected = group or expected
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    keywords = frozenset(key for key in expected.keywords if takes_any or key in names)
    takes_context = expected.context and bool(names) and _is_context(parameters[0])
    inputs = ("ctx",) if takes_context else expected.inputs
    try:
        signature.bind(*inputs, **dict.fromkeys(keywords))
    except TypeError:
        raise ValueError(
            f"its signature is ({', '.join(names)}), and a plugin of this kind must be"
            f" {KINDS[kind].forms}"
        ) from None
    return Call(takes_context, keywords, group is not None)


def _signature(function: Callable[..., Any]) -> inspect.Signature:
    try:
        return inspect.signature(function)
    except ValueError:  # a function written in C tells nothing
        return inspect.signature(lambda *_: None)


def _is_context(parameter: inspect.Parameter) -> bool:
    """Return True if the parameter has the name or annotation of its kind's context."""
    annotation = getattr(parameter.annotation, "__name__", str(parameter.annotation))
    return parameter.name in ("ctx", "context") or annotation.endswith("Context")


class Params(dict[str, Any]):
    """A plugin's table of parameters. A KeyError for one that it lacks says whose it would be."""

    def __init__(self, values: Mapping[str, Any], table: str) -> None:
        super().__init__(values)
        self.table = table

    def __missing__(self, name: str) -> Any:
        error = KeyError(name)
        error.add_note(f"{self.table} does not give it")
        raise error


def params_of(kind: str, config: "TrainConfig") -> dict[str, Any]:
    """Return the table of parameters of a kind. The result omits `uncertainty_kind` in a
    transform's table, because retrain reads it.
    """
    key = KINDS[kind].params_key
    table = Params(config.value(_path(key)) if key else {}, key)
    if kind == "transform":
        table.pop("uncertainty_kind", None)
    return table


def refuse_unknown_params(
    kind: str, name: str, known: Collection[str], config: "TrainConfig"
) -> None:
    """Raise ConfigurationError for a params table with a name that the built-in `name` does not
    know.
    """
    allowed = f"it knows {', '.join(sorted(known))}" if known else "it has no parameters"
    for param in params_of(kind, config).keys() - known:
        raise ConfigurationError(
            f"{_placed(config, KINDS[kind].params_key)} {param} is not a parameter of the built-in"
            f' "{name}"; {allowed}.'
        )


# -- trials ----------------------------------------------------------------------------------------


def probe(plugin: Plugin, config: "TrainConfig", trial: Callable[[], str | None]) -> list[str]:
    """Try a plugin on a small example before the first step; return the trial's note.

    Raises ConfigurationError for a Fault, whatever its code raises, and an output of another form;
    with `[plugins] strict = false` that is a note.
    """
    try:
        note = trial()
    except ConfigurationError:
        raise
    except Exception as error:
        cause: BaseException = error
        if isinstance(error, RunFailed):  # the plugin's own exception, as a run would name it
            cause = error.__cause__ or error
        problem = f"fails on a small example ({describe(cause)})"
        if isinstance(cause, Fault):
            problem = str(cause)
        note = f"{plugin.where} {problem}"
        if config.plugins.strict:
            raise ConfigurationError(
                f"{_placed(config, note)}; fix it, or set [plugins] strict = false to get only a"
                " warning."
            ) from error
        note = f"{note}; the run continues because [plugins] strict = false."
    return [note] if note else []


def state_of(where: str, plugin: Any) -> dict[str, Any]:
    """Return, through JSON, what a plugin keeps between steps; {} if it has no `state`. Raises
    RunFailed.
    """
    with user_code(f"{where}: state()", RunFailed):
        kept: dict[str, Any] = json.loads(json.dumps(getattr(plugin, "state", dict)()))
    return kept


def restore(where: str, plugin: Any, state: dict[str, Any]) -> None:
    """Give a plugin what `state_of` returned. Raises RunFailed."""
    if state and hasattr(plugin, "load"):
        with user_code(f"{where}: load()", RunFailed):
            plugin.load(state)


@contextmanager
def user_code(what: str, failure: type[RetrainError]) -> Iterator[None]:
    """Run a plugin's code. Whatever it raises becomes `failure`, one sentence that begins with
    `what`, with the cause attached.
    """
    try:
        yield
    except (RetrainError, KeyboardInterrupt):
        raise
    except Fault as fault:
        raise failure(f"{what} {fault}.") from fault
    except BaseException as error:  # anything may come, SystemExit too: the code is not ours
        if type(error).__module__.startswith("retrain."):  # an alarm of our own
            raise
        raise failure(f"{what} failed with {describe(error)}.") from error


def describe(error: BaseException) -> str:
    """Return `TypeName: first line of the message`, and of each note of the error."""
    firsts: list[str] = []
    with suppress(BaseException):  # the text is the plugin's code too
        texts = (str(error), *getattr(error, "__notes__", ()))
        firsts = [line.rstrip(".") for text in texts for line in text.strip().splitlines()[:1]]
    return ": ".join(filter(None, (type(error).__name__, ", ".join(firsts))))


# -- dotted paths ----------------------------------------------------------------------------------


def _load_dotted(name: str, where: str, config: "TrainConfig") -> Any:
    attribute = name.rpartition(".")[2]
    tried = []
    for candidate in _modules_of(name, config):
        module = _import(candidate, config, where)
        if hasattr(module, attribute):
            return getattr(module, attribute)
        reason = "no such module"
        if module is not None:
            close = nearest(attribute, vars(module))
            reason = f"has no {attribute}" + (f", but {close}" if close else "")
        tried.append(f"{candidate} ({reason})")
    places = ", ".join(dict.fromkeys(map(str, config.search_folders)))
    raise ConfigurationError(
        f"{where} does not load: tried {', '.join(tried)} in {places} and sys.path."
    )


def _import(name: str, config: "TrainConfig", where: str) -> ModuleType | None:
    """Import a module; None if there is none of that name."""
    folders = list(map(str, config.search_folders))
    with _importable(folders), user_code(f"{where}: importing {name}", ConfigurationError):
        # The folders where a run began may hold the original of a copied file.
        existing = _files_of(name, dict.fromkeys(map(str, config.own_folders)))
        if len(existing) > 1:
            raise ConfigurationError(
                f"{where} exists twice, in {existing[0]} and {existing[1]}; rename one."
            )
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise  # a module that the plugin itself imports
            return None
        # Python loads each module once, and may have loaded its own before the user's.
        own = name.partition(".")[0] in sys.stdlib_module_names
        if own and existing and getattr(module, "__file__", None) != str(existing[0]):
            raise ConfigurationError(
                f"{where}: Python ignores {existing[0]}, since it has a module {name} of its"
                " own. Rename the file."
            )
        return module


@contextmanager
def _importable(names: Sequence[str]) -> Iterator[None]:
    """Put the folders first on sys.path during the import of a plugin. Afterwards they stay at its
    end, for later imports of the plugin.

    They do not stay first: a `datasets` package in the user's folder must not replace the library
    that retrain imports lazily.
    """
    importlib.invalidate_caches()  # the file may be newer than the last look at its folder
    sys.path[:0] = names
    try:
        yield
    finally:
        for name in names:
            sys.path.remove(name)
        sys.path.extend(name for name in names if name not in sys.path)


# -- checks ----------------------------------------------------------------------------------------


def _check(kind: str, plugin: Any, where: str, config: "TrainConfig") -> None:
    expected, params = KINDS[kind], params_of(kind, config)
    what = f"of type {type(plugin).__name__}"
    if isinstance(plugin, type):
        what = f"the class {plugin.__name__}"
    if expected.base:
        _check_class(plugin, expected.base, where, what)
    elif not callable(plugin):
        raise ConfigurationError(f"{where} is {what}, and must be a function: {expected.forms}.")
    elif kind == "data":
        source_arguments(plugin, params, "train", where)
    else:
        try:
            call = inspect_call(kind, plugin)
        except ValueError as error:
            raise ConfigurationError(f"{where}: {error}.") from error
        if params and not call.takes_context and "params" not in call.keywords:
            raise ConfigurationError(
                f"{where} takes no params, but {expected.params_key} gives {', '.join(params)};"
                " give the function a `params` argument or empty the table."
            )


def _check_class(plugin: Any, base_path: str, where: str, what: str) -> None:
    derives = inspect.isclass(plugin) and issubclass(plugin, imported(base_path))
    if not derives:
        raise ConfigurationError(f"{where} is {what}, and must be a subclass of {base_path}.")
    if inspect.isabstract(plugin):
        missing = ", ".join(sorted(plugin.__abstractmethods__))
        raise ConfigurationError(f"{where} does not define {missing} of {base_path}.")


def source_arguments(
    source: Callable[..., Any], params: Mapping[str, Any], split: str, where: str
) -> dict[str, Any]:
    """Return the arguments of a data source: its params, and `split` if it takes one. Raises
    ConfigurationError for params that do not fit.
    """
    signature = _signature(source)
    given = dict(params) | ({"split": split} if "split" in signature.parameters else {})
    try:
        signature.bind(**given)
    except TypeError as error:
        raise ConfigurationError(
            f"{where} does not take [data] params {sorted(params)}: {error}."
        ) from error
    return given


def _placed(config: "TrainConfig", sentence: str) -> str:
    """Begin a sentence with the flag or variable that gave its first key, else with the file, if
    there is one.
    """
    origin = config._provenance.origins.get(_path(sentence.partition(" = ")[0]), "file")
    place = config.source_path if origin == "file" else origin
    return f"{place}: {sentence}" if place else sentence
