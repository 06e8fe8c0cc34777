"""Functions of a notebook as plugins, and what a notebook shows of a configuration and a run."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from runs import lines, small

from retrain import train
from retrain.config import load_config, replaced
from retrain.errors import ConfigurationError
from retrain.run.notebook import module_source

PATTERN = re.compile("[0-9]")
HALF = 0.5
OPEN_FILE = Path(__file__)
FILES = [OPEN_FILE]


def digits(text: str) -> int:
    return len(PATTERN.findall(text))


def even(response: str, reference: str, other: float = HALF) -> float:
    """1 where the completion has an even number of digits."""
    return 1.0 if digits(response) % 2 == 0 else other - 0.5  # HALF stands in the default alone


def centered(rewards: list[float]) -> list[float]:
    mean = sum(rewards) / len(rewards)
    return [reward - mean for reward in rewards]


NOTHING = None


def same(response: str, reference: str) -> float:
    return 0.0 if NOTHING is None else 1.0


first = same


def same(rewards: list[float]) -> list[float]:  # type: ignore[no-redef]
    return rewards


def _length(text: str) -> float:
    return float(len(text))


length = _length


def long(response: str, reference: str) -> float:
    return length(response)


def opens(response: str, reference: str) -> float:
    return float(OPEN_FILE.exists())


def counts(response: str, reference: str) -> float:
    return float(len(FILES))


def test_a_source_stands_alone_with_its_imports_constants_and_helpers() -> None:
    names: dict[str, object] = {}
    exec(module_source([even, centered]).replace(f"from {__name__} import digits", DIGITS), names)
    assert names["even"]("12 34", "") == 1.0 and names["even"]("123", "") == 0.0  # type: ignore[operator]
    assert names["centered"]([1.0, 0.0]) == [0.5, -0.5]  # type: ignore[operator]


DIGITS = "import re\ndef digits(text): return len(re.findall('[0-9]', text))"


def test_a_constant_of_none_and_another_name_of_a_function_are_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names: dict[str, Any] = {}
    exec(module_source([first]), names)
    assert names["same"]("", "") == 0.0
    monkeypatch.setattr(_length, "__module__", "__main__")  # as in a notebook
    exec(module_source([long]), names)
    assert names["long"]("abc", "") == 3.0


def test_two_functions_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="two functions have the name same"):
        module_source([first, same])


def test_what_cannot_be_written_is_named() -> None:
    def inside(response: str, reference: str) -> float:
        return HALF

    def closed(response: str, reference: str) -> float:
        return float(len(inside.__name__))

    def indented(response: str, reference: str) -> float:
        return float(
            """
x"""
            in response
        )

    for function, said in (
        (indented, "cannot see the source of indented"),
        (lambda response, reference: 1.0, "define it with def"),
        ("math", "'math' is not a function with a name"),
        (closed, "uses inside of the function around it"),
        (opens, "OPEN_FILE, a PosixPath that no file can hold"),
        (counts, "FILES, a list that no file can hold"),
    ):
        with pytest.raises(ConfigurationError, match=said):
            module_source([function])


def test_a_secret_in_a_function_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_API_KEY", "an even number of digits")  # stands in the docstring
    with pytest.raises(ConfigurationError, match="holds a secret"):
        train(small(tmp_path / "run"), reward=even)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("has_folder", [False, True])
def test_a_refused_run_leaves_no_source_behind(tmp_path: Path, has_folder: bool) -> None:
    folder = tmp_path / "logs" / "run"
    if has_folder:
        folder.mkdir(parents=True)
    with pytest.raises(ConfigurationError, match="has no no_such"):
        train(small(folder, algorithm={"transform_mode": "json.no_such"}), reward=even)
    assert not list(tmp_path.rglob("notebook_*"))
    assert folder.exists() == has_folder


@pytest.mark.slow
def test_a_run_with_functions_keeps_their_source_and_resumes_without_them(tmp_path: Path) -> None:
    config = small(tmp_path / "run", training={"max_steps": 1})
    run = train(config, reward=even, advantage=centered, quiet=True, skip_parity=True)
    (source,) = run.folder.glob("notebook_*.py")
    stored = load_config(run.folder / "config.toml")
    assert stored.reward.type == f"{source.stem}.even"
    assert stored.algorithm.advantage_mode == f"{source.stem}.centered"
    code = json.loads((run.folder / "environment.json").read_text())["code"]
    assert set(code["plugins"]) == {f"{source.stem}.even", f"{source.stem}.centered"}
    rewards = {line["reward"] for line in lines(run.folder / "emergence" / "generations.jsonl")}
    assert rewards <= {0.0, 1.0}
    again = replaced(stored, {"resume.from": str(run.folder), "training.max_steps": 2})
    assert len(train(again, quiet=True, skip_parity=True).records()) == 2


def test_a_notebook_shows_one_line_and_a_frame(tmp_path: Path) -> None:
    config = small(tmp_path / "run").with_(lr=5e-4, max_steps=1, reward_type="random")
    assert repr(config) == "TrainConfig(maxrl+none: lab on lab, 1 step of 2 x 4)"
    assert config.training.lr == 5e-4
    for name in ("lr_", "learning_rate"):  # a slip, and the name in another trainer
        with pytest.raises(ConfigurationError, match=r"did you mean lr\?"):
            config.with_(**{name: 1})
    run = train(config, quiet=True, skip_parity=True)
    assert repr(run) == f"Run({str(run.folder)!r}: done, maxrl+none, 1 step)"
    frame = run.metrics()
    assert list(frame["step"]) == [0] and "mean_reward" in frame.columns
