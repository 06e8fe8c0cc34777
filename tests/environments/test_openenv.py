"""OpenEnv by the example plugin: a real server, its real client, and a run of the lab model."""

import os
import subprocess
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = [pytest.mark.environments, pytest.mark.timeout(600)]
if find_spec("openenv") is None:
    pytest.skip("needs openenv", allow_module_level=True)

from examples.environments.openenv import OpenEnv  # noqa: E402
from retrain.environments.episodes import EpisodeHost  # noqa: E402
from retrain.types import Outcome  # noqa: E402
from tests.environments.checks import check_trained, scripted  # noqa: E402

ARGS = {"app": "openenv_guess:app", "folder": str(Path(__file__).parent / "packages")}


def servers() -> bytes:
    command = ["pgrep", "--parent", str(os.getpid()), "--full", ARGS["app"]]
    return subprocess.run(command, stdout=subprocess.PIPE).stdout


def test_a_session_plays_the_problem_of_its_seed() -> None:
    environment = OpenEnv(**ARGS)
    host = EpisodeHost(environment, max_turns=0, timeout_s=60, correct_threshold=0.5)
    with closing(host):
        six = environment.examples("train")[5]
        said, score = scripted(host, six, ["4", "nothing", "\\boxed{6}"])
        assert (said, score.reward, score.turn_rewards) == (["higher", "?"], 1, (0, 0, 1))
        assert servers() and scripted(host, six, ["6 or 7"] * 4)[1].outcome is Outcome.WRONG
    assert not servers()


def test_the_lab_trains_and_no_server_is_left(tmp_path: Path) -> None:
    provider = "examples.environments.openenv.OpenEnv"
    check_trained(tmp_path / "run", {"provider": provider, "args": ARGS}, turns=4)
    assert not servers()
