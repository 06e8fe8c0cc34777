"""A wandb server that is not there, or never answers, beside the real library: the run is kept on
disk, and its process ends in time.
"""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import retrain.tracking.wandb
from retrain.records.entries import StepRecord
from retrain.records.run_folder import RunFolder
from retrain.tracking import build_tracker
from retrain.tracking.base import StartEvent
from tests.marks import first_of
from tests.trackers import SECRET, config, keep_here, wandb_logs, wandb_steps

LEAVING = """
import sys
from pathlib import Path

import retrain.tracking.wandb
from retrain.config import TrainConfig
from retrain.records.run_folder import RunFolder
from retrain.tracking import build_tracker
from retrain.tracking.base import StartEvent
from retrain.tracking.external import Background

Background.patience_s = 0.5
retrain.tracking.wandb._INIT_S = 60.0
folder = Path(sys.argv[1])
folder.mkdir()
tracker = build_tracker(TrainConfig.model_validate({"logging": {"wandb_project": "p"}}), RunFolder(folder), condition="grpo+none")
tracker.emit(StartEvent("cpu"))
tracker.close()
"""
"""A run that ends while wandb still waits for the server to answer its first question."""
DYING = LEAVING.replace(
    "tracker.close()",
    """
import time, wandb
while not (service := wandb.setup()._connection):
    time.sleep(0.05)
time.sleep(1)
service._proc._process.kill()
service._proc._process.wait()
for step in range(50):
    tracker.emit(StepRecord(step=step, condition="grpo+none", loss=0.5))
    time.sleep(0.02)
tracker.close()
""",
).replace(
    "from retrain.records.run_folder",
    "from retrain.records.entries import StepRecord\nfrom retrain.records.run_folder",
)
"""One whose wandb service process is killed in the middle."""


@pytest.fixture(params=first_of(["closed", "silent"]))
def server(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    """The address of a port that nobody listens on, or of one that takes every connection and never
    says a word.
    """
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        if request.param == "silent":
            listener.listen(100)
        address = f"http://127.0.0.1:{listener.getsockname()[1]}"
        keep_here(tmp_path / "home", monkeypatch)
        monkeypatch.setenv("WANDB_MODE", "online")
        monkeypatch.setenv("WANDB_BASE_URL", address)
        yield address


def test_the_run_is_kept_on_disk_and_how_to_send_it_is_said_once(
    server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(retrain.tracking.wandb, "_INIT_S", 2.0)
    tracker = build_tracker(
        config(wandb_project="p"), RunFolder(tmp_path / "run"), condition="grpo+none"
    )
    (tmp_path / "run").mkdir()
    began = time.monotonic()
    tracker.emit(StartEvent("cpu"))
    tracker.emit(StepRecord(step=0, condition="grpo+none", loss=0.5))
    assert time.monotonic() - began < 1, "the run waits for nobody"
    tracker.close()
    assert time.monotonic() - began < 15
    (log,) = wandb_logs(tmp_path / "run")
    assert wandb_steps(log) == [0]
    out = capsys.readouterr().out
    run_id = tracker.state()["wandb_run_id"]
    sent = f"`wandb sync --id {run_id} {tmp_path}/run/wandb/offline-run-*-"
    assert out.count("wandb does not answer") == out.count(sent) == 1
    assert SECRET not in out


def run_of(code: str, folder: Path) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-c", code, str(folder)]
    return subprocess.run(command, env=os.environ, capture_output=True, text=True, timeout=120)


@pytest.mark.slow
def test_a_process_ends_in_time_though_wandb_still_waits_for_its_server(
    server: str, tmp_path: Path
) -> None:
    began = time.monotonic()
    ended = run_of(LEAVING, tmp_path / "run")
    assert time.monotonic() - began < 30, "without a limit it is a minute"
    assert ended.returncode == 0 and ended.stderr == ""
    assert ended.stdout.count("wandb did not end within 0.5 s, so retrain stops waiting") == 1


@pytest.mark.slow
def test_a_process_ends_without_a_traceback_though_wandbs_own_process_has_died(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_here(tmp_path / "home", monkeypatch)
    ended = run_of(DYING, tmp_path / "run")
    assert ended.returncode == 0 and "Traceback" not in ended.stderr
    assert ended.stdout.count("wandb failed and receives nothing more from this run") == 1


def test_wandb_sends_no_reports_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from wandb.env import error_reporting_enabled

    monkeypatch.delenv("WANDB_ERROR_REPORTING", raising=False)
    assert error_reporting_enabled()
    build_tracker(config(wandb_project="p"), RunFolder(tmp_path), condition="grpo+none").close()
    assert not error_reporting_enabled()
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "true")
    build_tracker(config(wandb_project="p"), RunFolder(tmp_path), condition="grpo+none").close()
    assert error_reporting_enabled()
