"""An environment that cannot train: it has an evaluation set alone."""

import verifiers as vf
from datasets import Dataset


def load_environment() -> vf.Environment:
    rows = Dataset.from_list([{"question": "1+1=?", "answer": "2"}])
    return vf.SingleTurnEnv(
        eval_dataset=rows, rubric=vf.Rubric(funcs=[lambda completion, **_: 0.0])
    )
