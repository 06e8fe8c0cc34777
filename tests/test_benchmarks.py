"""Benchmarks: memory of the measured block alone, the same work for every peer, failures that are
reported.
"""

import ast
import importlib
import inspect
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.commands import wait_until_dead

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "benchmarks"

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="memory is read from Linux's /proc"
)


@pytest.fixture(autouse=True)
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))


def test_peak_memory_is_that_of_the_measured_block_alone() -> None:
    from workers.worker import measured

    larger = np.ones(300 * 2**17)  # 300 MiB, gone before the block
    del larger
    with measured() as measure:
        inside = np.ones(100 * 2**17)
    assert 95 / 1024 < measure.peak_gib - measure.before_gib < 150 / 1024
    assert inside[0] == 1


def test_every_peer_gets_the_same_job_with_new_prompts_at_each_step() -> None:
    from workers.job import make_job

    one, again, other = (make_job(1000, 3, 4, 32, True, step) for step in (1, 1, 2))
    assert all(map(np.array_equal, one.prompts, again.prompts))
    assert one.lengths == again.lengths == other.lengths
    assert [len(prompt) for prompt in one.prompts] == [len(prompt) for prompt in other.prompts]
    assert not any(map(np.array_equal, one.prompts, other.prompts))
    assert len(one.lengths) == 12 and len(set(one.lengths)) > 1


def test_a_worker_that_ends_says_what_it_wrote_last(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import processes

    (tmp_path / "broken.py").write_text("raise MemoryError('no room for the batch')")
    monkeypatch.setattr(processes, "WORKERS", tmp_path)
    with pytest.raises(processes.WorkerFailed, match="no room for the batch") as failure:
        processes.Worker(sys.executable, "broken.py", {"threads": 1})
    assert failure.value.out_of_memory


def test_a_worker_answers_each_request_and_what_it_prints_is_no_answer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import processes

    (tmp_path / "echo.py").write_text(
        f"import sys; sys.path.insert(0, {str(FOLDER / 'workers')!r})\n"
        "from worker import serve\n"
        "def answer(request):\n    print('noise')\n    return {'twice': 2 * request['number']}\n"
        "serve(lambda settings: answer, ('numpy',))"
    )
    monkeypatch.setattr(processes, "WORKERS", tmp_path)
    with processes.Worker(sys.executable, "echo.py", {"threads": 1}) as worker:
        assert [worker.ask(number=number) for number in (1, 5)] == [{"twice": 2}, {"twice": 10}]
        assert worker.versions["numpy"] == np.__version__


def test_a_worker_that_outlasts_its_seconds_is_ended_and_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import processes

    (tmp_path / "slow.py").write_text("import time; time.sleep(60)")
    monkeypatch.setattr(processes, "WORKERS", tmp_path)
    with pytest.raises(processes.WorkerFailed) as failure:
        processes.Worker(sys.executable, "slow.py", {"threads": 1}, seconds=0.2)
    assert failure.value.sentence == "stopped at its limit of 0 s"


GPU15 = ROOT / "scripts" / "gpu15.sh"
STAND_IN = """#!/bin/sh
case "$2" in
    machine) sleep 60 ;;
    runs) echo "MemoryError: no room" >&2; exit 7 ;;
esac
"""
"""Python, for gpu15.sh: one part hangs, one crashes."""


def gpu15(out: Path, python: str | Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OUT": str(out), "PYTHON": str(python)}
    return subprocess.run(
        [str(GPU15), "--device", "cpu", "--shapes", "tiny", *arguments],
        capture_output=True, text=True, env=environment,
    )  # fmt: skip


def test_the_parts_of_gpu15_have_a_command_each_and_fit_its_time() -> None:
    import gpu15

    parts = [line.split() for line in GPU15.read_text().splitlines() if line.startswith("part ")]
    assert [name for _, _, _, name in parts] == list(gpu15.PARTS)
    assert sum(int(seconds) for _, _, seconds, _ in parts) <= 535
    rest = ["--device", "cpu", "--shapes", "tiny", "--wheels=", "--out", "o", "--work", "w"]
    for _, number, seconds, name in parts:
        parsed = gpu15.parse_arguments([name, "--part", number, "--seconds", seconds, *rest])
        assert (parsed.name, parsed.part) == (name, int(number))


def test_gpu15_names_the_parts_that_crash_or_hang_and_runs_the_others(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(STAND_IN)
    python.chmod(0o755)
    (tmp_path / "a file").touch()
    done = gpu15(tmp_path / "a file", python, "--only", "1,3", "--seconds", "36")
    assert done.returncode == 1 and "a file cannot be written" in done.stderr
    said = [" ".join(line.split()) for line in done.stdout.splitlines()]
    # A busy machine has taken a second of the part's share before it begins.
    assert re.fullmatch("0 machine - timed out after [12] s", said[-3])
    assert said[-2] == "1 runs - failed with 7: MemoryError: no room"
    assert [line.split(", ")[1] for line in said[:3]] == ["machine", "runs", "learn"]


def test_a_measurement_that_fails_leaves_a_row_and_the_next_one_begins(tmp_path: Path) -> None:
    import gpu15

    arguments = "decode --part 2 --seconds 9 --device cpu --shapes tiny --wheels= --work w --out"
    part = gpu15.Part(gpu15.parse_arguments([*arguments.split(), str(tmp_path)]))
    part.measure("one", lambda: (str(1 / 0), {}), "decode.jsonl")
    part.measure("other", lambda: ("5 tok/s", {"drawn": 5}), "decode.jsonl")
    assert (tmp_path / "table.tsv").read_text().splitlines() == [
        "2\tone\t-\tfailed: ZeroDivisionError: division by zero",
        "2\tother\t5 tok/s\tdone",
    ]
    lines = [json.loads(line) for line in (tmp_path / "decode.jsonl").read_text().splitlines()]
    assert lines[0]["state"].startswith("failed") and lines[1]["drawn"] == 5


@pytest.mark.slow
def test_gpu15_decodes_and_learns_in_small_on_a_cpu(tmp_path: Path) -> None:
    done = gpu15(tmp_path, sys.executable, "--only", "2,3", "--seconds", "1500")
    assert done.returncode == 0, done.stdout + (tmp_path / "log.txt").read_text()
    table = (tmp_path / "table.tsv").read_text()
    assert table.count("tok/s") == 11 and "same bytes twice" in table
    assert len(list(tmp_path.iterdir())) <= 8


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_paused_worker_ends_with_the_benchmark_however_that_ends(number: signal.Signals) -> None:
    benchmark = (
        f"import sys, time; sys.path.insert(0, {str(FOLDER)!r})\n"
        "from processes import ProcessGroup\n"
        "with ProcessGroup([sys.executable, '-c', 'import time; time.sleep(60)'], {}) as group:\n"
        "    group.pause()\n    print(group.process.pid, flush=True)\n    time.sleep(60)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", benchmark], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        worker = int(process.stdout.readline())
        process.send_signal(number)
        process.wait(20)
    wait_until_dead([worker], 5)


def test_programs_beside_the_package_call_its_functions_as_they_are_defined() -> None:
    for folder in ("benchmarks", "examples", "scripts"):
        for path in (ROOT / folder).rglob("*.py"):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            names = imported_names(tree)
            for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
                function = isinstance(call.func, ast.Name) and names.get(call.func.id)
                given = [*call.args, *(word.arg for word in call.keywords)]
                if not function or None in given or any(isinstance(a, ast.Starred) for a in given):
                    continue
                words = {str(word.arg): None for word in call.keywords}
                try:
                    inspect.signature(function).bind(*call.args, **words)
                except TypeError as error:
                    pytest.fail(f"{path}:{call.lineno}: {call.func.id}: {error}")


def imported_names(tree: ast.Module) -> dict[str, Any]:
    """What a program imports from the package, by the names that it gives."""
    found = {}
    for node in ast.walk(tree):
        module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
        if module.startswith("retrain"):
            home = importlib.import_module(module)
            found.update({one.asname or one.name: getattr(home, one.name) for one in node.names})
    return {name: one for name, one in found.items() if callable(one)}
