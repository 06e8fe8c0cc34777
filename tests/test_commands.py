"""The helper that forks command lines: each is as good as one that Python started."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.commands import run


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


def test_nothing_of_one_command_is_left_in_the_next(tmp_path: Path) -> None:
    change = (
        "import os, sys, retrain\nprint(os.environ.pop('HOME', None), hasattr(retrain,"
        " 'left'))\nretrain.left = 1"
    )
    assert [run(script(tmp_path, change)).stdout for _ in range(2)] == [
        f"{os.environ.get('HOME')} False\n"
    ] * 2


def test_what_libraries_read_at_their_import_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="HF_ENDPOINT"):
        run(script(tmp_path, ""), env=os.environ | {"HF_ENDPOINT": "http://127.0.0.1:9"})
