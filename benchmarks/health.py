"""How early a run that collapses can be told from a sound one: `python benchmarks/health.py` makes
200 sound runs and 50 planted collapses on the lab, and writes a table of each warning's rates to
results/.

A collapse is planted in one of three ways: a learning rate that rises tenfold, a reward that pays
length, a reward that pays repetition, which drives the entropy down. A warning is false when it
names a sound run. It is in time when it names a collapse ten steps before held-out accuracy has
halved. What each run recorded is kept in `--state`, so that a benchmark that was stopped goes on
where it was; `--only I/N` makes the I-th part of N of the runs.
"""

import argparse
import json
import math
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from inspect import getdoc
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from report import add_output, load_average, publish, table

from retrain import train
from retrain.config import TrainConfig
from retrain.errors import ConfigurationError

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
from runs import lines
from sound_runs import lab_run

STEPS, EVERY, PROBLEMS, MAX_TOKENS, BATCH, GROUP = 50, 5, 64, 96, 8, 4
SOLVED = 10
"""Held-out problems that a run must have solved before it can collapse."""
AHEAD = 10

SETTINGS: dict[str, tuple[Any, ...]] = {
    "training.temperature": (0.8, 1.0, 1.0, 1.2),
    "training.lr": (1e-4, 3e-4, 1e-3),
    "training.lr_schedule": ("constant", "linear"),
    "lora.rank": (4, 16),
    "data.difficulty": (1, 1, 2, 5),
    "algorithm.advantage_mode": ("grpo", "grpo_std", "maxrl", "rloo"),
    "algorithm.transform_mode": ("none", "none", "gtpo"),
    "loss.mode": ("importance_sampling", "ppo"),
    "loss.kl_coef": (0.0, 0.01),
}
"""Values that are drawn with equal probability."""


PLANTED = {"rate": "match", "length": "health.longer", "entropy": "health.repeated"}
"""The ways to plant a collapse, and the reward of each."""


def longer(response: str, _: str) -> float:
    """Pay the length of what stands before the answer."""
    return len(response.partition("\\boxed")[0]) / MAX_TOKENS


def repeated(response: str, _: str) -> float:
    """Pay the share of the most frequent character."""
    most = Counter(response).most_common(1)
    return sum(count for _, count in most) / max(len(response), 1)


def drawn(number: int, planted: str, folder: Path) -> tuple[dict[str, Any], TrainConfig]:
    """The first settings of a run's stream that the configuration does not refuse."""
    rng = random.Random(f"{planted} {number}")
    while True:
        chosen = {key: rng.choice(values) for key, values in SETTINGS.items()}
        if planted:
            # At the smallest rate nothing collapses in so few steps, and what is not solved before
            # cannot collapse.
            chosen["training.lr"] = max(chosen["training.lr"], 3e-4)
            chosen["data.difficulty"] = 1
        sections: dict[str, Any] = {
            "reward": {"type": PLANTED.get(planted, "match")},
            "training": {
                "seed": number,
                "save_every": 0,
                "max_steps": STEPS,
                "max_examples": 0,
                "batch_size": BATCH,
                "group_size": GROUP,
                "max_tokens": MAX_TOKENS,
            },
            "evaluation": {
                "every": EVERY,
                "at_start": True,
                "max_examples": PROBLEMS,
                "reward": "match",
            },
        }
        if planted == "rate":
            rate = chosen["training.lr"]
            sections["schedule"] = {"training.lr": [[10, rate], [30, 10 * rate]]}
        try:
            return chosen, lab_run(folder, chosen, sections)
        except ConfigurationError as error:
            print(number, error, file=sys.stderr)


def made(number: int, planted: str) -> dict[str, Any]:
    """Take a run, and return its settings and what it recorded."""
    began = time.monotonic()
    with TemporaryDirectory() as scratch:
        folder = Path(scratch) / "run"
        chosen, config = drawn(number, planted, folder)
        with (
            (Path(scratch) / "said").open("w") as said,
            redirect_stdout(said),
            redirect_stderr(said),
        ):
            train(config, quiet=True, skip_parity=True)
        records = lines(folder / "metrics.jsonl")
        evaluated = lines(folder / "evaluation.jsonl")
    held_out: dict[int, list[int]] = {}
    for row in evaluated:
        held_out.setdefault(row["step"], []).append(row["correct"])
    print(number, planted or "sound", f"{time.monotonic() - began:.0f} s", flush=True)
    return {
        "number": number,
        "planted": planted,
        "settings": chosen,
        "held_out": [[step, sum(right)] for step, right in held_out.items()],
        "series": {
            name: [float(f"{record[name] or 0:.4g}") for record in records] for name in RECORDED
        },
    }


RECORDED = (
    "mean_reward",
    "correct_rate",
    "entropy_mean",
    "surprisal_mean",
    "completion_tokens_mean",
    "truncated_fraction",
    "answer_found_rate",
    "grad_norm",
    "kl_mean",
    "logprob_diff_mean",
    "length_reward_z",
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sound", type=int, default=200)
    parser.add_argument("--planted", type=int, default=51)
    parser.add_argument("--only", default="0/1")
    parser.add_argument("--state", type=Path, default=Path("health.jsonl"))
    add_output(parser)
    given, load = parser.parse_args(), load_average()
    torch.set_num_threads(1)
    part, parts = map(int, given.only.split("/"))
    kinds = list(PLANTED)
    orders = [(number, kinds[number % 3]) for number in range(given.planted)]
    sound = [(number, "") for number in range(given.sound)]
    # Every fifth run is planted, so that a part of them says something about both.
    mixed = [
        order
        for i in range(max(len(orders), len(sound) // 4 + 1))
        for order in (*orders[i : i + 1], *sound[4 * i : 4 * i + 4])
    ]
    done = {(run["number"], run["planted"]) for run in kept(given.state)}
    for order in mixed[part::parts]:
        if order not in done:
            with given.state.open("a", encoding="utf-8") as state:
                state.write(json.dumps(made(*order)) + "\n")
    if parts == 1:
        title = "Warnings of a collapse: false ones, and those in time"
        publish("health", title, paragraphs(kept(given.state)), load, given.output)


def kept(state: Path) -> list[dict[str, Any]]:
    return lines(state) if state.exists() else []


# -- what a warning would have said ----------------------------------------------------------------


def halved(run: dict[str, Any]) -> int | None:
    """The step at which held-out accuracy was at most half of the best before."""
    best = 0
    for step, right in run["held_out"]:
        if best >= SOLVED and right <= best / 2:
            return int(step)
        best = max(best, right)
    return None


def length_pays_on(run: dict[str, Any], step: int) -> bool:
    """Over ten steps, longer completions of a group got more reward by more than six standard
    deviations of shuffled rewards.
    """
    return sum(run["series"]["length_reward_z"][step - 9 : step + 1]) / math.sqrt(10) > 6


def success_falls(run: dict[str, Any], step: int) -> bool:
    """The correct rate of five steps is five standard errors below the best of ten steps."""
    rates = run["series"]["correct_rate"]
    best = max(statistics.fmean(rates[at - 9 : at + 1]) for at in range(9, step + 1))
    error = math.sqrt(max(best * (1 - best), 0.01) / (5 * BATCH * GROUP))
    return best - statistics.fmean(rates[step - 4 : step + 1]) > 5 * error


def entropy_gone(run: dict[str, Any], step: int) -> bool:
    """The entropy is below a fifth of its first ten steps, and held-out accuracy fell."""
    entropies = run["series"]["entropy_mean"]
    return entropies[step] < statistics.fmean(entropies[:10]) / 5 and _falls(run, step, 1)


def reward_misleads(run: dict[str, Any], step: int) -> bool:
    """The reward rose over fifteen steps, and held-out accuracy fell three times."""
    rewards = run["series"]["mean_reward"]
    first, last = rewards[max(step - 14, 0) : step - 4], rewards[step - 4 : step + 1]
    return statistics.fmean(last) > statistics.fmean(first) and _falls(run, step, 3)


def _falls(run: dict[str, Any], step: int, times: int) -> bool:
    """Return True if each of the last evaluations is below the one before it."""
    known = [right for at, right in run["held_out"] if at <= step + 1][-times - 1 :]
    return len(known) > times and all(later < earlier for earlier, later in pairwise(known))


WARNINGS = (length_pays_on, success_falls, entropy_gone, reward_misleads)


def paragraphs(runs: list[dict[str, Any]]) -> Iterator[str]:
    planted = [run for run in runs if run["planted"]]
    collapsed = [run for run in planted if halved(run) is not None]
    sound = [run for run in runs if not run["planted"] and halved(run) is None]
    yield (
        f"{len(sound)} sound runs; {len(planted)} runs with a planted fault, of which"
        f" {len(collapsed)} collapsed; held-out accuracy of {len(runs) - len(planted) - len(sound)}"
        f" others halved unasked. A warning is in time {AHEAD} steps before the evaluation at which"
        " accuracy has halved."
    )
    rows = []
    for warns in WARNINGS:
        in_time = [run for run in collapsed if named(run, warns) + AHEAD <= (halved(run) or 0)]
        at_all = [run for run in planted if named(run, warns) < math.inf]
        false = sum(named(run, warns) < math.inf for run in sound)
        rows.append([f"`{warns.__name__}`", false, *_by_kind(in_time), *_by_kind(at_all)])
    rows.append(["of", len(sound), *_by_kind(collapsed), *_by_kind(planted)])
    kinds = (f"{when}, {kind}" for when in ("in time", "at all") for kind in PLANTED)
    yield table(["warning", "false", *kinds], rows)
    yield from (f"`{warns.__name__}`: {getdoc(warns)}" for warns in WARNINGS)


def named(run: dict[str, Any], warns: Callable[[dict[str, Any], int], bool]) -> float:
    """Return the first step at which a warning speaks; infinity if it does not."""
    return next((step for step in range(9, STEPS) if warns(run, step)), math.inf)


def _by_kind(runs: list[dict[str, Any]]) -> list[int]:
    of = Counter(run["planted"] for run in runs)
    return [of[kind] for kind in PLANTED]


if __name__ == "__main__":
    main()
