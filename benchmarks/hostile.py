"""Hostile completions through the math reward: `python benchmarks/hostile.py` prints a table and
writes it under benchmarks/results/.

A step of 128 completions is made of the hostile set of `retrain audit` (nested fractions, towers of
powers, factorials, 1 MB outputs, 10,000 boxes, ...) and submitted at once, as a training step does,
with a reference that is a plain number and with one that lets every answer reach math-verify.
Seconds are until the last verdict; `lost` counts completions without one.
"""

import argparse
import time
from collections import Counter
from concurrent.futures import wait
from itertools import cycle, islice

from report import add_output, load_average, publish, table

from retrain.audit.cases import HOSTILE, boxed
from retrain.config import config_from_mapping
from retrain.rewards import ScoreRequest, build_scorer
from retrain.types import Example, Outcome

COMPLETIONS = 128
INTEGRALS = [boxed(rf"\int_0^{limit} e^{{\sin x^2}} \cos x^3 dx") for limit in range(1, 9)]
"""Not refused beside a reference that is an integral: sympy works on them until the deadline."""
_PATIENCE_S = 600


def step(responses: list[str], reference: str, deadline_s: float) -> list[object]:
    reward = {"type": "math", "workers": 2, "deadline_s": deadline_s, "max_failure_rate": 1.0}
    with build_scorer(config_from_mapping({"reward": reward})) as scorer:
        scorer.submit(
            request(boxed(r"\frac{2}{4}"), r"\frac{1}{2}", 0)
        ).result()  # the workers have started
        began = time.perf_counter()
        verdicts = [
            scorer.submit(request(response, reference, number))
            for number, response in enumerate(responses)
        ]
        done, lost = wait(verdicts, _PATIENCE_S)
        seconds = time.perf_counter() - began
        counts = Counter(verdict.result().outcome for verdict in done)
        after = scorer.submit(request(boxed(r"\frac{3}{6}"), r"\frac{1}{2}", 0)).result().outcome
    outcomes = [
        counts[outcome] for outcome in (Outcome.RIGHT, Outcome.WRONG, Outcome.COULD_NOT_JUDGE)
    ]
    return [
        reference,
        f"{deadline_s:g}",
        len(responses),
        f"{seconds:.1f}",
        *outcomes,
        len(lost),
        after.value,
    ]


def request(response: str, reference: str, number: int) -> ScoreRequest:
    return ScoreRequest(response, reference, "", Example("", reference), 0, number, 0)


def main() -> None:
    parser = argparse.ArgumentParser(description="Hostile completions through the math reward.")
    add_output(parser)
    output = parser.parse_args().output
    load = load_average()
    hostile = list(islice(cycle(attack("4") for attack in HOSTILE.values()), COMPLETIONS))
    beside = [*hostile[: COMPLETIONS - len(INTEGRALS)], *INTEGRALS]
    rows = [
        step(hostile, "4", 5.0),
        step(beside, r"\int x dx", 5.0),
        step(beside, r"\int x dx", 1.0),
    ]
    head = [
        "reference",
        "deadline_s",
        "completions",
        "seconds",
        "right",
        "wrong",
        "could not judge",
        "lost",
        "the next answer",
    ]
    about = f"{len(HOSTILE)} hostile completions in turn, two workers, max_failure_rate = 1."
    publish("hostile", "Hostile completions", [about, table(head, rows)], load, output)


if __name__ == "__main__":
    main()
