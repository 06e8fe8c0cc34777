"""Processor time and answers of `retrain power`: `python benchmarks/seeds.py` (seconds).

Each row is one call of `seeds_needed` and the detectable differences of its table, without the
start of Python.
"""

import argparse
import time

from report import add_output, load_average, publish, table

from retrain.analysis import power

CASES = ((1, 1.0), (1, 0.1), (4, 1.0), (4, 0.25), (20, 1.0), (20, 0.25), (4, 0.1))
"""(comparisons, effect in standard deviations)"""
HEAD = ("comparisons", "effect (sd)", "seeds", "CPU s")


def answer(comparisons: int, effect: float) -> tuple[int, float]:
    """Return (seeds needed, CPU seconds)."""
    for cached in (power._joint_level, power._detectable_units, power._noise):
        cached.cache_clear()
    begun = time.process_time()
    seeds = power.seeds_needed(effect, 1.0, power.Rule(comparisons))
    for count in power.SEED_COUNTS:
        power.minimal_detectable_effect(count, 1.0, power.Rule(comparisons))
    return seeds, time.process_time() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_output(parser)
    arguments, load = parser.parse_args(), load_average()
    rows = []
    for case in CASES:
        seeds, seconds = answer(*case)
        rows.append((*case, seeds, f"{seconds:.2f}"))
    publish("seeds", "Seeds that a difference needs", [table(HEAD, rows)], load, arguments.output)


if __name__ == "__main__":
    main()
