"""The helper that forks command lines: each is as good as one that Python started."""

import json
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.commands import Command, run


def script(folder: Path, text: str) -> list[str]:
    file = folder / "script.py"
    file.write_text(text)
    return [sys.executable, str(file), "an argument"]


SAYS_WHAT_IT_IS = """
import atexit, json, os, sys, torch
import beside
atexit.register(print, "at exit", file=sys.stderr)
print(json.dumps([__name__, sys.argv[1:], dict(os.environ), os.getcwd(), torch.get_num_threads(), os.getsid(0) == os.getpid()]))
sys.exit(7)
"""


@pytest.mark.slow
def test_a_forked_command_has_what_a_started_one_has(tmp_path: Path) -> None:
    (tmp_path / "beside.py").touch()
    (tmp_path / "folder").mkdir()
    command = script(tmp_path, SAYS_WHAT_IT_IS)
    environment = {name: value for name, value in os.environ.items() if name != "HOME"} | {
        "OMP_NUM_THREADS": "2",
        "A": "b",
    }
    options: dict[str, Any] = {
        "env": environment,
        "cwd": tmp_path / "folder",
        "start_new_session": True,
    }
    forked, started = (
        run(command, **options),
        subprocess.run(command, capture_output=True, text=True, **options),
    )
    assert json.loads(forked.stdout) == json.loads(started.stdout)
    assert (
        (forked.returncode, forked.stderr)
        == (started.returncode, started.stderr)
        == (7, "at exit\n")
    )


@pytest.mark.slow
def test_it_does_not_import_torch_again_and_forks_from_a_single_thread(tmp_path: Path) -> None:
    look = (
        "import os, sys\nprint('torch' in sys.modules,"
        " len(os.listdir(f'/proc/{os.getppid()}/task')))"
    )
    assert run(script(tmp_path, look)).stdout == "True 1\n"


def test_nothing_of_one_command_is_left_in_the_next(tmp_path: Path) -> None:
    change = (
        "import os, sys, retrain\nprint(os.environ.pop('HOME', None), hasattr(retrain,"
        " 'left'))\nretrain.left = 1"
    )
    assert [run(script(tmp_path, change)).stdout for _ in range(2)] == [
        f"{os.environ.get('HOME')} False\n"
    ] * 2


@pytest.mark.parametrize(
    ("text", "code", "words"),
    [
        ("raise ZeroDivisionError('a bug')", 1, "ZeroDivisionError: a bug"),
        ("import sys\nsys.exit('a sentence')", 1, "a sentence"),
        ("import os\nos._exit(9)", 9, ""),
        ("import os\nos.kill(os.getpid(), 9)", -signal.SIGKILL, ""),
    ],
)
def test_every_end_has_its_exit_code(tmp_path: Path, text: str, code: int, words: str) -> None:
    done = run(script(tmp_path, text), stderr=subprocess.STDOUT)
    assert done.returncode == code and words in done.stdout
    assert not done.stderr


def test_a_terminal_is_its_own(tmp_path: Path) -> None:
    text = (
        "import os, signal, sys\nsys.stdout.reconfigure(errors='replace')\nprint(os.isatty(1),"
        " flush=True)\nsignal.pause()"
    )
    ours, its = pty.openpty()
    command = Command(script(tmp_path, text), terminal=its)
    os.close(its)
    assert os.read(ours, 100) == b"True\r\n"
    os.close(ours)
    assert command.wait(60) == -signal.SIGHUP


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_signal_reaches_it_and_it_alone(tmp_path: Path, number: signal.Signals) -> None:
    text = (
        "import pathlib, signal\nsignal.signal(signal.SIGINT,"
        " signal.SIG_DFL)\npathlib.Path('ready').touch()\nsignal.pause()"
    )
    for folder in (tmp_path / "one", tmp_path / "other"):
        folder.mkdir()
    one, other = (
        Command(script(folder, text), cwd=folder)
        for folder in (tmp_path / "one", tmp_path / "other")
    )
    while not all((tmp_path / name / "ready").exists() for name in ("one", "other")):
        assert one.poll() is other.poll() is None
        time.sleep(0.01)
    one.send_signal(number)
    assert one.wait(60) == -number
    assert other.poll() is None
    other.kill()
    assert other.wait(60) == -signal.SIGKILL


def test_a_command_that_takes_too_long_is_killed(tmp_path: Path) -> None:
    text = (
        "import os, pathlib,"
        " signal\npathlib.Path('pid').write_text(str(os.getpid()))\nsignal.pause()"
    )
    with pytest.raises(subprocess.TimeoutExpired):
        run(script(tmp_path, text), cwd=tmp_path, timeout=0.5)
    deadline = time.monotonic() + 30
    while (tmp_path / "pid").exists() and psutil.pid_exists(
        int((tmp_path / "pid").read_text() or os.getpid())
    ):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_what_libraries_read_at_their_import_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="HF_ENDPOINT"):
        run(script(tmp_path, ""), env=os.environ | {"HF_ENDPOINT": "http://127.0.0.1:9"})


def test_a_failure_is_raised_where_success_is_asked_for(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"exit code 3: .*why"):
        run(script(tmp_path, "import sys\nprint('why')\nsys.exit(3)"), check=True)
