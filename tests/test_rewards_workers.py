"""Real math-verify in real worker processes: a job that hangs, dies or swells is ended, and the
pool judges the next one.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from io import BufferedIOBase
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

import retrain.rewards.workers as workers
from retrain.rewards.score import PartScore
from retrain.rewards.worker import QUESTION, _verify, read_message
from retrain.rewards.workers import WorkerPool, WorkerSetup
from tests.commands import is_alive, wait_until_dead
from tests.marks import first_of

DEADLINE_S = 2.0


@contextmanager
def pool_of(
    setup: WorkerSetup, count: int = 1, deadline_s: float = DEADLINE_S
) -> Iterator[WorkerPool]:
    pool = WorkerPool(setup, count, deadline_s)
    try:
        yield pool
    finally:
        pool.close()


def math_pool(count: int = 1, deadline_s: float = DEADLINE_S) -> AbstractContextManager[WorkerPool]:
    return pool_of(WorkerSetup(verify=True), count, deadline_s)


def descendants(pid: int, recursive: bool = True) -> set[int]:
    """Living child processes, and their own."""
    found = psutil.Process(pid).children(recursive)
    return {child.pid for child in found if is_alive(child.pid)}


def verify(pool: WorkerPool, answer: str, gold: str = "4") -> "Future[PartScore]":
    return pool.submit({"handler": "verify", "gold": gold, "answer": answer})


@pytest.fixture(scope="module")
def patient_pool() -> Iterator[WorkerPool]:
    with math_pool(deadline_s=60) as shared:
        yield shared


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    with math_pool() as shared:
        yield shared


@pytest.mark.parametrize(
    ("answer", "gold", "value"),
    [
        (r"\frac{8}{2}", "4", 1.0),
        (r"\sqrt{16}", "4", 1.0),
        ("0.5", r"\frac{1}{2}", 1.0),
        ("x^2+2x+1", "(x+1)^2", 1.0),
        ("x^2+2x", "(x+1)^2", 0.0),
        (r"\{2,1\}", r"\{1,2\}", 1.0),
        ("(2,1)", "(1,2)", 0.0),
        ("1,234", "1234", 1.0),
        (r"\text{Evelyn}", r"\text{Evelyn }", 1.0),
        (r"\frac{1}{", "4", 0.0),
        (r"\foo{\bar", "4", 0.0),
        ("4", r"x=4", 1.0),
        ("2x+z=1", "1", 0.0),
        ("1", "2x+z=1", 0.0),
    ],
)
def test_equal_expressions_are_right_and_unparsable_ones_wrong(
    patient_pool: WorkerPool, answer: str, gold: str, value: float
) -> None:
    assert verify(patient_pool, answer, gold).result(60) == PartScore(value)


@pytest.mark.faults("rewards and judges that misbehave")
@pytest.mark.parametrize(
    ("answer", "gold"),
    first_of(
        [
            ("10", r"9^{9^{9^9}}"),  # one power of big integers in C, which no alarm interrupts
            (r"\binom{10^8}{5\cdot 10^7}", "4"),
            (r"(1+" * 25 + "1" + ")^2" * 25, "4"),  # the digits double at each step
        ]
    ),
)
def test_a_hard_answer_ends_on_the_deadline_and_a_new_worker_judges_the_next(
    pool: WorkerPool, answer: str, gold: str
) -> None:
    assert verify(pool, r"\frac{8}{2}").result(60).value == 1.0
    servers = descendants(os.getpid(), recursive=False)
    judgment = verify(pool, answer, gold).result(60)
    assert judgment.value is None
    assert "deadline_s = 2" in judgment.reason
    assert verify(pool, r"\frac{8}{2}").result(60).value == 1.0
    assert (
        descendants(os.getpid(), recursive=False) == servers
    )  # the replacement is forked, not imported anew


@pytest.mark.slow
@pytest.mark.faults("rewards and judges that misbehave")
def test_an_answer_that_swells_is_stopped_before_its_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(workers, "MEMORY_LIMIT", 200 << 20)
    with math_pool(deadline_s=60) as pool:
        judgment = verify(pool, "(x+y+z+1)^{900}", "(x+y+z)^{900}").result(60)
        assert judgment.value is None
        assert "GiB" in judgment.reason
        assert verify(pool, r"\frac{8}{2}").result(60).value == 1.0


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_an_answer_for_which_memory_runs_out_inside_math_verify_is_not_wrong() -> None:
    """The library's own `except Exception` would make it so. In a process of its own: the limit
    holds for ever.
    """
    script = (
        "import resource; from retrain.rewards.verification import equal\n"
        "mapped = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (mapped + (20 << 20), -1))\n"
        "try: print(equal('(x+y+z)^{60}', '(x+y+z+1)^{60}'))\n"
        "except MemoryError: print('no memory')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout == "no memory\n"


def test_an_error_that_passes_through_math_verify_is_no_verdict(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where a module's name Exception stands for the kinds that were known, others pass through."""

    def fail(gold: str, answer: str) -> bool:
        raise Exception("cannot consume EOF")

    monkeypatch.setitem(
        sys.modules,
        "retrain.rewards.verification",
        SimpleNamespace(right=fail),  # type: ignore[arg-type]
    )
    reply = _verify({"gold": "4", "answer": "4"})
    assert reply == {"value": None, "reason": "math-verify failed (Exception: cannot consume EOF)"}


@pytest.mark.slow
def test_every_module_that_catches_exception_lets_memory_errors_alone_through() -> None:
    """In a process of its own, which imports sympy."""
    script = (
        "import importlib, pathlib, sys; import retrain.rewards.verification as v\n"
        "import latex2sympy2_extended, math_verify\n"
        "for package in (math_verify, latex2sympy2_extended):\n"
        "    for file in pathlib.Path(package.__file__).parent.rglob('*.py'):\n"
        "        name = f'{package.__name__}.{file.stem}'\n"
        "        if 'except Exception' not in file.read_text(encoding='utf-8'): continue\n"
        "        if name == 'math_verify.utils': continue  # a clock that is off here\n"
        "        module = sys.modules[name]\n"
        "        for kind in ('MemoryError', 'ValueError', 'RecursionError', 'Exception'):\n"
        "            code = f'try: raise {kind}(1)\\nexcept Exception: caught = True'\n"
        "            seen = dict(vars(module))\n"
        "            try: exec(code, seen)\n"
        "            except MemoryError: seen['caught'] = False\n"
        "            print(name, kind, seen['caught'])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    found = [line.split() for line in done.stdout.splitlines()]
    libraries = {name.partition(".")[0] for name, _, _ in found}
    assert libraries == {"math_verify", "latex2sympy2_extended"}
    assert all((caught == "True") == (kind != "MemoryError") for _, kind, caught in found)


@pytest.mark.slow
def test_an_import_does_not_count_against_the_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "slow_to_import.py").write_text(
        "import time\ntime.sleep(2)\ndef score(response, reference): return 1.0\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    text = {"prompt": "", "reference": ""}
    job = {"handler": "slow_to_import.score", "response": "", **text, "example": text}
    with pool_of(WorkerSetup(rewards=("slow_to_import.score",)), deadline_s=1.0) as pool:
        assert pool.submit(job).result(60) == PartScore(1.0)


def test_many_threads_may_submit_and_each_gets_its_own_verdict() -> None:
    with math_pool(2, deadline_s=30) as pool:
        verdicts: dict[int, float | None] = {}

        def ask(number: int) -> None:
            asked = verify(pool, rf"\frac{{{2 * number}}}{{2}}", str(number % 5))
            verdicts[number] = asked.result(60).value

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(40)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert verdicts == {number: float(number == number % 5) for number in range(40)}


linux_only = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.mark.slow
@linux_only
def test_the_pool_outlives_its_workers_and_its_fork_server() -> None:
    before = descendants(os.getpid())
    with math_pool(deadline_s=30) as pool:
        assert verify(pool, r"\frac{8}{2}").result(60).value == 1.0
        processes = descendants(os.getpid()) - before
        for pid in processes:
            os.kill(pid, signal.SIGKILL)
        wait_until_dead(processes)
        first = verify(pool, r"\frac{8}{2}").result(60)
        assert first.value == 1.0 or "died" in first.reason
        assert verify(pool, r"\frac{8}{2}").result(60).value == 1.0
    assert not descendants(os.getpid()) - before


@linux_only
def test_a_killed_fork_server_leaves_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spawns = "import subprocess\nsubprocess.Popen(['sleep', '600'])\n"
    (tmp_path / "sleeping.py").write_text(spawns + SLEEPS)
    monkeypatch.chdir(tmp_path)
    before = descendants(os.getpid())
    with pool_of(WorkerSetup(rewards=("sleeping.score",)), deadline_s=30) as pool:
        pool.wait_ready()
        started = descendants(os.getpid()) - before
        pool._process.kill()
        pool._process.wait()
        assert pool.submit(sleep_job(0.0)).result(60) == PartScore(1.0)
        wait_until_dead(started, within_s=20)


@pytest.mark.slow
@linux_only
def test_workers_die_with_a_killed_trainer_even_within_an_endless_answer(tmp_path: Path) -> None:
    script = tmp_path / "trainer.py"
    script.write_text(
        "import time\nfrom retrain.rewards.workers import WorkerPool, WorkerSetup\npool ="
        " WorkerPool(WorkerSetup(verify=True), 2, 600.0)\npool.wait_ready()\nasked ="
        " [pool.submit({'handler': 'verify', 'gold': '9^{9^{9^9}}', 'answer': '10'}) for _ in"
        " range(2)]\nwhile not all(future.running() for future in asked):"
        " time.sleep(0.05)\ntime.sleep(0.2)\nprint('busy', flush=True)\ntime.sleep(600)\n"
    )
    trainer = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    assert trainer.stdout is not None
    assert trainer.stdout.readline() == "busy\n"
    started = descendants(trainer.pid)
    assert len(started) == 3  # the fork server and two workers
    trainer.kill()
    trainer.wait()
    wait_until_dead(started)


def test_closing_ends_every_job() -> None:
    with math_pool(deadline_s=60) as pool:
        pool.wait_ready()
        asked = [verify(pool, "10", r"9^{9^{9^9}}") for _ in range(3)]
        time.sleep(0.2)
    assert not any(future.running() for future in asked)  # though their deadline is a minute away
    assert all(future.cancelled() or future.result(5).value is None for future in asked)
    assert verify(pool, "4").cancelled()


LEAVES_A_CHILD = """
import os, time
def score(response, reference):
    child = os.fork()
    if child == 0:
        os.setsid()  # out of the worker's session, so that nothing kills it with the worker
        time.sleep(60)
        os._exit(0)
    open(reference, "w").write(str(child))
    if response == "die":
        os._exit(3)
    time.sleep(60)
"""


@pytest.mark.faults("rewards and judges that misbehave")
@linux_only
@pytest.mark.parametrize("response", ["die", "sleep"])
def test_a_child_that_holds_the_channel_delays_no_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, response: str
) -> None:
    (tmp_path / "leaving.py").write_text(LEAVES_A_CHILD)
    monkeypatch.chdir(tmp_path)
    setup = WorkerSetup(rewards=("leaving.score",), plugins={}, params={})
    job = {"handler": "leaving.score", "response": response, "reference": str(tmp_path / "pid")}
    job |= {"prompt": "", "example": {"prompt": "", "reference": ""}}
    with pool_of(setup, deadline_s=30) as pool:
        pool.wait_ready()
        asked = pool.submit(job)
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
            time.sleep(0.02)
        began = time.monotonic()
    try:
        assert time.monotonic() - began < 5
        assert asked.result(1).value is None
    finally:
        os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)


SLEEPS = "import time\ndef score(response, _):\n    return time.sleep(float(response)) or 1.0\n"


def sleep_job(seconds: float) -> dict[str, object]:
    text = {"prompt": "", "reference": ""}
    return {"handler": "sleeping.score", "response": str(seconds), **text, "example": text}


def test_an_answer_in_time_counts_though_the_server_reads_it_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sleeping.py").write_text(SLEEPS)
    monkeypatch.chdir(tmp_path)
    with pool_of(WorkerSetup(rewards=("sleeping.score",)), deadline_s=1.0) as pool:
        pool.wait_ready()
        asked = pool.submit(sleep_job(0.3))
        time.sleep(0.1)
        os.kill(pool._process.pid, signal.SIGSTOP)
        time.sleep(1.2)
        os.kill(pool._process.pid, signal.SIGCONT)
        assert asked.result(60) == PartScore(1.0)
        assert pool.submit(sleep_job(0.0)).result(60) == PartScore(1.0)


def test_a_line_that_breaks_leaves_the_other_workers_alone() -> None:
    process, (broken, whole) = workers._fork_server(WorkerSetup().message(60.0), 2, 60.0)
    try:

        def ask(line: BufferedIOBase) -> None:
            line.write(QUESTION)
            line.flush()

        ask(broken)
        assert read_message(broken) == {"group_rewards": []}
        ask(broken)
        time.sleep(0.3)
        broken.close()  # with the second answer unread, which resets the server's end
        time.sleep(0.3)
        ask(whole)
        assert read_message(whole) == {"group_rewards": []}
    finally:
        workers._end(process)


def test_a_script_that_fails_without_closing_its_pool_ends_at_once(tmp_path: Path) -> None:
    (tmp_path / "sleeping.py").write_text(SLEEPS)
    (tmp_path / "script.py").write_text(
        "from retrain.rewards.workers import WorkerPool, WorkerSetup\n"
        "pool = WorkerPool(WorkerSetup(rewards=('sleeping.score',)), 1, 600.0)\n"
        f"asked = [pool.submit({sleep_job(600)}) for _ in range(3)]\n"
        "pool.wait_ready()\n"
        "raise SystemExit(5)\n"
    )
    command = [sys.executable, "script.py"]
    assert subprocess.run(command, cwd=tmp_path, timeout=60, check=False).returncode == 5


def test_a_pool_closed_while_it_still_imports_does_not_wait_for_the_import() -> None:
    with math_pool() as pool:
        process = pool._process
    assert process.returncode != -signal.SIGKILL  # the process ended in time, so nobody killed it
