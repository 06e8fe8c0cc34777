"""scripts/replications.py: which campaign it starts or continues, and the page that it writes."""

import json
from pathlib import Path

import pytest

from retrain.config import load_config

pytest.importorskip("matplotlib")

from scripts import replications

FILES = Path(__file__).resolve().parents[1] / "examples" / "replications"


@pytest.mark.parametrize("path", sorted(FILES.glob("*.toml")), ids=lambda path: path.stem)
def test_the_file_of_a_replication_loads_and_has_a_claim(path: Path) -> None:
    assert load_config(path, environ={}).logging.log_dir == replications._folder(path.stem)
    assert path.stem.removesuffix(replications.SMOLLM2) in replications.CLAIMS


def test_without_a_name_the_replications_of_the_lab_are_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[str] = []
    monkeypatch.setattr(replications, "run", lambda name, model: made.append(name))
    monkeypatch.setattr(replications, "write_page", lambda name: None)
    monkeypatch.setattr("sys.argv", ["replications.py"])
    replications.main()
    assert set(made) == {"luck", "nsr", "ranks", "mismatch"}


@pytest.mark.parametrize(
    ("name", "link"), [("nsr", "../../../docs/lab.md"), ("nsr-smollm2", "nsr.md")]
)
def test_a_page_leads_to_the_lab_or_to_what_was_found_there(name: str, link: str) -> None:
    assert f"on [the lab]({link})" in "\n".join(replications._head(name))


def test_a_campaign_is_started_by_its_own_file_and_continued_where_it_stopped(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(replications, "ROOT", tmp_path)
    started: list[tuple[str, ...]] = []
    monkeypatch.setattr(replications, "retrain", lambda *words, shown: started.append(words))
    model = ["--model", "models/small"]
    replications.run("nsr-smollm2", model)
    folder = tmp_path / "logs" / "replications" / "nsr-smollm2"
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text("{}", encoding="utf-8")
    replications.run("nsr-smollm2", model)
    first = ("examples/replications/nsr-smollm2.toml", *model)
    assert started == [first, (*first, "--resume", "logs/replications/nsr-smollm2")]


@pytest.mark.parametrize(
    ("to_come", "interval", "shown"),
    [(0, [-0.01, 0.02], "[-1.0, +2.0]"), (3, [-0.01, 0.02], "[-1.0, +2.0]"), (0, None, "[no int")],
)
def test_a_page_has_a_verdict_only_when_no_run_is_to_come(
    to_come: int,
    interval: list[float] | None,
    shown: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    contrast = {"condition": "b", "word": "equivalent", "interval": interval}
    contrast |= {"mean_difference": 0.01, "pairs": 7, "p_adjusted": 0.5}
    contrast |= {"equivalence_p_adjusted": 0.003}
    comparison = {
        "arms": [{"label": "a", "mean": 0.5}, {"label": "b", "mean": 0.51}],
        "answer": "b ties with a.",
        "baseline": "a",
        "contrasts": [contrast],
        "margin": 0.05,
        "planned": "A plan.",
        "to_come": to_come,
    }
    monkeypatch.setattr(replications, "retrain", lambda *words: json.dumps(comparison))
    monkeypatch.setattr(replications, "PAGES", tmp_path)
    *_, row, _, said, _ = replications._comparisons("ranks")
    assert row.startswith(f"| b | 51.0% | +1.0 pp {shown}") and "] | 7 |" in row
    assert (tmp_path / "ranks.svg").is_file()
    assert ("equivalent, p 0.003" in row, "ties" in said) == (not to_come, not to_come)
    assert said.startswith("No verdict yet: 3 runs" if to_come else "b ties")


def test_the_page_of_the_real_model_keeps_what_its_reader_wrote(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(replications, "ROOT", tmp_path)
    monkeypatch.setattr(replications, "PAGES", tmp_path)
    verdicts = tmp_path / "logs" / "replications" / "luck-smollm2.json"
    verdicts.parent.mkdir(parents=True)
    verdicts.write_text(json.dumps([[1.0, 0.0], [1.0, 1.0]]), encoding="utf-8")
    page = tmp_path / "luck-smollm2.md"
    page.write_text(f"old\n{replications.READING}\nIt moves.\n", encoding="utf-8")
    replications.write_page("luck-smollm2")
    text = page.read_text(encoding="utf-8")
    assert text.startswith("# Evaluation luck on SmolLM2-135M\n")
    assert "make replications ONLY=luck SMOLLM2=models/smollm2-135m\n" in text
    assert "| 1 | 100.0% |\n| 2 | 50.0% |\n" in text
    assert text.endswith("## What it says\n\nIt moves.\n")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["foo"], "foo is no replication; choose from luck, nsr, ranks, mismatch, lora-or-full"),
        (
            ["lora-or-full"],
            "lora-or-full has no campaign on the lab; name the model with --smollm2",
        ),
        (
            ["nsr", "--smollm2", "/nowhere"],
            "--smollm2 /nowhere holds no model (no config.json); scripts/get_smollm2.py writes it",
        ),
    ],
)
def test_a_wrong_word_is_answered_in_a_sentence(
    words: list[str],
    sentence: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("sys.argv", ["replications.py", *words])
    with pytest.raises(SystemExit, match="2"):
        replications.main()
    assert capsys.readouterr().err.splitlines()[-1] == f"replications.py: error: {sentence}"


def test_what_a_command_refuses_is_said_by_its_sentence_alone(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit, match="2"):
        replications.retrain("nowhere.toml")
    said = capfd.readouterr().err
    assert said.startswith("retrain: ") and said.count("\n") == 1
