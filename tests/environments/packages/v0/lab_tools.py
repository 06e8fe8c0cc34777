"""Tool use: a calculator that the model may call before it answers."""

import verifiers as vf
from datasets import Dataset


async def add(a: int, b: int) -> int:
    """Add two whole numbers.

    Args:
        a: the first number
        b: the second number
    """
    return int(a) + int(b)


def load_environment(max_turns: int = 4) -> vf.Environment:
    def right(completion, answer, **_) -> float:
        return float(answer in str(completion[-1]["content"]))

    rows = [
        {"question": f"What is {n} + {n + 1}?", "answer": str(2 * n + 1)} for n in range(100, 108)
    ]
    return vf.ToolEnv(
        dataset=Dataset.from_list(rows),
        tools=[add],
        rubric=vf.Rubric(funcs=[right]),
        max_turns=max_turns,
    )
