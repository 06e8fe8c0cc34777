"""What `[inference] calibration` records of sound engines while an adapter is trained: `python
benchmarks/calibration_runs.py` makes whole runs on the lab, prints a table and writes it to
results/. With `--engine vllm --url http://127.0.0.1:8000` a server samples (`retrain serve vllm`).

Every completion of a step is tested. What each run did is kept in `--state`, so that a benchmark
that was stopped goes on where it was.
"""

import argparse
import json
import random
import sys
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from report import add_output, load_average, publish, table
from scipy import stats

from retrain import train
from retrain.errors import RetrainError
from retrain.run.calibration import SHARED_FROM, WARNED_FROM

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
from runs import lines, small

COMPLETIONS = (4, 8)
"""Prompts and completions of each, of a step."""
SETTINGS: dict[str, tuple[Any, ...]] = {
    "training.temperature": (0.7, 1.0),
    "training.top_p": (1.0, 0.95, 0.8),
    "inference.dtype": ("auto", "bf16"),
}
"""Values that are drawn with equal probability. A server has its own precision, and truncates only on
a GPU."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=24)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--engine", default="pytorch")
    parser.add_argument("--url", default="", help="of the server that samples")
    parser.add_argument("--state", type=Path, help="by default a file of this engine and --steps")
    add_output(parser)
    given, load = parser.parse_args(), load_average()
    if min(given.runs, given.steps) < 1:
        parser.error("--runs and --steps must be at least 1")
    given.state = given.state or Path(f"calibration-runs-{given.engine}-{given.steps}.jsonl")
    torch.set_num_threads(1)
    done = lines(given.state) if given.state.exists() else []
    for number in range(len(done), given.runs):
        try:
            done.append(made(number, given))
        except RetrainError as error:
            parser.exit(error.exit_code, f"{parser.prog}: {error}\n")
        with given.state.open("a", encoding="utf-8") as state:
            state.write(json.dumps(done[-1]) + "\n")
        print(done[-1], flush=True)
    publish(
        f"calibration-runs-{given.engine}",
        f"Calibration of trained adapters, sampled by {given.engine}",
        paragraphs(done, given.steps),
        load,
        given.output,
    )


def made(number: int, given: argparse.Namespace) -> dict[str, Any]:
    """Take a run, and return its settings and what was recorded of it."""
    rng = random.Random(number)
    chosen = {key: rng.choice(values) for key, values in SETTINGS.items()}
    if given.url:
        del chosen["inference.dtype"], chosen["training.top_p"]
    batch_size, group_size = COMPLETIONS
    sections: dict[str, Any] = {
        "reward": {"type": "match"},
        "inference": {
            "engine": given.engine,
            "url": given.url,
            "calibration": True,
            "calibration_completions": batch_size * group_size,
        },
        "training": {
            "seed": number,
            "max_steps": given.steps,
            "batch_size": batch_size,
            "group_size": group_size,
            "max_tokens": 96,
            "max_examples": 4096,
            "save_every": 0,
        },
    }
    for key, value in chosen.items():
        section, name = key.split(".")
        sections[section][name] = value
    with TemporaryDirectory() as scratch:
        run = train(small(Path(scratch) / "run", **sections), quiet=True)
        records = lines(run.folder / "metrics.jsonl")
    rates, last = [record["correct_rate"] for record in records], records[-1]
    return {
        "number": number,
        "settings": chosen,
        "tokens": last["calibration_tokens"],
        "first": sum(rates[:5]) / len(rates[:5]),
        "last": sum(rates[-5:]) / len(rates[-5:]),
        "lambda": last["calibration_lambda_total"],
        "evidence": max(record["calibration_evidence"] for record in records),
        "shared": max(
            max(record["calibration_shared_prompt"], record["calibration_shared_number"])
            for record in records
        ),
    }


def paragraphs(runs: list[dict[str, Any]], steps: int) -> Iterable[str]:
    warned = [run for run in runs if run["evidence"] >= WARNED_FROM or run["shared"] >= SHARED_FROM]
    low, high = stats.binomtest(len(warned), len(runs)).proportion_ci(method="wilson")
    yield (
        f"{len(warned)} of {len(runs)} runs were warned of; Wilson interval (95%) {100 * low:.1f}%"
        f" to {100 * high:.1f}%. Lab model, {steps} steps of {COMPLETIONS[0]} prompts x"
        f" {COMPLETIONS[1]} completions, lr 1e-3, all tested, one thread."
    )
    keys = list(dict.fromkeys(key for run in runs for key in run["settings"]))
    head = ["run", *(f"`{key}`" for key in keys), "tokens", "right, first and last 5 steps"]
    head += ["lambda", "highest evidence", "most alike, sd"]
    yield table(head, (row(run, keys) for run in runs))


def row(run: dict[str, Any], keys: Iterable[str]) -> list[object]:
    return [
        run["number"],
        *(run["settings"].get(key, "") for key in keys),
        f"{run['tokens']:,}",
        f"{run['first']:.0%}, {run['last']:.0%}",
        f"{run['lambda']:+.4f}",
        f"{run['evidence']:.2f}",
        f"{run['shared']:.1f}",
    ]


if __name__ == "__main__":
    main()
