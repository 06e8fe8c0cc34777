"""`retrain init` and `retrain migrate-config`: what they write, and what they never touch."""

import errno
import io
import json
import sys
import tomllib
from pathlib import Path

import jsonschema
import pytest

from retrain.cli.init import template_text, templates
from retrain.cli.main import main
from retrain.config import load_config
from retrain.config.removed import REDEFINED

ROOT = Path(__file__).resolve().parents[1]
LEGACY = """\
# my run
[backend]
backend = "prime_rl"          # the external trainer
prime_rl_transport = "filesystem"
prime_rl_sync_wait_s = 10

[training]
seed = 1
"""


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def legacy() -> Path:
    path = Path("old.toml")
    path.write_text(LEGACY)
    return path


TEMPLATES = ["campaign", "environment", "experiment", "lab", "quickstart", "sft", "squeeze"]


@pytest.mark.parametrize("name", templates())
def test_every_template_loads_and_every_key_of_its_own_has_a_comment(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["init", "--template", name]) == 0
    assert "retrain.toml" in capsys.readouterr().out
    config, text = load_config(environ={}), Path("retrain.toml").read_text()
    assert text.startswith("#:schema retrain.schema.json\n# ")
    if name in TEMPLATES:
        if config.kind != "squeeze":  # which trains nothing
            assert config.evaluation.at_start and config.evaluation.at_end
            assert config.loss.max_grad_norm == 1.0
        lines = [line for line in text.splitlines() if " = " in line and not line.startswith("#")]
        assert [line for line in lines if " # " not in line] == []
    for path in (file for file in Path().glob("*.py")):
        compile(path.read_text(), path, "exec")


def test_the_list_names_every_template_with_what_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", "--list"]) == 0 and not [*Path().iterdir()]
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [*templates()]
    assert [name for name in templates() if "/" not in name] == TEMPLATES
    assert "papers/dapo" in templates() and all(len(line.split()) > 3 for line in lines)


def test_a_papers_template_brings_the_plugin_that_it_names() -> None:
    assert main(["init", "--template", "papers/dapo", "--output", "mine/run.toml"]) == 0
    assert {path.name for path in Path("mine").iterdir()} == {"run.toml", "dapo.py"}


def test_force_writes_over_a_file() -> None:
    Path("retrain.toml").write_text("mine")
    assert main(["init", "--force"]) == 0
    assert Path("retrain.toml").read_text() == template_text("quickstart")


@pytest.mark.slow
def test_the_schema_of_an_editor_is_printed_and_knows_the_templates(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["help", "config", "--json"]) == 0
    schema = json.loads(capsys.readouterr().out)
    for name in templates():
        jsonschema.validate(tomllib.loads(template_text(name)), schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"training": {"lrr": 1}}, schema)
    assert main(["help", "training", "--json"]) == 2


def test_init_never_overwrites(capsys: pytest.CaptureFixture[str]) -> None:
    Path("retrain.toml").write_text("mine")
    assert main(["init"]) == 2
    assert Path("retrain.toml").read_text() == "mine"
    assert "never overwrites" in capsys.readouterr().err
    assert main(["init", "--output", "other.toml"]) == 0
    assert "retrain other.toml\n" in Path("other.toml").read_text()


def test_the_checkout_has_what_init_writes_and_init_beside_it_says_so(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["init"]) == 0
    assert Path("retrain.toml").read_bytes() == (ROOT / "retrain.toml").read_bytes()
    capsys.readouterr()
    assert main(["init"]) == 0 and "Already there" in capsys.readouterr().out
    assert main(["init", "--template", "lab"]) == 2


@pytest.mark.parametrize(
    ("option", "value", "code", "said"),
    [
        ("--template", "quickstrat", 2, "--template 'quickstrat' is not known; did you mean"),
        ("--output", "mine/x.toml", 2, "mine cannot be used: it is a file, and a folder is"),
        ("--output", "/proc/x.toml", 3, "/proc/x.toml is not writable; name another place."),
    ],
)
def test_init_explains_what_is_wrong(
    option: str, value: str, code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("mine").touch()
    assert main(["init", option, value]) == code and said in capsys.readouterr().err


@pytest.mark.parametrize("template", ["papers/dapoo", "dapo"])
def test_a_mistyped_template_is_told_the_near_one(
    template: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["init", "--template", template]) == 2
    assert capsys.readouterr().err.endswith("is not known; did you mean papers/dapo?\n")


def test_a_template_without_its_flag_is_told_the_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", "lab"]) == 2
    assert "(lab). An example is `retrain init --template lab" in capsys.readouterr().err


def test_preview_shows_the_difference_and_writes_nothing(
    legacy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["migrate-config", "old.toml"]) == 0
    shown = capsys.readouterr().out
    assert '-prime_rl_transport = "filesystem"' in shown and "+[backend.options]" in shown
    assert legacy.read_text() == LEGACY


def test_check_exits_with_1_until_the_file_is_migrated(legacy: Path) -> None:
    assert main(["old.toml"]) == 2
    assert main(["migrate-config", "old.toml", "--check"]) == 1
    assert legacy.read_text() == LEGACY
    assert main(["migrate-config", "old.toml", "--write"]) == 0
    assert main(["migrate-config", "old.toml", "--check"]) == 0
    config = load_config(legacy)
    assert config.backend.options["transport"] == "filesystem"


def test_what_a_person_has_to_change_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    Path("old.toml").write_text(
        '[model]\ndtype = "fp8"\n[[campaign.conditions]]\nadvantage_mode = "grpo"\n'
        'transform_mode = "none"\nevaluation = { covariate = "x" }\n'
    )
    assert main(["migrate-config", "old.toml", "--check"]) == 1
    seen = capsys.readouterr()
    assert "make the changes above" in seen.out
    assert seen.err.startswith("Yours to change: model.dtype = fp8 left in 0.10; use ")
    assert "Yours to change: evaluation.covariate left in 0.10; " in seen.err
    Path("old.toml").write_text('[[campaign.conditions]]\nalgorithm_mode = "dr_grpo"\n')
    assert main(["migrate-config", "old.toml", "--check"]) == 0
    assert capsys.readouterr().err == f"{REDEFINED}\n"  # as the run says it


def test_as_json_it_says_what_would_change_and_what_was_written(
    legacy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = legacy.read_text()
    assert main(["migrate-config", str(legacy), "--json"]) == 0
    seen = json.loads(capsys.readouterr().out)
    assert seen["needs_migration"] and "-prime_rl_" in seen["difference"] and seen["wrote"] is None
    assert legacy.read_text() == before
    assert main(["migrate-config", str(legacy), "--check", "--json"]) == 1
    assert json.loads(capsys.readouterr().out) == seen
    assert main(["migrate-config", str(legacy), "--write", "--backup", "--json"]) == 0
    done = json.loads(capsys.readouterr().out)
    assert done["wrote"] == str(legacy) and Path(done["backup"]).read_text() == before
    assert legacy.read_text() == done["migrated"]


def test_write_keeps_comments_mode_and_a_backup(legacy: Path) -> None:
    legacy.chmod(0o600)
    assert main(["migrate-config", "old.toml", "--write", "--backup"]) == 0
    assert "# my run" in legacy.read_text() and "# the external trainer" in legacy.read_text()
    assert Path("old.toml.bak").read_text() == LEGACY
    assert legacy.stat().st_mode & 0o777 == 0o600
    assert main(["migrate-config", "old.toml", "--write", "--backup"]) == 0
    assert Path("old.toml.bak").read_text() == LEGACY and not Path("old.toml.bak2").exists()


def test_an_older_backup_is_kept(legacy: Path) -> None:
    Path("old.toml.bak").write_text("older")
    assert main(["migrate-config", "old.toml", "--write", "--backup"]) == 0
    assert Path("old.toml.bak").read_text() == "older"
    assert Path("old.toml.bak2").read_text() == LEGACY


def test_output_leaves_the_source_and_other_files_alone(
    legacy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):
        assert main(["migrate-config", "old.toml", "--output", "new.toml"]) == 0
    assert legacy.read_text() == LEGACY and "[backend.options]" in Path("new.toml").read_text()
    Path("new.toml").write_text("mine")
    assert main(["migrate-config", "old.toml", "--output", "new.toml"]) == 2
    assert Path("new.toml").read_text() == "mine"


def test_stream_mode_is_a_filter(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(LEGACY))
    assert main(["migrate-config", "--stdin", "--stdout"]) == 0
    once = capsys.readouterr().out
    assert "[backend.options]" in once and "prime_rl_" not in once
    monkeypatch.setattr(sys, "stdin", io.StringIO(once))
    assert main(["migrate-config", "--stdin", "--stdout"]) == 0
    assert capsys.readouterr().out == once
    for text, code in ((b"\xef\xbb\xbf[model]\n", 0), (b"# caf\xe9\n", 2)):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text), encoding="utf-8"))
        assert main(["migrate-config", "--stdin"]) == code


def test_a_file_that_the_disk_takes_in_part_is_named_and_taken_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(path: Path, _: bytes) -> None:
        path.write_text("a part")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    assert main(["init", "--output", f"{tmp_path}/x.toml"]) == 3
    assert f"{tmp_path}/x.toml cannot be used: No space left" in capsys.readouterr().err
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["old.toml", "--stdin"],
        ["old.toml", "--check", "--write"],
        ["old.toml", "--backup"],
        ["--stdin", "--write"],
        ["missing.toml"],
        ["broken.toml"],
        ["binary.toml"],
    ],
)
def test_wrong_usage_is_one_sentence_and_changes_nothing(
    arguments: list[str], legacy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("broken.toml").write_text("[backend\n")
    Path("binary.toml").write_bytes(b"\xff\xfe")
    assert main(["migrate-config", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("retrain: ") and error.count("\n") == 1
    assert legacy.read_text() == LEGACY


def test_init_writes_all_files_of_a_template_or_none(capsys: pytest.CaptureFixture[str]) -> None:
    Path("dapo.py").write_text("mine")
    argv = ["init", "--template", "papers/dapo", "--output"]
    assert main([*argv, "new.toml"]) == 2
    assert "dapo.py exists, and retrain never overwrites it" in capsys.readouterr().err
    assert [path.name for path in Path().iterdir()] == ["dapo.py"]
    assert main([*argv, ".", "--force"]) == 2
    assert "is a folder; name a file" in capsys.readouterr().err
