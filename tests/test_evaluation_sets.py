"""[evaluation] source as a list: each source is a task with its own samples and temperature."""

import json
from pathlib import Path
from typing import Any

import pytest
from runs import lines, small, small_run

from retrain.analysis.arms import evaluation_words
from retrain.cli.main import main
from retrain.config import TrainConfig, config_from_mapping
from retrain.config.plan import Plan
from retrain.data.prompts import load_examples
from retrain.errors import ConfigurationError
from retrain.rewards.verification import equal

STAND_INS: dict[str, dict[str, Any]] = {
    "math500": {
        "problem": "Convert (0,3).",
        "solution": "so \\boxed{\\left( 3, \\frac{\\pi}{2} \\right)}",
        "answer": "\\left( 3, \\frac{\\pi}{2} \\right)",
        "subject": "Precalculus",
        "level": 2,
        "unique_id": "test/precalculus/807.json",
    },
    "aime24": {
        "id": 60,
        "problem": "Every morning Aya goes for a walk.",
        "solution": "...",
        "answer": "033",
        "url": "https://artofproblemsolving.com/",
        "year": "2024",
    },
    "aime25": {"id": "0", "problem": "Find the sum of all bases b > 9.", "answer": "70"},
    "gpqa_diamond": {
        "Question": "Which energy difference resolves the two levels?",
        "Correct Answer": "10^-4 eV",
        "Incorrect Answer 1": "10^-11 eV",
        "Incorrect Answer 2": "10^-8 eV",
        "Incorrect Answer 3": "10^-9 eV",
        "Record ID": "rec06pnAkLOr2t2mp",
        "Subdomain": "Physics (general)",
    },
}
"""A row of each data set, with the columns that the hub's has."""


def rows(path: Path, items: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(item) + "\n" for item in items), encoding="utf-8")
    return str(path)


def asked(source: Any, **evaluation: Any) -> TrainConfig:
    return config_from_mapping(
        {"data": {"source": "lab"}, "evaluation": {"source": source, "at_end": True, **evaluation}}
    )


@pytest.fixture
def two(tmp_path: Path) -> dict[str, Any]:
    """Two sources: the lab's held-out split at the training's settings, and a file of three."""
    file = rows(
        tmp_path / "sums.jsonl", [{"prompt": f"{n} + 1", "answer": n + 1} for n in range(3)]
    )
    return {
        "source": ["lab", file],
        "max_examples": 4,
        "at_end": True,
        "reward": "match",
        "tasks": {"sums": {"samples": 3, "temperature": 0.5, "max_examples": 2}},
    }


# --- presets --------------------------------------------------------------------------------------


def test_a_copy_of_a_set_that_is_not_there_is_named_by_its_key() -> None:
    config = asked("math", tasks={"math": {"path": "lost.jsonl"}})
    with pytest.raises(ConfigurationError, match=r'^\[evaluation.tasks.math\] path = "lost.jsonl"'):
        load_examples(config, "heldout")


@pytest.mark.parametrize("name", STAND_INS)
def test_a_preset_reads_a_copy_of_its_data_set(name: str, tmp_path: Path) -> None:
    copy = rows(tmp_path / "copy.jsonl", [STAND_INS[name]])
    config = asked(name, tasks={name: {"path": copy}})
    (example,) = load_examples(config, "heldout").examples
    text, reference = str(example.prompt), example.reference
    if name == "gpqa_diamond":
        shown = dict(line.split(") ", 1) for line in text.splitlines() if ") " in line)
        assert set(shown) == set("ABCD") and shown[reference] == "10^-4 eV"
    else:
        assert text == STAND_INS[name]["problem"]
        assert reference == {"aime24": "33"}.get(name, STAND_INS[name]["answer"])
    assert Plan.of(asked(name)).judges == (("match", 1.0),)  # training's, which verifies
    assert equal(reference, reference)


def test_a_preset_reads_the_hubs_data_set(monkeypatch: pytest.MonkeyPatch) -> None:
    read = []

    def split(data: Any, name: str) -> list[dict[str, Any]]:
        read.append((data.name, data.config, name))
        return [STAND_INS[{"MATH-500": "math500"}.get(data.name.rpartition("/")[2], "aime24")]]

    monkeypatch.setattr("retrain.data.readers._load_split", split)
    for config in Plan.of(asked(["math500", "aime24"])).evaluations:
        assert len(load_examples(config, "heldout").examples) == 1
    assert read == [
        ("HuggingFaceH4/MATH-500", "", "test"),
        ("HuggingFaceH4/aime_2024", "", "train"),
    ]


def test_an_evaluation_set_is_not_trained_on() -> None:
    with pytest.raises(ConfigurationError, match="is an evaluation set, not for training"):
        load_examples(config_from_mapping({"data": {"source": "aime24"}}))


# --- several sources ------------------------------------------------------------------------------


def test_each_source_is_a_task_with_its_own_samples(
    two: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = small(tmp_path / "run", training={"max_steps": 1}, evaluation=two)
    small_run(config)
    records = lines(tmp_path / "run" / "evaluation.jsonl")
    counts = {(item["task"], item["samples"]) for item in records}
    assert counts == {("lab", 1), ("sums", 3)} and len(records) == 4 + 2
    assert all(item["example_id"].startswith(item["task"] + "/") for item in records)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert set(summary["evaluation"]["after"]["tasks"]) == {"lab", "sums"}
    assert "  sums | pass@1" in capsys.readouterr().out
    words = evaluation_words(config.evaluation, config.training)
    assert words.startswith("lab: temperature 1, 1 sample") and "sums: temperature 0.5, 3" in words


def test_a_list_of_one_is_its_only_source(tmp_path: Path) -> None:
    """Byte for byte, so that a file of one source goes on as it was."""
    for name, source in (("one", "lab"), ("list", ["lab"])):
        evaluation = {"source": source, "max_examples": 3, "at_end": True, "reward": "match"}
        small_run(small(tmp_path / name, training={"max_steps": 1}, evaluation=evaluation))
    one, other = (tmp_path / name / "evaluation.jsonl" for name in ("one", "list"))
    assert one.read_bytes() == other.read_bytes()


@pytest.mark.slow
def test_eval_and_compare_have_a_row_for_each_task(
    two: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for arm in ("maxrl", "grpo"):
        algorithm = {"advantage_mode": arm}
        given = {"training": {"max_steps": 1}, "algorithm": algorithm, "evaluation": two}
        small_run(small(tmp_path / arm, **given), quiet=True)
    assert main(["eval", str(tmp_path / "grpo")]) == 0
    output = capsys.readouterr().out
    assert "  lab | pass@1" in output and "  sums | pass@1" in output
    arms = [str(tmp_path / "maxrl"), "--baseline", str(tmp_path / "grpo")]
    assert main(["compare", *arms, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["arms"]
    assert [set(arm["tasks"]["scores"]) for arm in found] == [{"lab", "sums"}] * 2


# --- what is refused ------------------------------------------------------------------------------
