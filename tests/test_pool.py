"""The pieces of a step are computed by worker processes, and nobody can tell how many there
were.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from retrain.backends.local.backend import LocalBackend
from retrain.errors import RunFailed
from retrain.model.pool import Pool, can_fork, in_order
from retrain.types import MachineChoices
from tests.commands import is_alive, wait_until_dead
from tests.runs import small, small_run, timeless

pytestmark = pytest.mark.skipif(
    not can_fork(), reason="workers are forked, which this system's libraries do not survive"
)

SHARED: dict[str, Any] = {
    "training": {
        "batch_size": 17,
        "max_steps": 2,
        "save_every": 1,
        "max_tokens": 12,
        "micro_batch_tokens": 200,
        "updates_per_batch": 2,
    },
    "loss": {"mode": "ppo", "kl_coef": 0.01, "max_grad_norm": 1.0},
    "evaluation": {"at_end": True, "max_examples": 5},
}
"""68 completions, more than decode together in one piece, and several micro-batches."""


def run(folder: Path, workers: int, **sections: dict[str, Any]) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(workers)
    try:
        small_run(small(folder, **SHARED | sections), quiet=True)
    finally:
        torch.set_num_threads(before)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("alone") / "run"
    run(folder, 1)
    return folder


def assert_same_bytes(left: Path, right: Path) -> None:
    assert timeless(left / "metrics.jsonl") == timeless(right / "metrics.jsonl")
    names = ("adapter_model.safetensors", "optimizer.safetensors")
    checkpoints = [folder / "checkpoints" / "step_000002" for folder in (left, right)]
    for name in names:
        assert (checkpoints[0] / name).read_bytes() == (checkpoints[1] / name).read_bytes(), name
    for name in ("emergence/generations.jsonl", "evaluation.jsonl"):
        assert (left / name).read_bytes() == (right / name).read_bytes(), name


def test_a_run_is_the_same_bytes_whatever_the_number_of_workers(
    alone: Path, tmp_path: Path
) -> None:
    run(tmp_path / "run", 3)
    assert_same_bytes(alone, tmp_path / "run")


@pytest.mark.slow
def test_redrawn_groups_are_the_same_whatever_the_number_of_workers(tmp_path: Path) -> None:
    """A redraw may come to another worker than the one that computed its prompt."""
    training = SHARED["training"] | {"max_resamples": 2, "max_tokens": 4}
    for workers in (1, 2):
        run(tmp_path / str(workers), workers, training=training, reward={"random_p": 0.2})
    assert_same_bytes(tmp_path / "1", tmp_path / "2")


@pytest.mark.slow
def test_a_run_may_go_on_with_another_number_of_workers(alone: Path, tmp_path: Path) -> None:
    run(tmp_path / "run", 2, training=SHARED["training"] | {"max_steps": 1}, evaluation={})
    run(tmp_path / "run", 1, resume={"from": str(tmp_path / "run")})
    assert_same_bytes(tmp_path / "run", alone)


def test_a_small_model_gets_workers_and_the_threads_of_a_stored_run_stand(tmp_path: Path) -> None:
    """Threads changed a run's bytes, workers do not: one that was begun with threads goes on with
    as many.
    """
    before = torch.get_num_threads()
    stored = MachineChoices(2, 128, 4096, 256, False)
    torch.set_num_threads(3)
    try:
        for choices, expected in (
            (None, (3, 1)),
            (stored, (1, 2)),
            (replace(stored, threads=1), (3, 1)),
        ):
            with closing(LocalBackend(small(tmp_path), choices, eos_ids=(258,))) as backend:
                assert (backend.choices.workers, backend.choices.threads) == expected
                assert torch.get_num_threads() == expected[1]
            assert torch.get_num_threads() == 3, "the next run has all of them again"
    finally:
        torch.set_num_threads(before)


# --- the pool itself ------------------------------------------------------------------------------


@pytest.fixture
def changing() -> torch.Tensor:
    return torch.zeros(3)


@pytest.fixture
def pool(changing: torch.Tensor) -> Iterator[Pool]:
    pool = Pool(2, [changing])
    yield pool
    pool.close()


def test_workers_see_what_changed_between_two_calls(pool: Pool, changing: torch.Tensor) -> None:
    def add(piece: int) -> Iterator[tuple[float, int]]:
        yield float(changing.sum()) + piece, changing._version

    compute = pool.shared(add)
    assert [value for value, _ in in_order(compute(range(5)))] == [0, 1, 2, 3, 4]
    first = {version for _, (_, version) in compute(range(4))}
    changing += 1
    second = list(in_order(compute(range(4))))
    assert [value for value, _ in second] == [3, 4, 5, 6]
    assert not first & {version for _, version in second}, (
        "what was derived from the old values would be taken for current"
    )


def test_what_a_worker_raises_is_raised_here_and_the_pool_goes_on(pool: Pool) -> None:
    def work(piece: int) -> Iterator[int]:
        yield piece
        if piece == 1:
            raise RunFailed("piece 1 is not finite")

    compute = pool.shared(work)
    with pytest.raises(RunFailed, match="piece 1 is not finite"):
        list(compute(range(4)))
    assert sorted(result for _, result in compute([2, 3, 4])) == [2, 3, 4]


def test_results_that_nobody_listened_to_are_not_taken_for_others(pool: Pool) -> None:
    def work(piece: int) -> Iterator[int]:
        for _ in range(5):
            time.sleep(0.002)
            yield piece

    compute = pool.shared(work)
    assert next(compute([1, 1]))[1] == 1
    assert [result for _, result in compute([2, 2, 2])] == [2] * 15


def test_a_worker_that_is_killed_ends_the_run_in_a_sentence(pool: Pool) -> None:
    def work(piece: int) -> Iterator[int]:
        os.kill(os.getpid(), signal.SIGKILL)
        yield piece

    with pytest.raises(RunFailed, match="died of signal 9"):
        list(pool.shared(work)([1]))


def test_workers_leave_signals_to_the_parent_and_die_with_it() -> None:
    program = (
        "import os, time\nfrom retrain.model.pool import Pool\ndef work(piece):\n    yield"
        " os.getpid()\n    time.sleep(60)\npids = [pid for _, pid in zip(range(2), (pid for _, pid"
        " in Pool(2).shared(work)([0, 1])))]\nprint(*pids, flush=True)\ntime.sleep(60)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        workers = [int(pid) for pid in process.stdout.readline().split()]
        assert len(set(workers)) == 2
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            os.kill(workers[0], number)
        time.sleep(0.05)
        assert all(map(is_alive, workers))
        process.kill()
    wait_until_dead(workers, 5)
