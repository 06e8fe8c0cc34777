"""`--resume` of a path that holds no run."""

from pathlib import Path

import pytest

from retrain.cli.main import main
from tests.campaigns import write_run


@pytest.mark.parametrize("command", [(), ("explain",)])
@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("gone", "--resume gone does not exist; name the folder of a run"),
        ("file", "holds no run of retrain"),
        ("", "--resume names no folder"),
        ("run/checkpoints/step_1", "it is a part of the run"),
    ],
)
def test_resume_of_no_folder_says_what_stands_there(
    name: str,
    what: str,
    command: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    (write_run(tmp_path / "run", 1) / "checkpoints" / "step_1").mkdir(parents=True)
    assert main([*command, "--resume", name]) == 2
    assert what in capsys.readouterr().err
