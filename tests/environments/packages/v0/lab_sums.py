"""Single-turn: the lab's sums of three, judged by the number in the box."""

import re

import verifiers as vf
from datasets import Dataset


def _rows(start: int, count: int) -> Dataset:
    terms = [
        (11 + (7 * n) % 80, 12 + (11 * n) % 80, 13 + (13 * n) % 80)
        for n in range(start, start + count)
    ]
    return Dataset.from_list(
        [{"question": "+".join(map(str, row)) + "=?", "answer": str(sum(row))} for row in terms]
    )


def boxed(completion) -> str:
    found = re.findall(r"\\boxed\{([^{}]*)\}", str(completion[-1]["content"]))
    return found[-1] if found else ""


def load_environment(train: int = 64, evaluation: int = 8) -> vf.Environment:
    def right(completion, answer, **_) -> float:
        return float(boxed(completion) == answer)

    def has_box(completion, **_) -> float:
        return float(bool(boxed(completion)))

    rubric = vf.Rubric(funcs=[right, has_box], weights=[1.0, 0.1])
    return vf.SingleTurnEnv(
        dataset=_rows(0, train), eval_dataset=_rows(train, evaluation), rubric=rubric
    )
