"""The number game as a server of OpenEnv, in the words that the lab model knows."""

import re

from openenv.core import Action, Environment, Observation, State, create_fastapi_app


class Reply(Action):
    message: str


class Answer(Observation):
    text: str


class Guess(Environment[Reply, Answer, State]):
    SUPPORTS_CONCURRENT_SESSIONS = True
    state = State()

    def reset(self, seed=0, episode_id=None, largest: int = 10, turns: int = 4) -> Answer:
        self.number, self.left = 1 + seed % largest, turns
        return Answer(text=f"guess my number from 1 to {largest}")

    def step(self, action: Reply, timeout_s=None) -> Answer:
        found = re.findall(r"\d{1,9}", action.message)
        guess, self.left = int(found[-1]) if found else None, self.left - 1
        hint = "?" if guess is None else "higher" if guess < self.number else "lower"
        self.left *= guess != self.number
        return Answer(text=hint, reward=float(guess == self.number), done=not self.left)


app = create_fastapi_app(Guess, Reply, Answer, max_concurrent_envs=128)
