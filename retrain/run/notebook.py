"""Functions of a notebook as plugins: their source becomes a module in the run's folder.

Workers import it from there, environment.json names it with its sha256, and a resumed run needs no
notebook.
"""

import ast
import hashlib
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from types import CodeType, FunctionType, ModuleType
from typing import Any

from retrain.config import TrainConfig, replaced
from retrain.errors import ConfigurationError, RetrainError
from retrain.records.disk import remove_empty, replace_file
from retrain.records.redact import Redactor
from retrain.records.run_folder import RunFolder
from retrain.run.start import missing_folders, no_trace_of_a_refusal

_CONSTANTS = (bool, int, float, str, bytes, tuple, list, dict, set, type(None))


@contextmanager
def with_functions(
    config: TrainConfig, functions: Mapping[str, Callable[..., Any]]
) -> Iterator[TrainConfig]:
    """Yield the configuration with each function as the plugin of its key, such as "reward.type".

    Writes notebook_<hash>.py into the run's folder, and deletes it if retrain refuses the run.
    Raises ConfigurationError for a function whose source cannot stand alone, and for a folder that
    does not belong to the run.
    """
    if not functions:
        yield config
        return
    source = module_source(functions.values())
    if Redactor().text(source) != source:
        raise ConfigurationError(
            "A function for train holds a secret, and retrain keeps its source in the run's"
            " folder; read the secret from an environment variable."
        )
    folder = RunFolder(config.folder)
    folder.refuse_run(resuming=bool(config.resume.from_))
    name = f"notebook_{hashlib.sha256(source.encode()).hexdigest()[:8]}"
    file, made = folder.path / f"{name}.py", missing_folders(folder.path)
    was_there = file.exists()
    folder.path.mkdir(parents=True, exist_ok=True)
    replace_file(file, source)
    values = {key: f"{name}.{function.__name__}" for key, function in functions.items()}
    if "algorithm.advantage_mode" in values and config.algorithm.algorithm_mode:
        values["algorithm.algorithm_mode"] = ""
    config = replaced(config, values)
    # retrain looks for a plugin in the folder of the configuration's file.
    config._provenance = replace(config._provenance, path=folder.config)
    try:
        with no_trace_of_a_refusal(folder, made):
            yield config
    except RetrainError:
        # A run that has begun names the file in its own configuration.
        begun = folder.config.is_file() and name in folder.config.read_text(encoding="utf-8")
        if not (was_there or begun):
            file.unlink()
            remove_empty(made)
        raise


def module_source(functions: Any) -> str:
    """Return a module that defines the functions, and what they use of their own module: imports,
    constants, and other functions.
    """
    lines: dict[str, str] = {}
    for function in functions:
        _collect(function, lines, getattr(function, "__name__", repr(function)))
    imports = [line for line in lines.values() if line.startswith(("import ", "from "))]
    rest = [line for line in lines.values() if line not in imports]
    return "\n".join([*imports, "", "", "\n\n\n".join(rest)]) + "\n"


def _collect(function: Callable[..., Any], lines: dict[str, str], asked: str) -> None:
    """Add a function's source to `lines`, after the names that it uses; `asked` is the name of the
    function that train got.
    """
    if not isinstance(function, FunctionType) or function.__name__ == "<lambda>":
        raise ConfigurationError(
            f"{asked} is not a function with a name; define it with def and give it to train."
        )
    if function.__code__.co_freevars:
        raise ConfigurationError(
            f"{asked}: {function.__name__} uses {', '.join(function.__code__.co_freevars)} of"
            " the function around it. Its source does not show that; define it at the top"
            " level."
        )
    try:
        source = textwrap.dedent(inspect.getsource(function)).rstrip()
        signature = _names_of_signature(source)
    except (OSError, TypeError, SyntaxError):  # The text may also begin left of the function.
        raise ConfigurationError(
            f"{asked}: retrain cannot see the source of {function.__name__}. Write it into a"
            " file and name it in the configuration, such as my_module.my_function."
        ) from None
    if lines.get(function.__name__, source) != source:
        raise ConfigurationError(
            f"{asked}: two functions have the name {function.__name__}, and a module holds only"
            " one. Rename one."
        )
    lines[function.__name__] = ""  # A function that calls itself must not come twice.
    for name in sorted(_names(function.__code__) | signature):
        if name in function.__globals__ and name not in lines:
            _define(name, function.__globals__[name], lines, asked)
    # Last again, behind what it uses: a dict keeps the order of insertion.
    del lines[function.__name__]
    lines[function.__name__] = source


def _define(name: str, value: Any, lines: dict[str, str], asked: str) -> None:
    """Add the line that defines `name` in another module."""
    home = getattr(value, "__module__", None)
    if isinstance(value, ModuleType):
        module = value.__name__
        lines[name] = f"import {module}{'' if module == name else f' as {name}'}"
    elif isinstance(value, re.Pattern):
        lines.setdefault("re", "import re")
        lines[name] = f"{name} = re.compile({value.pattern!r}, {value.flags})"
    elif isinstance(value, FunctionType) and home == "__main__":
        # Skip a name that waits for this one.
        if value.__name__ not in lines or lines[value.__name__]:
            _collect(value, lines, asked)
        if name != value.__name__:
            lines[name] = f"{name} = {value.__name__}"
    elif home and home != "__main__" and getattr(sys.modules.get(str(home)), name, None) is value:
        lines[name] = f"from {home} import {name}"
    elif isinstance(value, _CONSTANTS) and _reads_back(value):
        lines[name] = f"{name} = {value!r}"
    else:
        raise ConfigurationError(
            f"{asked} uses {name}, a {type(value).__name__} that no file can hold; make"
            " it inside the function, or give it as a parameter of the configuration."
        )


def _reads_back(value: Any) -> bool:
    try:
        return bool(ast.literal_eval(repr(value)) == value)
    except (ValueError, SyntaxError, RecursionError, MemoryError):  # The last two mean too deep.
        return False


def _names(code: CodeType) -> set[str]:
    """Return the names that the code and the functions inside it may take from their module."""
    inner = [_names(one) for one in code.co_consts if isinstance(one, CodeType)]
    return set(code.co_names).union(*inner)


def _names_of_signature(source: str) -> set[str]:
    """Return the names in the decorators, defaults and annotations of a function."""
    (node,) = ast.parse(source).body
    body: list[ast.AST] = getattr(node, "body", [])
    outside = [part for part in ast.iter_child_nodes(node) if part not in body]
    found = [one for part in outside for one in ast.walk(part)]
    return {one.id for one in found if isinstance(one, ast.Name)}
