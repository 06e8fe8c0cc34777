"""Answers judged per second: `python benchmarks/rewards.py` prints a table and writes it under
benchmarks/results/.

Every answer is distinct, so that no cache holds it, and stands in a completion of 500 words; half
of the answers are right. Times are wall time with all answers submitted at once, after the workers
have started. Answers "decided by strings" need no worker.
"""

import argparse
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from report import add_output, load_average, publish, table

from retrain.config import TrainConfig
from retrain.rewards import Scorer, ScoreRequest, build_scorer
from retrain.types import Example, Outcome

TEXT = (
    "so we divide both sides by two and then add the first number to what is left which gives the"
    " answer"
)
WORDS = TEXT.split()
SEED = 5


def integers(number: int, right: bool) -> tuple[str, str]:
    return str(number if right else number + 1), str(number)


def fractions(number: int, right: bool) -> tuple[str, str]:
    return (
        rf"\frac{{{2 * number + (not right)}}}{{{2 * number + 14}}}",
        rf"\frac{{{number}}}{{{number + 7}}}",
    )


def slashes(number: int, right: bool) -> tuple[str, str]:
    return f"{number + (not right)}/{number + 7}", rf"\dfrac{{{number}}}{{{number + 7}}}"


def polynomials(number: int, right: bool) -> tuple[str, str]:
    return f"x^2+{2 * number}x+{number * number + (not right)}", f"(x+{number})^2"


Answers = Callable[[int, bool], tuple[str, str]]
CASES: Sequence[tuple[str, str, Answers, int, int]] = (
    ("match", "integers", integers, 20_000, 0),
    ("match, hendrycks", "a/b against \\dfrac{a}{b}", slashes, 20_000, 0),
    ("math", "integers (decided by strings)", integers, 20_000, 1),
    ("math", "fractions (decided by strings)", fractions, 2_000, 1),
    ("math", "polynomials", polynomials, 400, 1),
    ("math", "polynomials", polynomials, 400, 2),
)


def requests(answers: Answers, count: int) -> list[ScoreRequest]:
    rng = np.random.default_rng(SEED)
    text = " ".join(rng.choice(WORDS, 500))
    made = []
    for index in range(count):
        answer, reference = answers(1000 + index, index % 2 == 0)
        made.append(
            ScoreRequest(
                f"{text} \\boxed{{{answer}}}.",
                reference,
                text,
                Example(text, reference),
                0,
                index,
                0,
            )
        )
    return made


def scorer_of(kind: str, workers: int) -> Scorer:
    reward = {
        "type": kind.split(",")[0],
        "workers": workers,
        "deadline_s": 60.0,
        "normalize": "hendrycks" if "hendrycks" in kind else "none",
    }
    return build_scorer(TrainConfig.model_validate({"reward": reward}))


def measure(kind: str, answers: Answers, count: int, workers: int) -> tuple[float, float]:
    """Answers per second, and the fraction found right."""
    asked = requests(answers, count)
    with scorer_of(kind, workers) as scorer:
        for future in [
            scorer.submit(request) for request in requests(polynomials, 8 * max(1, workers))
        ]:
            future.result()  # every worker has started and answered
        started = time.perf_counter()
        scores = [future.result() for future in [scorer.submit(request) for request in asked]]
        elapsed = time.perf_counter() - started
    return count / elapsed, sum(score.outcome is Outcome.RIGHT for score in scores) / count


def time_to_first_verdict() -> float:
    started = time.perf_counter()
    with scorer_of("math", 1) as scorer:
        scorer.submit(requests(polynomials, 1)[0]).result()
        return time.perf_counter() - started


def rates() -> Iterator[list[object]]:
    for kind, name, answers, count, workers in CASES:
        rate, right = measure(kind, answers, count, workers)
        yield [kind, name, workers or "-", f"{rate:,.0f}", f"{right:.0%}"]


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the throughput of the rewards.")
    add_output(parser)
    output = parser.parse_args().output
    load = load_average()
    found = table(["reward", "answers", "workers", "answers/s", "right"], rates())
    first = f"From the start to the first verdict of math-verify: {time_to_first_verdict():.1f} s."
    publish("rewards", "Rewards", [found, first], load, output)


if __name__ == "__main__":
    main()
