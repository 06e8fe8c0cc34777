"""What a missing, damaged, copied, moved or linked run folder does: a run goes on whole or is left
as it is.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from retrain.analysis.runs import StoredRun
from retrain.cli.main import main
from retrain.config import TrainConfig, replaced
from retrain.config.overrides import Overrides
from retrain.errors import ConfigurationError, RunFailed
from retrain.records.checkpoint import CheckpointStore
from retrain.records.run_folder import RunFolder
from retrain.run.evaluate import evaluate_run
from retrain.run.notes import notes, preflight_lines
from retrain.run.start import RunStart, open_run
from tests.runs import lines, small, small_run

SECTIONS = {"evaluation": {"every": 2, "max_examples": 2}, "logging": {"tokens_every": 2}}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four steps, checkpoints after the second and the fourth, an evaluation at each."""
    folder = tmp_path_factory.mktemp("made") / "run"
    small_run(small(folder, **SECTIONS), quiet=True)
    return folder


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "run"))


def resumed(folder: Path, **more: dict[str, object]) -> TrainConfig:
    return small(folder, **SECTIONS, resume={"from": str(folder)}, **more)


def opened(config: TrainConfig, *, overwrite: bool = False) -> RunStart:
    with open_run(config, overwrite=overwrite) as opening:
        return opening


def tree(folder: Path) -> dict[str, str]:
    """Name -> sha256 of every file; the lock's own file aside."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != ".lock"]
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
    }


def flip_a_bit(path: Path, byte: int = 1000) -> None:
    data = bytearray(path.read_bytes())
    data[byte] ^= 1
    path.write_bytes(data)


def without_line(path: Path, number: int) -> None:
    kept = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(kept[:number] + kept[number + 1 :]))


# -- damaged ---------------------------------------------------------------------------------------


def damage_every_checkpoint(folder: Path) -> None:
    for path in folder.glob("checkpoints/step_*/adapter_model.safetensors"):
        flip_a_bit(path)


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "no config": (lambda folder: (folder / "config.toml").unlink(), r"config\.toml is missing"),
    "no metrics": (
        lambda folder: (folder / "metrics.jsonl").unlink(),
        r"metrics\.jsonl is missing",
    ),
    "no evaluation": (
        lambda folder: (folder / "evaluation.jsonl").unlink(),
        r"evaluation\.jsonl is missing",
    ),
    "a lost line": (lambda folder: without_line(folder / "metrics.jsonl", 0), r"metrics\.jsonl"),
    "a changed line": (
        lambda folder: flip_a_bit(folder / "evaluation.jsonl", 5),
        r"evaluation\.jsonl differs from its sha256",
    ),
    "every checkpoint damaged": (
        damage_every_checkpoint,
        r"step_000002 is not used: adapter_model\.safetensors differs",
    ),
    "no checkpoints": (
        lambda folder: shutil.rmtree(folder / "checkpoints"),
        r"trainer_state\.json names a checkpoint, but",
    ),
    "only checkpoints": (
        lambda folder: [path.unlink() for path in folder.iterdir() if path.suffix] and None,
        r"config\.toml is missing",
    ),
}


@pytest.mark.faults("damaged places: names of a run as another thing")
@pytest.mark.parametrize("name", DAMAGES)
def test_a_run_that_cannot_be_verified_is_refused_and_left_as_it_is(run: Path, name: str) -> None:
    damage, words = DAMAGES[name]
    marker = (run / ".retrain.json").read_text()
    damage(run)
    (run / ".retrain.json").write_text(marker)
    before = tree(run)
    with pytest.raises(
        ConfigurationError, match=rf"is not resumable, and .* unchanged, .*{words}.*--overwrite"
    ):
        opened(resumed(run))
    with pytest.raises(ConfigurationError, match=r"already holds a run.*--resume.*--overwrite"):
        opened(small(run, **SECTIONS))
    assert tree(run) == before


def test_a_folder_in_which_a_run_left_nothing_is_started_anew(tmp_path: Path) -> None:
    RunFolder(tmp_path / "run").create()
    assert opened(small(tmp_path / "run")).state.step == 0
    assert opened(resumed(tmp_path / "run")).notes == (
        f"{tmp_path / 'run'} has no checkpoint yet: starting at step 0.",
    )


def test_a_resume_names_a_damaged_summary_and_forgets_it(run: Path) -> None:
    (run / "summary.json").write_text("{")
    (note, *_) = opened(resumed(run)).notes
    assert note.startswith(f"{run / 'summary.json'} ") and note.endswith("writes a new one.")
    assert not (run / "summary.json").exists()


def test_a_checkpoint_whose_steps_lost_their_rows_gives_way_and_is_kept(run: Path) -> None:
    """A power cut can leave a sealed step beside rows that never reached the disk."""
    metrics = run / "metrics.jsonl"
    os.truncate(metrics, metrics.stat().st_size - 10)
    opening = opened(resumed(run))
    assert opening.state.step == 2
    assert any("step_000004 is not used: metrics.jsonl has" in note for note in opening.notes)
    assert "step_000004 is kept as damaged-step_000004." in opening.notes
    now, used = run / "trainer_state.json", run / "checkpoints/step_000002/trainer_state.json"
    assert now.read_bytes() == used.read_bytes(), "else its longer logs would count as lost"
    assert StoredRun(run).unsound == "", "summary.json counts four steps"
    assert (run / "checkpoints" / "damaged-step_000004" / "manifest.json").is_file()
    assert [line["step"] for line in lines(metrics)] == [0, 1]
    assert {line["step"] for line in lines(run / "evaluation.jsonl")} == {2}
    assert [path.name for path in (run / "tokens").iterdir()] == ["step_0.safetensors"]


def test_a_second_damaged_checkpoint_of_a_step_does_not_replace_the_first(run: Path) -> None:
    (run / "checkpoints" / "damaged-step_000004").mkdir()
    flip_a_bit(run / "checkpoints" / "step_000004" / "adapter_model.safetensors")
    assert "step_000004 is kept as damaged-step_000004-2." in opened(resumed(run)).notes


def test_whatever_stands_behind_the_sealed_rows_is_cut(run: Path) -> None:
    before = tree(run)
    for name in ("metrics.jsonl", "evaluation.jsonl", "emergence/generations.jsonl"):
        with (run / name).open("ab") as file:
            file.write(bytes(5000) + b"\n{}\n")
    assert opened(resumed(run)).state.step == 4
    assert {
        name: digest for name, digest in tree(run).items() if not name.endswith(".aside")
    } == before
    assert (run / "metrics.jsonl.aside").read_bytes() == bytes(5000) + b"\n{}\n"


def test_lost_completions_are_said_and_stop_nothing(run: Path) -> None:
    (run / "emergence" / "generations.jsonl").unlink()
    opening = opened(resumed(run))
    assert opening.state.step == 4
    assert "emergence/generations.jsonl: generations.jsonl is missing" in str(opening.notes)


def test_what_a_kill_leaves_among_the_checkpoints_is_cleared_away(run: Path) -> None:
    checkpoints = run / "checkpoints"
    (checkpoints / ".tmp-rehearsal").write_bytes(b"half of a file")
    (checkpoints / ".tmp-step_000006").mkdir()
    (checkpoints / "step_000004").rename(
        checkpoints / ".tmp-replaced-step_000004"
    )  # killed between two renames
    opening = opened(resumed(run))
    assert opening.state.step == 4
    assert sorted(path.name for path in checkpoints.iterdir()) == [
        "final",
        "step_000002",
        "step_000004",
    ]


def test_a_run_inside_another_run_is_noted_and_refused_where_their_files_would_mix(
    run: Path,
) -> None:
    before = tree(run)
    for part in ("checkpoints/mine", "tokens", "emergence/deep/mine"):
        with pytest.raises(ConfigurationError, match=rf"lies in .*{part[:5]}.*choose another"):
            opened(small(run / part))
    assert tree(run) == before
    assert opened(small(run / "beside")).notes == (
        f"{run / 'beside'} lies inside the folder of the run {run}.",
    )


def test_a_resumed_run_names_no_key_as_set_that_nobody_set(run: Path) -> None:
    assert preflight_lines(opened(resumed(run)).config) == preflight_lines(resumed(run))


# -- checkpoints outside of the run's folder -------------------------------------------------------


@pytest.fixture
def outside(run: Path, tmp_path: Path) -> Path:
    """Where the checkpoints of `run` lie, as `[backend] adapter_path` puts them."""
    target = tmp_path / "adapters" / "run"
    target.parent.mkdir()
    (run / "checkpoints").rename(target)
    sign(target, kind="checkpoints", format=1, run_id="1234", run=str(run))
    (run / "checkpoints.json").write_text(json.dumps({"path": str(target), "run_id": "1234"}))
    return target


def sign(folder: Path, **content: object) -> None:
    (folder / ".retrain.json").write_text(json.dumps(content))


def test_a_run_signs_its_checkpoints_with_its_id_and_folder(tmp_path: Path) -> None:
    config = small(
        tmp_path / "run", backend={"devices": "cpu", "adapter_path": str(tmp_path / "adapters")}
    )
    target = opened(config).store.folder
    pointer = json.loads((tmp_path / "run" / "checkpoints.json").read_text())
    marker = json.loads((target / ".retrain.json").read_text())
    assert marker == {
        "kind": "checkpoints",
        "format": 1,
        "run": str(tmp_path / "run"),
        "run_id": pointer["run_id"],
    }
    assert pointer["path"] == str(target)


def test_a_path_to_checkpoints_that_are_not_the_runs_is_not_believed(
    run: Path, outside: Path, made: Path
) -> None:
    (run / "checkpoints.json").write_text(
        json.dumps({"path": str(made / "checkpoints"), "run_id": "1234"})
    )
    before = tree(made)
    with pytest.raises(ConfigurationError, match="has no marker of this run"):
        opened(resumed(run, training={"keep_checkpoints": 2}))
    with pytest.raises(ConfigurationError, match="has no marker of this run"):
        evaluate_run(run, overrides=Overrides(), log=lambda line: None)
    opened(small(run), overwrite=True)
    assert tree(made) == before


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("", "is not valid JSON"),
        ("[]", "holds a list"),
        ("{}", "names no folder of checkpoints"),
        ('{"path": "/x"}', "names no folder of checkpoints"),
    ],
)
def test_a_damaged_pointer_is_named(run: Path, outside: Path, content: str, problem: str) -> None:
    (run / "checkpoints.json").write_text(content)
    with pytest.raises(RunFailed, match=rf"checkpoints\.json {problem}"):
        opened(resumed(run))


def test_a_copied_run_leaves_the_originals_checkpoints_alone(
    run: Path, outside: Path, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(run, tmp_path / "copies" / "run"))
    before = tree(outside)
    with pytest.raises(ConfigurationError, match=f"belong to {run}; {copy} is a copy"):
        opened(resumed(copy))
    with pytest.raises(ConfigurationError, match="holds the checkpoints of another run"):
        opened(
            small(copy, backend={"devices": "cpu", "adapter_path": str(outside.parent)}),
            overwrite=True,
        )
    assert tree(outside) == before
    assert opened(resumed(run)).state.step == 4
    shutil.copytree(outside, copy / "checkpoints")  # as the message says
    (copy / "checkpoints.json").unlink()
    opening = opened(resumed(copy))
    assert opening.state.step == 4 and opening.store.folder == copy / "checkpoints"


def test_a_copied_run_with_its_checkpoints_inside_is_a_run_of_its_own(
    run: Path, tmp_path: Path
) -> None:
    before = tree(run)
    copy = Path(shutil.copytree(run, tmp_path / "copy"))
    without_line(copy / "metrics.jsonl", 3)
    assert opened(resumed(copy)).state.step == 2
    assert tree(run) == before


def test_a_moved_run_takes_its_checkpoints_along(run: Path, outside: Path, tmp_path: Path) -> None:
    moved = run.rename(tmp_path / "moved")
    assert opened(resumed(moved)).state.step == 4
    assert json.loads((outside / ".retrain.json").read_text())["run"] == str(moved)
    late_copy = Path(shutil.copytree(moved, run))  # back in its first place, and a copy now
    with pytest.raises(ConfigurationError, match="is a copy"):
        opened(resumed(late_copy))


def test_a_linked_run_is_the_run_itself(run: Path, outside: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(run)
    with open_run(resumed(link), overwrite=False) as opening:
        assert opening.state.step == 4
        with pytest.raises(ConfigurationError, match="is being written by"):
            opened(resumed(run))
    assert json.loads((outside / ".retrain.json").read_text())["run"] == str(run)


def test_checkpoints_that_an_earlier_version_marked_become_signed(run: Path, outside: Path) -> None:
    sign(outside, kind="checkpoints", format=1, run_id="1234")
    assert opened(resumed(run)).state.step == 4
    assert json.loads((outside / ".retrain.json").read_text()) == {
        "kind": "checkpoints",
        "format": 1,
        "run_id": "1234",
        "run": str(run),
    }


def test_checkpoints_whose_run_lost_its_folder_are_deleted_only_when_told_to(
    run: Path, outside: Path
) -> None:
    shutil.rmtree(run)
    before, config = (
        tree(outside),
        small(run, backend={"devices": "cpu", "adapter_path": str(outside.parent)}),
    )
    with pytest.raises(
        ConfigurationError, match=r"holds checkpoints of .*whose own files are gone.*--overwrite"
    ):
        opened(config)
    assert tree(outside) == before
    (outside / "notes.txt").write_text("mine")
    (outside / "final" / "old").touch()
    opened(config, overwrite=True)
    assert (outside / "final" / "old").exists()  # until nothing refuses the run
    small_run(config, overwrite=True, quiet=True)
    assert (outside / "notes.txt").exists() and not (outside / "final" / "old").exists()


def test_a_folder_of_checkpoints_is_no_place_for_a_run(outside: Path) -> None:
    with pytest.raises(ConfigurationError, match="is a folder of checkpoints"):
        opened(small(outside))


# -- links below a run's folder --------------------------------------------------------------------


@pytest.mark.faults("damaged places: names of a run as another thing")
@pytest.mark.parametrize(
    "name", ["checkpoints", "tokens", "emergence", "metrics.jsonl", "emergence/generations.jsonl"]
)
def test_a_link_below_a_runs_folder_is_never_followed(run: Path, tmp_path: Path, name: str) -> None:
    elsewhere = (run / name).rename(tmp_path / "elsewhere")
    (run / name).symlink_to(elsewhere)
    before = tree(tmp_path)
    with pytest.raises(ConfigurationError, match="is a link, and retrain changes nothing behind"):
        opened(resumed(run))
    assert tree(tmp_path) == before
    opened(small(run), overwrite=True)
    assert not (run / name).exists() and elsewhere.exists()
    assert {
        path: digest for path, digest in tree(tmp_path).items() if path.startswith("elsewhere")
    } == {path: digest for path, digest in before.items() if path.startswith("elsewhere")}


@pytest.mark.faults("damaged places: names of a run as another thing")
def test_a_linked_checkpoint_loses_its_link_and_nothing_else(run: Path, tmp_path: Path) -> None:
    store = CheckpointStore(run / "checkpoints", keep=2)
    other = (run / "checkpoints" / "step_000002").rename(tmp_path / "other")
    (run / "checkpoints" / "step_000002").symlink_to(other)
    before = tree(other)
    newest = store.newest(print)
    assert newest is not None
    store.save(replace(newest.state(), step=6), lambda folder: None)
    assert store.steps() == [4, 6]
    assert tree(other) == before


def test_a_run_whose_checkpoints_are_all_damaged_is_not_taken_for_an_untrained_one(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in run.glob("checkpoints/step_*/adapter_model.safetensors"):
        path.write_bytes(b"")
    assert main(["eval", str(run)]) == 1
    said = capsys.readouterr().err
    assert "No checkpoint in" in said and said.count("trying the previous one") == 1


def test_a_run_whose_transform_weighs_the_tokens_of_a_sure_model_is_warned(made: Path) -> None:
    """By what the lab's folder says of it, also where the run has stored tokens."""
    config = small(made, **SECTIONS)
    weighs = {"algorithm.transform_mode": "gtpo"}
    other = weighs | {"model.model": "a/b"}
    for changes, warned in ((weighs, True), ({}, False), (other, False)):
        said = " ".join(notes(replaced(config, changes)))
        assert ("5% of them carry 92% of the gradient" in said) == warned
