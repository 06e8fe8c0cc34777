"""Six algorithms that were written by the manual alone still run."""

import shutil
from itertools import combinations
from math import log
from pathlib import Path

import numpy as np
import pytest

from retrain import load_config
from tests.data.by_manual.empo import empo
from tests.data.by_manual.passk import passk
from tests.marks import first_of
from tests.runs import lines, small_run

FOLDER = Path(__file__).parent / "data" / "by_manual"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py"))


@pytest.mark.parametrize("name", first_of(NAMES, quick=0))
def test_a_plugin_that_was_written_by_the_manual_runs(name: str, here: Path) -> None:
    for path in FOLDER.iterdir():
        if path.is_file():
            shutil.copy(path, here)
    config = load_config(f"{name}.toml", ["--seed", "1", "--lora-rank", "4"])
    small_run(config, quiet=True)
    records = lines(here / "logs" / name / "metrics.jsonl")
    assert len(records) == config.training.max_steps
    assert any(record["num_datums"] for record in records)


def test_its_passk_is_the_mean_over_the_subsets_of_a_completion() -> None:
    for rewards in ([1.0, 0, 0, 0], [0, 1.0, 0, 1.0, 0, 0]):
        subsets = list(combinations(range(len(rewards)), 2))
        worth = np.array([max(rewards[i] for i in subset) for subset in subsets])
        worth = (worth - worth.mean()) / worth.std()
        expected = [worth[[i in subset for subset in subsets]].mean() for i in range(len(rewards))]
        assert passk(rewards, {"k": 2}) == pytest.approx(expected)


def test_its_empo_is_the_share_of_the_same_answer_within_bounds_of_entropy() -> None:
    responses = [r"\boxed{1}", r"\boxed{1}", "none", r"\boxed{2}"]
    entropy = 0.5 * log(2) + 0.5 * log(4)
    bounds = {"low": entropy - 0.01, "high": entropy + 0.01}
    assert empo(responses, "", bounds) == [0.5, 0.5, 0.0, 0.25]
    assert empo(responses, "", {"low": 0.0, "high": entropy - 0.01}) == [0.0] * 4
