"""Reading runs back: real ones, campaigns, torn and damaged files."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from campaigns import compared, problems, write_campaign, write_manifest, write_run
from runs import small, small_run

import retrain
from retrain.analysis.measures import choose_metric
from retrain.analysis.runs import StoredRun, find_runs, is_campaign
from retrain.cli.main import main
from retrain.errors import ConfigurationError, RunFailed
from retrain.records import jsonl


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two real runs of two steps, evaluated at the end."""
    root = tmp_path_factory.mktemp("trained")
    for seed in (1, 2):
        train(root / f"run_s{seed}", seed)
    return root


def train(folder: Path, seed: int, **sections: dict[str, Any]) -> None:
    evaluation = {"at_end": True, "at_start": True, "max_examples": 6}
    small_run(
        small(folder, training={"seed": seed, "max_steps": 2}, evaluation=evaluation, **sections),
        quiet=True,
    )


def test_a_frame_holds_what_the_runs_recorded(trained: Path) -> None:
    frame = retrain.load_runs(trained)
    assert list(frame.columns[:4]) == ["run", "condition", "seed", "step"]
    rows = [[f"run_s{seed}", seed, step] for seed in (1, 2) for step in (0, 1)]
    assert frame[["run", "seed", "step"]].values.tolist() == rows
    runs = [retrain.Run(trained / f"run_s{seed}", None) for seed in (1, 2)]  # type: ignore[arg-type]
    records = [record for run in runs for record in run.records()]
    for name in ("loss", "mean_reward", "step_time_s", "num_datums"):
        assert frame[name].tolist() == [getattr(record, name) for record in records]
    assert frame["plan_entropy_mean"].isna().all() and frame["sepa_gate_step"].isna().all()
    assert frame["condition"].tolist() == ["maxrl+none"] * 4
    assert frame.groupby("run", observed=True)["correct_rate"].mean().between(0, 1).all()


def test_a_run_with_tables_of_values_is_read_too(tmp_path: Path) -> None:
    """[schedule], an environment and a loss of one's own write tables into a step."""
    tables = ("scheduled", "by_task", "environment_metrics", "loss_metrics")
    measured = {name: {"loss.kl_coef": 0.1} for name in tables}
    write_run(tmp_path / "run", 3, rates=[0.5, 0.25], measured=measured)
    frame = retrain.load_runs(tmp_path)
    assert frame["correct_rate"].tolist() == [0.5, 0.25]
    assert not frame.columns.intersection(tables).size


def test_types_do_not_depend_on_the_data(trained: Path, tmp_path: Path) -> None:
    write_run(tmp_path / "bare", 3, rates=[None, None])
    categories = ["run", "condition", "uncertainty_kind", "bp_action", "bp_regime"]
    bare, whole = (retrain.load_runs(folder).dtypes for folder in (tmp_path, trained))
    assert bare.drop(categories).equals(whole.drop(categories))
    assert isinstance(whole["uncertainty_kind"], pd.CategoricalDtype)


def test_a_run_that_could_not_be_started_any_more_is_read_and_not_resumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It ran under the rules of an earlier version: k1 was no refused loss term then."""
    folder = write_run(tmp_path / "old", 1, finished=False, max_steps=3)
    config = folder / "config.toml"
    config.write_text(
        config.read_text().replace("kl_coef = 0.0", "kl_coef = 0.1").replace('"k3"', '"k1"')
    )
    assert StoredRun(folder).config.loss.kl_estimator == "k1"
    assert len(retrain.load_runs(folder)) == 2
    assert main(["--resume", str(folder)]) == 2
    assert 'kl_estimator = "k1" has an' in capsys.readouterr().err


def test_a_finished_run_says_so_and_gives_its_last_evaluation(trained: Path) -> None:
    first, second = find_runs(trained)
    assert (first.seed, second.seed, first.steps, first.unfinished) == (1, 2, 2, "")
    assert first.final_evaluation is not None and first.final_evaluation.step == 2
    assert len(first.final_evaluation.problems) == 6


def test_real_runs_compare(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tmp_path / "gtpo", 1, algorithm={"transform_mode": "gtpo"})
    capsys.readouterr()
    result = compared(capsys, tmp_path / "gtpo", "--baseline", *sorted(trained.iterdir()))
    (found,) = result["contrasts"]
    assert result["metric"] == "pass@1" and list(found["differences"]) == ["1"]
    assert (found["same_prompts"], found["shared_noise"]) == (1, 1)
    assert found["verdict"] == "inconclusive"
    assert found["differing_keys"] == ["algorithm.transform_mode"]


def test_the_tail_of_a_file_is_its_end(trained: Path) -> None:
    path = trained / "run_s1" / "evaluation.jsonl"
    forward = list(jsonl.read_jsonl(path))
    assert list(jsonl.read_jsonl_backwards(path)) == forward[::-1]


def test_a_torn_last_line_is_no_step(tmp_path: Path) -> None:
    run = StoredRun(
        write_run(tmp_path / "run", 1, rates=[0.1, 0.2, 0.3], finished=False, max_steps=9)
    )
    with run.folder.metrics.open("a") as file:
        file.write('{"step": 3, "condition": "x", "correct')
    assert run.steps == 3 and run.unfinished == "stopped after 3 of 9 steps"
    assert retrain.load_runs(tmp_path)["correct_rate"].tolist() == [0.1, 0.2, 0.3]
    assert run.curve("correct_rate").tolist() == [[0, 1, 2], [0.1, 0.2, 0.3]]


DAMAGE = {
    "{]": "line 2",
    '{"step": 1, "corr': "line 2",
    '{"step": "x"}': "line 2",
    "7": "line 2",
    '{"step": 1.5, "condition": "x"}': "line 2",
    '{"step": -1, "condition": "x"}': "line 2",
    '{"step": 1000000000000000000000000000000, "condition": "x"}': "line 2",
    f'{{"step": 1, "condition": "x", "loss": 1{"0" * 400}}}': "line 2",
    '{"step": 1, "condition": "x", "loss": NaN}': "step 1",
    '{"step": 1, "condition": "x", "loss": "low"}': "step 1",
}
"""A damaged second line, and where a sentence says that it is."""


@pytest.mark.parametrize(("damage", "place"), DAMAGE.items())
def test_a_damaged_line_is_named(
    damage: str, place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By load_runs, which reads the file from its start, and by status and compare, which read the
    last steps from its end.
    """
    run = StoredRun(write_run(tmp_path / "run", 1, rates=[0.1, 0.2], held_out=problems([1])))
    other = write_run(tmp_path / "other", 1, rates=[0.1, 0.2], held_out=problems([1]))
    lines = run.folder.metrics.read_text().splitlines()
    run.folder.metrics.write_text("\n".join([lines[0], damage, lines[1]]) + "\n")
    sentence = rf"run/metrics\.jsonl, {place}\b"
    with pytest.raises(RunFailed, match=sentence):
        retrain.load_runs(tmp_path)
    assert main(["status", str(run.path)]) == 0
    assert re.search(sentence, capsys.readouterr().out)
    assert (
        main(["compare", str(run.path), "--baseline", str(other), "--metric", "correct_rate"]) == 1
    )
    assert re.search(sentence, capsys.readouterr().err)


@pytest.mark.parametrize(
    ("damage", "place"),
    [('{"step": 2, "exam', "line 1"), ('{"step": 2, "example_id": "0"}', "step 2")],
)
def test_a_damaged_line_of_an_evaluation_is_named(
    damage: str, place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = StoredRun(write_run(tmp_path / "run", 1, held_out=problems([1, 0])))
    other = write_run(tmp_path / "other", 1, held_out=problems([1, 0]))
    _, second = run.folder.evaluation.read_text().splitlines()
    run.folder.evaluation.write_text(f"{damage}\n{second}\n")
    for command in (["status"], ["compare", "--baseline", str(other)]):
        main([command[0], str(run.path), *command[1:]])
        printed = capsys.readouterr()
        assert re.search(rf"run/evaluation\.jsonl, {place}\b", printed.out + printed.err)


def test_a_line_without_a_step_is_named_by_the_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = StoredRun(write_run(tmp_path / "run", 1, rates=[0.1, 0.2]))
    run.folder.metrics.write_text(
        re.sub(r'"step": ?\d+', '"step": null', run.folder.metrics.read_text())
    )
    assert main(["report", str(run.path)]) == 1
    assert re.search(r"run/metrics\.jsonl, line 1\b", capsys.readouterr().err)


def test_lines_of_other_versions_are_read(tmp_path: Path) -> None:
    run = StoredRun(write_run(tmp_path / "run", 1, rates=[0.5]))
    run.folder.metrics.write_text(
        '{"step": 0, "condition": "x", "correct_rate": 1, "of_the_future": [1], "mismatch_k3": 0.1,'
        ' "max_token_hit_rate": 0.5, "scheduled": {"algorithm.reference_coef": 0.25}}\n'
    )
    frame = retrain.load_runs(tmp_path)
    assert frame["correct_rate"].tolist() == [1.0] and np.isnan(frame["loss"][0])
    assert "of_the_future" not in frame
    assert frame["truncated_fraction"].tolist() == [0.5]
    assert choose_metric("max_token_hit_rate", [run]).of(run) == 0.5
    assert run.config_at(0).algorithm.teacher_coef == 0.25


def test_runs_are_found_in_campaigns_and_beside_them(tmp_path: Path) -> None:
    write_campaign(tmp_path / "logs" / "campaign_1", {"grpo+none": [5, 6]}, asked=10)
    write_run(tmp_path / "logs" / "alone", 7)
    (tmp_path / "logs" / "notes").mkdir()
    found = dict.fromkeys(retrain.load_runs(tmp_path / "logs")["run"])
    in_campaign = [f"campaign_1/runs/grpo+none_s{seed}" for seed in (1, 2)]
    assert list(found) == ["alone", *in_campaign]
    assert set(retrain.load_runs(tmp_path / "logs" / "alone")["run"]) == {"alone"}


def test_a_campaigns_own_label_names_the_condition(tmp_path: Path) -> None:
    write_run(tmp_path / "runs/fast_s1", 1)
    write_manifest(tmp_path, [{"condition": "fast", "seed": 1}])
    assert set(retrain.load_runs(tmp_path)["condition"]) == {"fast"}


def test_a_checkpoint_is_no_campaign(trained: Path) -> None:
    manifests = [path.parent for path in trained.rglob("manifest.json")]
    assert manifests and not any(map(is_campaign, manifests))


def test_a_folder_without_runs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="holds no run"):
        retrain.load_runs(tmp_path)
    with pytest.raises(ConfigurationError, match="is not a folder"):
        retrain.load_runs(tmp_path / "nowhere")


def test_untrained_weights_are_no_final_evaluation(tmp_path: Path) -> None:
    run = StoredRun(write_run(tmp_path / "run", 1, held_out=problems([1])))
    run.folder.evaluation.write_text(
        run.folder.evaluation.read_text().replace('"step": 2', '"step": 0')
    )
    assert run.final_evaluation is None


def test_a_summary_that_is_not_done_is_no_result(tmp_path: Path) -> None:
    run = StoredRun(write_run(tmp_path / "run", 1))
    assert run.unfinished == ""
    run.folder.summary.write_text(run.folder.summary.read_text().replace('"done"', '"interrupted"'))
    assert StoredRun(run.path).unfinished == "was interrupted after 2 steps"
    run.folder.summary.write_text('{"steps": 2}')
    without = "left a summary.json without a status after 2 steps"
    assert StoredRun(run.path).unfinished == without


@pytest.mark.parametrize(
    ("engine", "recorded", "shared"),
    [
        ("pytorch", None, True),
        ("pytorch", {"noise": "counter"}, True),
        ("my_engines.Mine", {"noise": "counter"}, True),
        ("my_engines.Mine", {"noise": "none"}, False),
        ("my_engines.Mine", None, False),
        ("vllm", None, False),
    ],
)
def test_shared_noise_is_what_the_run_recorded_of_its_engine(
    tmp_path: Path, engine: str, recorded: object, shared: bool
) -> None:
    """A folder of an earlier version has recorded nothing; the built-in engine is then known by its
    name, and no plugin is imported.
    """
    (tmp_path / "config.toml").write_text(f'[inference]\nengine = "{engine}"\n')
    if recorded:
        (tmp_path / "environment.json").write_text(json.dumps({"engine": recorded}))
    assert StoredRun(tmp_path).has_counter_noise is shared
