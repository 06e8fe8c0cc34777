"""Write the traces of sft_sums.toml: the first 200 problems of its environment, each solved a term
at a time.

    python examples/sft_sums.py
"""

import json
import re
from pathlib import Path

import reasoning_gym

from retrain.config import load_config

HERE = Path(__file__).parent
TRACES = 200


def solution(terms: list[int], answer: str) -> str:
    """Add the terms from left to right: "8 + 5 = 13. 13 - 4 = 9. <answer>9</answer>"."""
    total, steps = terms[0], []
    for term in terms[1:]:
        sign, size = ("-" if term < 0 else "+"), abs(term)
        steps.append(f"{total} {sign} {size} = {total + term}.")
        total += term
    assert str(total) == answer, (terms, answer)
    return f"{' '.join(steps)} <answer>{answer}</answer>"


def main() -> None:
    environment = load_config(HERE / "sft_sums.toml").environment
    args = {key: value for key, value in environment.args.items() if key != "evaluation_size"}
    problems = reasoning_gym.create_dataset(environment.id, **(args | {"seed": 0, "size": TRACES}))
    with (HERE / "sft_sums.jsonl").open("w", encoding="utf-8") as traces:
        for problem in problems:
            terms = [
                int(term)
                for term in re.findall(
                    r"[+-]?\d+", re.sub(r"\s", "", problem["question"].split(":")[1])
                )
            ]
            prompt = (
                f"{problem['question']}\n\nGive the final answer inside <answer> and </answer>."
            )
            row = {"prompt": prompt, "completion": solution(terms, problem["answer"])}
            traces.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
