"""A run's folder: whose it is, what is in it, and what signals do to it."""

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from retrain import train
from retrain.analysis.runs import campaign_runs
from retrain.analysis.status import overview
from retrain.config import dump_toml, load_stored
from retrain.errors import (
    ConfigurationError,
    EnvironmentFailure,
    Interrupted,
    RetrainError,
    RunFailed,
    StoppedAtOnce,
)
from retrain.records import run_folder
from retrain.records.run_folder import RunFolder, writer_lock
from retrain.run.evaluate import evaluate_run
from retrain.run.interrupts import Interrupts
from retrain.run.loop import take_step
from retrain.run.saver import Saver
from retrain.run.session import Session
from tests.commands import Command
from tests.runs import lines, quiet_run, small, small_run
from tests.stops import hang_up


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "run"
    evaluation = {"at_start": True, "at_end": True, "max_examples": 4}
    train(small(folder, evaluation=evaluation | {"samples": 2, "k": [1, 2]}), quiet=True)
    return folder


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds a run and, beside it, its adapters."""
    folder = tmp_path_factory.mktemp("apart")
    backend = {"devices": "cpu", "adapter_path": str(folder / "adapters")}
    quiet_run(folder / "run", training={"max_steps": 1}, backend=backend)
    return folder


def test_the_summary_holds_both_evaluations_and_the_last_metrics(done: Path) -> None:
    summary = json.loads((done / "summary.json").read_text())
    assert summary["status"] == "done"
    assert summary["steps"] == 4
    assert summary["seconds"] > 0 and summary["tokens"] > 0
    for when, step in (("before", 0), ("after", 4)):
        evaluation = summary["evaluation"][when]
        low, high = evaluation["interval"]
        assert evaluation["step"] == step
        assert low <= evaluation["pass@1"] <= high
        assert evaluation["pass@2"] >= evaluation["pass@1"]
    assert summary["last"] == lines(done / "metrics.jsonl")[-1]


def test_the_final_adapter_loads_in_peft(done: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    from retrain.model.text import LAB_MODEL

    base = AutoModelForCausalLM.from_pretrained(LAB_MODEL)
    adapted = PeftModel.from_pretrained(base, done / "checkpoints" / "final")
    factors = [one for name, one in adapted.named_parameters() if "lora_B" in name]
    assert any(one.abs().sum() > 0 for one in factors)


def test_overwrite_starts_anew_and_leaves_foreign_files_alone(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    quiet_run(folder, training={"max_steps": 1})
    (folder / "notes.txt").write_text("mine")
    of_the_run = [folder / name for name in ("report.html", "report-training.png")]
    for path in of_the_run:
        path.write_text("of the run that is gone")
    small_run(small(folder, training={"max_steps": 2}), overwrite=True, quiet=True)
    assert not any(path.exists() for path in of_the_run)
    assert len(lines(folder / "metrics.jsonl")) == 2
    assert (folder / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize(
    "mistake",
    [
        {"loss": {"mode": "no_such_module.loss"}},
        {"data": {"source": "no_such_module.source"}},
        {"backend": {"devices": "gpu:7"}},
        {"model": {"model": "./no-such-model"}},
        {"lora": {"init_from": "nowhere"}},
        {"inference": {"engine": "vllm", "url": "http://127.0.0.1:9"}},
    ],
    ids=lambda mistake: next(iter(mistake)),
)
def test_what_is_refused_does_not_empty_the_folder_that_it_would_overwrite(
    mistake: dict[str, Any], apart: Path
) -> None:
    before = {path: path.read_bytes() for path in apart.rglob("*") if path.is_file()}
    with pytest.raises(RetrainError):
        backend = {"devices": "cpu", "adapter_path": str(apart / "adapters")}
        wrong = mistake | {"backend": backend | mistake.get("backend", {})}
        small_run(small(apart / "run", **wrong), overwrite=True, quiet=True)
    assert {path: path.read_bytes() for path in apart.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("killed", ["moving", "moved", "forgetting"])
def test_what_is_overwritten_is_whole_or_gone_whenever_a_start_is_killed(
    killed: str, done: Path, tmp_path: Path
) -> None:
    folder = RunFolder(tmp_path / "run")
    shutil.copytree(done, folder.path)
    before = {path.relative_to(folder.path) for path in folder.path.rglob("*")}
    if killed == "moving":
        (folder.path / ".tmp-replacing").mkdir()
        folder.metrics.rename(folder.path / ".tmp-replacing" / folder.metrics.name)
    else:
        folder.set_aside()
        folder.config.touch()  # of the run that was to come
    if killed == "forgetting":
        (folder.path / ".tmp-replaced").rename(folder.path / ".tmp-forgotten")
    folder.put_back()
    after = {path.relative_to(folder.path) for path in folder.path.rglob("*")}
    assert (after == before) == (killed != "forgetting")
    folder.forget()
    assert not [*folder.path.glob(".tmp-*")]


def test_a_folder_in_a_newer_format_is_refused_in_one_sentence(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.create()
    marker = json.loads(folder.marker.read_text())
    folder.marker.write_text(json.dumps(marker | {"format": 99}))
    with pytest.raises(RunFailed, match="format 99, and this retrain reads formats up to 1"):
        folder.refuse_run(resuming=False)
    folder.config.touch()
    assert "format 99" in overview(folder.path).runs[0].note
    (folder.path / "manifest.json").write_text('{"runs": []}')
    for read in (campaign_runs, partial(evaluate_run, overrides={}, log=print)):
        with pytest.raises(RunFailed, match="format 99"):
            read(folder.path)


def test_nothing_without_our_marker_is_ever_deleted(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "weights").write_text("precious")
    with pytest.raises(ConfigurationError, match="was not made by retrain"):
        small_run(small(tmp_path), overwrite=True, quiet=True)
    assert (tmp_path / "checkpoints" / "weights").read_text() == "precious"


def test_a_given_adapter_path_is_honored_and_another_runs_checkpoints_are_safe(
    tmp_path: Path,
) -> None:
    shared = {
        "backend": {"devices": "cpu", "adapter_path": str(tmp_path / "adapters")},
        "training": {"max_steps": 2},
    }
    quiet_run(tmp_path / "one" / "run", **shared)
    assert (tmp_path / "adapters" / "run" / "final" / "adapter_model.safetensors").is_file()
    assert not (tmp_path / "one" / "run" / "checkpoints").exists()
    with pytest.raises(ConfigurationError, match="another run"):
        quiet_run(tmp_path / "two" / "run", **shared)
    more = {"training": {"max_steps": 3}, "resume": {"from": str(tmp_path / "one" / "run")}}
    assert quiet_run(tmp_path / "one" / "run", **shared | more).summary.steps == 3
    small_run(small(tmp_path / "one" / "run", **shared), overwrite=True, quiet=True)


@pytest.mark.faults("starters of one folder")
def test_two_writers_of_one_folder_are_refused_and_the_owner_is_named(tmp_path: Path) -> None:
    with (
        Session.open(small(tmp_path / "run"), overwrite=False),
        pytest.raises(ConfigurationError, match=f"pid {os.getpid()}"),
    ):
        small_run(small(tmp_path / "run"), quiet=True)


def test_an_owner_that_ends_as_it_is_asked_for_is_another_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its name goes before its lock."""
    folder = RunFolder(tmp_path)
    with writer_lock(folder):
        folder.lock_owner.unlink()
        monkeypatch.setattr(Path, "exists", lambda _: True)
        refused = pytest.raises(ConfigurationError, match="written by another process")
        with refused, writer_lock(folder):
            pass


def test_a_marker_that_another_starter_wrote_meanwhile_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both write one temporary file, which the first of them renames. Of 8 starters at once one ended
    with "cannot be written".
    """

    def overtaken(path: Path, content: str) -> None:
        path.write_text(content)
        raise FileNotFoundError(2, "No such file or directory")

    monkeypatch.setattr(run_folder, "replace_file", overtaken)
    RunFolder(tmp_path / "run").create()
    assert run_folder.kind_of(tmp_path / "run") == "run"


def test_a_place_where_no_folder_can_be_made_is_named() -> None:
    with pytest.raises(ConfigurationError, match="/proc/x is not a place for a folder"):
        RunFolder(Path("/proc/x")).create()


def test_a_folder_that_begins_with_a_dash_is_no_flag_in_the_printed_command() -> None:
    assert RunFolder(Path("-x")).resume_command == "retrain ./-x/config.toml --resume ./-x"


def test_a_configuration_of_another_version_is_said_to_be_one(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("[training]\nlater_key = 1\n")
    (tmp_path / "environment.json").write_text('{"retrain": "99.0"}')
    told = r"is of retrain 99\.0, and this is .*\n.*later_key"
    with pytest.raises(ConfigurationError, match=told):
        load_stored(tmp_path / "config.toml")


def test_a_resume_keeps_the_drawn_seed_and_the_steps_taken(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    resume, short = {"from": str(folder)}, {"seed": -1, "max_steps": 1}
    first = quiet_run(folder, training=short)
    again = quiet_run(folder, training=short | {"max_steps": 2}, resume=resume)
    assert first.summary.seed == again.summary.seed >= 0
    stored = (folder / "config.toml").read_text()
    assert f"seed = {first.summary.seed}" in stored
    with pytest.raises(ConfigurationError, match="= 1 is too small for a run that has taken 2 st"):
        quiet_run(folder, training=short, resume=resume)
    assert (folder / "config.toml").read_text() == stored and (folder / "summary.json").exists()


def started(command: list[str], env: dict[str, str]) -> "subprocess.Popen[str]":
    """Python itself, from its start to its end."""
    return subprocess.Popen(
        command, env=env, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


@pytest.mark.parametrize(
    ("number", "code", "start"),
    [
        pytest.param(signal.SIGINT, 130, started, marks=pytest.mark.slow),
        (signal.SIGTERM, 143, Command),
    ],
)
def test_one_signal_saves_and_exits_with_its_code(
    tmp_path: Path, number: signal.Signals, code: int, start: Any
) -> None:
    folder, file = tmp_path / "run", tmp_path / "run.toml"
    file.write_text(dump_toml(small(folder, training={"max_steps": 500, "save_every": 400})))
    command = [sys.executable, "-m", "retrain", str(file), "--skip-parity"]
    process = start(command, env=os.environ | {"OMP_NUM_THREADS": "1"})
    wait_for_lines(folder / "metrics.jsonl", 2, process)
    process.send_signal(signal.SIGUSR1)  # saves and goes on
    deadline = time.monotonic() + 60
    while not list((folder / "checkpoints").glob("step_*")) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert process.poll() is None
    assert len(list((folder / "checkpoints").glob("step_*"))) == 1
    wait_for_lines(folder / "metrics.jsonl", len(lines(folder / "metrics.jsonl")) + 2, process)
    process.send_signal(number)
    _, error = process.communicate(timeout=120)
    assert process.returncode == code, error
    assert "Traceback" not in error and "Stopping at the next safe point" in error
    steps = len(lines(folder / "metrics.jsonl"))
    assert (folder / "checkpoints" / f"step_{steps:06d}" / "manifest.json").is_file()


def test_a_terminal_that_closes_saves_as_sigterm_does(tmp_path: Path) -> None:
    folder, file = tmp_path / "run", tmp_path / "run.toml"
    file.write_text(dump_toml(small(folder, training={"max_steps": 500, "save_every": 400})))
    assert hang_up(file, folder) == 129
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["status"], summary["reason"]) == ("interrupted", "Interrupted by SIGHUP.")
    assert (folder / "checkpoints" / f"step_{summary['steps']:06d}" / "manifest.json").is_file()


@pytest.fixture
def hangups() -> Iterator[None]:
    before = signal.getsignal(signal.SIGHUP)
    yield
    signal.signal(signal.SIGHUP, before)


def test_several_hangups_are_one(hangups: None) -> None:
    with Interrupts() as interrupts:
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGHUP):
            os.kill(os.getpid(), number)
        assert interrupts.stopped_by == signal.SIGTERM


def test_a_signal_before_a_part_that_stops_at_once_is_not_kept_waiting_for_it(
    hangups: None,
) -> None:
    with Interrupts() as interrupts:
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(Interrupted), interrupts.at_once():
            pytest.fail("it was entered")


def test_a_run_under_nohup_outlives_its_terminal(hangups: None) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with Interrupts() as interrupts:
        os.kill(os.getpid(), signal.SIGHUP)
        assert interrupts.stopped_by is None


def test_rows_are_on_the_disk_before_their_checkpoint_is_sealed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, synced = os.fsync, []

    def watch(descriptor: int) -> None:
        synced.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        real(descriptor)

    monkeypatch.setattr(os, "fsync", watch)
    sections = {
        "evaluation": {"every": 1, "max_examples": 2},
        "logging": {"tokens_every": 1},
        "training": {"max_steps": 1},
    }
    quiet_run(tmp_path / "run", **sections)
    before = synced[: synced.index("manifest.json")]
    rows = {"metrics.jsonl", "evaluation.jsonl", "steps.jsonl", "generations.jsonl"}
    assert rows | {"emergence", ".tmp-step_0.safetensors"} <= {*before}
    state = json.loads((tmp_path / "run" / "trainer_state.json").read_text())
    size = (tmp_path / "run" / "metrics.jsonl").stat().st_size
    assert state["files"]["metrics.jsonl"]["size"] == size


def test_a_refused_row_is_tried_again_and_the_third_time_stops_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, refused = os.write, 1

    def write(descriptor: int, data: bytes) -> int:
        nonlocal refused
        if refused and Path(f"/proc/self/fd/{descriptor}").readlink().name == "metrics.jsonl":
            refused -= 1
            raise OSError(28, "No space left on device")
        return real(descriptor, data)

    monkeypatch.setattr(os, "write", write)
    quiet_run(tmp_path / "once")
    assert [line["step"] for line in lines(tmp_path / "once" / "metrics.jsonl")] == [0, 1, 2, 3]
    refused = 1000
    with pytest.raises(
        EnvironmentFailure,
        match=r"cannot write the checkpoint of step 3 to .*metrics\.jsonl: No space left.*3 times in a row",
    ):
        quiet_run(tmp_path / "always", training={"max_steps": 9, "save_every": 9})
    refused = 0
    resume, training = {"from": str(tmp_path / "always")}, {"max_steps": 2, "save_every": 9}
    quiet_run(tmp_path / "always", training=training, resume=resume)
    assert [line["step"] for line in lines(tmp_path / "always" / "metrics.jsonl")] == [0, 1]


def wait_for_lines(path: Path, count: int, process: "Command | subprocess.Popen[str]") -> None:
    while process.poll() is None and (
        not path.exists() or len(path.read_bytes().splitlines()) < count
    ):
        time.sleep(0.02)


def test_a_failed_save_is_tried_again_and_the_third_stops_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from retrain.backends.local.backend import LocalBackend

    calls = []

    def full(backend: LocalBackend, folder: Path) -> None:
        calls.append(folder)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(LocalBackend, "save", full)
    with pytest.raises(EnvironmentFailure, match=r"No space left.*--resume"):
        quiet_run(tmp_path / "run", training={"max_steps": 9, "save_every": 2})
    assert len(calls) == 3
    assert len(lines(tmp_path / "run" / "metrics.jsonl")) == 4  # due at 2, again at 3 and 4


def test_a_disk_that_fills_up_stops_the_run_in_a_sentence_and_room_lets_it_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_files: None
) -> None:
    from retrain.records.checkpoint import CheckpointStore

    def no_room(store: CheckpointStore, *_: object) -> None:
        raise OSError(27, "File too large")

    # It was not full when the run began.
    monkeypatch.setattr(CheckpointStore, "rehearse", lambda store, size: None)
    sections = {"training": {"max_steps": 3, "save_every": 1}}
    told = r"cannot write the checkpoint of step 3 .* File too large, 3 times in a row"
    with pytest.raises(EnvironmentFailure, match=told):
        quiet_run(tmp_path / "run", **sections)
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    resumed = small(tmp_path / "run", **sections, resume={"from": str(tmp_path / "run")})
    with monkeypatch.context() as full:
        full.setattr(CheckpointStore, "save_final", no_room)
        told = r"cannot be written: File too large; .* continue with `retrain .* --resume .*`"
        with pytest.raises(EnvironmentFailure, match=told):
            small_run(resumed, quiet=True)
    small_run(resumed, quiet=True)
    assert [line["step"] for line in lines(tmp_path / "run" / "metrics.jsonl")] == [0, 1, 2]


def test_whoever_may_read_the_folder_may_read_every_file(tmp_path: Path) -> None:
    quiet_run(tmp_path / "run", logging={"tokens_every": 1})
    readable = (tmp_path / "run" / "metrics.jsonl").stat().st_mode & 0o044
    files = [path for path in (tmp_path / "run").rglob("*.*") if path.suffix != ".lock"]
    closed = [path.name for path in files if readable & ~path.stat().st_mode]
    assert not closed


def test_a_run_holds_two_evaluations_however_many_it_made(tmp_path: Path) -> None:
    config = small(tmp_path / "run", evaluation={"every": 1, "at_start": True, "max_examples": 2})
    with Session.open(config, overwrite=False, skip_parity=True) as session:
        for _ in range(3):
            session.evaluate_if_due()
            take_step(session)
        past = session.observer.past
        assert past.before and past.after and (past.before.step, past.after.step) == (0, 2)


def test_processes_with_different_weights_save_nothing(tmp_path: Path) -> None:
    config = small(tmp_path / "run", training={"save_every": 1})
    with Session.open(config, overwrite=False, skip_parity=True) as session:
        take_step(session)
        session.world = SimpleNamespace(size=2, gather=lambda digest: [digest, "another"])
        with pytest.raises(RunFailed, match="different weights after step 1, so retrain saved"):
            session.save_if_due()
        assert not [*session.folder.checkpoints.glob("*")]


def test_interrupting_twice_ends_at_once(tmp_path: Path) -> None:
    with Session.open(small(tmp_path / "run"), overwrite=False) as session:
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(Interrupted, match="SIGINT"):
            session.interrupts.check()
        with pytest.raises(StoppedAtOnce, match="without another save"):
            os.kill(os.getpid(), signal.SIGINT)


def test_a_stop_while_loading_stays_one_where_a_library_makes_another_error_of_it() -> None:
    with pytest.raises(Interrupted) as caught, Interrupts() as interrupts, interrupts.at_once():
        with pytest.raises(Interrupted):
            os.kill(os.getpid(), signal.SIGINT)
        raise ImportError
    assert isinstance(caught.value.__context__, ImportError), "it stopped within the part"


def test_a_signal_is_acknowledged_while_the_process_is_in_a_long_call() -> None:
    call = "print(flush=True)\n hashlib.pbkdf2_hmac('sha256', b'', b'', 10**7)"
    text = f"import hashlib\nfrom retrain.run.interrupts import *\nwith Interrupts():\n {call}"
    with started([sys.executable, "-c", text], dict(os.environ)) as process:
        assert process.stdout and process.stderr and process.stdout.readline() == "\n"
        process.send_signal(signal.SIGINT)
        assert "Stopping at the next safe point" in process.stderr.readline()
        assert process.poll() is None
        process.kill()


def test_a_run_whose_folder_was_deleted_says_so_and_asks_for_no_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def deleted(saver: Saver, state: Any, *, may_retry: bool) -> None:
        shutil.rmtree(saver.folder.path, ignore_errors=True)
        real(saver, state, may_retry=may_retry)

    real = Saver.save
    monkeypatch.setattr(Saver, "save", deleted)
    with pytest.raises(RunFailed) as caught:
        quiet_run(tmp_path / "run")
    assert str(caught.value) == f"{tmp_path / 'run'} was deleted or moved while it was written to."


def test_a_run_leaves_the_acknowledgment_of_the_campaign_around_it() -> None:
    with Interrupts():
        own = signal.set_wakeup_fd(-1)
        signal.set_wakeup_fd(own)
        with Interrupts():
            pass
        assert own == signal.set_wakeup_fd(own) != -1
