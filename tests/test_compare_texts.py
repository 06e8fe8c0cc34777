"""The texts of docs/verdicts.md are what the five campaigns give today."""

from pathlib import Path

import pytest

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
        assert f"## {title}\n\n```text\n{text}```" in page, f"docs/verdicts.md: {title}: python scripts/five_campaigns.py prints it anew"
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    assert main(["compare", str(tmp_path / "winner")]) == 0
    assert capsys.readouterr().out == shown["A clear winner"]
