"""Processor time and answers of `retrain power` before and after its joint level was drawn without
the runs: `python benchmarks/seeds.py` (about three minutes).

Each row is one call of `seeds_needed` and the detectable differences of its table, without the
start of Python.
"""

import argparse
import time
from functools import lru_cache
from unittest.mock import patch

import earlier_rules
from report import add_output, load_average, publish, table

from retrain.analysis import power

CASES = ((1, 1.0), (1, 0.1), (4, 1.0), (4, 0.25), (20, 1.0), (20, 0.25), (4, 0.1))
"""(comparisons, effect in standard deviations)"""
HEAD = ("comparisons", "effect (sd)", "seeds before", "seeds", "CPU s before", "CPU s", "ratio")


def answer(comparisons: int, effect: float) -> tuple[float, int, list[float]]:
    """Return (CPU seconds, seeds needed, detectable differences)."""
    for cached in (power._joint_level, power._detectable_units, power._noise):
        cached.cache_clear()
    begun = time.process_time()
    seeds = power.seeds_needed(effect, 1.0, power.Rule(comparisons))
    found = [
        power.minimal_detectable_effect(count, 1.0, power.Rule(comparisons)) or float("inf")
        for count in power.SEED_COUNTS
    ]
    return time.process_time() - begun, seeds, found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_output(parser)
    arguments, load = parser.parse_args(), load_average()
    before = {
        "_joint_level": lru_cache(earlier_rules.joint_level),
        "_first_count": earlier_rules.first_count,
    }
    rows, largest = [], 0.0
    for case in CASES:
        with patch.multiple(power, **before):
            old_seconds, old_seeds, old = answer(*case)
        seconds, seeds, new = answer(*case)
        times = f"{old_seconds:.2f}", f"{seconds:.2f}", f"{old_seconds / seconds:.0f}"
        rows.append((*case, old_seeds, seeds, *times))
        both = [(a, b) for a, b in zip(old, new, strict=True) if a < float("inf")]
        largest = max(largest, *(abs(b / a - 1) for a, b in both))
    said = f"Largest change of a detectable difference: {100 * largest:.1f}%."
    publish(
        "seeds", "Seeds that a difference needs", [table(HEAD, rows), said], load, arguments.output
    )


if __name__ == "__main__":
    main()
