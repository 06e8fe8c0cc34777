"""`retrain verify` and `retrain diff`: equal runs are equal, and what was changed is found."""

import json
import shutil
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from runs import lines, quiet_run, small, small_run
from safetensors.numpy import load_file, save_file
from torch.nn import Identity

from retrain import train
from retrain.analysis.folder_comparison import FirstDifference, FolderComparison, compared
from retrain.analysis.runs import StoredRun
from retrain.cli.main import main
from retrain.config.load import load_stored
from retrain.model.attention import AttentionError
from retrain.records.checkpoint import commit_folder
from retrain.records.run_folder import RunFolder
from retrain.run.gate import GateResult
from retrain.run.replay import _gate_mismatch, _saved, replayed
from tests.marks import first_of

EVERY_STEP = {
    "logging": {"tokens_every": 1},
    "evaluation": {"every": 2, "max_examples": 8, "max_tokens": 24, "reward": "match"},
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return quiet_run(tmp_path_factory.mktemp("base") / "run", **EVERY_STEP).folder


@pytest.fixture
def copy(base: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(base, tmp_path / "copy"))


def of(one: Path, other: Path, steps: range = range(10)) -> FolderComparison:
    return compared(StoredRun(one), StoredRun(other), steps)


def part(step: int, record: str, *fields: str) -> FirstDifference:
    return FirstDifference(step, record, fields)


def change_tokens(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    from safetensors import safe_open

    with safe_open(path, framework="numpy") as file:
        metadata = file.metadata()
    arrays = load_file(path)
    change(arrays)
    save_file(arrays, path, metadata=metadata)


def change_config(run: Path, *changes: tuple[str, str]) -> None:
    text = (run / "config.toml").read_text()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    (run / "config.toml").write_text(text)


def change_row(path: Path, step: int, **values: Any) -> None:
    rows = [row | values if row["step"] == step else row for row in lines(path)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def reseal(run: Path, rows: list[dict[str, Any]]) -> None:
    """Write the rows of evaluation.jsonl, and their hash into the checkpoint after two steps."""

    def sealed(folder: Path) -> None:
        for path in checkpoint.iterdir():
            shutil.copyfile(path, folder / path.name)
        (folder / "manifest.json").unlink()
        (folder / "trainer_state.json").write_text(json.dumps(state))

    (run / "evaluation.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    checkpoint = run / "checkpoints" / "step_000002"
    state = json.loads((checkpoint / "trainer_state.json").read_text())
    before = "".join(json.dumps(row) + "\n" for row in rows if row["step"] <= 2).encode()
    state["files"]["evaluation.jsonl"] = {"size": len(before), "sha256": sha256(before).hexdigest()}
    commit_folder(checkpoint, sealed, step=2, config_hash=state["config_hash"])


def grow(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"x")


def lose(run: Path, *names: str) -> None:
    for name in names:
        (run / name).unlink()


def fewer_steps(run: Path, *lost: str) -> None:
    metrics = run / "metrics.jsonl"
    metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:3]))
    lose(run, *lost)


def change_last(run: Path) -> None:
    last = lines(run / "evaluation.jsonl")[-1]
    change_row(run / "evaluation.jsonl", 4, correct=1 - last["correct"])


def stopped_at_two(run: Path) -> None:
    """No checkpoint is due there, and the replay makes one all the same."""
    change_config(run, ("save_every = 2", "save_every = 0"))
    grow(run / "checkpoints" / "step_000002" / "adapter_model.safetensors")


def stopped_by_the_clock(run: Path) -> None:
    """And its resume lowered max_steps below its steps."""
    change_config(run, ("max_hours = 0.0", "max_hours = 1e-7"), ("max_steps = 4", "max_steps = 3"))


def ended_evaluation(run: Path) -> None:
    kept = [row for row in lines(run / "evaluation.jsonl") if row["step"] < 4]
    (run / "evaluation.jsonl").write_text("".join(json.dumps(row) + "\n" for row in kept))
    lose(run, "trainer_state.json")  # it would say that rows were lost


def misshape(**change: Any) -> Callable[[Path], None]:
    def changed(run: Path) -> None:
        first, *others = lines(run / "evaluation.jsonl")
        rows = [first | change, *others]
        (run / "evaluation.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    return changed


LAST = "checkpoints/final/adapter_model.safetensors"
LOST = ("tokens/step_3.safetensors", "emergence/generations.jsonl")
NOT_THERE = "generations.jsonl at step 2, generations.jsonl at step 3, the stored tokens at step 3."
CHANGES: list[tuple[Callable[[Path], Any], str, int, str]] = [
    (lambda run: grow(run / LAST), "verify COPY", 1, "First difference: step 4, in the adapter."),
    (change_last, "verify COPY", 1, "First difference: step 4, in evaluation.jsonl:"),
    (stopped_at_two, "verify COPY --steps 0:2", 1, "First difference: step 2, in the adapter."),
    (stopped_by_the_clock, "verify COPY", 0, "Verified"),
    (
        lambda run: lose(run, *LOST),
        "verify COPY",
        0,
        f"Not there, and so not compared: {NOT_THERE}",
    ),
    (lambda run: lose(run, "metrics.jsonl"), "verify COPY", 2, "metrics.jsonl is missing"),
    (
        lambda run: (run / "emergence" / "steps.jsonl").write_text("7\n"),
        "verify COPY",
        1,
        "COPY/emergence/steps.jsonl, line 1,",
    ),
    (
        lambda run: change_config(run, ('"maxrl"', '"my_code.advantage"')),
        "verify COPY",
        2,
        "--trust",
    ),
    (
        lambda run: fewer_steps(run, "summary.json", "trainer_state.json"),  # as of a killed run
        "diff BASE COPY",
        1,
        "equal until COPY ends; it has no step 3",
    ),
    (ended_evaluation, "diff BASE COPY", 0, "Only BASE has evaluation.jsonl at step 4."),
    (lambda run: lose(run, "metrics.jsonl"), "diff BASE COPY", 1, "COPY: metrics.jsonl is missing"),
    (
        lambda run: lose(run, "evaluation.jsonl"),
        "diff BASE COPY",
        1,
        "COPY: evaluation.jsonl is missing",
    ),
    (misshape(example_id=[]), "diff BASE COPY", 1, "retrain: COPY/evaluation.jsonl"),
    (misshape(step="x"), "diff BASE COPY", 1, "retrain: COPY/evaluation.jsonl"),
    (misshape(correct=None), "diff BASE COPY", 1, "retrain: COPY/evaluation.jsonl"),
]


@pytest.mark.parametrize(("change", "command", "code", "expected"), CHANGES)
def test_what_became_of_a_run_is_found_by_verify_and_diff(
    change: Callable[[Path], Any],
    command: str,
    code: int,
    expected: str,
    base: Path,
    copy: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    change(copy)
    command, expected = (
        text.replace("COPY", str(copy)).replace("BASE", str(base)) for text in (command, expected)
    )
    assert main(command.split()) == code
    said = " ".join("".join(capsys.readouterr()).split())
    assert expected in said and "Traceback" not in said and "no step yet" not in said


# -- verify ----------------------------------------------------------------------------------------


def test_a_run_is_verified_from_its_checkpoint_and_left_as_it_was(
    copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    environment = json.loads((copy / "environment.json").read_text())
    environment["packages"]["torch"] = "1.0"
    (copy / "environment.json").write_text(json.dumps(environment))
    before = {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()}
    assert main(["verify", str(copy)]) == 0
    said = capsys.readouterr().out
    assert "steps 2 to 3" in said and "Other, without effect: torch (1.0, " in said
    assert before == {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()}


@pytest.mark.slow
def test_a_replay_has_the_mismatch_of_the_gate_that_its_run_passed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gate passed at the start, and a later session skips it."""
    passed = GateResult(9, 257, max_difference=1e-6, mean_difference=5e-4, tolerance=1e-4)
    monkeypatch.setattr("retrain.run.session.run_parity_gate", lambda *_, **__: passed)
    folder = tmp_path / "run"
    train(small(folder, training={"max_steps": 3, "save_every": 0}), quiet=True)
    longer = {"max_steps": 4, "save_every": 0}
    quiet_run(folder, training=longer, resume={"from": str(folder)})
    found = json.loads((folder / "environment.json").read_text())
    assert found["parity_gate"] == passed.to_json()
    assert found["resumed"][0]["parity_gate"] is None
    assert main(["verify", str(folder), "--steps", "0:3"]) == 0
    config = load_stored(folder / "config.toml", to_read=True)
    with replayed(RunFolder(folder), config, 0, 1, tmp_path / "again") as session:
        assert session.state.gate_mismatch == 5e-4


def test_the_mismatch_of_a_gate_that_a_later_session_ran_is_found(tmp_path: Path) -> None:
    """As with a run that began with --skip-parity: a session keeps the first figure."""
    folder = RunFolder(tmp_path)
    gates = [None, {"mean_difference": None}, {"mean_difference": 0.0}, {"mean_difference": 0.1}]
    sessions = [{"step": step, "parity_gate": gate} for step, gate in enumerate(gates)]
    folder.environment.write_text(json.dumps({"parity_gate": None, "resumed": sessions}))
    assert _gate_mismatch(folder) == 0.0


def test_a_changed_number_a_changed_token_and_a_changed_adapter_are_found(
    copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = copy / "checkpoints" / "step_000004"
    state = json.loads((checkpoint / "trainer_state.json").read_text())

    def flipped(folder: Path) -> None:
        for path in checkpoint.iterdir():
            if path.name != "manifest.json":
                shutil.copyfile(path, folder / path.name)
        arrays = load_file(folder / "adapter_model.safetensors")
        first = next(iter(arrays.values())).reshape(-1)
        first[0] += 1e-3
        save_file(arrays, folder / "adapter_model.safetensors")

    commit_folder(checkpoint, flipped, step=4, config_hash=state["config_hash"])
    assert main(["verify", str(copy), "--steps", "2:4"]) == 1
    assert "First difference: step 4, in the adapter." in capsys.readouterr().out
    change_row(copy / "metrics.jsonl", 3, loss=9.0)
    assert main(["verify", str(copy), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["parting"] == {"step": 3, "record": "metrics.jsonl", "fields": ["loss"]}
    assert found["steps"] == [2, 4] and not found["equal"]


def test_the_evaluation_at_the_checkpoint_is_made_again(
    copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The checkpoint knows the bytes of evaluation.jsonl, so a forger seals it anew."""
    written = copy / "evaluation.jsonl"
    rows = lines(written)
    row = next(row for row in rows if row["step"] == 2)
    row["correct"] = 1 - row["correct"]
    written.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["verify", str(copy)]) != 0
    said = capsys.readouterr().err
    assert f"cannot start from step 2 of {copy}" in said and "evaluation.jsonl differs" in said
    assert "--overwrite" not in said, "which would delete what is to be verified"

    reseal(copy, rows)
    assert main(["verify", str(copy)]) == 1
    assert "First difference: step 2, in evaluation.jsonl: " in capsys.readouterr().out


@pytest.mark.slow
def test_the_evaluation_of_an_earlier_max_steps_is_made_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """None is due there any more. Its rows are forged and sealed anew, as by the run itself."""
    evaluation = {"at_end": True, "max_examples": 4, "max_tokens": 24, "reward": "match"}
    run = tmp_path / "run"
    first = small(run, evaluation=evaluation, training={"max_steps": 2})
    small_run(first, quiet=True)
    more = {"evaluation": evaluation, "training": {"max_steps": 3}, "resume": {"from": str(run)}}
    quiet_run(run, **more)
    assert [row["step"] for row in lines(run / "evaluation.jsonl")] == [2] * 4 + [3] * 4
    assert main(["verify", str(run)]) == 0
    assert "not compared" not in capsys.readouterr().out
    rows = lines(run / "evaluation.jsonl")
    rows[0]["correct"] = 1 - rows[0]["correct"]
    reseal(run, rows)
    assert main(["verify", str(run)]) == 1
    assert "First difference: step 2, in evaluation.jsonl: " in capsys.readouterr().out


def test_changed_tokens_and_changed_answers_are_found_though_the_records_are_equal(
    copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokens = copy / "tokens" / "step_3.safetensors"
    whole = tokens.read_bytes()
    change_tokens(tokens, lambda arrays: arrays["token_ids"].__iadd__(1))
    assert main(["verify", str(copy)]) == 1
    assert "First difference: step 3, in the stored tokens." in capsys.readouterr().out
    tokens.write_bytes(whole)
    (copy / "environment.json").unlink()  # what it holds is not compared
    change_row(copy / "emergence" / "generations.jsonl", 3, completion="other")
    assert main(["verify", str(copy), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert not found["equal"] and found["parting"]["record"] == "generations.jsonl"


@pytest.mark.slow
def test_a_last_adapter_of_no_step_is_not_compared(copy: Path) -> None:
    manifest = copy / "checkpoints" / "final" / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"step": []}))
    assert main(["verify", str(copy)]) == 0


def test_a_run_of_one_step_is_not_said_to_have_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = small(tmp_path / "run", training={"max_steps": 1, "save_every": 1})
    assert "lab, 1 step of 2 x 4" in repr(config)
    run = small_run(config, quiet=True).folder
    assert main(["export", str(run)]) == 0
    assert "for 1 step of reinforcement" in (tmp_path / "run-adapter" / "README.md").read_text()
    capsys.readouterr()
    assert main(["verify", str(run)]) == 0
    said = capsys.readouterr().out
    assert f"Verified: step 0 of {run} is the same, byte for byte." in said
    (run / "metrics.jsonl").unlink()
    assert "metrics.jsonl is missing" in StoredRun(run).unsound


def test_a_damaged_checkpoint_is_passed_over_in_a_line(
    copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (copy / "checkpoints" / "step_000002" / "adapter_model.safetensors").unlink()
    assert main(["verify", str(copy)]) == 0
    printed = capsys.readouterr()
    (line,) = [line for line in printed.err.splitlines() if "step_000002" in line]
    assert line == "Checkpoint step_000002 is not used: adapter_model.safetensors is missing."
    assert "steps 0 to 3" in printed.out


def test_a_failed_replay_is_told_in_its_own_sentence(
    copy: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also one of a class that is not made of a sentence."""

    def refused(run: Any, config: Any, start: int, stop: int, scratch: Path) -> Any:
        raise AttentionError(Identity(), f"what {scratch} has not")

    monkeypatch.setattr("retrain.run.replay.replayed", refused)
    assert main(["verify", str(copy)]) == 2
    assert f"what {copy} has not" in capsys.readouterr().err


@pytest.mark.parametrize("steps", ["4:2", "0:9", "x", "1", "2:2"])
def test_steps_that_a_run_has_not_are_refused(
    base: Path, steps: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", str(base), "--steps", steps]) == 2
    assert "such as 0:4" in capsys.readouterr().err


def test_code_that_is_trusted_is_run_again(here: Path) -> None:
    (here / "trusted_code.py").write_text("def f(rewards): return [r - 0.5 for r in rewards]\n")
    algorithm, training = {"advantage_mode": "trusted_code.f"}, {"max_steps": 1}
    run = here / "run"
    quiet_run(run, algorithm=algorithm, training=training)
    assert main(["verify", str(run)]) == 2 and main(["verify", str(run), "--trust"]) == 0


def test_keys_that_a_resume_changed_are_named_before_it(base: Path, copy: Path) -> None:
    """config.toml holds the last session's, by which earlier steps are taken again."""
    environment = json.loads((copy / "environment.json").read_text())
    environment["resumed"] = [{"step": 2, "changed": ["training.lr_horizon (0, 8)"]}]
    (copy / "environment.json").write_text(json.dumps(environment))
    for step in (3, 1):
        change_row(copy / "metrics.jsonl", step, loss=1.0)
        recorded = of(base, copy).recorded
        assert any("training.lr_horizon (0, 8)" in each for each in recorded) == (step == 1)


@pytest.mark.parametrize("step", [1, 3])
def test_a_resume_in_another_environment_is_a_cause_from_its_step_on(
    base: Path, copy: Path, step: int
) -> None:
    environment = json.loads((copy / "environment.json").read_text())
    packages = environment["packages"] | {"torch": "1.0"}
    session = {"step": 2, "packages": packages, "python": environment["python"], "changed": []}
    environment |= {"resumed": [session], "python": "2.7"}
    del environment["instructions"]  # as an older version
    (copy / "environment.json").write_text(json.dumps(environment))
    change_row(copy / "metrics.jsonl", step, loss=1.0)
    named = of(base, copy).recorded
    assert any("torch (" in each for each in named) == (step == 3)
    assert not any("instructions" in each for each in named)
    assert any("Python (" in each for each in named)
    # verify begins at step 2, and the replay's one environment is compared with the last session's.
    (only,) = of(copy, base, range(2, 3)).recorded
    assert only.startswith("torch (1.0, ")


@pytest.mark.parametrize(
    "resumed",
    [
        None,
        [1],
        "x",
        [{"step": []}, {"step": 1, "parity_gate": "x"}, {"parity_gate": {"mean_difference": "x"}}],
        [{"changed": "abc", "step": "4"}],
        [{"changed": [1], "step": 9}],
        [{"changed": 1, "step": 9}],
    ],
)
def test_sessions_of_another_shape_do_no_harm(base: Path, copy: Path, resumed: Any) -> None:
    environment = json.loads((copy / "environment.json").read_text())
    (copy / "environment.json").write_text(json.dumps(environment | {"resumed": resumed}))
    assert _gate_mismatch(RunFolder(copy)) == _gate_mismatch(RunFolder(base))
    assert _saved(RunFolder(copy)) - _saved(RunFolder(base)) <= {1, 9}
    change_row(copy / "metrics.jsonl", 3, loss=1.0)
    assert of(base, copy).parting == part(3, "metrics.jsonl", "loss")


# -- diff ------------------------------------------------------------------------------------------


def test_equal_runs_do_not_part(base: Path, copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (copy / "trainer_state.json").unlink()
    change_row(copy / "metrics.jsonl", 1, step_time_s=99.0)  # what a clock says is not a difference
    assert main(["diff", str(base), str(copy)]) == 0
    assert "are equal." in capsys.readouterr().out
    (copy / "summary.json").unlink()
    change_config(copy, ('label = ""', 'label = "mine"'))
    for step in range(4):
        change_row(copy / "metrics.jsonl", step, condition="mine")
    assert main(["diff", str(base), str(copy)]) == 0
    said = capsys.readouterr().out
    assert "are equal but for the label of the condition (maxrl+none, mine).\n" in said


@pytest.mark.parametrize(
    ("sections", "cause", "step"),
    first_of(
        [
            ({"training": {"lr": 2e-3}}, "training.lr (0.001, 0.002)", 1),
            ({"training": {"seed": 4}}, "training.seed (3, 4)", 0),
            ({"training": {"temperature": 0.9}}, "training.temperature", 0),
            ({"data": {"difficulty": 2}}, "data.difficulty", 0),
        ],
        quick=2,
    ),
)
def test_another_key_is_named_with_the_first_step_that_it_changes(
    base: Path, tmp_path: Path, sections: dict[str, Any], cause: str, step: int
) -> None:
    other = quiet_run(tmp_path / "run", **EVERY_STEP, **sections).folder
    found = of(base, other)
    assert found.parting and (found.parting.step, found.parting.record) == (step, "metrics.jsonl")
    assert cause in found.recorded[0]


def test_other_tokens_with_equal_records_are_found(base: Path, copy: Path) -> None:
    change_tokens(
        copy / "tokens" / "step_1.safetensors", lambda arrays: arrays["rewards"].__iadd__(1)
    )
    assert of(base, copy).parting == part(1, "the stored tokens")


@pytest.mark.parametrize("lost", [[], ["summary.json"]])
def test_records_that_were_cut_are_no_earlier_end(
    base: Path, copy: Path, lost: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    metrics = copy / "metrics.jsonl"
    fewer_steps(copy, *lost)
    assert main(["diff", str(base), str(copy)]) == 1
    found = capsys.readouterr()
    assert not found.out and "the file was changed or the disk is damaged" in found.err
    if not lost:
        assert f"{metrics}, line 4, does not hold step 3" in found.err
        assert main(["verify", str(copy)]) == 1
        assert f"{metrics}, line 4, does not hold step 3" in capsys.readouterr().err


def test_every_record_of_a_repeated_id_is_compared(base: Path, copy: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(base, tmp_path / "other"))
    rows = [row | {"example_id": "one"} for row in lines(base / "evaluation.jsonl")]
    changed = [rows[0] | {"correct": 1 - rows[0]["correct"]}, *rows[1:]]
    for run, own in ((other, rows), (copy, changed)):
        (run / "evaluation.jsonl").write_text("".join(json.dumps(row) + "\n" for row in own))
    assert of(other, copy).parting == part(2, "evaluation.jsonl", "one")


def test_a_version_instructions_and_a_plugins_source_are_named(base: Path, copy: Path) -> None:
    path = copy / "environment.json"
    environment = json.loads(path.read_text())
    own = environment["instructions"]
    environment["instructions"] = "NONE"
    environment["packages"]["numpy"] = "0.1"
    environment["code"]["plugins"] = {"mine.advantage": "abc"}
    path.write_text(json.dumps(environment))
    change_row(copy / "metrics.jsonl", 0, loss=1.0)
    found = of(base, copy).recorded
    assert any(each.startswith("numpy (") for each in found)
    assert "the plugin mine.advantage" in found
    assert f"instructions of the processor ({own}, NONE)" in found


def test_other_held_out_answers_come_before_the_step_that_they_precede(
    base: Path, copy: Path
) -> None:
    rows = lines(copy / "evaluation.jsonl")
    rows[0]["correct"] = 1 - rows[0]["correct"]
    (copy / "evaluation.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert of(base, copy).parting == part(2, "evaluation.jsonl", rows[0]["example_id"])
