"""Nothing that a model, an exception or a foreign folder says acts on the terminal, wherever a
sentence with it is shown or kept.
"""

import json
from pathlib import Path

import pytest
from campaigns import write_run
from runs import quiet_run

from retrain.cli.main import main
from retrain.errors import RunFailed
from retrain.records.terminal import clean

HOSTILE = "\x1b]0;owned\x07\x1b[2J\u202egnp\x9b31m\r\x00\x85\u2028 end"
SAFE = "<U+202E>gnp<U+2028> end"


def test_a_clean_sentence_keeps_its_words_lines_and_tabs() -> None:
    assert clean(f"a\t{HOSTILE}\nb") == f"a\t{SAFE}\nb"
    assert (
        clean("begun \x1b]8;; never ended; go on with --resume")
        == "begun 8;; never ended; go on with --resume"
    )
    plain = "accuracy → 90 % (naïve, 东京, 👩‍🔬)\n"
    assert clean(plain) == plain


def test_an_error_shows_no_escapes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(arguments: list[str]) -> int:
        raise RunFailed(f"the reward\nsaid {HOSTILE}")

    monkeypatch.setattr("retrain.cli.main._dispatch", fail)
    assert main([]) == 1
    assert capsys.readouterr().err == f"retrain: the reward\\nsaid {SAFE}\n"


@pytest.mark.parametrize("command", ["status", "compare", "report"])
def test_a_foreign_run_cannot_write_escapes_by_its_name_or_its_reason(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_run(tmp_path / "run", 1).rename(tmp_path / f"run{HOSTILE}".replace("\0", ""))
    (folder / "summary.json").write_text(json.dumps({"status": "failed", "reason": HOSTILE}))
    main([command, str(tmp_path)])
    captured = capsys.readouterr()
    assert captured.out or captured.err
    assert not set("\x1b\x9b\u202e\r\x00\x85\u2028") & set(captured.out + captured.err)


def test_the_summary_of_a_run_that_failed_holds_no_escapes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RunFailed(f"the reward said {HOSTILE}")

    monkeypatch.setattr("retrain.run.session.Session.sample", fail)
    with pytest.raises(RunFailed):
        quiet_run(tmp_path / "run", training={"max_steps": 1})
    assert (
        json.loads((tmp_path / "run" / "summary.json").read_text())["reason"]
        == f"the reward said {SAFE}"
    )
