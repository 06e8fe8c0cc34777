"""Plugins: one way for every kind to be found, loaded and checked.

A name is built in, an installed entry point (group `retrain.plugins`), or a dotted path
"module.function". For a dotted path the prefixes of `[plugins] search_paths` are tried first; the
current folder and the folder of the TOML file are importable.
"""

import hashlib
import importlib
import inspect
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.machinery import PathFinder
from importlib.metadata import EntryPoint
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

from retrain.config.names import (
    OWN_PLUGINS,
    installed_plugins,
    is_data_location,
    is_dotted,
    nearest,
)
from retrain.errors import ConfigurationError, RetrainError, RunFailed
from retrain.system import toml_value

if TYPE_CHECKING:
    from retrain.config import TrainConfig

T = TypeVar("T")


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
    """True if a function of one context object, `f(ctx)`, is allowed instead of the plain form."""
    params_key: str = ""
    """The table whose values the plugin takes."""
    base: str = ""
    """The class that a plugin must derive from, as "module.Class"; "" for a function."""
    group: "Kind | None" = None
    """The form for a whole group, chosen by the name of its first input; None if there is none."""

    @property
    def forms(self) -> str:
        """The allowed signatures, for a message."""
        if self.base:
            return "a class"
        if not self.inputs:
            return "f(**params)" if not self.context else "f(), f(params) or f(ctx)"
        plain = ", ".join([*self.inputs, *(f"{keyword}=..." for keyword in self.keywords)])
        whole = ""
        if self.group:
            whole = f" or {self.group.forms}"
        return f"f({plain})" + (" or f(ctx)" if self.context else "") + whole


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
_CONTEXT_NAMES = ("ctx", "context")


@dataclass(frozen=True)
class Call:
    """The call that a plugin function expects."""

    takes_context: bool
    keywords: frozenset[str]
    """The optional inputs of its kind that its signature has."""
    whole_group: bool = False
    """It takes the completions of a whole group."""


class ForeignCode(ConfigurationError):
    """A run's folder names the code, and nobody said that it may be run."""


def load_plugin(
    kind: str, name: str, config: "TrainConfig", builtins: Mapping[str, Any] | None = None
) -> Any:
    """Return the callable, class or built-in object that `name` means for this kind.

    `builtins` holds the kind's own names. Raises ConfigurationError, one sentence naming what was
    tried, for a name that is not found or found twice, code that cannot be loaded, a signature that
    is not of the kind, or params that it cannot take.
    """
    where = _where(kind, name, config)
    installed = installed_plugins()
    own, points = dict(builtins or {}), [point for point in installed if point.name == name]
    places = ["built in"] * (name in own) + [_place(point) for point in points]
    if len(places) > 1:
        raise ConfigurationError(
            f"{where} is found twice ({' and '.join(places)}); rename or uninstall one."
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
        hint = "."
        if close:
            hint = f'; did you mean "{close}"?'
        raise ConfigurationError(
            f"{where} is not known; it can be {', '.join(sorted(names))}, or a dotted path such as"
            f" my_module.my_function{hint}"
        )
    if kind == "advantage" and inspect.isclass(plugin):  # one that keeps something between steps
        with user_code(where, ConfigurationError):
            plugin = plugin()
    _check(kind, plugin, where, config)
    return plugin


def _place(point: EntryPoint) -> str:
    package = point.dist.name if point.dist else "an installed package"
    return f"entry point {point.value} of {package}"


def _dotted_names(config: "TrainConfig") -> list[tuple[str, str]]:
    """("section.key", dotted name) of every plugin that a configuration names by its path."""
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
    """Dotted name -> sha256 (hex) of the file with the plugin, for every one that the configuration
    names by its path.

    No code is run: a reward is loaded in its workers alone. A name whose file is not found has no
    entry.
    """
    from retrain.config.plan import sources_of

    every = (config, *(source.config for source in sources_of(config)))
    names = chain.from_iterable(map(_dotted_names, every))
    files = {name: _file_of(name, config) for _, name in names}
    return {
        name: hashlib.sha256(file.read_bytes()).hexdigest()
        for name, file in files.items()
        if file is not None
    }


def _file_of(name: str, config: "TrainConfig") -> Path | None:
    folders = list(map(str, _plugin_folders(config)))
    for candidate in _modules_of(name, config):
        where: Sequence[str] | None = [*folders, *sys.path]
        spec = None
        parts = candidate.split(".")
        for depth in range(len(parts)):
            # The part before is a module and no package.
            if where is None:
                spec = None
                break
            # importlib.util.find_spec would import the parents, which is to run them.
            spec = PathFinder.find_spec(".".join(parts[: depth + 1]), where)
            where = spec.submodule_search_locations if spec is not None else None
        if spec is not None and spec.origin is not None and Path(spec.origin).is_file():
            return Path(spec.origin)
    return None


def _modules_of(name: str, config: "TrainConfig") -> list[str]:
    """Return the modules that may hold a dotted name, in the order of trial."""
    module = name.rpartition(".")[0]
    if name.startswith(OWN_PLUGINS):
        return [module]
    prefixes = [f"{prefix}." if prefix else "" for prefix in config.plugins.search_paths]
    return [f"{prefix}{module}" for prefix in [*prefixes, ""]]


def _plugin_folders(config: "TrainConfig") -> list[Path]:
    """The folders where plugins are looked for before sys.path: the current one, and the folder of
    the configuration's file.
    """
    beside = []
    if config.source_path is not None:
        beside = [config.source_path.resolve().parent]
    return list(dict.fromkeys([Path.cwd(), *beside]))


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
    sentences = ["[{}] {} = {}".format(*path.split("."), toml_value(name)) for path, name in named]
    remote = [f"[model] trust_remote_code = true (of {model.model})"] * model.trust_remote_code
    return remote + sentences


def inspect_call(kind: str, function: Callable[..., Any]) -> Call:
    """Determine the call of a plugin function of this kind. Raises ValueError saying which
    signatures are allowed.
    """
    expected = KINDS[kind]
    parameters = _parameters(function)
    if parameters is None:  # a function written in C tells nothing
        return Call(takes_context=False, keywords=frozenset())
    kinds = {p.kind for p in parameters}
    names = [p.name for p in parameters]
    # What the first parameter is called decides between one completion and a group of them.
    group = expected.group
    if group is not None and names[:1] != [group.inputs[0]]:
        group = None
    expected = group or expected
    takes_any = inspect.Parameter.VAR_KEYWORD in kinds
    keywords = frozenset(key for key in expected.keywords if takes_any or key in names)
    own = [p for p in parameters if p.name not in expected.keywords]
    inputs = [p for p in own if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    takes_context = expected.context and bool(inputs) and _is_context(inputs[0])
    wanted = 1 if takes_context else len(expected.inputs)
    required = sum(p.default is p.empty for p in inputs)
    demands_keyword = any(p.kind is p.KEYWORD_ONLY and p.default is p.empty for p in own)
    too_few = len(inputs) < wanted and inspect.Parameter.VAR_POSITIONAL not in kinds
    if demands_keyword or required > wanted or too_few:
        raise ValueError(
            f"its signature is ({', '.join(names)}), and a plugin of this kind must be"
            f" {KINDS[kind].forms}"
        )
    return Call(takes_context, keywords, group is not None)


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter] | None:
    try:
        return list(inspect.signature(function).parameters.values())
    except ValueError:
        return None


def _is_context(parameter: inspect.Parameter) -> bool:
    """Return True if the parameter is named or annotated as the context of its kind."""
    annotation = parameter.annotation
    if not isinstance(annotation, str):
        annotation = getattr(annotation, "__name__", "")
    return parameter.name in _CONTEXT_NAMES or annotation.endswith("Context")


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
    """Return the table of parameters of a kind. `uncertainty_kind` in a transform's table is read
    by retrain, so it is left out.
    """
    tables: dict[str, Mapping[str, Any]] = {
        "advantage": config.algorithm.advantage_params,
        "transform": config.algorithm.transform_params,
        "uncertainty": config.algorithm.uncertainty_params,
        "algorithm": config.algorithm.params,
        "reward": config.reward.params,
        "data": config.data.params,
        "sampler": config.data.sampler_params,
        "loss": config.loss.params,
    }
    table = Params(tables.get(kind, {}), KINDS[kind].params_key)
    if kind == "transform":
        table.pop("uncertainty_kind", None)
    return table


def refuse_unknown_params(
    kind: str, name: str, known: frozenset[str], config: "TrainConfig"
) -> None:
    """Raise ConfigurationError for a params table with a name that the built-in `name` does not
    know.
    """
    unknown = [param for param in params_of(kind, config) if param not in known]
    if unknown:
        allowed = "it has no parameters"
        if known:
            allowed = f"it knows {', '.join(sorted(known))}"
        raise ConfigurationError(
            f"{_file(config.source_path)}{KINDS[kind].params_key} {unknown[0]} is not a parameter"
            f' of the built-in "{name}"; {allowed}.'
        )


def report_probe(kind: str, name: str, problem: str, config: "TrainConfig") -> str:
    """Report that a plugin gave something of the wrong shape on a small example: raise
    ConfigurationError, or return a warning if `[plugins] strict = false`.
    """
    sentence = f"{_where(kind, name, config)} {problem}"
    if config.plugins.strict:
        raise ConfigurationError(
            f"{sentence}; fix it, or set [plugins] strict = false to be warned only."
        )
    return f"{sentence}; the run continues because [plugins] strict = false."


def built(kind: str, where: str, make: Callable[[], T]) -> T:
    """Make an object of a plugin's class. Raises ConfigurationError: of its table of parameters for
    a ValueError, of a fault of its own for any other exception.
    """
    try:
        with user_code(where, ConfigurationError):
            return make()
    except ConfigurationError as error:
        if isinstance(error.__cause__, ValueError):
            raise ConfigurationError(f"{KINDS[kind].params_key}: {error.__cause__}.") from error
        raise


def state_of(where: str, give: Callable[[], Any]) -> dict[str, Any]:
    """Return, through JSON, what the `state` of a plugin gives. Raises RunFailed."""
    with user_code(f"{where}: state()", RunFailed):
        kept: dict[str, Any] = json.loads(json.dumps(give()))
    return kept


@contextmanager
def user_code(what: str, failure: type[RetrainError]) -> Iterator[None]:
    """Run a plugin's code: whatever it raises becomes `failure`, one sentence that begins with
    `what`; the cause stays attached.
    """
    try:
        yield
    except (RetrainError, KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:  # anything may come, SystemExit too: the code is not ours
        if type(error).__module__.startswith("retrain."):  # an alarm of our own
            raise
        raise failure(f"{what} failed with {describe(error)}.") from error


def describe(error: BaseException) -> str:
    """Return `TypeName: first line of the message`, and of each note of the error."""
    texts = (str(error), *getattr(error, "__notes__", ()))
    firsts = [line.rstrip(".") for text in texts for line in text.strip().splitlines()[:1]]
    return ": ".join(filter(None, (type(error).__name__, ", ".join(firsts))))


# -- dotted paths ----------------------------------------------------------------------------------


def _load_dotted(name: str, where: str, config: "TrainConfig") -> Any:
    attribute = name.rpartition(".")[2]
    folders = _plugin_folders(config)
    tried = []
    for candidate in _modules_of(name, config):
        if not all(part.isidentifier() for part in candidate.split(".")):
            tried.append(
                f"{candidate} (not a module's name; search_paths holds prefixes such as plugins)"
            )
            continue
        module = _import(candidate, folders, where)
        if module is None:
            tried.append(f"{candidate} (no such module)")
            continue
        if hasattr(module, attribute):
            return getattr(module, attribute)
        public = [item for item in vars(module) if not item.startswith("_")]
        close = nearest(attribute, public)
        hint = ""
        if close:
            hint = f", but {close}"
        tried.append(f"{candidate} (has no {attribute}{hint})")
    raise ConfigurationError(
        f"{where} cannot be loaded: tried {', '.join(tried)} in {', '.join(map(str, folders))} and"
        " sys.path."
    )


def _import(name: str, folders: Sequence[Path], where: str) -> ModuleType | None:
    """Import a module; None if there is none of that name."""
    relative = Path(*name.split("."))
    tails = (relative.with_suffix(".py"), relative / "__init__.py")
    files = [folder / tail for folder in folders for tail in tails]
    existing = [file for file in files if file.is_file()]
    if len(existing) > 1:
        raise ConfigurationError(
            f"{where} is found twice, in {existing[0]} and {existing[1]}; rename one."
        )
    with _importable(folders), user_code(f"{where}: importing {name}", ConfigurationError):
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
                f"{where}: {existing[0]} is not read, since Python has a module {name} of its own;"
                " rename the file."
            )
        return module


@contextmanager
def _importable(folders: Sequence[Path]) -> Iterator[None]:
    """Put the folders first on sys.path while a plugin is imported; afterwards they stay at its
    end, for what the plugin imports later.

    They do not stay first: a `datasets` package in the user's folder must not replace the library
    that retrain imports lazily.
    """
    importlib.invalidate_caches()  # the file may be newer than the last look at its folder
    names = [str(folder) for folder in folders]
    sys.path[:0] = names
    try:
        yield
    finally:
        for name in names:
            sys.path.remove(name)
        sys.path.extend(name for name in names if name not in sys.path)


# -- checks ----------------------------------------------------------------------------------------


def _check(kind: str, plugin: Any, where: str, config: "TrainConfig") -> None:
    if KINDS[kind].base:
        _check_class(plugin, KINDS[kind].base, where)
        return
    if not callable(plugin):
        raise ConfigurationError(
            f"{where} is {_a(plugin)}, and must be a function: {KINDS[kind].forms}."
        )
    params = params_of(kind, config)
    if kind == "data":
        _check_source(plugin, params, where)
        return
    try:
        call = inspect_call(kind, plugin)
    except ValueError as error:
        raise ConfigurationError(f"{where}: {error}.") from error
    if params and not call.takes_context and "params" not in call.keywords:
        raise ConfigurationError(
            f"{where} takes no params, but {KINDS[kind].params_key} gives {', '.join(params)}; give"
            " the function a `params` argument or empty the table."
        )


def _check_class(plugin: Any, base_path: str, where: str) -> None:
    module, _, name = base_path.rpartition(".")
    base: type = getattr(importlib.import_module(module), name)
    qualified = f"{base.__module__}.{base.__qualname__}"
    derives = inspect.isclass(plugin) and issubclass(plugin, base)
    if not derives:
        raise ConfigurationError(f"{where} is {_a(plugin)}, and must be a subclass of {qualified}.")
    if inspect.isabstract(plugin):
        missing = ", ".join(sorted(plugin.__abstractmethods__))
        raise ConfigurationError(f"{where} does not define {missing} of {qualified}.")


def _check_source(plugin: Callable[..., Any], params: Mapping[str, Any], where: str) -> None:
    """Check that a data source can be called with its params, and with `split` if it takes one."""
    parameters = _parameters(plugin)
    if parameters is None:  # a function written in C tells nothing
        return
    given = dict(params)
    if any(parameter.name == "split" for parameter in parameters):
        given["split"] = "train"
    try:
        inspect.signature(plugin).bind(**given)
    except TypeError as error:
        raise ConfigurationError(
            f"{where} cannot be called with [data] params {sorted(params)}: {error}."
        ) from error


# -- words -----------------------------------------------------------------------------------------


def _file(source: Path | None) -> str:
    if source is not None:
        return f"{source}: "
    return ""


def _where(kind: str, name: str, config: "TrainConfig") -> str:
    return f'{_file(config.source_path)}{KINDS[kind].key} = "{name}"'


def _a(thing: object) -> str:
    if isinstance(thing, type):
        return f"the class {thing.__name__}"
    return f"of type {type(thing).__name__}"
