"""An environment of OpenEnv (`pip install openenv`): its server answers, and its rewards judge.

[environment]
provider = "examples.environments.openenv.OpenEnv"
args = { app = "server.app:app", folder = "my_env", action = "message", observation = "text" }

The server runs on this machine for as long as the run. A problem is a seed of its `reset`, and
held-out problems have other seeds.
"""

import socket
import subprocess
import sys

from openenv.core import GenericEnvClient

from retrain.environments import Environment, Episode, Result
from retrain.types import ChatMessage, Example

SEEDS = {"train": range(64), "evaluation": range(64, 80)}


class OpenEnv(Environment):
    """Serve `app` of `folder`. `action` and `observation` name the fields that hold their text."""

    def __init__(self, app: str, folder=".", action="message", observation="text") -> None:
        self.action, self.observation = action, observation
        # The server inherits a socket that listens already, so that a client waits for its start.
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            place = ["--app-dir", folder, "--fd", str(listener.fileno()), "--log-level", "warning"]
            self.process = subprocess.Popen(
                [sys.executable, "-m", "uvicorn", app, *place], pass_fds=[listener.fileno()]
            )

    def examples(self, split: str) -> list[Example]:
        game = self.episode()
        problems = [Example(game.begin(seed), "", info={"seed": seed}) for seed in SEEDS[split]]
        game.close()
        return problems

    def episode(self) -> "Game":
        return Game(self)

    def close(self) -> None:
        self.process.terminate()
        self.process.wait()


class Game(Episode):
    """A session of the server."""

    def __init__(self, environment: OpenEnv) -> None:
        self.environment, self.rewards = environment, []
        self.client = GenericEnvClient(environment.url, connect_timeout_s=120).sync()

    def begin(self, seed: int) -> list[ChatMessage]:
        return self.said(self.client.reset(seed=seed))

    def said(self, result) -> list[ChatMessage]:
        text = result.observation[self.environment.observation]
        return [{"role": "user", "content": text}]

    def reset(self, example: Example, seed: int) -> list[ChatMessage]:
        return self.begin(example.info["seed"])

    def step(self, reply: str) -> list[ChatMessage] | None:
        result = self.client.step({self.environment.action: reply})
        self.rewards.append(result.reward or 0)
        return None if result.done else self.said(result)

    def result(self) -> Result:
        return Result(sum(self.rewards), turn_rewards=self.rewards)

    def close(self) -> None:
        self.client.close()
