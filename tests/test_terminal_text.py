"""Nothing that a model, an exception or a foreign folder says acts on the terminal, wherever a sentence with it is shown or kept."""

import json
from pathlib import Path

import pytest
from campaigns import write_run

from retrain.cli.main import main
from retrain.errors import RunFailed
from retrain.tracking.terminal import clean

HOSTILE = "\x1b]0;owned\x07\x1b[2J\u202egnp\x9b31m\r\x00 end"
SAFE = "<U+202E>gnp end"


def test_a_clean_sentence_keeps_its_words_lines_and_tabs() -> None:
    assert clean(f"a\t{HOSTILE}\nb") == f"a\t{SAFE}\nb"
    assert clean("begun \x1b]8;; never ended; go on with --resume") == "begun 8;; never ended; go on with --resume"
    plain = "accuracy → 90 % (naïve, 东京, 👩‍🔬)\n"
    assert clean(plain) == plain


def test_an_error_shows_no_escapes(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(arguments: list[str]) -> int:
        raise RunFailed(f"the reward said {HOSTILE}")

    monkeypatch.setattr("retrain.cli.main._dispatch", fail)
    assert main([]) == 1
    assert capsys.readouterr().err == f"retrain: the reward said {SAFE}\n"


@pytest.mark.parametrize("command", [["status"], ["compare", "--markdown"]])
def test_a_foreign_run_cannot_write_escapes_by_its_name_or_its_reason(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_run(tmp_path / f"run{HOSTILE.replace(chr(0), '').replace('/', '')}")
    (folder / "summary.json").write_text(json.dumps({"status": "failed", "reason": HOSTILE}))
    main([command[0], str(tmp_path)])
    captured = capsys.readouterr()
    assert not set("\x1b\x9b\u202e\r\x00") & set(captured.out + captured.err)
