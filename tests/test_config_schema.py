"""The schema: what it accepts, how strict it is, and that nothing made from it has drifted."""

import json
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from retrain.cli.help import every_key
from retrain.config import (
    TrainConfig,
    config_from_mapping,
    config_from_toml,
    dump_toml,
    load_config,
)
from retrain.config.json_schema import json_schema
from retrain.config.keys import Key, all_keys, flags, keys_by_path, section_models
from retrain.config.values import OpenName
from retrain.errors import ConfigurationError
from retrain.system import toml_value
from scripts.docs_keys import annotated_toml, artifacts

ROOT = Path(__file__).resolve().parents[1]
BLOCKS = sorted((ROOT / "tests" / "data" / "config_blocks").glob("*.toml"))
TEMPLATES = sorted((ROOT / "retrain" / "assets" / "templates").glob("*.toml"))


@pytest.mark.parametrize(
    "path",
    [*BLOCKS, *TEMPLATES, *sorted((ROOT / "examples").glob("*.toml"))],
    ids=lambda path: path.stem,
)
def test_every_documented_block_loads_and_survives_storing(path: Path) -> None:
    config = load_config(path, environ={})
    assert config_from_toml(dump_toml(config)) == config


def test_the_annotated_block_holds_the_documented_defaults() -> None:
    """Where the schema's default differs from the first documentation, the difference is listed
    here, with nothing else.
    """
    text = (ROOT / "tests" / "data" / "config_blocks" / "annotated.toml").read_text()
    differing = {
        f"{section}.{name}"
        for section, keys in tomllib.loads(text).items()
        for name, value in keys.items()
        if f"{section}.{name}" in keys_by_path()
        and keys_by_path()[f"{section}.{name}"].default != value
    }
    assert differing == {"backend.adapter_path", "backend.options"}


# -- strictness ------------------------------------------------------------------------------------

WRONG_TYPES: dict[type, Any] = {
    int: 5,
    float: 0.5,
    str: "5",
    bool: True,
    list: ["5"],
    dict: {"a": 5},
}


@pytest.mark.parametrize("key", all_keys(), ids=lambda key: key.path)
def test_no_value_is_coerced_from_another_type(key: Key) -> None:
    if key.path == "campaign.conditions":
        return
    taken = (
        set(key.kinds)
        | ({int} if float in key.kinds else set())
        | ({str} if key.path == "environment.args" else set())
    )
    for kind, value in WRONG_TYPES.items():
        if kind not in taken:
            with pytest.raises(ConfigurationError, match=rf"\[{key.section}\] {key.name} = "):
                config_from_mapping({key.section: {key.name: value}})


def test_an_integer_is_a_number_for_a_float_key() -> None:
    assert type(config_from_toml("[training]\nlr = 1").training.lr) is float


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_no_number_is_infinite_or_undefined(value: str) -> None:
    for key in all_keys():
        if float in key.kinds:
            with pytest.raises(ConfigurationError, match="finite number"):
                config_from_toml(f"[{key.section}]\n{key.name} = {value}")
        elif dict in key.kinds:
            with pytest.raises(ConfigurationError, match="finite number"):
                config_from_toml(f"[{key.section}]\n{key.name} = {{ a = [{value}] }}")


def test_a_configuration_cannot_be_changed_in_place() -> None:
    config = TrainConfig()
    with pytest.raises(ValueError, match="frozen"):
        config.training.lr = 1.0  # type: ignore[misc]
    with pytest.raises(ValueError, match="frozen"):
        config.training = config.training  # type: ignore[misc]


# -- round trip ------------------------------------------------------------------------------------


def values_of(annotation: Any, metadata: list[Any]) -> st.SearchStrategy[Any]:
    """Values that a key's annotation allows, at the edges of its range too."""
    if get_origin(annotation) is Annotated:
        inner, *extra = get_args(annotation)
        return values_of(inner, [*extra, *metadata])
    names = next((item.kind for item in metadata if isinstance(item, OpenName)), None)
    if names:
        return st.sampled_from(
            [*Key("", "", _field(annotation, metadata), None).choices, "my_module.my_plugin"]
        )
    if get_origin(annotation) is Literal:
        return st.sampled_from(get_args(annotation))
    if get_origin(annotation) is list:
        return st.lists(values_of(get_args(annotation)[0], []), max_size=3)
    if get_origin(annotation) is dict:
        leaf = (
            st.none()
            | st.booleans()
            | st.integers(-(2**60), 2**60)
            | st.floats(allow_nan=False, allow_infinity=False)
            | st.text()
        )
        return st.dictionaries(
            st.text(),
            leaf | st.lists(leaf, max_size=2) | st.dictionaries(st.text(), leaf, max_size=2),
            max_size=3,
        )
    if annotation in (int, float):
        return (
            st.sampled_from([0, 1, 2, 0.5, 3, 17, 1e-8])
            if annotation is float
            else st.sampled_from([-1, 0, 1, 2, 3, 17, 2**32 - 1])
        )
    if annotation is bool:
        return st.booleans()
    if annotation is str:
        return st.text() | st.sampled_from(
            ["cpu", "gpu:0,gpu:1", "cuda:3", "{prompt}", "a, b", '["x y"]', '\x7f\t\n\\"']
        )
    members = [member for member in get_args(annotation) if member is not type(None)]
    return st.one_of([values_of(member, metadata) for member in members])


def _field(annotation: Any, metadata: list[Any]) -> Any:
    from pydantic.fields import FieldInfo

    field = FieldInfo(annotation=annotation)
    field.metadata = metadata
    return field


KEYS = [key for key in all_keys() if key.path != "campaign.conditions"]
SOME_VALUES = st.lists(
    st.sampled_from(KEYS).flatmap(
        lambda key: st.tuples(
            st.just(key), values_of(key.field.annotation, list(key.field.metadata))
        )
    ),
    max_size=6,
)


@settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow],
)
@given(SOME_VALUES)
def test_a_stored_configuration_loads_as_the_same(chosen: list[tuple[Key, Any]]) -> None:
    data: dict[str, dict[str, Any]] = {}
    for key, value in chosen:
        data.setdefault(key.section, {})[key.name] = value
    try:
        config = config_from_mapping(data)
    except ConfigurationError:
        assume(False)
    stored = config_from_toml(dump_toml(config))
    assert stored == config
    assert stored.kind == config.kind
    assert all(
        stored.is_set(key.path) == config.is_set(key.path)
        for key in KEYS
        if key.traits.meaningful_unset
    )


@given(
    st.recursive(
        st.text() | st.booleans() | st.integers() | st.floats(allow_nan=False),
        lambda inner: st.dictionaries(st.text(), inner),
    )
)
def test_every_value_is_written_as_toml_reads_it(value: Any) -> None:
    assert tomllib.loads(f"value = {toml_value(value)}")["value"] == value


# -- what is made from the schema ------------------------------------------------------------------


@pytest.mark.parametrize("name", list(artifacts()))
def test_generated_files_have_not_drifted(name: str) -> None:
    assert (ROOT / name).read_text(encoding="utf-8") == artifacts()[name], "run `make docs`"


def test_the_annotated_file_loads_as_the_defaults_and_sets_nothing_by_accident() -> None:
    config = load_config(ROOT / "examples/all_keys.toml", environ={})
    assert config == TrainConfig()
    assert config.kind == "run"
    assert not any(config.is_set(key.path) for key in all_keys() if key.traits.meaningful_unset)


def test_the_annotated_file_shows_every_key_and_its_commented_lines_load() -> None:
    lines = [
        line.removeprefix("# ") if line.startswith("# ") and _is_setting(line[2:]) else line
        for line in annotated_toml().splitlines()
    ]
    data = tomllib.loads("\n".join(lines))
    assert {f"{section}.{name}" for section, keys in data.items() for name in keys} == {
        key.path for key in all_keys()
    }
    assert config_from_mapping(data).kind == "campaign"


def _is_setting(text: str) -> bool:
    return (text.startswith("[") and text.endswith("]")) or (
        text.split(" = ")[0].isidentifier() and " = " in text
    )


def test_the_flag_table_never_changes() -> None:
    """A new key adds a line to the file; a line that is there stays as it is."""
    recorded = (ROOT / "tests" / "data" / "config_flags.txt").read_text().splitlines()
    assert [f"{flag} {path}" for flag, path in flags().items()] == recorded


def test_every_key_has_a_sentence_a_flag_and_a_variable_of_its_own() -> None:
    keys = all_keys()
    assert all(key.doc.endswith(".") and "\n" not in key.doc for key in keys)
    assert len({key.flag for key in keys}) == len({key.variable for key in keys}) == len(keys)
    assert all(model.__doc__ for model in section_models().values())


def test_the_help_and_the_json_schema_know_every_key() -> None:
    text, schema = every_key(), json_schema()
    for key in all_keys():
        assert f"  {key.flag}" in text
        assert key.name in schema["$defs"][key.section.capitalize()]["properties"]
    assert "traits" not in json.dumps(schema)
    assert "entropy_mask_rho" in schema["$defs"]["Algorithm"]["properties"]


def test_the_names_of_the_package_and_the_flag_module_need_no_pydantic() -> None:
    code = (
        "import sys, retrain.config, retrain.config.overrides; sys.exit('pydantic' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
