"""`retrain init-plugin`: a plugin to start from, and a run of the lab that uses it."""

import importlib.util
import keyword
import re
import shlex
from importlib import resources
from pathlib import Path
from typing import Annotated

import typer

from retrain.errors import ConfigurationError, EnvironmentFailure

KINDS = (
    "transform", "advantage", "algorithm", "reward", "data", "engine", "backend", "uncertainty",
    "environment", "loss", "sampler",
)  # fmt: skip
"""Kinds with a template, NAME.txt and NAME.toml in retrain/assets/plugins."""


def command(
    kind: Annotated[str, typer.Option(help=f"What it is: {', '.join(KINDS)}.")],
    name: Annotated[str, typer.Option(help="Its name: of the file and of the function or class.")],
    with_test: Annotated[bool, typer.Option("--with-test", help="Write a test beside it.")] = False,
    output: Annotated[
        Path, typer.Option(help="The folder to write to; the current one if not given.")
    ] = Path(),
) -> None:
    """Write a plugin that runs as it is, NAME.py, and NAME.toml, which uses it on the lab.

    The code is the example of its kind in CONTRIBUTING.md. Nothing is overwritten.
    """
    if kind not in KINDS:
        raise ConfigurationError(
            f"--kind {kind!r} is no kind of plugin; allowed are {', '.join(KINDS)}."
        )
    texts = plugin_texts(kind, name, output, with_test=with_test)
    taken = [str(path) for path in texts if path.exists()]
    if taken:
        raise ConfigurationError(
            f"{' and '.join(taken)} {'exist and are' if taken[1:] else 'exists and is'} not"
            " overwritten; choose another --name or --output."
        )
    is_name = re.fullmatch(r"[A-Za-z]\w*", name, re.ASCII) and not keyword.iskeyword(name)
    if not is_name or importlib.util.find_spec(name):
        raise ConfigurationError(
            f"--name {name!r} cannot be a plugin's: it must be a Python name, such as my_{kind},"
            " and not a word of Python or the name of a module that can be imported already."
        )
    try:
        output.mkdir(parents=True, exist_ok=True)
        for path, text in texts.items():
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise EnvironmentFailure(f"--output {output} cannot be written: {error}.") from error
    file = shlex.quote(str(output / f"{name}.toml"))
    print(f"Wrote {', '.join(map(str, texts))}. Next: retrain {file}")


def plugin_texts(kind: str, name: str, folder: Path, *, with_test: bool) -> dict[Path, str]:
    """Make the files of a new plugin: path -> text."""
    code, table = _asset(f"{kind}.txt"), _asset(f"{kind}.toml")
    # A reward's function is called score; of every other kind the path in the TOML ends in what is
    # renamed.
    (module, own) = re.findall(r'"(my_\w+)\.?(\w*)"', table)[0]
    if own:
        public = name
        if own[0].isupper():
            public = "".join(part.capitalize() for part in name.split("_"))
        code, table = (re.sub(rf"\b{own}\b", public, text) for text in (code, table))
    file = folder / f"{name}.toml"
    texts = {
        file.with_suffix(".py"): code,
        file: _run(table.replace(module, name), name, file),
    }
    if with_test:
        texts[folder / f"test_{name}.py"] = _asset("test.txt").replace("NAME", name)
    return texts


def _run(table: str, name: str, file: Path) -> str:
    """Put a plugin's table into the run that uses it."""
    import tomlkit

    run = tomlkit.parse(_asset("run.toml").replace("NAME", name).replace("FILE", str(file)))
    for section, values in tomlkit.parse(table).items():
        if section in run:
            run[section].update(values)
        else:
            run[section] = values
    return tomlkit.dumps(run)


def _asset(name: str) -> str:
    return (resources.files("retrain.assets") / "plugins" / name).read_text(encoding="utf-8")
