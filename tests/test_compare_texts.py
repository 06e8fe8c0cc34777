"""The texts of docs/verdicts.md are what the five campaigns give today."""

from pathlib import Path

import pytest
from campaigns import write_campaign

from retrain.cli.main import main
from scripts.five_campaigns import WIDTH, texts

PAGE = Path(__file__).resolve().parents[1] / "docs" / "verdicts.md"


def test_the_page_of_five_campaigns_shows_what_compare_prints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    page = PAGE.read_text(encoding="utf-8")
    shown = dict(texts(tmp_path))
    assert len(shown) == 5
    for title, text in shown.items():
        assert f"## {title}\n\n```text\n{text}```" in page, (
            f"docs/verdicts.md: {title}: python scripts/five_campaigns.py prints it anew"
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
