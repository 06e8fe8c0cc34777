"""Multi-turn: guess a number, told each time whether it is higher or lower, in the words that the
lab model knows.
"""

import re

import verifiers as vf
from datasets import Dataset


def last_number(text) -> int | None:
    found = re.findall(r"\d{1,9}", str(text))
    return int(found[-1]) if found else None


class Guess(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **_):
        guess, number = last_number(messages[-1]["content"]), int(state["answer"])
        if guess == number:
            state["final_env_response"] = [{"role": "user", "content": "="}]
            return state["final_env_response"]
        return [
            {
                "role": "user",
                "content": "?" if guess is None else "higher" if guess < number else "lower",
            }
        ]


def load_environment(largest: int = 10, max_turns: int = 4, problems: int = 64) -> vf.Environment:
    prompt = [{"role": "user", "content": f"guess my number from 1 to {largest}"}]
    rows = [{"prompt": prompt, "answer": str(1 + n % largest)} for n in range(problems)]

    def near(completion, answer, **_) -> float:
        replies = [message["content"] for message in completion if message["role"] == "assistant"]
        guess = last_number(replies[-1]) if replies else None
        return 0.0 if guess is None else max(0.0, 1 - abs(guess - int(answer)) / largest)

    def solved(completion, answer, **_) -> float:
        replies = [message["content"] for message in completion if message["role"] == "assistant"]
        return float(bool(replies) and last_number(replies[-1]) == int(answer))

    rubric = vf.Rubric(funcs=[solved, near], weights=[0.6, 0.4])
    return Guess(
        dataset=Dataset.from_list(rows),
        eval_dataset=Dataset.from_list(rows[:largest]),
        max_turns=max_turns,
        rubric=rubric,
    )
