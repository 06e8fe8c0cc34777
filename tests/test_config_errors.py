"""Wrong configurations and the sentence that each gets: place, section, key, value, what is
allowed, the nearest name.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from retrain.config import config_from_mapping, config_from_toml, learning_sections, load_config
from retrain.config.names import builtin_names
from retrain.errors import ConfigurationError
from tests.wrong_inputs import AT_LOAD


@pytest.mark.parametrize(("text", "part"), AT_LOAD, ids=[part for _, part in AT_LOAD])
def test_a_wrong_value_gets_one_sentence_that_names_it(text: str, part: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        config_from_toml(text, Path("run.toml"))
    assert caught.value.exit_code == 2
    matching = [problem for problem in caught.value.problems if part in problem]
    assert len(matching) == 1, caught.value.problems
    assert matching[0].startswith("run.toml")
    assert matching[0].endswith((".", "?")) and "\n" not in matching[0]
    if "[" in part and "number 1" not in part:
        assert len(caught.value.problems) == 1, caught.value.problems


def test_a_folder_that_the_locale_cannot_name_is_no_bug(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text('[logging]\nlog_dir = "l\u00e4"', encoding="utf-8")
    environment = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    for flags, part in (
        (
            ["--log-dir", "l\u00e4"],
            "holds bytes that are not text in this locale's encoding (ascii)",
        ),
        ([], "which this locale's encoding (ascii) lacks; set PYTHONUTF8=1."),
    ):
        command = [sys.executable, "-m", "retrain", "run.toml", *flags]
        ended = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60
        )
        assert ended.returncode == 2 and "log_dir" in ended.stderr
        assert part in ended.stderr


def test_all_problems_of_a_file_come_at_once() -> None:
    with pytest.raises(ConfigurationError) as caught:
        config_from_toml(
            '[training]\nlr = "a"\ngrup_size = 3\nkeep_checkpoints = 1\n[los]\n[loss]\ncorrection ='
            ' "tis"',
            Path("run.toml"),
        )
    found = "\n".join(caught.value.problems)
    assert len(caught.value.problems) == 5
    assert all(
        part in found for part in ("lr = ", "grup_size", "keep_checkpoints", "[los]", "correction")
    )


@pytest.mark.parametrize(
    ("section", "name"),
    [
        *(("inference", name) for name in builtin_names("engine") if name != "pytorch"),
        ("backend", "tinker"),
        ("backend", "prime_rl"),
    ],
)
@pytest.mark.parametrize("kind", ["shannon_entropy", "entropy", "token_entropy"])
def test_shannon_entropy_is_refused_where_no_logits_are(section: str, name: str, kind: str) -> None:
    key = "engine" if section == "inference" else "backend"
    values = {"uncertainty_kind": kind}
    algorithm = values if section == "inference" else {"transform_params": values}
    with pytest.raises(ConfigurationError, match=f'with {key} = "{name}": it returns log-probs'):
        config_from_mapping({"algorithm": algorithm, section: {key: name}})


def test_files_that_cannot_be_read_say_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        ConfigurationError, match=r"retrain\.toml does not exist; make one with `retrain init`"
    ):
        load_config(environ={})
    with pytest.raises(ConfigurationError, match=r"absent\.toml does not exist; check the path"):
        load_config("absent.toml", environ={})
    with pytest.raises(ConfigurationError, match="is a folder; name a TOML file"):
        load_config(tmp_path, environ={})
    (tmp_path / "latin.toml").write_bytes(b'[model]\nmodel = "\xe9"')
    with pytest.raises(ConfigurationError, match=r"latin\.toml is not UTF-8 text \(byte 17\)"):
        load_config("latin.toml", environ={})


def test_a_long_value_is_cut_in_its_sentence() -> None:
    with pytest.raises(ConfigurationError) as caught:
        config_from_mapping({"training": {"lr": "x" * 5000}})
    assert len(str(caught.value)) < 300


def test_an_open_name_may_be_a_plugin_without_being_imported() -> None:
    config = config_from_mapping(
        {
            "algorithm": {"advantage_mode": "no_such_module.f"},
            "reward": {"type": "no_such_module.g"},
        }
    )
    assert config.condition_label == "f+gtpo_sepa"


def test_wrong_options_beyond_number_are_counted_and_not_each_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compared: list[str] = []
    monkeypatch.setattr(learning_sections, "nearest", lambda name, known: compared.append(name))
    with pytest.raises(ConfigurationError) as caught:
        config_from_mapping({"backend": {"options": {f"k{number}": 1 for number in range(5000)}}})
    assert len(caught.value.problems) == 20
    assert "4,981 more of its names" in caught.value.problems[-1]
    assert compared == [f"k{number}" for number in range(19)]


def test_a_data_source_that_names_what_lies_here_is_answered_with_its_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sums").mkdir()
    (tmp_path / "lines.jsonl").touch()
    for word, place in (("sums", "./sums"), ("lines", "lines.jsonl")):
        with pytest.raises(ConfigurationError, match=f'did you mean "{place}"'):
            config_from_mapping({"data": {"source": word}})
    with pytest.raises(ConfigurationError) as refused:
        config_from_mapping({"data": {"source": "nothing"}})
    assert "did you mean" not in str(refused.value)
