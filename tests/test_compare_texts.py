"""The stored texts of five campaigns are what they give today."""

from pathlib import Path

import pytest
from campaigns import write_campaign

from retrain.cli.main import main
from scripts.five_campaigns import WIDTH, texts

STORED = Path(__file__).parent / "data" / "five_campaigns.md"


def test_the_texts_of_five_campaigns_are_what_compare_prints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = dict(texts(tmp_path))
    assert len(shown) == 5
    sections = "\n".join(f"## {title}\n\n```text\n{text}```\n" for title, text in shown.items())
    assert sections == STORED.read_text(encoding="utf-8"), (
        "python scripts/five_campaigns.py prints it anew"
    )
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    assert main(["compare", str(tmp_path / "winner")]) == 0
    assert capsys.readouterr().out == shown["A clear winner"]


def test_a_single_seed_is_not_set_against_itself(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        main(["compare", str(write_campaign(tmp_path, {"grpo+none": [40], "maxrl+none": [46]}))])
        == 0
    )
    assert "\nmaxrl+none, seed 1: +6.0 pp\n" in capsys.readouterr().out
