"""A run whose folder another hand has touched, that several start at once, and that goes on for
long.
"""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from retrain.cli.main import main
from retrain.config import dump_toml
from retrain.records.run_folder import RunFolder
from retrain.run.observer import StepObserver
from retrain.system import resident_bytes
from tests.commands import forked
from tests.runs import lines, small, small_run, timeless
from tests.stops import run_quietly

SECTIONS: dict[str, Any] = {
    "training": {"max_steps": 4, "save_every": 2, "batch_size": 1, "max_tokens": 8},
    "evaluation": {"every": 2, "max_examples": 2, "max_tokens": 8},
    "logging": {"tokens_every": 2},
}
ADAPTER = "checkpoints/final/adapter_model.safetensors"
# The long form takes minutes a test.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(7200)]


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps, and beside it one of two that is to go on."""
    folder = tmp_path_factory.mktemp("straight")
    small_run(small(folder / "run", **SECTIONS), quiet=True)
    half = SECTIONS | {"training": SECTIONS["training"] | {"max_steps": 2}}
    small_run(small(folder / "half", **half), quiet=True)
    return folder / "run"


# -- damaged places --------------------------------------------------------------------------------


def empty(place: Path, outside: Path) -> None:
    place.touch()


def folder_of_a_file(place: Path, outside: Path) -> None:
    place.mkdir()
    (place / "x").touch()


def link_to_nothing(place: Path, outside: Path) -> None:
    place.symlink_to(outside / "absent")


def link_outside(place: Path, outside: Path) -> None:
    place.symlink_to(outside / "precious")


FORMS: tuple[Callable[[Path, Path], None], ...] = (
    empty,
    folder_of_a_file,
    link_to_nothing,
    link_outside,
)


@pytest.mark.faults("damaged places: names of a run as another thing")
def test_any_name_of_a_run_may_be_another_thing(
    straight: Path,
    tmp_path: Path,
    share: tuple[int, int],
    long: bool,
    capsys: pytest.CaptureFixture[str],
    record_property: Any,
) -> None:
    """A resume ends in a sentence, or with the numbers of the straight run; whatever reads the run
    ends in a sentence or does its work; nothing outside is touched. The short form tries one form of
    each name.
    """
    half = straight.with_name("half")
    names = sorted(path.relative_to(half) for path in half.rglob("*"))
    cases = [(name, form) for name in names for form in FORMS]
    if not long:
        cases = [(name, FORMS[at % len(FORMS)]) for at, name in enumerate(names)]
    part, parts = share
    problems = []
    for at, (name, form) in enumerate(cases[part::parts]):
        place = tmp_path / str(at)
        run, outside = Path(shutil.copytree(half, place / "run", symlinks=True)), place / "outside"
        outside.mkdir()
        (outside / "precious").write_text("precious")
        if (run / name).is_dir():
            shutil.rmtree(run / name)
        else:
            (run / name).unlink()
        form(run / name, outside)
        found = problem(run, straight)
        if [path.name for path in outside.iterdir()] != ["precious"] or (
            outside / "precious"
        ).read_text() != "precious":
            found = "what a link points to was changed"
        if found:
            problems.append(f"{name} as {form.__name__}: {found} {capsys.readouterr().err}")
        shutil.rmtree(place)
    record_property("cases", len(cases[part::parts]))
    assert not problems, "\n".join(problems)


def problem(run: Path, straight: Path) -> str:
    """What is wrong with how commands meet a damaged run; "" if nothing is."""
    resume = ["--resume", str(run), "--max-steps", "4", "--quiet", "--skip-parity"]
    for command in (
        ["status", str(run)],
        ["report", str(run), "--output", str(run.parent / "page.html")],
        ["diff", str(straight), str(run)],
        resume,
    ):
        try:
            code = main(command)
        except Exception as error:  # noqa: BLE001  # a bug, whatever it is
            return f"{command[0]} raised {type(error).__name__}: {error}"
        if code not in (0, 1, 2, 3):
            return f"{command[0]} ended with {code}"
    if code == 0 and (
        timeless(run / "metrics.jsonl") != timeless(straight / "metrics.jsonl")
        or (run / ADAPTER).read_bytes() != (straight / ADAPTER).read_bytes()
    ):
        return "the resumed run has other numbers"
    return ""


# -- several at once, and for long -----------------------------------------------------------------


@pytest.mark.faults("starters of one folder")
def test_of_several_starters_one_runs(
    straight: Path, tmp_path: Path, long: bool, record_property: Any
) -> None:
    rounds, starters = (10, 8) if long else (2, 4)
    for number in range(rounds):
        folder, file = tmp_path / str(number), tmp_path / f"{number}.toml"
        file.write_text(dump_toml(small(folder, **SECTIONS)), encoding="utf-8")
        said = [tmp_path / f"{number}-{starter}" for starter in range(starters)]
        threads = torch.get_num_threads()
        started = [forked(run_quietly, str(file), str(path), threads) for path in said]
        for process in started:
            process.join(240)
        codes = sorted(process.exitcode for process in started)
        assert codes == [0, *[2] * (starters - 1)], [path.read_text() for path in said]
        assert not any("Traceback" in path.read_text() for path in said)
        assert timeless(folder / "metrics.jsonl") == timeless(straight / "metrics.jsonl")
        assert (folder / ADAPTER).read_bytes() == (straight / ADAPTER).read_bytes()
    record_property("cases", rounds * starters)


@pytest.mark.faults("steps of one run: memory and disk that each takes")
def test_a_long_run_takes_no_more_memory_for_each_step(
    tmp_path: Path, long: bool, monkeypatch: pytest.MonkeyPatch, record_property: Any
) -> None:
    steps = 1000 if long else 150
    resident: list[int] = []
    real = StepObserver.observe

    def observed(*args: Any, **options: Any) -> Any:
        resident.append(resident_bytes(os.getpid()))
        return real(*args, **options)

    monkeypatch.setattr(StepObserver, "observe", observed)
    training = SECTIONS["training"] | {"max_steps": steps, "save_every": 50, "keep_checkpoints": 2}
    folder = small_run(small(tmp_path / "run", training=training), quiet=True).folder
    warm = steps // 3
    growth = (resident[-1] - resident[warm]) / 1024 / (steps - 1 - warm)
    paths = [path for path in RunFolder(folder).lines() if path.is_file()]
    record_property("cases", len(lines(folder / "metrics.jsonl")))
    record_property("KiB of memory a step", round(growth, 1))
    record_property(
        "KiB of lines a step", round(sum(path.stat().st_size for path in paths) / 1024 / steps, 1)
    )
    assert growth < 64
