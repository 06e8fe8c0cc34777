"""Benchmarks: memory of the measured block alone, the same work for every peer, failures that are
reported.
"""

import ast
import importlib
import inspect
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

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


@pytest.mark.slow
def test_a_part_that_fails_leaves_a_sentence_and_the_other_parts_go_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import cuda
    import processes
    from cuda_parts import SIZES, Bench

    (tmp_path / "growth_point.py").write_text(
        "raise RuntimeError('CUDA out of memory. Tried to allocate 9 GiB')"
    )
    monkeypatch.setattr(processes, "WORKERS", tmp_path)
    bench = Bench(SIZES["tiny"], {"device": "cpu", "dtype": "fp32", "threads": 1}, None, None, 60)
    sections = cuda.sections(bench, ["learn", "profile"])
    assert sections.count("Failed: retrain: not enough memory.") == 2
    assert "## Learning" in sections and "## Where the time goes" in sections


@pytest.mark.slow
def test_a_probe_that_is_not_there_or_fails_is_no_success() -> None:
    failing = (
        "import gpu_first as g; g.PROBES['learn'] = lambda machine: 1 / 0; g.main()",
        "--device=cpu", "--shapes=tiny",
    )  # fmt: skip
    for only, code, said in (
        ("nothing", 2, "the probes are environment"),
        ("learn", 1, "ZeroDivisionError"),
    ):
        command = [sys.executable, "-c", *failing, f"--only={only}"]
        ended = subprocess.run(command, cwd=FOLDER, capture_output=True, text=True)
        assert ended.returncode == code
        assert said in ended.stdout + ended.stderr


@pytest.mark.slow
def test_the_probe_of_shared_weights_runs_in_small_on_a_cpu() -> None:
    command = [sys.executable, "gpu_first.py", "--device=cpu", "--shapes=tiny", "--only=handles"]
    ended = subprocess.run(command, cwd=FOLDER, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout
    assert json.loads(ended.stdout)["opened"]


@pytest.mark.slow
def test_the_gpu_benchmark_runs_in_small_on_a_cpu(tmp_path: Path) -> None:
    command = [
        sys.executable,
        str(FOLDER / "cuda.py"),
        "--device",
        "cpu",
        "--shapes",
        "tiny",
        "--only",
        "learn",
        "--output",
        str(tmp_path),
    ]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(FOLDER.parent)},
    )
    assert done.returncode == 0, done.stderr
    (file,) = tmp_path.glob("cuda-tiny-cpu-*.md")
    text = file.read_text(encoding="utf-8")
    assert "Failed" not in text
    assert (
        text.count("| retrain, ") == 5
        and text.count("| 1.000000 |") == 5
        and "published, not measured here" in text
    )


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
    deadline = time.monotonic() + 5
    while is_alive(worker) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not is_alive(worker)


def is_alive(pid: int) -> bool:
    """A zombie, which nobody has waited for yet, is not."""
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"


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
