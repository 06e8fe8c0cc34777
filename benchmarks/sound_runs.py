"""How many sound runs a guard stops: `python benchmarks/sound_runs.py` makes 200 short whole runs
on the lab, prints a table and writes it to results/.

The settings of each run are drawn from SETTINGS by its number, so that nobody chose them. Each run
has the parity gate and every other guard that is on by default. What each one did is
kept in `--state`, so that a benchmark that was stopped goes on where it was.
"""

import argparse
import io
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Iterable
from contextlib import nullcontext, redirect_stderr, redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from report import add_output, load_average, publish, table
from scipy import stats

from retrain import train
from retrain.config import TrainConfig
from retrain.errors import ConfigurationError, Interrupted, RetrainError

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
from runs import lines, small
from split import two_devices

SETTINGS: dict[str, tuple[Any, ...]] = {
    "training.temperature": (0.3, 0.6, 0.8, 1.0, 1.2),
    "training.max_tokens": (24, 48, 96),
    "training.batch_size": (2, 4),
    "training.group_size": (2, 4, 8),
    "training.max_steps": (2, 3),
    "training.lr": (4e-5, 1e-3, 5e-3),
    "training.minibatches": (1, 2),
    "training.updates_per_batch": (1, 2),
    "training.max_resamples": (0, 2),
    "training.top_p": (1.0, 1.0, 0.9),
    "lora.dropout": (0.0, 0.0, 0.1),
    "lora.rank": (1, 4, 16),
    "inference.dtype": ("auto", "auto", "bf16"),
    "backend.devices": ("cpu", "cpu", "gpu:0,gpu:1"),
    "data.difficulty": (1, 3, 5),
    "algorithm.advantage_mode": ("grpo", "maxrl", "rloo", "reinforce"),
    "algorithm.transform_mode": ("none", "gtpo", "gtpo_sepa"),
    "loss.mode": ("importance_sampling", "ppo", "gspo", "cispo"),
    "loss.kl_coef": (0.0, 0.01),
    "loss.old_logprobs": ("sampler", "recomputed"),
}
"""Values that are drawn with equal probability; two gpus stand for split mode on this CPU. Where 24
tokens cut every completion the task is hopeless, and at temperature 0.3 it is nearly solved."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--first", type=int, default=0, help="the run to begin with")
    parser.add_argument("--state", type=Path, default=Path("sound-runs.jsonl"))
    add_output(parser)
    given, load, began = parser.parse_args(), load_average(), time.monotonic()
    torch.set_num_threads(1)
    for number in range(given.first, given.runs):
        if number not in {run["number"] for run in kept(given.state)}:
            with given.state.open("a", encoding="utf-8") as state:
                state.write(json.dumps(made(number)) + "\n")
    by_number = {run["number"]: run for run in kept(given.state)}
    runs = [run for number, run in sorted(by_number.items()) if number < given.runs]
    publish(
        "sound-runs",
        "Sound runs that a guard stopped",
        [*paragraphs(runs), f"One thread; the last part took {time.monotonic() - began:.0f} s."],
        load,
        given.output,
    )


def kept(state: Path) -> list[dict[str, Any]]:
    return lines(state) if state.exists() else []


def drawn(number: int, folder: Path) -> tuple[dict[str, Any], TrainConfig]:
    """The first settings of a run's stream that the configuration does not refuse."""
    rng = random.Random(number)
    while True:
        chosen = {key: rng.choice(values) for key, values in SETTINGS.items()}
        sections: dict[str, Any] = {
            "reward": {"type": "match"},
            "training": {"seed": number, "save_every": 0},
        }
        try:
            return chosen, lab_run(folder, chosen, sections)
        except ConfigurationError:
            continue


def lab_run(
    folder: Path, chosen: dict[str, Any], sections: dict[str, dict[str, Any]]
) -> TrainConfig:
    """Return a small run with the chosen values of "section.key" above its sections."""
    for key, value in chosen.items():
        section, name = key.split(".")
        sections.setdefault(section, {})[name] = value
    sections["model"] = {"lora_rank": sections["lora"].pop("rank")}
    return small(folder, **sections)


def made(number: int) -> dict[str, Any]:
    """Take a run, and return its settings, the sentence that stopped it, and what it was like."""
    with TemporaryDirectory() as scratch:
        folder = Path(scratch) / "run"
        chosen, config = drawn(number, folder)
        split = two_devices() if "," in config.backend.devices else nullcontext()
        said, stopped = io.StringIO(), ""
        try:
            with split, redirect_stdout(said), redirect_stderr(said):
                train(config, quiet=True)
        except Interrupted:
            raise
        except RetrainError as error:
            stopped = f"{type(error).__name__}: {error}"
        metrics = folder / "metrics.jsonl"
        records = lines(metrics) if metrics.exists() else []
    found = {
        "steps": len(records),
        "correct": [record["correct_rate"] for record in records],
        "trained": sum(record["num_datums"] > 0 for record in records),
        "redrawn": sum(record.get("groups_redrawn") or 0 for record in records),
    }
    print(number, f"{len(records)} steps", stopped, flush=True)
    return {"number": number, "settings": chosen, "stopped": stopped} | found


def paragraphs(runs: list[dict[str, Any]]) -> Iterable[str]:
    stops = [run for run in runs if run["stopped"]]
    low, high = stats.binomtest(len(stops), len(runs)).proportion_ci(method="wilson")
    yield (
        f"{len(stops)} of {len(runs)} whole sound runs stopped; Wilson interval (95%)"
        f" {100 * low:.1f}% to {100 * high:.1f}%. Lab model, two or three steps each, with the"
        " parity gate."
    )
    yield from (f"Run {run['number']}: {run['stopped']}" for run in stops)
    cells = [(key, value) for key, values in SETTINGS.items() for value in dict.fromkeys(values)]
    counts = Counter(cell for run in runs for cell in run["settings"].items())
    of_stops = Counter(cell for run in stops for cell in run["settings"].items())
    rows = [[f"`{key}`", value, counts[key, value], of_stops[key, value]] for key, value in cells]
    yield table(["key", "value", "runs", "stopped"], [*rows, *kinds(runs)])


def kinds(runs: list[dict[str, Any]]) -> Iterable[list[object]]:
    """Rows of what the runs were like."""
    named = {
        "no completion right": [run for run in runs if not any(run["correct"])],
        "most completions right": [
            run for run in runs if run["steps"] and min(run["correct"], default=0) > 0.5
        ],
        "a group redrawn": [run for run in runs if run["redrawn"]],
        "a step that trained nothing": [run for run in runs if run["trained"] < run["steps"]],
    }
    for name, chosen in named.items():
        yield [name, "", len(chosen), sum(bool(run["stopped"]) for run in chosen)]


if __name__ == "__main__":
    main()
