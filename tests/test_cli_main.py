"""The command line: what the first argument means, exit codes, one sentence for each mistake."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from retrain.cli.main import is_path, main
from retrain.cli.parameters import command_named, given_path
from retrain.cli.run import parse_arguments
from retrain.cli.usage import COMMANDS, FLAGS, usage
from retrain.config.keys import all_keys, flags
from retrain.errors import Interrupted
from scripts.docs_commands import help_records

LIBRARIES = ("torch", "transformers", "peft", "datasets", "wandb", "scipy", "pandas")
HEAVY = (*LIBRARIES, "numpy", "pydantic", "rich", "tomlkit", "typer", "httpx")


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def imported_by(*arguments: str) -> set[str]:
    """The modules that a fresh process has after running the command."""
    code = (
        f"import sys; from retrain.cli.main import main; main({list(arguments)!r});"
        " sys.stderr.write('\\n'.join(sys.modules))"
    )
    command = [sys.executable, "-c", code]
    return {*subprocess.run(command, capture_output=True, text=True, check=True).stderr.split()}


@pytest.mark.parametrize("arguments", [(), ("status",), ("/nowhere/a.toml",), ("doctor",)])
def test_a_deleted_current_folder_is_a_sentence(
    arguments: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    os.chdir(gone)  # left again with the fixture
    gone.rmdir()
    assert main(list(arguments)) == 2
    assert capsys.readouterr().err == (
        "retrain: the current folder no longer exists; change to another one with `cd`.\n"
    )


ENGINES_RUN_ON = ("vllm", "mlx", "msgspec", "tinker")


@pytest.mark.parametrize(
    ("arguments", "heavy"),
    [
        (["--help"], {*HEAVY}),
        (["version"], {*LIBRARIES}),
        (["plugins"], {*LIBRARIES} - {"scipy"}),
        (["backends"], {"torch", "transformers", "peft", "datasets", *ENGINES_RUN_ON}),
        (["man", "quickstart"], {*LIBRARIES, "numpy", "retrain.config.schema"}),
    ],
)
def test_what_reads_no_model_imports_nothing_heavy(arguments: list[str], heavy: set[str]) -> None:
    assert not heavy & imported_by(*arguments)


def test_help_lists_ten_flags_that_exist_and_every_command(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert len(FLAGS) == 10 and set(FLAGS) <= {*flags()}
    assert all(name in shown for name in (*FLAGS, *COMMANDS))


def test_without_a_file_init_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    shown = capsys.readouterr()
    assert "retrain.toml" in shown.err and "retrain init" in shown.err and shown.out == ""
    assert shown.err.count("\n") == 1


def test_a_file_that_exists_is_a_path_and_what_looks_like_one() -> None:
    assert all(map(is_path, ("a/b", "x.toml", "./x"))) and not is_path("plain")
    Path("plain").touch()
    assert is_path("plain")


def test_every_wrong_flag_is_told_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["x.toml", "--lrr", "1", "--batchsize", "2"]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 2 and "did you mean --lr?" in errors[0]
    assert "did you mean --batch-size?" in errors[1]


def test_the_reference_shows_every_flag_and_one_section(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help"]) == 0 and capsys.readouterr().out.startswith(usage())
    assert main(["help", "config"]) == 0
    shown = capsys.readouterr().out
    assert all(f"  {key.flag}" in shown for key in all_keys())
    assert main(["help", "sepa"]) == 0
    shown = capsys.readouterr().out
    assert "--sepa-steps" in shown and "--lr " not in shown
    assert main(["help", "trainig"]) == 2
    assert "did you mean `retrain help training`?" in capsys.readouterr().err


def test_a_reader_that_goes_away_gets_no_traceback() -> None:
    command = (
        f'{sys.executable} -c \'from retrain.cli.main import main; raise SystemExit(main(["help",'
        ' "config"]))\' | true'
    )
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert result.stderr == ""


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["version"]) == 0 and main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("retrain 0.")


def test_switches_flags_and_the_file_come_in_any_order() -> None:
    parsed = parse_arguments(
        ["--quiet", "--lr", "1e-4", "run.toml", "--overwrite", "--batch-size=4"]
    )
    assert parsed.path == Path("run.toml") and parsed.quiet and parsed.overwrite
    assert {override.path: override.value for override in parsed.overrides.given} == {
        "training.lr": 1e-4,
        "training.batch_size": 4,
    }


def test_an_error_masks_secrets(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_API_KEY", "open-sesame")
    assert main(["open-sesame"]) == 2
    assert "open-sesame" not in capsys.readouterr().err


def test_a_bug_prints_a_masked_traceback_and_exits_with_1() -> None:
    code = (
        "import sys, retrain.cli.main as cli\n"
        "def broken(arguments): raise ZeroDivisionError('with open-sesame')\n"
        "cli._dispatch = broken\n"
        "sys.exit(cli.main(['x']))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={"MY_API_KEY": "open-sesame", "PATH": ""},
        check=False,
    )
    assert result.returncode == 1
    assert "ZeroDivisionError: with ***" in result.stderr and "bug in retrain" in result.stderr


def test_ctrl_c_exits_with_130_and_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(arguments: list[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("retrain.cli.main._dispatch", interrupted)
    assert main(["x"]) == 130
    assert capsys.readouterr().err == "retrain: Interrupted by SIGINT.\n"


def test_ctrl_c_during_the_first_imports_exits_with_130_and_a_line() -> None:
    code = (
        "import sys; before = {*sys.modules}; from retrain.cli import start\n"
        "assert {*sys.modules} - before == {'retrain', 'retrain.cli'}\n"
        "class Pressed:\n    def find_spec(self, *_): raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Pressed()); sys.exit(start())"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (130, "retrain: Interrupted by SIGINT.\n")


def test_a_second_ctrl_c_while_the_first_one_is_told_exits_with_130(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def stopped(arguments: list[str]) -> int:
        raise Interrupted("Interrupted by SIGINT.", signal.SIGINT)

    def interrupted(*_: Any) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("retrain.cli.main._dispatch", stopped)
    monkeypatch.setattr("retrain.cli.main._ended_by", interrupted)
    assert main(["x"]) == 130


def test_dotenv_is_read_and_never_overrides(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import os

    monkeypatch.setenv("FROM_SHELL", "shell")
    monkeypatch.setenv("RETRAIN_TRAINING_LR", "placeholder")  # so that it is restored afterwards
    monkeypatch.delenv("RETRAIN_TRAINING_LR")
    Path(".env").write_text("FROM_SHELL=file\nRETRAIN_TRAINING_LR=fast\n")
    Path("run.toml").write_text("[training]\nseed = 1\n")
    assert main(["run.toml"]) == 2
    shown = capsys.readouterr()
    assert shown.out == "Loaded .env\n"
    assert os.environ["FROM_SHELL"] == "shell" and "RETRAIN_TRAINING_LR" in shown.err
    assert main(["run.toml", "--quiet"]) == 2
    assert capsys.readouterr().out == ""


def test_a_broken_dotenv_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    Path(".env").write_bytes(b"KEY=\xff\xfe\n")
    Path("run.toml").touch()
    assert main(["run.toml"]) == 2
    assert ".env is not readable" in capsys.readouterr().err


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams_change_no_exit_code_and_no_file_takes_their_place(closed: str) -> None:
    """Descriptors 0 to 2 are taken before any file of the run is opened, else what a library prints
    would land in that file.
    """
    code = (
        "import os, sys; from retrain.cli.main import main; code = main(['version']); free ="
        " os.open('free', os.O_CREAT); raise SystemExit(code if free > 2 else 'a file became a"
        " standard stream')"
    )
    command = ["bash", "-c", f'{sys.executable} -c "{code}" {closed}']
    assert subprocess.run(command, check=False).returncode == 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has a device that is always full")
def test_a_full_disk_under_standard_output_is_named() -> None:
    for asked in ("help config", "version"):  # more than a buffer, and less
        command = f"env -u PYTHONUNBUFFERED {sys.executable} -m retrain {asked} > /dev/full"
        result = subprocess.run(
            ["bash", "-c", command], capture_output=True, text=True, check=False
        )
        assert result.returncode == 3
        assert "Standard output, or a file, cannot be used: No space left" in result.stderr
        assert "Traceback" not in result.stderr


def test_a_loop_of_links_is_no_bug(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "run.toml").write_text('[model]\nmodel = "lab"\n')
    assert main([f"{tmp_path}/run.toml", "--log-dir", f"{tmp_path}/loop"]) == 2
    assert f"{tmp_path}/loop" in capsys.readouterr().err


@pytest.mark.parametrize("name", list(COMMANDS))
def test_a_help_page_fits_80_columns(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main([name, "--help"]) == 0
    page = capsys.readouterr().out
    assert page.count("Usage:") == 1 and f"Usage: retrain {name}" in page
    assert "Example: retrain" in page
    assert not [form for form in ("[[", "--as-json", "--form ") if form in page]
    assert all(len(line) <= 80 for line in page.split("Example:")[0].splitlines())


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("version --loud", "`retrain version`: no such option: --loud. An example is"),
        ("init --outputt x", "no such option: --outputt (Possible options: --output)"),
        ("init --output", "`retrain init`: option '--output' requires an argument"),
        ("diff logs/lab", "`retrain diff`: missing argument 'OTHER' (Another run's folder"),
        ("diff", "`retrain diff`: missing argument 'RUN' (A run's folder"),
        ("status --watch=3", "`retrain status`: option '--watch' does not take a value"),
        ("status --interval 0", "'--interval': it should be greater than or equal"),
        ("power --effect=abc", "invalid value for '--effect': it should be a valid number"),
        ("backends --format x", "'--json': 'x' is not one of 'text', 'json'. An example"),
        ("backends a b", "`retrain backends`: got unexpected extra argument(s) (b). An example is"),
        ("report", "`retrain report`: missing argument 'DIR' (A run's folder"),
    ],
)
def test_a_wrong_use_of_a_command_is_one_sentence_of_ours(
    line: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(line.split()) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.count("\n") == 1
    assert shown.err.startswith("retrain: ") and sentence in shown.err


@pytest.mark.parametrize(
    ("line", "advice"),
    [
        ("train", "`retrain FILE.toml` trains"),
        ("run mine.toml --seed 3", "`retrain mine.toml --seed 3` trains"),
        ("fit", "`retrain FILE.toml` trains"),
        ("start", "`retrain FILE.toml` trains"),
        ("lab", "`retrain init --template lab --output lab.toml`"),
        ("mine --lr 1", "did you mean `retrain mine.toml --lr 1`?"),
        ("check", "`retrain explain FILE.toml`"),
        ("versoin", "did you mean `retrain version`?"),
        ("migrate", "did you mean `retrain migrate-config`?"),
        ("zzz", "`retrain --help` lists the commands"),
        (
            "run.toml --inference-prefix-caching maybe",
            (
                "run.toml and maybe; a value needs its flag before it, and a switch takes true or false"
                " alone."
            ),
        ),
        ("a.toml b.toml", "retrain: retrain runs one file at a time"),
        ("a.toml --quiet=1", "retrain: --quiet takes no value"),
        ("run.toml -q", "retrain: -q is not a flag; flags have two dashes"),
        ("run.toml --quiet --verbose", "contradict each other"),
    ],
)
def test_wrong_lines_that_people_type_are_answered_with_what_to_type(
    line: str, advice: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("mine.toml").touch()
    for name in ("train", "mine"):  # a folder of that name changes nothing
        Path(name).mkdir()
    assert main(line.split()) == 2
    error = capsys.readouterr().err
    assert advice in error and error.count("\n") == 1


PATHS = [
    (name, re.split(r"[ ,]", shown)[0])
    for name in COMMANDS
    for shown, _ in help_records(name)
    if re.search("path>|RUN|CONFIG", shown)
]


@pytest.mark.parametrize(("name", "given"), PATHS)
def test_every_path_argument_expands_home_and_variables(
    name: str, given: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SCRATCH", raising=False)
    line = [name]
    for parameter in command_named(name).params:
        is_option = parameter.opts[0].startswith("-")
        named = parameter.opts[0] if is_option else parameter.metavar
        if named == given or parameter.required:
            value = "$SCRATCH/a" if named == given else "advantage"
            line += [parameter.opts[0], value] if is_option else [value]
    assert main(line) == 2
    assert (
        f"retrain: {given} of `retrain {name}` = '$SCRATCH/a' names $SCRATCH, and no variable has"
        " that name" in capsys.readouterr().err
    )


def test_a_path_among_several_is_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("SCRATCH", "/scratch")
    for kind in (str, Path):
        found = given_path([kind("~/a/$SCRATCH"), kind("${SCRATCH}/b")], "RUN")
        assert found == [kind("/home/me/a//scratch"), kind("/scratch/b")]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("$PLACE.toml --lr x", "retrain: flag --lr: [training] lr"),
        ("explain $PLACE.toml --lr x", "retrain: flag --lr: [training] lr"),
        ("serve vllm ${PLACE}.toml --lr x", "retrain: flag --lr: [training] lr"),
        ("--resume $PLACE.toml", "a.toml' holds no run of retrain"),
        ("$ABSENT", "FILE = '$ABSENT' names $ABSENT, and no variable has that name"),
        ("explain $ABSENT/a", "FILE = '$ABSENT/a' names $ABSENT, and no variable has that name"),
        ("--resume $ABSENT", "--resume = '$ABSENT' names $ABSENT, and no variable has that name"),
        ("--resume ~nobody.here", "names ~nobody.here, and no user has that name"),
    ],
)
def test_files_among_the_flags_are_expanded(
    line: str,
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "a.toml").touch()
    monkeypatch.setenv("PLACE", str(tmp_path / "a"))
    monkeypatch.chdir(tmp_path)
    assert main(line.split()) == 2
    assert said in capsys.readouterr().err
