"""Recipes: `algorithm_mode = "dapo"` is the method of examples/papers/dapo.toml, below the file."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from retrain.advantages.pipeline import CreditPipeline
from retrain.backends.own_loss import own_function
from retrain.campaign.plan import plan_campaign
from retrain.cli.help import papers_page
from retrain.config import TrainConfig, config_from_mapping, load_config, replaced
from retrain.config.load import config_from_toml, load_stored
from retrain.config.names import OWN_PLUGINS, PAPERS, recipe_names
from retrain.config.recipes import METHOD, departures, recipe
from retrain.config.removed import REDEFINED
from retrain.config.stored import config_hash, dump_toml, resume_differences
from retrain.config.unused import unused_keys
from retrain.errors import ConfigurationError
from retrain.plugins import named_code
from retrain.run.notes import departure_note, preflight_lines

LAB = '[model]\nmodel = "lab"\n[data]\nsource = "lab"\n[reward]\ntype = "match"\n'


def with_mode(name: str, more: str = "") -> TrainConfig:
    return config_from_toml(f'{LAB}[algorithm]\nalgorithm_mode = "{name}"\n{more}')


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.toml"
    path.write_text(f'{LAB}[algorithm]\nalgorithm_mode = "dapo"\n[loss]\nclip_high = 0.2\n')
    return path


@pytest.mark.parametrize("name", recipe_names())
def test_a_recipe_is_the_method_of_its_file(name: str) -> None:
    """Every key of the file but the lab's has the same value under the name alone."""
    sections = tomllib.loads((PAPERS / f"{name}.toml").read_text(encoding="utf-8"))
    frame = {
        "model": sections["model"],
        "logging": sections["logging"],
        "data": sections["data"],
        "training": {k: v for k, v in sections["training"].items() if k not in METHOD},
        "loss": {"max_grad_norm": sections["loss"]["max_grad_norm"]},
        "algorithm": {"algorithm_mode": name},
    }
    if sections["reward"] == {"type": "match"}:
        frame["reward"] = sections["reward"]
    wanted = load_config(PAPERS / f"{name}.toml", environ={}).model_dump()
    found = config_from_mapping(frame).model_dump()
    assert found["algorithm"].pop("algorithm_mode") == name
    del wanted["algorithm"]["algorithm_mode"]
    assert _short(found) == wanted
    assert recipe(name).get("reward.type") != "match"  # the lab's: a user's own reward stays


def _short(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _short(item) for name, item in value.items()}
    return value.removeprefix(OWN_PLUGINS) if isinstance(value, str) else value


@pytest.mark.parametrize("name", recipe_names())
def test_the_plugins_of_a_recipe_are_found_and_are_no_foreign_code(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.toml").write_text(dump_toml(with_mode(name)))
    stored = load_stored(tmp_path / "config.toml")
    CreditPipeline(stored, lambda ids: [""] * len(ids))
    own_function("loss", stored)
    assert named_code(stored) == [] and unused_keys(with_mode(name)) == []


def test_a_later_source_wins_and_is_named(file: Path) -> None:
    config = load_config(file, environ={})
    assert config.loss.clip_low == recipe("dapo")["loss.clip_low"]
    assert config.origins["loss.clip_low"] == "recipe dapo"
    assert (config.loss.clip_high, config.origins["loss.clip_high"]) == (0.2, "file")
    config = load_config(file, environ={"RETRAIN_LOSS_CLIP_LOW": "0.1"})
    assert config.origins["loss.clip_low"] == "environment RETRAIN_LOSS_CLIP_LOW"
    environ = {"RETRAIN_LOSS_CLIP_LOW": "0.1"}
    assert load_config(file, ["--loss-clip-low", "0.15"], environ=environ).loss.clip_low == 0.15


def test_what_the_file_sets_otherwise_is_named_in_one_line(file: Path) -> None:
    config = load_config(file, environ={})
    assert departure_note(config) == "Recipe dapo, but you set clip_high to 0.2."
    assert departure_note(config) in preflight_lines(config)
    assert departure_note(with_mode("dapo")) == ""
    assert REDEFINED in preflight_lines(with_mode("dr_grpo"))
    assert REDEFINED not in preflight_lines(with_mode("grpo_constant"))
    moved = replaced(with_mode("dapo"), {"schedule.points": {"loss.clip_high": [[0, 0.3]]}})
    assert departure_note(moved) == "Recipe dapo, but you set clip_high to a schedule."
    assert not any("clip_high = " in line for line in preflight_lines(moved))
    assert any(line.startswith('algorithm_mode = "dapo" sets') for line in preflight_lines(config))


def test_a_table_is_merged_and_goes_with_the_name_that_it_is_for() -> None:
    config = with_mode("w_reinforce", "advantage_params = { right = 0.5 }\n")
    assert config.algorithm.advantage_params == {"right": 0.5, "wrong": 1.0}
    config = with_mode("dppo", '[loss]\nmode = "gmpo"\n')
    assert config.loss.params == {} and not config.is_set("loss.clip_low")
    assert departures(config.algorithm.algorithm_mode, config.value) == {"loss.mode": "gmpo"}


def test_a_recipe_of_the_command_line_takes_the_place_of_the_files_modes(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(f'{LAB}[algorithm]\nadvantage_mode = "maxrl"\ntransform_mode = "gtpo"\n')
    config = load_config(file, ["--algorithm-mode", "gspo"], environ={})
    algorithm = config.algorithm
    assert (algorithm.advantage_mode, algorithm.transform_mode) == ("grpo_std", "none")
    assert not departures(algorithm.algorithm_mode, config.value)


def test_a_condition_takes_a_recipe_below_the_file_and_below_its_own_keys(tmp_path: Path) -> None:
    config = config_from_toml(
        f"{LAB}[training]\nminibatches = 2\n[campaign]\nseeds = [1]\n"
        '[[campaign.conditions]]\nalgorithm_mode = "dapo"\n'
        '[[campaign.conditions]]\nalgorithm_mode = "lite_ppo"\nloss.clip_high = 0.3\n'
        '[[campaign.conditions]]\nadvantage_mode = "grpo"\ntransform_mode = "none"\n'
    )
    dapo, lite, grpo = (run.config for run in plan_campaign(config, tmp_path).runs)
    assert dapo.loss.clip_high == recipe("dapo")["loss.clip_high"] and not grpo.is_set("loss.mode")
    assert dapo.algorithm.advantage_mode == recipe("dapo")["algorithm.advantage_mode"]
    assert dapo.training.max_resamples == 2 and dapo.training.minibatches == 2
    assert departures("dapo", dapo.value) == {"training.minibatches": 2}
    found = departures(lite.algorithm.algorithm_mode, lite.value)
    assert found == {"training.minibatches": 2, "loss.clip_high": 0.3}


def test_a_condition_whose_recipe_cannot_be_is_refused_with_its_number() -> None:
    with pytest.raises(ConfigurationError, match=r"conditions.* number 2: .*minibatches = 4"):
        config_from_toml(
            f"{LAB}[training]\nbatch_size = 1\ngroup_size = 2\n[campaign]\nseeds = [1]\n"
            '[[campaign.conditions]]\nadvantage_mode = "grpo"\ntransform_mode = "none"\n'
            '[[campaign.conditions]]\nalgorithm_mode = "gspo"\n'
        )


def test_a_recipe_is_part_of_a_runs_identity(tmp_path: Path) -> None:
    config = with_mode("gspo")
    stored = config_from_toml(dump_toml(config))
    assert stored == config and config_hash(stored) == config_hash(config)
    assert not resume_differences(stored, config)
    assert any("clip_high" in line for line in resume_differences(stored, with_mode("cispo")))


def test_help_lists_the_names_that_algorithm_mode_takes() -> None:
    listed = re.findall(r"^  (\w+) ", papers_page(), re.MULTILINE)
    assert tuple(listed) == recipe_names() and "dr_grpo" in listed
    assert all(with_mode(name).algorithm.algorithm_mode == name for name in listed)
