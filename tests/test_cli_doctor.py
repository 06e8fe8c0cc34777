"""`retrain doctor`, and what a command with --json prints when it fails."""

import json
from pathlib import Path

import pytest

from retrain.cli import doctor
from retrain.cli.main import main


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("retrain.model.hub.why_unreachable", lambda: "HF_HUB_OFFLINE is set")


def findings(capsys: pytest.CaptureFixture[str]) -> dict[str, dict[str, str]]:
    return {each["name"]: each for each in json.loads(capsys.readouterr().out)}


def test_every_check_finds_something_and_a_step_of_the_lab_is_trained(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_never_shown")
    assert main(["doctor", "--json"]) == 0
    found = findings(capsys)
    assert len(found) == len(doctor.CHECKS) and all(each["found"] for each in found.values())
    assert "trained" in found["self-test"]["found"] and not [*Path().iterdir()]
    assert found["hub"]["state"] == "note" and "HF_HUB_OFFLINE" in found["hub"]["found"]
    assert "set: HF_TOKEN;" in found["keys"]["found"]
    assert "never_shown" not in json.dumps(found)


def test_what_a_run_needs_and_is_lacking_exits_with_3(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "_TRAINER", ("torch", "no_such_package"))
    assert main(["doctor", "--format", "json"]) == 3
    found = findings(capsys)
    assert found["torch"]["state"] == found["self-test"]["state"] == "lacks"
    assert "pip install" in found["torch"]["advice"]
    assert main(["doctor"]) == 3
    assert "lacks what a run needs: torch, self-test" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["compare", "no/such/folder", "--json"],
        ["compare", "no/such/folder", "--format", "json"],
        ["status", "no/such/folder", "--json"],
        ["xray", "no_such_advantage", "--json"],
        ["explain", "no.toml", "--json"],
        ["backends", "nothing", "--format=json"],
    ],
)
def test_an_error_is_json_where_json_was_asked_for(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(arguments)
    shown = capsys.readouterr()
    content = json.loads(shown.out)
    assert code in (2, 3) and content["exit_code"] == code
    assert shown.err.removeprefix("retrain: ").strip() == content["error"]
    main([argument for argument in arguments if "json" not in argument and argument != "--format"])
    assert not capsys.readouterr().out
