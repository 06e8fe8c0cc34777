"""auto_install: the failure of the real command, and its success with a stand-in for `prime`, which
needs the network.
"""

import os
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.environments
pytest.importorskip("verifiers")

from retrain import train  # noqa: E402
from retrain.config import load_config  # noqa: E402
from retrain.config.overrides import parse_overrides  # noqa: E402
from retrain.config.schema import Environment as Settings  # noqa: E402
from retrain.environments.verifiers import load as load_verifiers  # noqa: E402
from retrain.errors import ConfigurationError, EnvironmentFailure  # noqa: E402
from tests.runs import lines  # noqa: E402

STAND_IN = """#!{python}
# A stand-in for `prime env install owner/name`: it puts the environment's module where this Python looks.
import pathlib, sys
assert sys.argv[1:] == ["env", "install", {name!r}], sys.argv
module = pathlib.Path({target!r}, {name!r}.rpartition("/")[2].replace("-", "_") + ".py")
module.write_text({module!r})
"""
MODULE = """
import lab_sums
from verifiers.v1.envs.single_agent import SingleAgentEnv, SingleAgentEnvConfig
from verifiers.v1.env import Env

class Sums(lab_sums.Sums): ...

class Config(SingleAgentEnvConfig):
    split: str = "train"

class WithASplit(Env[Config]):
    run = SingleAgentEnv.run

__all__ = ["Sums", "WithASplit"]
"""
SEED_BLOCK = """
[environment]
provider = "verifiers"
id = "primeintellect/gsm8k"           # installed env id
args = { split = "train" }             # native TOML object
auto_install = true                    # install from Prime Hub if missing
max_turns = 8                          # only used for multi-turn envs
"""


def settings(name: str) -> Settings:
    return Settings(provider="verifiers", id=name, auto_install=True)


def stand_in(target: Path, name: str) -> str:
    return STAND_IN.format(python=sys.executable, target=str(target), name=name, module=MODULE)


def command(folder: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.mkdir()
    (folder / "prime").write_text(text)
    (folder / "prime").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


def test_a_fetched_environment_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    command(tmp_path / "bin", stand_in(tmp_path, "someone/fetched-env"), monkeypatch)
    environment = load_verifiers(settings("someone/fetched-env"))
    assert len(environment.examples("train")) == 64
    environment.close()


def test_the_environment_block_of_the_seeds_runs_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the stand-in for the hub, and the lab's sums for its problems."""
    monkeypatch.syspath_prepend(str(tmp_path))
    name = "primeintellect/gsm8k"
    command(tmp_path / "bin", stand_in(tmp_path, name), monkeypatch)
    file = tmp_path / "seed.toml"
    file.write_text(SEED_BLOCK + '[model]\nmodel = "lab"\nlora_rank = 4\n')
    tiny = "--batch-size 2 --group-size 4 --max-tokens 48 --max-steps 1 --devices cpu"
    train(
        load_config(file, parse_overrides([f"--log-dir={tmp_path / 'run'}", *tiny.split()])),
        quiet=True,
    )
    (record,) = lines(tmp_path / "run/metrics.jsonl")
    assert {"right", "has_box"} <= record["environment_metrics"].keys()


@pytest.mark.parametrize(
    ("script", "said"),
    [
        (
            "echo 'Failed to connect to the hub' >&2\nexit 7",
            "`prime env install someone/absent` failed with status 7: Failed to connect to the hub",
        ),
        ("exit 0", "although `prime env install someone/absent` succeeded"),
    ],
)
def test_a_failed_command_is_told_with_its_own_words(
    script: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command(tmp_path / "bin", f"#!/bin/sh\n{script}\n", monkeypatch)
    with pytest.raises(EnvironmentFailure, match=said):
        load_verifiers(settings("someone/absent"))


def test_without_the_command_or_an_owner_it_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(EnvironmentFailure, match="auto_install needs the command prime"):
        load_verifiers(settings("someone/absent"))
    with pytest.raises(ConfigurationError, match="the Prime hub knows environments as owner/name"):
        load_verifiers(settings("absent"))
