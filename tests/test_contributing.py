"""docs/plugins.md and CONTRIBUTING.md followed word for word: each plugin, in the file that its TOML
names, takes a step of a real run.
"""

import inspect
import json
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
from runs import lines, small, small_run

import retrain
from retrain import train
from retrain.advantages import episode
from retrain.advantages.pipeline import CreditPipeline
from retrain.backends.base import BACKENDS
from retrain.cli.init_plugin import Kind
from retrain.cli.main import main
from retrain.config import config_from_toml
from retrain.errors import ConfigurationError
from retrain.inference_engine.base import ENGINES
from retrain.records.entries import StepRecord
from tests.marks import first_of

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
PAGE = (ROOT / "docs" / "plugins.md").read_text(encoding="utf-8")
TEMPLATES = ROOT / "retrain" / "assets" / "plugins"
SECTIONS: dict[str, str] = dict(
    re.findall(r"^### (.+?)\n(.*?)(?=^##|\Z)", PAGE, re.MULTILINE | re.DOTALL)
)
UNSHOWN = {"An engine": "engine", "A backend": "backend", "An environment": "environment"}
"""Sections whose code only `retrain init-plugin` writes."""
ONE_STEP = {"training": {"max_steps": 1, "max_tokens": 12}}


def block(section: str, language: str) -> str:
    if language == "python" and section in UNSHOWN:
        return (TEMPLATES / f"{UNSHOWN[section]}.txt").read_text(encoding="utf-8")
    (found,) = re.findall(
        rf"^```{language}\n(.*?)^```$", SECTIONS[section], re.MULTILINE | re.DOTALL
    )
    return str(found)


def step(folder: Path) -> dict[str, Any]:
    return lines(folder / "metrics.jsonl")[0]


def by_prompt(folder: Path) -> list[list[dict[str, Any]]]:
    """The completions of each group."""
    of_prompt: dict[str, list[dict[str, Any]]] = {}
    for line in lines(folder / "emergence" / "generations.jsonl"):
        of_prompt.setdefault(line["prompt_id"], []).append(line)
    return list(of_prompt.values())


def advantages(folder: Path) -> list[list[float]]:
    """Of each group."""
    return [[line["advantage"] for line in group] for group in by_prompt(folder)]


def _distinct(group: list[dict[str, Any]]) -> bool:
    """A tenth of the reward says that no other completion of the group is the same."""
    written = [line["completion"] for line in group]
    expected = [0.1 * (written.count(text) == 1) for text in written]
    return expected == pytest.approx([line["reward"] % 1 for line in group])


PROOFS: dict[str, Callable[[Path], bool]] = {
    "An advantage": lambda folder: (
        min(map(min, advantages(folder))) == 0 and any(map(any, advantages(folder)))
    ),
    "A transform": lambda folder: step(folder)["condition"] == "maxrl+make_transform_spec",
    "An uncertainty": lambda folder: 0 < step(folder)["entropy_mean"] < 1,
    "An algorithm": lambda folder: step(folder)["condition"] == "centered",
    "A loss": lambda folder: 1.9 < step(folder)["loss_metrics"]["gate"] < 2.1,
    "A reward": lambda folder: step(folder)["reward_could_not_judge"] == 0,
    "A reward of a whole group": lambda folder: all(map(_distinct, by_prompt(folder))),
    "A data source": lambda folder: all(
        "=?" in line["prompt"] for line in lines(folder / "emergence" / "generations.jsonl")
    ),
    "An engine": lambda folder: step(folder)["logprob_diff_mean"] < 1e-5,
    "An environment": lambda folder: step(folder)["environment_metrics"]["replies"] >= 1,
    "A sampler of prompts": lambda folder: (
        len(json.loads((folder / "trainer_state.json").read_text())["sampler"]["rates"]) == 64
    ),
    "A backend": lambda folder: step(folder)["loss"] is not None,
}
"""What shows in the run's folder that the plugin acted."""


def test_every_section_has_its_proof() -> None:
    assert set(SECTIONS) == set(PROOFS)


@pytest.mark.parametrize("section", PROOFS)
def test_a_plugin_of_the_text_takes_a_step(
    section: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict[str, Any] = tomllib.loads(block(section, "toml"))
    (module,) = re.findall(r"\"(my_\w+)", block(section, "toml"))
    (tmp_path / f"{module}.py").write_text(block(section, "python"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    try:
        run = small_run(small(tmp_path / "run", **(ONE_STEP | settings)), quiet=True)
    finally:
        sys.modules.pop(module, None)
    assert run.summary.steps == 1 and PROOFS[section](run.folder)


def test_init_plugin_writes_what_the_text_shows() -> None:
    shown = {(block(section, "python"), block(section, "toml")) for section in SECTIONS}
    for kind in get_args(Kind):
        code = (TEMPLATES / f"{kind}.txt").read_text(encoding="utf-8")
        table = (TEMPLATES / f"{kind}.toml").read_text(encoding="utf-8")
        assert (code, table) in shown, kind


PLACES = {"engine": "inference_engine", "backend": "backends"}
ROWS = {
    "engine": ("An engine", "inference", ENGINES),
    "backend": ("A backend", "backend", BACKENDS),
}


@pytest.mark.parametrize("kind", first_of(reversed(ROWS)))
def test_a_built_in_engine_or_backend_is_a_class_and_its_row(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    section, table, rows = ROWS[kind]
    text = TEXT.partition("## Where to add what")[2]
    (about,) = re.findall(
        r"^(from \S+ import Description)\n\n(about = .+?^\))$", text, re.MULTILINE | re.DOTALL
    )
    (row,) = re.findall(rf'^"(\w+)": "retrain\.{PLACES[kind]}\.(\w+)\.(\w+)"$', text, re.MULTILINE)
    name, module, attribute = row
    code = f"{block(section, 'python')}\n\n{about[0]}\n\n{attribute}.{about[1]}\n"
    (tmp_path / f"{module}_built_in.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(rows, name, f"{module}_built_in.{attribute}")
    settings = ONE_STEP | {table: {kind: name}}
    run = train(small(tmp_path / "run", **settings), quiet=True)
    assert run.summary.steps == 1
    assert main(["backends", name]) == 0
    assert "an engine for one GPU" in capsys.readouterr().out


def test_a_built_in_advantage_is_a_function_and_its_line_in_the_table(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (line,) = re.findall(r"`(\"winners_only\": .+?),`", TEXT)
    namespace = vars(episode) | {}
    exec(block("An advantage", "python"), namespace)
    for name, builtin in eval(f"{{{line}}}", namespace).items():
        monkeypatch.setitem(episode.ADVANTAGES, name, builtin)
    config = config_from_toml(
        '[algorithm]\nadvantage_mode = "winners_only"\ntransform_mode = "none"'
    )
    assert CreditPipeline(config, lambda ids: [""] * len(ids)).notes == []
    with pytest.raises(ConfigurationError, match='did you mean "winners_only"'):
        config_from_toml('[algorithm]\nadvantage_mode = "winners_onl"')


def test_a_metric_is_a_field_of_the_record_and_its_value_in_the_observer() -> None:
    text = TEXT.partition("A **metric** is")[2].partition("\n\n")[0]
    entries, observer = re.findall(r"`(retrain/\w+/\w+\.py)`", text)
    assert ROOT / entries == Path(inspect.getfile(StepRecord)) and "make docs" in text
    assert "return StepRecord(" in (ROOT / observer).read_text(encoding="utf-8")


def test_a_key_with_an_effect_is_a_field_and_a_need(tmp_path: Path) -> None:
    text = TEXT.partition("A **key with an effect**")[2].partition("\n## ")[0]
    field, row = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    package = shutil.copytree(Path(retrain.__file__).parent, tmp_path / "retrain")
    for name, place, line in (
        ("config/learning_sections", r"class Optimizer\(.*\n    \"{3}.*\n", f"    {field}"),
        (
            "backends/tinker/facts",
            r"    lacks: ClassVar = \{\n",
            f"        {row[row.index('{') + 1 : row.rindex('}')]},\n",
        ),
    ):
        module = package / f"{name}.py"
        written, places = re.subn(place, rf"\g<0>{line}", module.read_text(encoding="utf-8"))
        assert places == 1
        module.write_text(written, encoding="utf-8")
    (tmp_path / "my.toml").write_text("")

    command = [sys.executable, "-m", "retrain", "my.toml", "--backend", "tinker"]
    ended = subprocess.run(
        [*command, "--ema-decay", "0.5"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    (because,) = re.findall(r': "(.+?)"', row)
    assert ended.returncode == 2
    assert "[optimizer] ema_decay = 0.5" in ended.stderr and because in ended.stderr
