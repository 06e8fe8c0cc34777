"""What left in 0.10: each row of removed.toml is answered in one sentence, wherever it is written."""

from pathlib import Path

import pytest

from retrain.cli.main import main
from retrain.cli.parameters import command_named
from retrain.cli.usage import COMMANDS
from retrain.config import config_from_mapping, config_from_toml, load_config, load_stored
from retrain.config.keys import flag_of, keys_by_path
from retrain.config.removed import removed
from retrain.errors import ConfigurationError
from retrain.system import toml_value

VALUES = [name for name in removed() if " = " in name]
KEYS = [name for name in removed() if "." in name and name not in VALUES]
OPTIONS = [name for name in removed() if " --" in name]
LEFT_COMMANDS = [name for name in removed() if name not in (*VALUES, *KEYS, *OPTIONS)]


def answer(name: str) -> str:
    return f"left in 0.10; {removed()[name]['instead']}."


def test_no_row_names_what_lives() -> None:
    assert not set(KEYS) & set(keys_by_path())
    assert not set(LEFT_COMMANDS) & set(COMMANDS)
    for command, option in (name.split(" ") for name in OPTIONS):
        taken = [flag for each in command_named(command).params for flag in each.opts]
        assert option not in taken, command


@pytest.mark.parametrize("path", KEYS)
def test_a_removed_key_is_answered_in_a_file_a_variable_a_flag_and_help(
    path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    section, _, name = path.partition(".")
    file = tmp_path / "run.toml"
    file.write_text(f'[{section}]\n{name} = "no value of it"\n')
    with pytest.raises(ConfigurationError) as refused:
        load_config(file, environ={})
    assert refused.value.problems == (f"{file}: [{section}] {name} {answer(path)}",)

    file.write_text("[training]\nmax_steps = 1\n")
    variable = f"RETRAIN_{section}_{name}".upper()
    with pytest.raises(ConfigurationError) as refused:
        load_config(file, environ={variable: "1"})
    assert refused.value.problems == (f"environment {variable} {answer(path)}",)

    flag = flag_of(section, name)
    for given in (flag, f"--{path}", "--no-" + flag.removeprefix("--")):
        with pytest.raises(ConfigurationError) as refused:
            load_config(file, [f"{given}=1"], environ={})
        assert refused.value.problems == (f"{given} {answer(path)}",)

    assert main(["help", path]) == 2
    assert capsys.readouterr().err == f"retrain: {path} {answer(path)}\n"


@pytest.mark.parametrize("path", [path for path in KEYS if "stored" in removed()[path]])
def test_the_stored_default_of_a_removed_key_still_loads(path: str, tmp_path: Path) -> None:
    section, _, name = path.partition(".")
    stored = config_from_toml(f"[{section}]\n{name} = {toml_value(removed()[path]['stored'])}\n")
    assert stored.model_dump() == config_from_mapping({section: {}}).model_dump()


@pytest.mark.parametrize("path", KEYS)
def test_a_stored_configuration_is_read_whatever_a_removed_key_holds(
    path: str, tmp_path: Path
) -> None:
    section, _, name = path.partition(".")
    file = tmp_path / "config.toml"
    file.write_text(f'[{section}]\n{name} = "no default"\n')
    load_stored(file, to_read=True)
    with pytest.raises(ConfigurationError, match="left in"):
        load_stored(file)


def test_migration_deletes_what_left_and_says_each(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A removed value stays: a person has to choose another."""
    file = tmp_path / "old.toml"
    sections = dict.fromkeys(path.partition(".")[0] for path in KEYS)
    old = "".join(
        f"[{section}] # kept\n"
        + "".join(
            f"{path.partition('.')[2]} = {{ a = 1 }}\n" for path in KEYS if f"{section}." in path
        )
        for section in sections
    )
    file.write_text(old + '[model]\ndtype = "fp8"\n')
    assert main(["migrate-config", str(file), "--write"]) == 0
    kept = "".join(f"[{section}] # kept\n" for section in sections)
    assert file.read_text() == kept + '[model]\ndtype = "fp8"\n'
    *said, last = capsys.readouterr().err.splitlines()
    assert last == f"Yours to change: model.dtype = fp8 {answer('model.dtype = fp8')}"
    named = [path.partition(".") for path in KEYS]
    assert sorted(said) == sorted(
        f"Deleted: [{section}] {name} {answer(f'{section}.{name}')}" for section, _, name in named
    )


@pytest.mark.parametrize("row", VALUES)
def test_a_removed_value_is_answered(row: str) -> None:
    path, _, value = row.partition(" = ")
    section, _, name = path.partition(".")
    with pytest.raises(ConfigurationError) as refused:
        config_from_mapping({section: {name: value}})
    assert refused.value.problems == (
        f'configuration: [{section}] {name} = "{value}" {answer(row)}',
    )


@pytest.mark.parametrize("row", VALUES)
def test_a_stored_configuration_with_a_removed_value_is_read(row: str, tmp_path: Path) -> None:
    path, _, value = row.partition(" = ")
    section, _, name = path.partition(".")
    file = tmp_path / "config.toml"
    file.write_text(f'[{section}]\n{name} = "{value}"\n')
    assert not load_stored(file, to_read=True).is_set(path)


@pytest.mark.parametrize("row", OPTIONS)
def test_a_removed_option_is_answered(row: str, capsys: pytest.CaptureFixture[str]) -> None:
    command, _, option = row.partition(" ")
    assert main([command, "logs", option]) == 2
    assert capsys.readouterr().err == f"retrain: {option} of `retrain {command}` {answer(row)}\n"


@pytest.mark.parametrize("name", LEFT_COMMANDS)
def test_a_removed_command_is_answered(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([name, "logs/lab"], [name, "--help"]):
        assert main(arguments) == 2
        assert capsys.readouterr().err == f"retrain: `retrain {name}` {answer(name)}\n"
    assert main(["help", name]) == 2
    assert answer(name) in capsys.readouterr().err
