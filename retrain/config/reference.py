"""Documents made from the schema: the annotated retrain.toml, the reference's tables, `retrain help config`, the JSON Schema.

`make docs` writes them into the repository, and `python -m retrain.config.reference` writes them alone; a test fails when one has drifted.
"""

import json
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from retrain.config.keys import SHORT_TABLE_FLAGS, Key, all_keys, section_models
from retrain.config.names import ALIASES, bracketed
from retrain.config.schema import BACKEND_OPTIONS, DEFAULT_CONDITIONS, TrainConfig
from retrain.parsing import toml_value

WIDTH = 110
"""Columns of comments."""


def annotated_toml() -> str:
    """Every key with its default and its documentation. As it stands, it loads as the defaults.

    Keys whose being unset says something, and sections that act by being there, are commented out.
    """
    header = (
        "Every key with its default; delete what you do not change. "
        "A key or section that is commented out does what its comment says while unset."
    )
    sections = ["\n".join(_annotated_section(name)) for name in section_models()]
    return "\n".join([*_comment(header), "", *("\n\n".join(sections)).split("\n")]) + "\n"


def _annotated_section(section: str) -> Iterator[str]:
    off = "# " if section_models()[section].traits.acts_by_presence else ""
    yield from _comment(_doc_of_section(section))
    yield f"{off}[{section}]"
    for key in _keys_of(section):
        if key.path == "campaign.conditions":
            continue
        yield from _comment(_doc_with_choices(key))
        example = (key.field.examples or [None])[0] if key.default is None else key.default
        yield f"{off or ('# ' if key.traits.meaningful_unset else '')}{key.name} = {toml_value(example)}"
    if section == "campaign":
        yield "# The conditions; without any, these five."
        for condition in DEFAULT_CONDITIONS:
            yield "# [[campaign.conditions]]"
            yield from (f"# {name} = {toml_value(value)}" for name, value in condition.model_dump(exclude_unset=True).items())


def _comment(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False, break_long_words=False)


def _keys_of(section: str) -> list[Key]:
    return [key for key in all_keys() if key.section == section]


def _doc_of_section(section: str) -> str:
    return (section_models()[section].__doc__ or "").split("\n")[0]


def _doc_with_choices(key: Key) -> str:
    """The documentation, with the names that the key takes where it does not say them already."""
    unsaid = [choice for choice in key.choices if choice not in key.doc]
    return f"{key.doc[:-1]}: {', '.join(key.choices)}." if unsaid and ":" not in key.doc else key.doc


def markdown_tables() -> str:
    """One table a section, for the documentation."""
    parts = ["# Configuration keys", "Made from the schema by `make docs`."]
    for section in section_models():
        parts.append(f"## [{section}]\n\n{_doc_of_section(section)}")
        rows = [_row(key) for key in _keys_of(section)]
        parts.append("\n".join(["| key | type | default | flag | what it does | allowed |", "|---|---|---|---|---|---|", *rows]))
        if section == "backend":
            parts.extend(_options_table(backend) for backend in BACKEND_OPTIONS)
    parts.append("## Other names\n\n" + "\n".join(f"- `{bracketed(a)}` is another name of `{bracketed(c)}`." for a, c in ALIASES.items()))
    return "\n\n".join(parts) + "\n"


def _row(key: Key) -> str:
    default = "unset" if key.default is None else f"`{toml_value(key.default)}`"
    return _cells(f"`{key.name}`", key.type_name, default, f"`{key.flag}`", key.doc, key.allowed)


def _options_table(backend: str) -> str:
    fields = BACKEND_OPTIONS[backend].model_fields.items()
    options = [Key("backend.options", name, field, field.get_default()) for name, field in fields]
    rows = [_cells(f"`{key.name}`", key.type_name, f"`{toml_value(key.default)}`", key.doc, key.allowed) for key in options]
    return "\n".join(
        [f"### [backend.options] of {backend}\n", "| key | type | default | what it does | allowed |", "|---|---|---|---|---|", *rows]
    )


def _cells(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


_HELP_FOOTER = """\
--flag VALUE and --flag=VALUE; --switch and --no-switch; lists as 1,2 or [1, 2]; tables as repeated KEY=VALUE.
--section.key VALUE works for every key. RETRAIN_<SECTION>_<KEY> sets a key from the environment.
A later one wins: defaults, file, environment, flags.
"""


def help_text(section: str | None = None) -> str:
    """The text of `retrain help config [SECTION]`: every key with its flag, default, allowed values and documentation."""
    return "\n".join(line for name in section_models() if section in (None, name) for line in _help_section(name)) + "\n" + _HELP_FOOTER


def _help_section(section: str) -> Iterator[str]:
    yield f"[{section}]  {_doc_of_section(section)}"
    for key in _keys_of(section):
        default = "unset" if key.default is None else toml_value(key.default)
        short = f", {SHORT_TABLE_FLAGS[key.path]} KEY=VALUE" if key.path in SHORT_TABLE_FLAGS else ""
        yield f"  {key.flag}{short}  ({key.name} = {default})"
        yield from textwrap.wrap(f"{key.doc} Allowed: {key.allowed}.", WIDTH, initial_indent="      ", subsequent_indent="      ")
    yield ""


def json_schema() -> dict[str, Any]:
    """JSON Schema of a configuration file, for editors."""
    schema: dict[str, Any] = _plain(TrainConfig.model_json_schema(by_alias=True))
    for alias, canonical in ALIASES.items():
        section, _, name = alias.partition(".")
        target, _, target_name = canonical.partition(".")
        properties = schema["$defs"][section.capitalize()]["properties"]
        properties[name] = {
            **schema["$defs"][target.capitalize()]["properties"][target_name],
            "description": f"Another name of {bracketed(canonical)}.",
        }
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "retrain configuration"}


def _plain(value: Any) -> Any:
    """Return a JSON Schema without the marks that `key` adds to it."""
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items() if name != "traits"}
    return [_plain(item) for item in value] if isinstance(value, list) else value


def artefacts() -> dict[str, str]:
    """Paths in the repository and what they must hold."""
    return {
        "retrain.toml": annotated_toml(),
        "docs/configuration-keys.md": markdown_tables(),
        "docs/retrain.schema.json": json.dumps(json_schema(), indent=2, ensure_ascii=False) + "\n",
    }


def write_artefacts(root: Path) -> None:
    for name, text in artefacts().items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write_artefacts(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parents[2])
