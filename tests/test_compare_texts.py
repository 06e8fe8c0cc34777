"""The stored texts of five campaigns are what they give today."""

from pathlib import Path

import pytest
from campaigns import write_campaign

from retrain.cli.main import main
from scripts.five_campaigns import ROOT, WIDTH, texts

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


def test_random_rewards_everywhere_leave_no_control(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arms = {"grpo+none": [40, 41], "maxrl+none": [46, 40]}
    assert main(["compare", str(write_campaign(tmp_path, arms, reward={"type": "random"}))]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "Every condition trains on random rewards" in shown and "is a control" not in shown


def test_explain_and_compare_state_one_rule_on_what_seeds_find(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arms = {"grpo+none": [40, 44, 41, 39, 45, 40, 42], "maxrl+none": [41, 40, 45, 42, 39, 44, 40]}
    write_campaign(tmp_path, arms)
    config = (ROOT / "examples" / "ab.toml").read_text().replace("mine.winners_only", "maxrl")
    (tmp_path / "c.toml").write_text(config)
    for arguments in (["explain", f"{tmp_path / 'c.toml'}"], ["compare", f"{tmp_path}"]):
        assert main(arguments) == 0
        shown = " ".join(capsys.readouterr().out.split())
        assert "7 seeds and 1 comparison find a true difference of 1.34 standard dev" in shown


def test_runs_that_solved_nothing_have_no_interval(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_campaign(tmp_path, {"grpo+none": [0] * 7, "maxrl+none": [0] * 7}, asked=20)
    assert main(["compare", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "Undecided on these 20 problems: no run solved any, so there is nothing" in shown
    assert "+0.0, +0.0" not in shown and "+0.0 to +0.0" not in shown
