"""`retrain init`: a configuration to start from, out of the package's templates."""

from collections.abc import Iterator
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Annotated

import typer

from retrain.errors import ConfigurationError, EnvironmentFailure

PAPERS = "papers"
_SCHEMA_LINE = "#:schema retrain.schema.json"
"""An editor with a TOML language server completes keys by the schema that it names."""


def command(
    template: Annotated[
        str, typer.Option(help="Which template; --list shows them.")
    ] = "quickstart",
    output: Annotated[Path, typer.Option(help="The file to write.")] = Path("retrain.toml"),
    show_list: Annotated[
        bool, typer.Option("--list", help="Print the templates, and write nothing.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Write over a file that exists.")] = False,
) -> None:
    """Write a configuration to start from. The template papers/NAME is a paper's algorithm on the
    lab, with its plugin beside it.
    """
    if show_list:
        print("\n".join(_listed()))
        return
    if template not in template_names():
        raise _unknown(template)
    files = {output: template_text(template).replace("retrain retrain.toml", f"retrain {output}")}
    plugin = _asset(template, ".py")
    # A paper's template may name a plugin, which comes with it.
    if plugin.is_file():
        files[output.parent / plugin.name] = plugin.read_text(encoding="utf-8")
    # All of a template's files are written, or none.
    for path, text in files.items():
        if path.is_dir() or (path.exists() and not force and not _holds(path, text)):
            raise _exists(path)
    done = {path: _write(path, text, force) for path, text in files.items()}
    written = [str(path) for path, is_new in done.items() if is_new]
    there = [str(path) for path, is_new in done.items() if not is_new]
    if there:
        print(f"Already there, as it would be written: {', '.join(there)}.")
    if written:
        print(f"Wrote {', '.join(written)}.")
    command = f"retrain {output if output != Path('retrain.toml') else ''}".rstrip()
    print(
        f"Next: {command} (template {template})."
        " `retrain help config --json > retrain.schema.json` lets an editor complete its keys."
    )


def _listed() -> Iterator[str]:
    """Each template with the first sentence of its comment."""
    width = max(map(len, template_names()))
    for name in template_names():
        lines = template_text(name).splitlines()
        comments = (line.removeprefix("# ") for line in lines if line.startswith("# "))
        yield f"  {name:<{width}}  {next(comments, '')}"


def _unknown(template: str) -> ConfigurationError:
    from retrain.config.names import NAME_CUTOFF, nearest

    names, paper = template_names(), f"papers/{template}"
    near = paper if paper in names else nearest(template, names, NAME_CUTOFF)
    hint = f"did you mean {near}?" if near else f"allowed are {', '.join(names)}."
    return ConfigurationError(f"--template {template!r} is not known; {hint}")


def _holds(path: Path, text: str) -> bool:
    return path.is_file() and path.read_bytes() == text.encode()


def _exists(path: Path) -> ConfigurationError:
    if path.is_dir():
        return ConfigurationError(
            f"--output {path} is a folder; name a file, such as {path / 'retrain.toml'}."
        )
    return ConfigurationError(
        f"{path} exists and is not overwritten; name another file with --output, or say --force."
    )


def _write(path: Path, text: str, force: bool) -> bool:
    """Write a file; return False for one that holds the text already."""
    if _holds(path, text):
        return False
    try:
        # "x" refuses an existing file without a gap between look and write
        with path.open("w" if force else "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as error:
        raise _exists(path) from error
    except FileNotFoundError as error:
        raise ConfigurationError(
            f"--output {path}: the folder {path.parent} does not exist; create it first."
        ) from error
    except OSError as error:
        raise EnvironmentFailure(f"--output {path} cannot be written: {error.strerror}.") from error
    return True


def template_text(name: str) -> str:
    """The text of a template, such as `lab` or `papers/dapo`."""
    return f"{_SCHEMA_LINE}\n{_asset(name, '.toml').read_text(encoding='utf-8')}"


def template_names() -> list[str]:
    """The templates of the package, then the papers'."""
    assets = resources.files("retrain.assets")
    papers = [f"{PAPERS}/{name}" for name in _names(assets / PAPERS)]
    return _names(assets / "templates") + papers


def _names(folder: Traversable) -> list[str]:
    return sorted(
        path.name.removesuffix(".toml") for path in folder.iterdir() if path.name.endswith(".toml")
    )


def _asset(template: str, suffix: str) -> Traversable:
    folder, _, name = template.rpartition("/")
    return resources.files("retrain.assets") / (folder or "templates") / f"{name}{suffix}"
