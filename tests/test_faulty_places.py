"""Accidents between a user's code, a run's folder and the commands that read it: a sentence, never
a traceback.
"""

import json
import shutil
import warnings
from pathlib import Path

import pytest

from retrain.cli.main import main
from retrain.config import config_from_mapping
from retrain.data import load_examples, sources
from retrain.errors import ConfigurationError
from tests.runs import small, small_run

MODULE = """
import itertools, sys
from retrain.data import Example
def unsure(response, reference):
    return None
def exits():
    sys.exit("good bye")
def deep():
    raise BaseException("from the deep")
def endless():
    for number in itertools.count():
        yield Example(f"What is {number} + 1?", str(number + 1))
"""


@pytest.fixture(scope="module")
def unjudged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with tokens in which nothing could be judged, in a folder of runs."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "accidents.py").write_text(MODULE)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        reward = {"type": "accidents.unsure", "max_failure_rate": 1.0, "workers": 1}
        steps = {"max_steps": 2, "max_tokens": 4, "max_examples": 16, "save_every": 1}
        small_run(
            small(folder / "run", reward=reward, training=steps, logging={"tokens_every": 1}),
            quiet=True,
        )
    return folder


def copy_of(run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(run, tmp_path / "run"))


def test_a_step_without_a_judged_completion_is_no_bug(
    unjudged: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", str(unjudged / "run")]) == 2
    assert "has no judged completion" in capsys.readouterr().err
    for folder in (unjudged / "run", unjudged):
        assert main(["report", str(folder), "--output", str(tmp_path / "page.html")]) == 0
        assert "has no judged completion" in (tmp_path / "page.html").read_text()


@pytest.mark.faults("damaged places: names of a run as another thing")
@pytest.mark.parametrize("name", ["tokens", "emergence"])
def test_a_file_in_place_of_a_folder_is_named_before_a_run_is_resumed(
    unjudged: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    run = copy_of(unjudged / "run", tmp_path)
    shutil.rmtree(run / name)
    (run / name).touch()
    assert main([str(run / "config.toml"), "--resume", str(run), "--max-steps", "3"]) == 2
    assert (
        f"{run / name} is a file, and a run keeps a folder of that name" in capsys.readouterr().err
    )


@pytest.mark.faults("damaged places: names of a run as another thing")
def test_damaged_tokens_are_named_when_a_run_is_resumed_and_read(
    unjudged: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(unjudged)
    run = copy_of(unjudged / "run", tmp_path)
    stored = run / "tokens" / "step_1.safetensors"
    stored.write_bytes(stored.read_bytes()[:-1])
    assert main(["inspect", str(run)]) == 1
    assert f"{stored} is damaged (SafetensorError" in capsys.readouterr().err
    assert (
        main([str(run / "config.toml"), "--resume", str(run), "--max-steps", "3", "--skip-parity"])
        == 0
    )
    assert f"{stored} is damaged (SafetensorError" in capsys.readouterr().out


def test_a_nul_in_dotenv_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".env").write_bytes(b"A_TEST_VARIABLE=1\0\n")
    (tmp_path / "x.toml").touch()
    assert main(["explain", "x.toml"]) == 2
    assert ".env is not readable (embedded null byte)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("source", "said"),
    [("exits", "SystemExit: good bye"), ("deep", "BaseException: from the deep")],
)
def test_a_source_that_raises_anything_gets_a_sentence(
    unjudged: Path, monkeypatch: pytest.MonkeyPatch, source: str, said: str
) -> None:
    monkeypatch.chdir(unjudged)
    with pytest.raises(ConfigurationError, match=said):
        load_examples(config_from_mapping({"data": {"source": f"accidents.{source}"}}))


def test_a_source_without_end_is_cut_by_max_examples(
    unjudged: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(unjudged)
    data = {"source": "accidents.endless"}
    cut = load_examples(config_from_mapping({"data": data, "training": {"max_examples": 5}}))
    assert [example.reference for example in cut.examples] == ["1", "2", "3", "4", "5"]
    monkeypatch.setattr(sources, "MAX_STREAMED", 1000)
    with pytest.raises(
        ConfigurationError,
        match=r"has given 1,000 examples and has no end in sight; set .training. max_examples",
    ):
        load_examples(config_from_mapping({"data": data}))


def test_a_label_with_an_escape_sequence_reaches_no_terminal(
    tmp_path: Path, unjudged: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = copy_of(unjudged / "run", tmp_path)
    campaign = tmp_path / "campaign"
    (campaign / "runs").mkdir(parents=True)
    shutil.move(run, campaign / "runs" / "a_s3")
    entry = {"name": "a_s3", "condition": "a\x1b[31mb", "seed": 3, "status": "done"}
    (campaign / "manifest.json").write_text(
        json.dumps({"runs": [entry], "conditions": [entry["condition"]], "seeds": [3]})
    )
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        main(["report", str(campaign), "--output", str(tmp_path / "page.html")])
    out, err = capfd.readouterr()
    assert "\x1b" not in out + err
