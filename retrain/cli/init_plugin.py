"""`retrain init-plugin`: a plugin to start from, and a run of the lab that uses it."""

import importlib.util
import keyword
import re
import shlex
from importlib import resources
from pathlib import Path
from typing import Annotated, Literal, get_args

import typer

from retrain.cli.shared import write_files
from retrain.errors import ConfigurationError

Kind = Literal[
    "transform", "advantage", "algorithm", "reward", "data", "engine", "backend", "uncertainty",
    "environment", "loss", "sampler",
]  # fmt: skip
"""Each has a template, NAME.txt and NAME.toml in retrain/assets/plugins."""


def command(
    kind: Annotated[
        Kind, typer.Option(metavar="KIND", help=f"Kind of plugin: {', '.join(get_args(Kind))}.")
    ],
    name: Annotated[str, typer.Option(help="Its name: of the file and of the function or class.")],
    with_test: Annotated[
        bool, typer.Option("--with-test", help="Write a test next to it.")
    ] = False,
    output: Annotated[
        Path, typer.Option(help="The folder to write to; the current one if not given.")
    ] = Path(),
) -> None:
    """Write a plugin that runs as it is, NAME.py, and NAME.toml, which uses it on the lab.

    The code is the example of its kind in docs/plugins.md. Nothing is overwritten.
    """
    is_name = re.fullmatch(r"[A-Za-z]\w*", name, re.ASCII) and not keyword.iskeyword(name)
    if not is_name or importlib.util.find_spec(name):
        raise ConfigurationError(
            f"--name {name!r} must be a Python name such as my_{kind}, and not a word of Python"
            " or the name of an importable module."
        )
    file = output / f"{name}.toml"
    texts = plugin_texts(kind, file)
    if with_test:
        texts[output / f"test_{name}.py"] = _asset("test.txt").replace("NAME", name)
    write_files(texts, "choose another --name or --output")
    print(f"Wrote {', '.join(map(str, texts))}. Next: retrain {shlex.quote(str(file))}")


def plugin_texts(kind: str, file: Path) -> dict[Path, str]:
    """Make the code of a new plugin, and the `file` of the run that uses it: path -> text."""
    import tomlkit

    name, code, table = file.stem, _asset(f"{kind}.txt"), _asset(f"{kind}.toml")
    # A reward's function keeps the name score. Every other kind gets a new name, the last part
    # of the path in the TOML.
    (module, own) = re.findall(r'"(my_\w+)\.?(\w*)"', table)[0]
    if own:
        public = name
        if own[0].isupper():
            public = "".join(part.capitalize() for part in name.split("_"))
        code, table = (re.sub(rf"\b{own}\b", public, text) for text in (code, table))
    run = tomlkit.parse(_asset("run.toml").replace("NAME", name).replace("FILE", str(file)))
    for section, values in tomlkit.parse(table.replace(module, name)).items():
        run.setdefault(section, {}).update(values)
    return {file.with_suffix(".py"): code, file: tomlkit.dumps(run)}


def _asset(name: str) -> str:
    return (resources.files("retrain.assets") / "plugins" / name).read_text(encoding="utf-8")
