"""`retrain init`: a configuration to start from, out of the package's templates."""

from importlib import resources
from pathlib import Path
from typing import Annotated

import typer

from retrain.errors import ConfigurationError, EnvironmentFailure


def command(
    template: Annotated[
        str, typer.Option(help="Which template: quickstart or lab.")
    ] = "quickstart",
    output: Annotated[
        Path, typer.Option(help="The file to write; an existing one is never changed.")
    ] = Path("retrain.toml"),
) -> None:
    """Write a configuration to start from."""
    names = template_names()
    if template not in names:
        raise ConfigurationError(
            f"--template {template!r} is not known; allowed are {', '.join(names)}."
        )
    text, done = template_text(template), "Wrote"
    try:
        with output.open(
            "x", encoding="utf-8"
        ) as file:  # "x" refuses an existing file without a gap between look and write
            file.write(text)
    except FileExistsError as error:
        if not (output.is_file() and output.read_bytes() == text.encode()):
            raise ConfigurationError(
                f"{output} exists and is not overwritten; name another file with --output."
            ) from error
        done = "Already there, as it would be written:"
    except FileNotFoundError as error:
        raise ConfigurationError(
            f"--output {output}: the folder {output.parent} does not exist; create it first."
        ) from error
    except OSError as error:
        raise EnvironmentFailure(
            f"--output {output} cannot be written: {error.strerror}."
        ) from error
    print(
        f"{done} {output} (template {template}). Next: retrain"
        f" {output if output != Path('retrain.toml') else ''}".rstrip()
    )


def template_text(name: str) -> str:
    return (resources.files("retrain.assets") / "templates" / f"{name}.toml").read_text(
        encoding="utf-8"
    )


def template_names() -> list[str]:
    folder = resources.files("retrain.assets") / "templates"
    return sorted(
        path.name.removesuffix(".toml") for path in folder.iterdir() if path.name.endswith(".toml")
    )
