"""The semaphore of Tinker campaigns: never more than the limit, over processes, whatever becomes of
the holders.
"""

import multiprocessing
import os
import signal
import threading
import time
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path

import pytest

from retrain.backends.tinker.service import Throttle, throttle_of
from retrain.config import config_from_mapping

FORK = multiprocessing.get_context("fork")


def call_often(
    folder: Path, inside: "Synchronized[int]", most: "Synchronized[int]", calls: "Synchronized[int]"
) -> None:
    throttle = Throttle(folder, 4)
    for _ in range(5):
        with throttle.slot():
            with inside.get_lock():
                inside.value += 1
                most.value = max(most.value, inside.value)
                calls.value += 1
            patience = time.monotonic() + 30
            while (
                most.value < 4 and time.monotonic() < patience
            ):  # until others have come in, however busy the machine is
                time.sleep(0.005)
            time.sleep(0.01)
            with inside.get_lock():
                inside.value -= 1


def hold(folder: Path, limit: int, held: "Synchronized[int]") -> None:
    with Throttle(folder, limit).slot():
        with held.get_lock():
            held.value += 1
        time.sleep(60)


def test_twelve_processes_never_hold_more_than_four_slots_and_use_all_of_them(
    tmp_path: Path,
) -> None:
    inside, most, calls = FORK.Value("i", 0), FORK.Value("i", 0), FORK.Value("i", 0)
    workers = [
        FORK.Process(target=call_often, args=(tmp_path, inside, most, calls)) for _ in range(12)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(120)
    assert calls.value == 60
    assert most.value == 4


def test_a_killed_holder_leaves_its_slot(tmp_path: Path) -> None:
    held = FORK.Value("i", 0)
    holders = [FORK.Process(target=hold, args=(tmp_path, 4, held)) for _ in range(4)]
    for holder in holders:
        holder.start()
    while held.value < 4:
        time.sleep(0.01)
    entered = threading.Event()

    def enter() -> None:
        with Throttle(tmp_path, 4).slot():
            entered.set()

    waiter = threading.Thread(target=enter, daemon=True)
    waiter.start()
    assert not entered.wait(0.3), "all four slots are held"
    assert holders[0].pid is not None
    os.kill(holders[0].pid, signal.SIGKILL)
    assert entered.wait(5)
    for holder in holders:
        holder.kill()
        holder.join()


def test_threads_of_one_process_share_the_slots_too(tmp_path: Path) -> None:
    throttle, other = Throttle(tmp_path, 1), Throttle(tmp_path, 1)
    entered = threading.Event()

    def enter() -> None:
        with other.slot():
            entered.set()

    with throttle.slot():
        thread = threading.Thread(target=enter, daemon=True)
        thread.start()
        assert not entered.wait(0.3)
    assert entered.wait(5)


def test_an_exception_gives_the_slot_back(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), Throttle(tmp_path, 1).slot():
        raise RuntimeError
    with Throttle(tmp_path, 1).slot():
        pass


def test_a_run_of_its_own_is_not_throttled(tmp_path: Path) -> None:
    assert throttle_of(config_from_mapping({"backend": {"backend": "tinker"}}).backend) is None
    shared = config_from_mapping(
        {"backend": {"backend": "tinker", "throttle_dir": str(tmp_path), "max_concurrent": 2}}
    ).backend
    assert isinstance(throttle_of(shared), Throttle)
