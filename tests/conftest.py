"""Options of the suite, and what several files need."""

import gc
import importlib
import logging
import os
import resource
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests.commands import IMPORTED, serve_from_here
from tests.marks import first_of
from tests.stops import MOMENTS
from tests.unwaited import wait_for_no_disk

# The suite runs in as many processes as there are cores. Threads of one process that meet at every
# operator would wait for those of another; child processes inherit the setting, so what they
# compute is the same to the last bit.
os.environ.setdefault("OMP_NUM_THREADS", "1")

wait_for_no_disk()

# Nobody reads what libraries log, and pytest's own plugin, which pyproject.toml leaves out, would
# put its handlers on hundreds of loggers six times a test.
logging.getLogger().addHandler(logging.NullHandler())
logging.lastResort = logging.NullHandler()

gc.disable()  # until everything is imported and collected

# How long an example takes says nothing about its property, and a busy machine is slow.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


PARTS = 4
"""Tests that a fault repeats hundreds of times are as many, for the processes of the suite."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--kills",
        type=int,
        default=2,
        help="how often a run is killed at a random moment and resumed (test_run_resume.py)",
    )
    parser.addoption(
        "--stops",
        type=int,
        default=3,
        help="at how many of 50 moments two signals stop a run (test_run_resume.py)",
    )

    parser.addoption(
        "--long", action="store_true", help="the long form of what `make test-faults` runs"
    )


def pytest_sessionstart() -> None:
    """A process of the whole suite will need what a run imports, and commands; coverage would
    follow those.
    """
    if "PYTEST_XDIST_WORKER" in os.environ:
        for name in IMPORTED:
            importlib.import_module(name)
        if sys.gettrace() is None:
            serve_from_here()


def pytest_collection_finish() -> None:
    """A million objects, of libraries and of tests, stay until the end: the garbage collector need
    not visit them again and again.
    """
    gc.freeze()
    gc.enable()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "moment" in metafunc.fixturenames:
        moments = MOMENTS[: metafunc.config.getoption("stops")]
        metafunc.parametrize("moment", first_of(moments), ids=str)
    if "share" in metafunc.fixturenames:
        metafunc.parametrize("share", [(part, PARTS) for part in range(PARTS)], ids=str)
    if "kill" in metafunc.fixturenames:
        metafunc.parametrize("kill", first_of(range(metafunc.config.getoption("kills"))))


@pytest.fixture(scope="session")
def long(pytestconfig: pytest.Config) -> bool:
    return bool(pytestconfig.getoption("long"))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """With `-m faults`, a line for each row of docs/reliability.md: how many cases were survived.
    A test is a case, unless it records how many `cases` it has; what else it records stands behind.
    """
    if "faults" not in terminalreporter.config.option.markexpr:
        return
    rows: dict[str, list[Any]] = {}
    for outcome in ("passed", "failed"):
        for report in terminalreporter.stats.get(outcome, []):
            found = dict(report.user_properties)
            for row in found.pop("rows", ()):
                rows.setdefault(row, []).append((outcome, found))
    terminalreporter.section("faults")
    for row, tests in sorted(rows.items()):
        counts = {
            outcome: sum(found.get("cases", 1) for its, found in tests if its == outcome)
            for outcome in ("passed", "failed")
        }
        failed = f", {counts['failed']} FAILED" * bool(counts["failed"])
        said = [
            f"{name} {value}"
            for _, found in tests
            for name, value in found.items()
            if name != "cases"
        ]
        terminalreporter.write_line(
            "; ".join([f"{row}: {counts['passed']}{failed}", *dict.fromkeys(said)])
        )


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Report the rows of docs/reliability.md that a test belongs to."""
    marks = [mark.args[0] for mark in item.iter_markers("faults")]
    if marks:
        item.user_properties.append(("rows", marks))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Generator[None, object, object]:
    """The command line leaves its own hook, which the next test must not meet."""
    before = sys.excepthook
    try:
        return (yield)
    finally:
        sys.excepthook = before


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder. Its modules can be imported, and do not outlive the test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield tmp_path
    for name, module in [*sys.modules.items()]:
        if str(getattr(module, "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.fixture
def small_files() -> Iterator[None]:
    """Files end at 100 kB, as on a disk that is full: the kernel refuses the rest of a write."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
