"""Six algorithms that were written by the manual alone still run."""

import shutil
import sys
from itertools import combinations
from math import log
from pathlib import Path
from statistics import fmean, pstdev

import pytest

from retrain import load_config
from tests.marks import first_of
from tests.runs import lines, small_run

FOLDER = Path(__file__).parent / "data" / "by_manual"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py"))


@pytest.fixture
def _beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in FOLDER.iterdir():
        if path.is_file():
            shutil.copy(path, tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in NAMES:
        sys.modules.pop(name, None)


@pytest.mark.usefixtures("_beside")
@pytest.mark.parametrize("name", first_of(NAMES, quick=0))
def test_a_plugin_that_was_written_by_the_manual_runs(name: str, tmp_path: Path) -> None:
    config = load_config(f"{name}.toml", ["--seed", "1", "--lora-rank", "4"])
    small_run(config, quiet=True)
    records = lines(tmp_path / "logs" / name / "metrics.jsonl")
    assert len(records) == config.training.max_steps
    assert any(record["num_datums"] for record in records)


@pytest.mark.usefixtures("_beside")
def test_its_passk_is_the_mean_over_the_subsets_of_a_completion() -> None:
    from passk import passk

    for rewards in ([1.0, 0, 0, 0], [0, 1.0, 0, 1.0, 0, 0]):
        subsets = list(combinations(range(len(rewards)), 2))
        worth = [max(rewards[i] for i in subset) for subset in subsets]
        mean, std = fmean(worth), pstdev(worth)
        expected = [
            fmean((one - mean) / std for one, subset in zip(worth, subsets) if i in subset)
            for i in range(len(rewards))
        ]
        assert passk(rewards, {"k": 2}) == pytest.approx(expected)


@pytest.mark.usefixtures("_beside")
def test_its_empo_is_the_share_of_the_same_answer_within_bounds_of_entropy() -> None:
    from empo import empo

    responses = [r"\boxed{1}", r"\boxed{1}", "none", r"\boxed{2}"]
    entropy = 0.5 * log(2) + 0.5 * log(4)
    bounds = {"low": entropy - 0.01, "high": entropy + 0.01}
    assert empo(responses, "", bounds) == [0.5, 0.5, 0.0, 0.25]
    assert empo(responses, "", {"low": 0.0, "high": entropy - 0.01}) == [0.0] * 4
