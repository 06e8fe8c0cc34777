"""`retrain status` on folders that real runs left, and on what happens to them."""

import errno
import gc
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from runs import lines, quiet_run, small

from retrain.analysis.status import State, loss_note, overview
from retrain.cli.main import main
from retrain.cli.status import lines as printed_lines
from retrain.config import dump_toml
from retrain.errors import Interrupted, RunFailed
from retrain.records.entries import StepRecord
from retrain.records.run_folder import RunFolder, mark
from retrain.run.session import Session
from tests import commands
from tests.runs import small_run


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real run of two steps with an evaluation."""
    evaluation = {"at_end": True, "max_examples": 4}
    return quiet_run(
        tmp_path_factory.mktemp("logs") / "run", training={"max_steps": 2}, evaluation=evaluation
    ).folder


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


@pytest.fixture
def sleeper() -> Iterator[int]:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        yield process.pid
        process.kill()


def test_a_collector_that_was_off_stays_off(finished: Path) -> None:
    """In a notebook the process goes on."""
    for switch, on in ((gc.disable, False), (gc.enable, True)):
        switch()
        assert main(["status", str(finished)]) == 0
        assert gc.isenabled() == on


def state_of(folder: Path) -> State:
    (status,) = overview(folder).all_runs
    return status.state


def own(folder: Path, pid: int, host: str | None = None) -> None:
    """As a process does that takes the lock. What an earlier session left is not its last word."""
    RunFolder(folder).summary.unlink(missing_ok=True)
    RunFolder(folder).lock_owner.write_text(f"pid {pid} on {host or socket.gethostname()}\n")


def age(folder: Path, seconds: float) -> None:
    then = time.time() - seconds
    for path in folder.iterdir():
        os.utime(path, (then, then))


def test_a_finished_run_shows_its_last_step_and_its_evaluation(run: Path) -> None:
    (status,) = overview(run).runs
    records = lines(run / "metrics.jsonl")
    assert (status.state, status.steps, status.max_steps, status.note) == (State.DONE, 2, 2, "")
    for name in ("correct_rate", "mean_reward", "loss"):
        assert getattr(status, name) == records[-1][name]
    for name, told in (("step_time_s", "median_step_time_s"), ("tokens_per_s", "tokens_per_s")):
        mean = sum(record[name] for record in records) / 2
        assert getattr(status, told) == pytest.approx(mean)
    summary = json.loads((run / "summary.json").read_text())
    assert status.held_out == summary["evaluation"]["after"]["pass@1"]


def test_an_unfinished_run_without_a_process_has_stopped_and_says_how_to_go_on(run: Path) -> None:
    (run / "summary.json").unlink()
    metrics = run / "metrics.jsonl"
    metrics.write_text(metrics.read_text().splitlines(keepends=True)[0] + '{"step": 1, "con')
    (status,) = overview(run).runs
    assert (status.state, status.steps) == (State.STOPPED, 1)
    assert f"retrain {run}/config.toml --resume {run}" in status.note


def test_a_run_that_lost_its_configuration_is_named_and_its_evaluations_are_no_runs(
    run: Path,
) -> None:
    (run / "evaluations" / "one").mkdir(parents=True)
    shutil.move(run / "config.toml", run / "evaluations" / "one" / "config.toml")
    for folder in (run, run.parent):
        (status,) = overview(folder).runs
        assert (status.path, status.state) == (run, State.UNREADABLE)
        assert "config.toml is missing" in status.note


def test_a_campaigns_failed_run_that_was_continued_to_its_end_alone_is_done(
    finished: Path, tmp_path: Path
) -> None:
    folder = campaign(tmp_path / "campaign", finished)
    run = folder / "runs" / "maxrl+none_s2"
    shutil.copyfile(finished / "summary.json", run / "summary.json")
    (found,) = overview(folder).campaigns
    (status,) = (one for one in found.runs if one.path == run)
    said = "It failed, says manifest.json, and is done, says its own summary.json."
    assert (status.state, status.note) == (State.DONE, said)


def test_a_campaigns_run_that_was_stopped_while_it_loaded_has_lost_nothing(tmp_path: Path) -> None:
    entry = {"name": "a_s1", "condition": "a", "seed": 1, "status": "interrupted"}
    folder = tmp_path / "runs" / "a_s1"
    mark(folder, "run")
    (folder / "output.log").write_text("Loading dataset...\n")
    (tmp_path / "manifest.json").write_text(json.dumps({"runs": [entry]}))
    (campaign,) = overview(tmp_path).campaigns
    said = f"An attempt ended before its first step; see {folder / 'output.log'}."
    assert [(run.state, run.note) for run in campaign.runs] == [(State.PENDING, said)]


def test_a_live_process_runs_until_it_is_silent_for_long(run: Path, sleeper: int) -> None:
    own(run, sleeper)
    assert state_of(run) is State.RUNNING
    age(run, 3600)
    os.utime(
        RunFolder(run).lock_owner
    )  # a session that began just now may load its model for a while
    assert state_of(run) is State.RUNNING


def test_a_process_that_writes_nothing_for_long_is_stalled(run: Path) -> None:
    own(run, os.getpid(), host="another-machine")
    assert state_of(run) is State.RUNNING
    age(run, 3600)
    (status,) = overview(run).runs
    assert status.state is State.STALLED
    assert status.idle_s == pytest.approx(3600, abs=60) and "1 h 00 min" in status.note


def test_a_process_that_is_gone_leaves_a_dead_run(run: Path, sleeper: int) -> None:
    own(run, sleeper)
    os.kill(sleeper, 9)
    for _ in range(100):  # nobody waits for it: a zombie is no writer
        if state_of(run) is State.DEAD:
            break
        time.sleep(0.05)
    (status,) = overview(run).runs
    assert status.state is State.DEAD and str(sleeper) in status.note


def test_a_process_number_that_was_given_out_again_is_no_writer(run: Path, sleeper: int) -> None:
    own(run, sleeper)
    age(run, 100)
    assert state_of(run) is State.DEAD


def test_a_killed_run_is_recognized(tmp_path: Path) -> None:
    folder, file = tmp_path / "run", tmp_path / "run.toml"
    file.write_text(dump_toml(small(folder, training={"max_steps": 1000})))
    words = [sys.executable, "-m", "retrain", str(file), "--quiet", "--skip-parity"]
    process = commands.Command(words)
    try:
        for _ in range(1200):
            if (folder / "metrics.jsonl").exists() and lines(folder / "metrics.jsonl"):
                break
            time.sleep(0.05)
        (status,) = overview(tmp_path).runs
        assert status.state is State.RUNNING and status.steps >= 1
        step_s = status.median_step_time_s
        assert step_s and status.remaining_s == pytest.approx((1000 - status.steps) * step_s)
    finally:
        process.kill()
        process.wait(60)
    assert state_of(tmp_path) is State.DEAD


def test_a_failed_run_says_why_and_a_resumed_one_no_longer(here: Path) -> None:
    tmp_path, broken = here, here / "broken"
    broken.touch()
    (here / "fragile.py").write_text(
        f"import os\ndef advantage(rewards):\n    assert not os.path.exists({str(broken)!r}), 'it"
        " is broken'\n    return rewards\n"
    )
    sections = {"algorithm": {"advantage_mode": "fragile.advantage"}, "plugins": {"strict": False}}
    with pytest.raises(RunFailed) as failure:
        small_run(small(tmp_path / "run", **sections), quiet=True)
    (status,) = overview(tmp_path).runs
    assert (status.state, status.steps) == (State.FAILED, 0)
    assert f"failed after 0 steps ({str(failure.value).rstrip('.')}); resume it with" in status.note
    assert "it is broken" in status.note
    marker = (tmp_path / "run" / ".retrain.json").rename(tmp_path / "marker")
    assert overview(tmp_path).runs[0].note.endswith("; put back its .retrain.json to resume it.")
    marker.rename(tmp_path / "run" / ".retrain.json")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["reason"], summary["adapter"]) == (str(failure.value), "")
    broken.unlink()
    small_run(
        small(tmp_path / "run", **sections, resume={"from": str(tmp_path / "run")}), quiet=True
    )
    (status,) = overview(tmp_path).runs
    assert (status.state, status.note) == (State.DONE, "")


@pytest.mark.parametrize(
    ("error", "state", "words"),
    [
        (Interrupted("Enough.", 2), State.STOPPED, "was interrupted"),
        (KeyError("x"), State.FAILED, "KeyError"),
    ],
)
def test_whatever_ends_a_session_is_in_its_summary(
    error: Exception, state: State, words: str, tmp_path: Path
) -> None:
    with pytest.raises(type(error)), Session.open(small(tmp_path / "run"), overwrite=False):
        raise error
    (status,) = overview(tmp_path).runs
    assert status.state is state and words in status.note


def campaign(folder: Path, finished: Path) -> Path:
    """Two runs that are there and one that is not."""
    entries = []
    for seed, status in ((1, "done"), (2, "failed"), (3, "pending")):
        name = f"maxrl+none_s{seed}"
        entry = {"name": name, "condition": "maxrl+none", "seed": seed, "status": status}
        entries.append(entry | {"dir": f"runs/{name}", "reason": "no disk"})
        if status != "pending":
            shutil.copytree(finished, folder / "runs" / name)
    (folder / "runs" / "maxrl+none_s2" / "summary.json").unlink()
    (folder / "manifest.json").write_text(json.dumps({"max_steps": 2, "runs": entries}))
    return folder


def test_a_campaign_counts_its_runs_and_those_that_have_not_started(
    finished: Path, tmp_path: Path
) -> None:
    folder = campaign(tmp_path / "campaign_20260101_000000", finished)
    shutil.copytree(finished, tmp_path / "alone")
    seen = overview(tmp_path)
    assert [status.name for status in seen.runs] == ["alone"]
    (found,) = seen.campaigns
    assert found.path == folder
    assert found.counts == {"done": 1, "failed": 1, "pending": 1}
    assert (found.steps, found.max_steps, found.remaining_s) == (4, 6, None)
    text = "\n".join(printed_lines(seen))
    assert "3 runs (1 done, 1 failed, 1 pending), step 4 of 6" in text
    assert "failed (no disk)" in text


def test_a_campaign_without_its_process_says_which_command_continues_it(
    finished: Path, tmp_path: Path, sleeper: int
) -> None:
    folder = campaign(tmp_path / "c d", finished)
    manifest, begun = folder / "manifest.json", {"command": "retrain c.toml --lr=3e-4"}

    def note(**more: Any) -> str:
        manifest.write_text(json.dumps(json.loads(manifest.read_text()) | more))
        (found,) = overview(folder).campaigns
        assert found.note in "\n".join(printed_lines(overview(folder)))
        assert not any("--resume" in run.note for run in found.runs)
        return found.note

    assert f"continue with the command that began it and `--resume '{folder}'`." in note()
    again = f"`retrain c.toml --lr=3e-4 --resume '{folder}'`."
    assert note(**begun).endswith(
        f"is not running, so no further run starts; continue with {again}"
    )
    own(folder, sleeper)
    assert note() == ""
    age(folder, 100)
    assert f"(pid {sleeper} on {socket.gethostname()} is gone)" in note()
    RunFolder(folder).lock_owner.unlink()
    queued = note(config={"campaign": {"launcher": "array"}})
    assert queued.endswith(f"submit the array again; each task calls {again}")
    own(folder / "runs" / "maxrl+none_s1", sleeper)
    assert note() == ""


@pytest.mark.parametrize("ends", ["before", "after"])
def test_a_run_may_end_while_it_is_looked_at(
    run: Path, sleeper: int, monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    """Just before or just after the look at when it last wrote its lock."""
    own(run, sleeper)
    owner, stat, looked = RunFolder(run).lock_owner, Path.stat, 0

    def looks(path: Path, **how: bool) -> os.stat_result:
        nonlocal looked
        looked += path == owner
        # The first look tells since when it has the lock.
        if looked == 2 and ends == "before":
            owner.unlink(missing_ok=True)
        found = stat(path, **how)
        if looked == 2:
            owner.unlink(missing_ok=True)
        return found

    monkeypatch.setattr(Path, "stat", looks)
    assert state_of(run) is State.RUNNING and not owner.exists()


def test_a_run_may_save_while_its_seal_is_looked_at(
    run: Path, sleeper: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    own(run, sleeper)
    state, read = RunFolder(run).trainer_state, Path.read_bytes

    def saves(path: Path) -> bytes:
        content = read(path)
        if path == state:
            state.write_text(json.dumps(json.loads(content) | {"step": 3}), encoding="utf-8")
        return content

    monkeypatch.setattr(Path, "read_bytes", saves)
    (status,) = overview(run).all_runs
    assert status.state is State.RUNNING and not status.note


def test_a_campaign_that_has_just_begun_counts_the_steps_that_it_plans(tmp_path: Path) -> None:
    entries = [{"name": f"c_s{seed}", "condition": "c", "seed": seed} for seed in (1, 2)]
    (tmp_path / "manifest.json").write_text(json.dumps({"max_steps": 9, "runs": entries}))
    assert "2 runs (2 pending), step 0 of 18" in "\n".join(printed_lines(overview(tmp_path)))


def test_a_campaign_whose_manifest_was_cut_is_named_beside_its_runs(
    finished: Path, tmp_path: Path
) -> None:
    folder = campaign(tmp_path / "campaign", finished)
    manifest = folder / "manifest.json"
    runs = len(list((folder / "runs").iterdir()))
    manifest.write_bytes(manifest.read_bytes()[:40])
    damaged, *others = overview(tmp_path).runs
    assert damaged.state is State.UNREADABLE and "manifest.json is not valid JSON" in damaged.note
    assert len(others) == runs and all(run.state is not State.UNREADABLE for run in others)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo,
    "folder": Path.mkdir,
    "link": lambda path: path.symlink_to("nowhere"),
    "cut": lambda path: path.write_text('{"runs": [{"na'),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("command", ["status", "compare", "report"])
def test_a_manifest_without_runs_that_cannot_be_read_is_named(
    command: str, damage: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A pipe, which nobody writes to, is not waited for."""
    manifest = tmp_path / "manifest.json"
    DAMAGES[damage](manifest)
    for runs in (False, True):
        if runs:
            (tmp_path / "runs").mkdir()
        assert main([command, str(tmp_path)]) == (0 if command == "status" else 1)
        seen = capsys.readouterr()
        said = seen.out + seen.err
        assert f"{manifest} is " in said and "No runs" not in said


def test_a_file_in_a_runs_place_and_a_folder_of_another_user_hide_no_other_run(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = campaign(tmp_path / "campaign", finished) / "runs" / "maxrl+none_s1"
    shutil.rmtree(planned)
    planned.touch()
    hers = Path(shutil.copytree(finished, tmp_path / "hers"))
    stat = Path.stat

    def denied(path: Path, **settings: Any) -> os.stat_result:
        if path.parent == hers:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return stat(path, **settings)

    monkeypatch.setattr(Path, "stat", denied)
    seen = overview(tmp_path)
    states = Counter(run.state for run in seen.all_runs)
    assert states == {State.UNREADABLE: 2, State.FAILED: 1, State.PENDING: 1}
    notes = "\n".join(printed_lines(seen))
    assert f"{planned}/" in notes and "a file stands where a folder is expected" in notes
    assert f"{hers}/" in notes and "this user may not read or write it" in notes


def test_what_is_left_of_a_campaign_is_shared_by_the_runs_that_run(
    finished: Path, tmp_path: Path, sleeper: int
) -> None:
    folder = campaign(tmp_path / "campaign", finished)
    own(folder / "runs" / "maxrl+none_s1", sleeper)
    (found,) = overview(tmp_path).campaigns
    assert found.median_step_time_s is not None
    assert found.remaining_s == pytest.approx(2 * found.median_step_time_s)


def test_checkpoints_outside_a_run_are_neither_runs_nor_campaigns(tmp_path: Path) -> None:
    quiet_run(
        tmp_path / "run",
        training={"max_steps": 2},
        backend={"adapter_path": str(tmp_path / "adapters")},
    )
    seen = overview(tmp_path)
    assert (tmp_path / "adapters" / "run" / "step_000002").is_dir()
    assert [status.name for status in seen.runs] == ["run"] and not seen.campaigns


def test_a_run_that_cannot_be_read_does_not_hide_the_others(finished: Path, tmp_path: Path) -> None:
    for name in ("bad", "good"):
        shutil.copytree(finished, tmp_path / name)
    (tmp_path / "bad" / "metrics.jsonl").write_text("nonsense\n")
    bad, good = overview(tmp_path).runs
    assert (bad.state, good.state) == (State.UNREADABLE, State.DONE)
    assert "metrics.jsonl" in bad.note


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"loss": -0.001, "grad_norm": 0.3}, "A loss near 0 is normal here"),
        ({"loss": 0.0, "grad_norm": 0.0}, "without a gradient"),
        ({"loss": None, "reported_loss": 0.0, "loss_is_placeholder": True}, "placeholder"),
        ({"loss": 0.5, "grad_norm": 0.3}, ""),
    ],
)
def test_a_loss_near_0_or_none_is_explained_by_its_cause(
    values: dict[str, Any], words: str
) -> None:
    note = loss_note(StepRecord(step=0, condition="maxrl+none", **values))
    assert words in note and bool(note) == bool(words)


# -- the command -----------------------------------------------------------------------------------


def test_the_command_prints_a_table_or_json(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", str(run.parent)]) == 0
    header, row, *_ = capsys.readouterr().out.splitlines()
    assert header.split()[:3] == ["run", "state", "step"]
    assert row.split()[:3] == ["run", "done", "2/2"]
    for arguments in (["--json"], ["--format", "json"]):
        assert main(["status", str(run.parent), *arguments]) == 0
        document = json.loads(capsys.readouterr().out)
        assert document["campaigns"] == [] and document["runs"][0]["state"] == "done"


def test_a_narrow_terminal_leaves_columns_out_before_lines_wrap(
    finished: Path, tmp_path: Path
) -> None:
    shutil.copytree(finished, tmp_path / "maxrl+gtpo_hicra_s101")
    (tmp_path / "maxrl+gtpo_hicra_s101" / "summary.json").unlink()
    wide, narrow, tiny = (printed_lines(overview(tmp_path), width) for width in (None, 80, 20))
    assert len(wide[0]) > 80 >= max(map(len, narrow[:2]))
    assert set(wide[0].split()) - set(narrow[0].split()) <= {"reward", "tokens/s", "loss", "s/step"}
    assert max(map(len, narrow)) <= 80 < max(map(len, wide))
    assert " ".join(wide[3:]).split() == " ".join(narrow[3:]).split()
    assert tiny[0].split() == ["run", "state", "step", "correct", "held-out", "left"]


def test_watching_ends_when_nothing_runs_any_more(
    run: Path, sleeper: int, capsys: pytest.CaptureFixture[str]
) -> None:
    own(run, sleeper)
    command = [sys.executable, "-m", "retrain", "status", str(run), "--watch", "--interval", "0.1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as watcher:
        assert watcher.stdout is not None
        assert "state" in watcher.stdout.readline() and "running" in watcher.stdout.readline()
        os.kill(sleeper, 9)
        rest, _ = watcher.communicate(timeout=30)
    assert watcher.returncode == 0 and "dead" in rest


def test_a_folder_without_runs_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"No runs in {tmp_path}.\n"


@pytest.mark.parametrize(
    ("changed", "found"),
    [
        (lambda first, second: first + second + second, "line 3, does not hold step 2"),
        (lambda first, second: second + first, "line 1, does not hold step 0"),
        (
            lambda one, two: one + two.replace('"step": 1', '"step": 5'),
            "line 2, does not hold step 1",
        ),
        (lambda first, second: first, "line 2, does not hold step 1"),
        (lambda first, second: "", "line 1, does not hold step 0"),
        (None, r"metrics\.jsonl is missing"),
    ],
)
def test_steps_that_are_missing_or_stand_twice_are_named(
    run: Path, changed: Callable[[str, str], str] | None, found: str
) -> None:
    (whole,) = overview(run).runs
    assert "metrics.jsonl" not in whole.note
    metrics = run / "metrics.jsonl"
    if changed is None:
        metrics.unlink()
    else:
        metrics.write_text(changed(*metrics.read_text().splitlines(keepends=True)))
    (damaged,) = overview(run).runs
    assert re.search(found + ".*put it back from a copy", damaged.note)


def test_ctrl_c_is_no_answer_without_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(folder: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("retrain.analysis.status.overview", interrupted)
    assert main(["status", str(tmp_path)]) == 130
    assert main(["status", str(tmp_path), "--watch"]) == 0
