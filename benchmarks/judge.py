"""Verdicts per second of a judge: `python benchmarks/judge.py --url URL --model NAME` prints a
table and writes it to results/.

The completions are short and all different, so that no cache helps, and are submitted at once, as a
training step does. `python -m tests.judges` serves a judge that answers at once, against which the
client's own limit shows.
"""

import argparse
import time
from collections import Counter

from report import add_output, load_average, publish, table

from retrain.config import config_from_mapping
from retrain.rewards import ScoreRequest, build_scorer
from retrain.types import Example, JudgeUsage, Outcome


def measure(url: str, model: str, concurrency: int, count: int) -> list[object]:
    reward = {
        "type": "judge",
        "judge_model": model,
        "judge_base_url": url,
        "judge_concurrency": concurrency,
        "judge_timeout_s": 300.0,
    }
    with build_scorer(config_from_mapping({"reward": reward})) as scorer:
        scorer.probe()
        requests = [
            request(f"Run {concurrency}, {number}: {number} + {number} = {2 * number}.", number)
            for number in range(count)
        ]
        began = time.perf_counter()
        scores = [verdict.result() for verdict in [scorer.submit(each) for each in requests]]
        seconds = time.perf_counter() - began
    outcomes = Counter(score.outcome for score in scores)
    usage = sum((score.usage for score in scores if score.usage), JudgeUsage())
    tokens = f"{usage.prompt_tokens / count:.0f} + {usage.completion_tokens / count:.1f}"
    verdicts = [
        outcomes[outcome] for outcome in (Outcome.RIGHT, Outcome.WRONG, Outcome.COULD_NOT_JUDGE)
    ]
    return [
        concurrency,
        count,
        usage.requests,
        f"{seconds:.1f}",
        f"{count / seconds:,.1f}",
        tokens,
        *verdicts,
    ]


def request(response: str, number: int) -> ScoreRequest:
    example = Example(f"What is {number} + {number}?", str(2 * number))
    return ScoreRequest(response, example.reference, "", example, 0, number, 0)


def main() -> None:
    parser = argparse.ArgumentParser(description="Verdicts per second of a judge.")
    parser.add_argument("--url", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--count", type=int, default=256)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 64])
    add_output(parser)
    arguments = parser.parse_args()
    load = load_average()
    rows = [
        measure(arguments.url, arguments.model, concurrency, arguments.count)
        for concurrency in arguments.concurrency
    ]
    head = [
        "concurrency",
        "completions",
        "requests",
        "seconds",
        "verdicts/s",
        "tokens read + written",
        "yes",
        "no",
        "could not judge",
    ]
    publish(
        f"judge-{arguments.model}",
        f"The judge {arguments.model}",
        [table(head, rows)],
        load,
        arguments.output,
    )


if __name__ == "__main__":
    main()
