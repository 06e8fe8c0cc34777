"""`--resume` of a path that holds no run."""

from pathlib import Path

import pytest

from retrain.cli.main import main


@pytest.mark.parametrize(("name", "what"), [("gone", "does not exist"), ("file", "is a file")])
def test_resume_of_no_folder_says_what_stands_there(
    name: str,
    what: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    assert main(["--resume", name]) > 0
    expected = f"retrain: --resume {name} {what}; name the folder of a run.\n"
    assert capsys.readouterr().err == expected
