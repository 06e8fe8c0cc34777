"""Tokens per second of the lab with back pressure against every fixed batch size.

    python benchmarks/backpressure_lab.py

Fixed sizes take turns, one step at a time in runs that are resumed, so that other load on the
machine falls on all of them alike. The run with back pressure is counted after its sweep, and once
with it.
"""

import argparse
import tempfile
from pathlib import Path
from statistics import median

from report import add_output, load_average, publish, table

from retrain import train
from retrain.config import TrainConfig, config_from_mapping
from retrain.records.entries import StepRecord

SIZES, GROUP, TOKENS = (1, 2, 4, 8, 16), 8, 48
ROUNDS, STEPS = 6, 40


def configuration(
    folder: Path, steps: int, batch_size: int, pressed: bool, resume: bool = False
) -> TrainConfig:
    training = {
        "seed": 1,
        "max_steps": steps,
        "batch_size": batch_size,
        "group_size": GROUP,
        "max_tokens": TOKENS,
        "save_every": 1000,
    }
    return config_from_mapping(
        {
            "model": {"model": "lab"},
            "data": {"source": "lab"},
            "training": training | {"lr": 1e-4, "temperature": 1.0},
            "backpressure": {"enabled": pressed, "max_batch_size": SIZES[-1]} if pressed else {},
            "backend": {"devices": "cpu"},
            "logging": {"log_dir": str(folder), "generations_every": 0},
            "resume": {"from": str(folder)} if resume else {},
        }
    )


def rate(records: list[StepRecord]) -> float:
    """Tokens over seconds of all the steps together."""
    seconds = sum(record.step_time_s or 0.0 for record in records)
    return (
        sum((record.tokens_per_s or 0.0) * (record.step_time_s or 0.0) for record in records)
        / seconds
    )


def fixed_rates(folder: Path, rounds: int) -> dict[int, list[float]]:
    """Batch size -> tokens per second of each round; the first step of a size is left out."""
    rates: dict[int, list[float]] = {size: [] for size in SIZES}
    for turn in range(rounds + 1):
        for size in SIZES:
            run = train(
                configuration(folder / f"fixed-{size}", turn + 1, size, False, resume=turn > 0),
                quiet=True,
            )
            if turn:
                rates[size].append(rate(run.records()[-1:]))
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_output(parser)
    parser.add_argument(
        "--rounds", type=int, default=ROUNDS, help="measured steps of each fixed size"
    )
    parser.add_argument(
        "--steps", type=int, default=STEPS, help="steps with back pressure, its sweep included"
    )
    chosen = parser.parse_args()
    load = load_average()
    with tempfile.TemporaryDirectory() as place:
        fixed = fixed_rates(Path(place), chosen.rounds)
        records = train(
            configuration(Path(place) / "pressed", chosen.steps, 4, True), quiet=True
        ).records()
    swept = [record for record in records if record.bp_regime != "warmup"]
    best = max(median(rates) for rates in fixed.values())
    rows = [
        (f"fixed, {size} prompts", median(rates), f"{min(rates):.0f} to {max(rates):.0f}")
        for size, rates in fixed.items()
    ]
    rows.append(
        (
            "back pressure, after its sweep",
            rate(swept),
            f"{swept[-1].next_batch_size} prompts at the end",
        )
    )
    rows.append(
        (
            "back pressure, with its sweep",
            rate(records),
            f"{len(records) - len(swept)} of {len(records)} steps",
        )
    )
    cells = [[name, f"{value:,.0f}", f"{value / best:.0%}", note] for name, value, note in rows]
    settings = (
        f"The lab, groups of {GROUP}, {TOKENS} tokens; median, least and most of {chosen.rounds}"
        " steps of each fixed size."
    )
    found = [settings, table(["batch size", "tokens/s", "of the best fixed", ""], cells)]
    publish("backpressure-lab", "Back pressure on the lab", found, load, chosen.output)


if __name__ == "__main__":
    main()
