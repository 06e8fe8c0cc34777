"""What the numbers of benchmarks/ rest on: memory of the measured block alone, the same work for every peer, failures that are seen."""

import sys
from pathlib import Path

import numpy as np
import pytest

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks"

pytestmark = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="memory is read from Linux's /proc")


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


def test_a_worker_that_ends_says_what_it_wrote_last(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import processes

    (tmp_path / "broken.py").write_text("raise MemoryError('no room for the batch')")
    monkeypatch.setattr(processes, "WORKERS", tmp_path)
    with pytest.raises(processes.WorkerFailed, match="no room for the batch") as failure:
        processes.Worker(sys.executable, "broken.py", {"threads": 1})
    assert failure.value.out_of_memory


def test_a_worker_answers_each_request_and_what_it_prints_is_no_answer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
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
