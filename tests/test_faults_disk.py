"""Every operation on the disk may fail, and the machine may stop at any of them: the run goes on
from what is there, and ends with the bytes of one that nothing disturbed.
"""

import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from retrain.cli.main import main
from retrain.config import dump_toml
from retrain.records.checkpoint import CheckpointStore
from tests.commands import forked
from tests.faulty_disk import FAULTS, KILLED, after_a_cut, faulty_run
from tests.runs import assert_same_run, small, small_run

STEPS, SAVE_EVERY = 6, 2
SECTIONS: dict[str, Any] = {
    "training": {
        "max_steps": STEPS,
        "save_every": SAVE_EVERY,
        "keep_checkpoints": 2,
        "batch_size": 1,
        "max_tokens": 8,
        "max_examples": 16,
    },
    "evaluation": {"every": 3, "max_examples": 2, "max_tokens": 8},
    "logging": {"tokens_every": 3},
}
# The long form takes minutes a test.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(7200)]


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_run(
        small(tmp_path_factory.mktemp("straight") / "run", **SECTIONS), quiet=True
    ).folder


def disturbed(
    tmp_path: Path, wanted: int, fault: str, cut: int | None = None, listed: str = ""
) -> tuple[int, str]:
    """The exit code of a run with one fault, and what it said of it."""
    folder, file, said = tmp_path / "run", tmp_path / "run.toml", tmp_path / "said"
    file.write_text(dump_toml(small(folder, **SECTIONS)), encoding="utf-8")
    threads = torch.get_num_threads()
    arguments = (str(file), str(folder), wanted, fault, cut, str(said), listed, threads)
    process = forked(faulty_run, *arguments)
    process.join(240)
    assert process.exitcode is not None
    return process.exitcode, said.read_text(encoding="utf-8")


def steps_to_repeat(folder: Path) -> int:
    metrics = folder / "metrics.jsonl"
    made = metrics.read_bytes().count(b"\n") if metrics.is_file() else 0
    return made - newest(folder)


def newest(folder: Path) -> int:
    """The step of the newest checkpoint whose every byte matches; 0 without one."""
    saved = CheckpointStore(folder / "checkpoints").newest(lambda _: None)
    return saved.step if saved else 0


def finish(tmp_path: Path) -> None:
    """Resume the run, or begin it anew where nothing of it was saved."""
    file, folder = tmp_path / "run.toml", tmp_path / "run"
    flags = [str(file), "--quiet", "--skip-parity"]
    nothing_saved = newest(folder) == 0
    if folder.exists() and main([*flags, "--resume", str(folder)]) == 0:
        return
    assert nothing_saved, "a saved run could not be resumed"
    assert main([*flags, "--overwrite"]) == 0


@pytest.fixture(scope="module")
def operations(straight: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Those of a whole run, as words."""
    place = tmp_path_factory.mktemp("counted")
    assert disturbed(place, 0, "", listed=str(place / "listed")) == (0, "")
    assert_same_run(straight, place / "run", STEPS)
    return (place / "listed").read_text().splitlines()


def problem(place: Path, straight: Path, code: int, said: str, fault: str) -> str:
    """What is wrong with a run after a fault; "" if it can be finished with the same bytes."""
    if fault in ("before", "after") and code != KILLED:
        return f"exit code {code}"
    if fault not in ("before", "after") and (code not in (0, 1, 3) or "Traceback" in said):
        return f"exit code {code}; {said}"
    if (steps := steps_to_repeat(place / "run")) > SAVE_EVERY:
        return f"{steps} steps to repeat"
    try:
        finish(place)
        assert_same_run(straight, place / "run", STEPS)
    except AssertionError as error:
        return f"{error}"
    return ""


@pytest.mark.faults("disk operations of a 6-step run, each failed")
def test_a_run_survives_the_failure_of_any_operation(
    straight: Path,
    operations: list[str],
    tmp_path: Path,
    share: tuple[int, int],
    long: bool,
    record_property: Any,
) -> None:
    """The short form fails 40 of them, each in one way; the long one all, in every way."""
    numbers = range(1, len(operations) + 1)
    cases = [(number, fault) for number in numbers for fault in FAULTS]
    if not long:
        chosen = sorted(random.Random(0).sample(numbers, 40))
        cases = [(number, FAULTS[at % len(FAULTS)]) for at, number in enumerate(chosen)]
    part, parts = share
    problems = []
    for number, fault in cases[part::parts]:
        place = tmp_path / f"{number}-{fault}"
        place.mkdir()
        found = problem(place, straight, *disturbed(place, number, fault), fault)
        if found:
            problems.append(f"{fault}, operation {number}, {operations[number - 1]}: {found}")
        shutil.rmtree(place)
    record_property("cases", len(cases[part::parts]))
    assert not problems, "\n".join(problems)


@pytest.mark.faults("power cuts of a 6-step run: what was not synced is lost")
def test_a_run_survives_a_power_cut(
    straight: Path,
    operations: list[str],
    tmp_path: Path,
    share: tuple[int, int],
    long: bool,
    record_property: Any,
) -> None:
    """In every second one, a half of what was not synced is there by chance."""
    moments = sorted(random.Random(1).sample(range(1, len(operations) + 1), 80 if long else 20))
    part, parts = share
    problems = []
    for at, number in enumerate(moments[part::parts]):
        place = tmp_path / str(number)
        place.mkdir()
        code, said = disturbed(place, number, "after", number if at % 2 else -1)
        sealed = newest(place / "run")
        after_a_cut(place / "run")
        lost = sealed - newest(place / "run")
        found = f"{lost} steps lost" if lost > SAVE_EVERY else ""
        found = found or problem(place, straight, code, said, "after")
        if found:
            problems.append(f"operation {number}, {operations[number - 1]}: {found}")
        shutil.rmtree(place)
    record_property("cases", len(moments[part::parts]))
    assert not problems, "\n".join(problems)


def test_a_finished_run_is_on_the_disk_as_a_whole(operations: list[str], tmp_path: Path) -> None:
    code, said = disturbed(tmp_path, len(operations), "after", -1)
    assert (code, said) == (KILLED, "")
    run, left = tmp_path / "run", tmp_path / "run-after"
    for path in filter(Path.is_file, run.rglob("*")):
        assert (left / path.relative_to(run)).read_bytes() == path.read_bytes(), path
