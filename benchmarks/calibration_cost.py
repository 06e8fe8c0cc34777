"""Processor time of `[inference] calibration` beside a learning pass, with one thread.

    export OMP_NUM_THREADS=1
    python benchmarks/calibration_cost.py
    python benchmarks/calibration_cost.py --model models/smollm2-135m --prompts 4 --max-tokens 48

All completions of one step are learned from, and some are tested, the order alternating. A run
learns only from groups that are neither solved nor hopeless, so its passes are shorter.
"""

import argparse
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
from report import add_output, load_average, publish, table

from retrain.config import TrainConfig, config_from_mapping
from retrain.config.values import MAX_TESTED
from retrain.inference_engine.base import Truncation
from retrain.run.calibration import AT_ONCE, ONE_IN, TOLERANCE, paired_rows
from retrain.run.dialogues import Watcher
from retrain.run.parts import Parts, load_parts, training_plan
from retrain.types import Group, Row


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="lab")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--group", type=int, default=4, help="completions of each prompt")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--pairs", type=int, default=10)
    add_output(parser)
    given, load = parser.parse_args(), load_average()
    config = configuration(given)
    with closing(load_parts(config, None, lambda _: None)) as parts:
        if parts.backend.choices.workers > 1:
            parser.error("several processes would share the work; set OMP_NUM_THREADS=1")
        groups = completions(parts, config)
        drawn = sum(map(len, groups))
        # At the default a test of AT_ONCE in some steps, or of more in each.
        default = max(AT_ONCE, drawn // ONE_IN)
        times = [
            pair_of(parts, config, groups, (default, min(MAX_TESTED, drawn)), number)
            for number in range(given.pairs)
        ]
    learning, usual, most = np.array(times).T
    rows = [
        row_of("unset", default, usual, learning, drawn / ONE_IN / default),
        row_of(str(MAX_TESTED), min(MAX_TESTED, drawn), most, learning, 1.0),
    ]
    what = (
        f"{given.model}: {drawn} completions ({given.prompts} x {given.group}) of at most"
        f" {given.max_tokens} tokens, temperature 1; a learning pass over all of them takes"
        f" {np.median(learning):.3f} s (median of {given.pairs}, {learning.min():.3f} to"
        f" {learning.max():.3f}). Processor time of one thread; the share is the median of the"
        " pairs', lowest and highest in brackets, over all steps of a run."
    )
    head = ["calibration_completions", "tested", "seconds", "in one step of", "share of a pass"]
    text = [what, table(head, rows)]
    name = Path(given.model).name
    publish(f"calibration-cost-{name}", "Calibration: its cost", text, load, given.output)


def configuration(given: argparse.Namespace) -> TrainConfig:
    return config_from_mapping(
        {
            "model": {"model": given.model, "lora_rank": 16},
            "data": {"source": "lab"},
            "reward": {"type": "match"},
            "backend": {"devices": "cpu"},
            "training": {
                "seed": 0,
                "max_examples": given.prompts,
                "batch_size": given.prompts,
                "group_size": given.group,
                "max_tokens": given.max_tokens,
                "temperature": 1.0,
                "lr": 1e-9,  # each pass is of the same weights
            },
            "logging": {"log_dir": "nowhere"},
        }
    )


def completions(parts: Parts, config: TrainConfig) -> list[Group]:
    batch = parts.prompts.batch(0, config.training.batch_size, 0)
    watcher = Watcher(check=lambda: None, completion=lambda _: None)
    return parts.sampler.draw(batch, 0, training_plan(config.training), watcher).first_draws


def pair_of(
    parts: Parts, config: TrainConfig, groups: list[Group], counts: tuple[int, ...], number: int
) -> list[float]:
    """Seconds of a learning pass over all completions, and of a test of each of `counts`."""
    learned = [
        row
        for group in groups
        for one in group.trajectories
        for row in Row.of(
            group.prompt,
            one,
            np.full(one.num_actions, 1.0 if one.sample % 2 else -1.0, np.float32),
            group.slot,
        )
    ]
    works: list[Callable[[], object]] = [lambda: parts.backend.train(learned, number)]
    for count in counts:
        inference = config.inference.model_copy(update={"calibration_completions": count})
        rows = paired_rows(groups, inference, 0, number)
        works.append(
            lambda rows=rows: parts.backend.tempered_scores(  # type: ignore[misc]
                rows, 1.0, Truncation(), TOLERANCE
            )
        )
    seconds = [0.0] * len(works)
    places = range(len(works))
    for place in places if number % 2 else reversed(places):
        start = time.process_time()
        works[place]()
        seconds[place] = time.process_time() - start
    return seconds


def row_of(
    key: str, count: int, own: np.ndarray, learning: np.ndarray, steps: float
) -> list[object]:
    """`steps`: the share of the steps that test."""
    shares = 100 * steps * own / learning
    return [
        key,
        count,
        f"{np.median(own):.3f}",
        f"{1 / steps:g}",
        f"{np.median(shares):.1f}% ({shares.min():.1f} to {shares.max():.1f})",
    ]


if __name__ == "__main__":
    main()
