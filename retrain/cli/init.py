"""`retrain init`: a configuration to start from, out of the package's templates."""

from pathlib import Path
from typing import Annotated

import typer

from retrain.cli.shared import write_files
from retrain.config.names import NAME_CUTOFF, PAPERS, nearest
from retrain.errors import ConfigurationError

_SCHEMA_LINE = "#:schema retrain.schema.json"
"""An editor with a TOML language server completes keys by the schema that it names."""


def command(
    template: Annotated[
        str, typer.Option(help="Name of the template; --list shows them.")
    ] = "quickstart",
    output: Annotated[Path, typer.Option(help="The file to write.")] = Path("retrain.toml"),
    show_list: Annotated[
        bool, typer.Option("--list", help="Print the templates, and write nothing.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Write over a file that exists.")] = False,
) -> None:
    """Write a configuration to start from. The template papers/NAME is a paper's algorithm on the
    lab, with its plugin in the same folder.
    """
    paths = templates()
    if show_list:
        width = max(map(len, paths))
        for name in paths:
            first = next(line for line in template_text(name).splitlines() if line[:2] == "# ")
            print(f"  {name:<{width}}  {first[2:]}")
        return
    if template not in paths:
        raise _unknown(template)
    files = {output: template_text(template).replace("retrain retrain.toml", f"retrain {output}")}
    plugin = paths[template].with_suffix(".py")
    # A paper's template may name a plugin, which comes with it.
    if plugin.is_file():
        files[output.parent / plugin.name] = plugin.read_text(encoding="utf-8")
    written = write_files(files, "name another file with --output, or say --force", force)
    there = [str(path) for path in files if path not in written]
    if there:
        print(f"Already there with the same content: {', '.join(there)}.")
    if written:
        print(f"Wrote {', '.join(map(str, written))}.")
    run = "retrain" if output == Path("retrain.toml") else f"retrain {output}"
    print(
        f"Next: {run} (template {template})."
        " `retrain help config --json > retrain.schema.json` lets an editor complete its keys."
    )


def _unknown(template: str) -> ConfigurationError:
    names = {name: name for name in templates()}
    names |= {name.removeprefix("papers/"): name for name in names}
    near = nearest(template, names, NAME_CUTOFF)
    hint = f"did you mean {names[near]}?" if near else f"allowed are {', '.join(templates())}."
    return ConfigurationError(f"--template {template!r} is not known; {hint}")


def templates() -> dict[str, Path]:
    """Map each template to its file: the templates of the package, then the papers."""
    own = {path.stem: path for path in sorted((PAPERS.parent / "templates").glob("*.toml"))}
    return own | {f"papers/{path.stem}": path for path in sorted(PAPERS.glob("*.toml"))}


def template_text(name: str) -> str:
    """Return the text of a template, such as `lab` or `papers/dapo`."""
    return f"{_SCHEMA_LINE}\n{templates()[name].read_text(encoding='utf-8')}"
