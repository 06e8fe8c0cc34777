"""Growth of time and memory with the number of completions and with their length: `python
benchmarks/growth.py`.

The model has the lab model's shape, random weights and a sufficient context; lengths are forced,
prompts have 64 tokens, groups 8 completions. Each point is a fresh process that samples and learns
once, after a small warm-up step. Memory is resident memory: before (libraries, weights), and the
peaks of sampling and of learning. An exponent compares a point with the previous one; 1 is linear.
Rows at once and micro-batch tokens are what retrain chose for the machine.
"""

import argparse
import math
import os
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

from processes import Worker
from report import add_output, load_average, publish, table, versions_line

GROUP, PROMPT_TOKENS, RANK = 8, 64, 16
HEAD = [
    "completions", "tokens each", "sample s", "tok/s", "exponent", "learn s", "tok/s", "exponent",
    "GiB before", "sampling", "learning", "rows at once", "micro-batch tokens",
]  # fmt: skip


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--completions",
        type=int,
        nargs="*",
        default=[8, 16, 32, 64, 128, 256, 512],
        help=f"multiples of {GROUP}",
    )
    parser.add_argument(
        "--completions-at",
        type=int,
        default=128,
        metavar="TOKENS",
        help="length of each while their number grows",
    )
    parser.add_argument("--lengths", type=int, nargs="*", default=[128, 512, 2048, 5120, 10240])
    parser.add_argument(
        "--lengths-at",
        type=int,
        default=8,
        metavar="COMPLETIONS",
        help="their number while the length grows",
    )
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    add_output(parser)
    arguments = parser.parse_args()
    if any(count % GROUP for count in (*arguments.completions, arguments.lengths_at)):
        parser.error(f"numbers of completions must be multiples of {GROUP}")
    return arguments


def measure(settings: dict[str, Any], completions: int, tokens: int) -> dict[str, Any]:
    with Worker(sys.executable, "growth_point.py", settings) as worker:
        shape = {"completions": completions, "tokens": tokens, "versions": worker.versions}
        return shape | worker.ask(completions=completions, tokens=tokens)


def rows(points: list[dict[str, Any]]) -> Iterator[list[str]]:
    before: dict[str, Any] | None = None
    for point in points:
        count = point["completions"] * point["tokens"]
        line = [f"{point['completions']}", f"{point['tokens']:,}"]
        for half in ("sampling", "learning"):
            seconds = point[half]["seconds"]
            line += [f"{seconds:.2f}", f"{count / seconds:,.0f}", _exponent(before, point, half)]
        memory = (
            point["sampling"]["before_gib"],
            point["sampling"]["peak_gib"],
            point["learning"]["peak_gib"],
        )
        yield (
            line + [f"{gib:.2f}" for gib in memory] + [point["rows_at_once"], point["micro_batch"]]
        )
        before = point


def _exponent(before: dict[str, Any] | None, point: dict[str, Any], half: str) -> str:
    if before is None:
        return ""
    grown = point["completions"] * point["tokens"] / (before["completions"] * before["tokens"])
    return f"{math.log(point[half]['seconds'] / before[half]['seconds']) / math.log(grown):.2f}"


def main() -> None:
    arguments = parse_arguments()
    load = load_average()
    longest = max([arguments.completions_at, *arguments.lengths])
    with tempfile.TemporaryDirectory() as folder:
        settings: dict[str, Any] = {
            "model": folder, "rank": RANK, "group": GROUP, "prompt_tokens": PROMPT_TOKENS,
            "threads": arguments.threads,
        }  # fmt: skip
        with Worker(sys.executable, "prepare.py", settings) as prepare:
            settings["vocabulary"] = prepare.ask(
                make="shape", folder=folder, context=longest + PROMPT_TOKENS
            )["vocabulary"]
        wider = [
            measure(settings, count, arguments.completions_at) for count in arguments.completions
        ]
        longer = [measure(settings, arguments.lengths_at, length) for length in arguments.lengths]
    points = [*wider, *longer]
    publish(
        "growth",
        "Growth with completions and with length",
        [
            (
                f"The lab model's shape with random weights, fp32, LoRA r{RANK}, prompts of"
                f" {PROMPT_TOKENS} tokens in groups of {GROUP}, {arguments.threads} threads."
                f" {versions_line(*(point['versions'] for point in points))}."
            ),
            table(HEAD, rows(wider)),
            table(HEAD, rows(longer)),
        ],
        load,
        arguments.output,
    )


if __name__ == "__main__":
    main()
