"""How often `[inference] calibration` warns of a sound sampler: `python
benchmarks/sampling_calibration.py` prints a table and writes it to results/.

Logits of the lab model are recorded once, after tokens that it wrote. Streams are then drawn anew
from them, at the temperature or beside it, and tested after every step.
"""

import argparse
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from report import add_output, load_average, publish, table
from scipy import stats

from retrain.model.calibration import tempered_scores
from retrain.model.head import Head
from retrain.run.calibration import TOLERANCE, Calibration
from retrain.run.dialogues import Watcher
from retrain.run.parts import load_parts, training_plan

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
from runs import small

FACTORS = (1.0, 0.97, 1.03, 0.9, 1.1)
"""Temperatures of the sampler; 1 is reported. Within the tolerance are the first three."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--tokens", type=int, default=500, help="tokens of a step")
    add_output(parser)
    given, load = parser.parse_args(), load_average()
    logits = recorded_logits()
    vocabulary = logits.shape[1]
    every = torch.arange(vocabulary).repeat(len(logits))
    # [positions, V, 12]: the scores of each token that could be drawn
    scores = tempered_scores(
        Head(torch.eye(vocabulary)),
        logits.repeat_interleave(vocabulary, 0),
        every,
        1.0,
        TOLERANCE,
        0,
        1.0,
        0.0,
    ).view(len(logits), vocabulary, -1)
    rows = []
    for factor in FACTORS:
        random = torch.Generator().manual_seed(0)
        p = (logits / factor).softmax(-1)
        found = [
            warned_at(p, scores, given.steps, given.tokens, random) for _ in range(given.streams)
        ]
        warned = [step for step in found if step]
        low, high = stats.binomtest(len(warned), len(found)).proportion_ci(method="wilson")
        median = np.median(warned) if warned else "-"
        share = f"{100 * low:.3f}% to {100 * high:.3f}%"
        rows.append([factor, f"{len(warned)} of {len(found)}", share, median])
        print(rows[-1], flush=True)
    what = (
        f"Streams warned of within {given.steps} steps of {given.tokens} tokens, drawn from"
        f" {len(logits):,} recorded positions of the lab at temperature 1, tolerance {TOLERANCE}."
    )
    head = ["sampler's temperature", "warned of", "Wilson 95%", "median step"]
    publish(
        "sampling-calibration",
        "Calibration: warnings by the sampler's temperature",
        [what, table(head, rows)],
        load,
        given.output,
    )


@torch.no_grad()
def recorded_logits() -> torch.Tensor:
    """[positions, V] logits of the lab after its own completions."""
    training = {"batch_size": 8, "group_size": 4, "max_tokens": 64}
    config = small(Path("nowhere"), training=training)
    with closing(load_parts(config, None, lambda _: None)) as parts:
        backend: Any = parts.backend
        watcher = Watcher(check=lambda: None, completion=lambda _: None)
        plan = replace(training_plan(config.training), seed=7)
        groups = parts.sampler.draw(parts.prompts.batch(0, 8, 0), 0, plan, watcher).groups
        found = []
        for group in groups:
            for one in group.trajectories:
                ids = np.concatenate([group.prompt.token_ids, one.token_ids]).astype(np.int64)
                logits = backend._adapter.peft_model(torch.from_numpy(ids)[None]).logits[0]
                found.append(logits[len(group.prompt.token_ids) - 1 : -1].float())
    return torch.cat(found)


def warned_at(
    p: torch.Tensor, scores: torch.Tensor, steps: int, tokens: int, random: torch.Generator
) -> int:
    """The step, from 1, at which a stream is warned of; 0 if at none."""
    total = Calibration()
    for number in range(1, steps + 1):
        places = torch.randint(len(p), (tokens,), generator=random)
        drawn = torch.multinomial(p[places], 1, generator=random)[:, 0]
        step = Calibration.of([scores[places, drawn].numpy()])
        assert step is not None
        total = total.after(step)
        if total.warned:
            return number
    return 0


if __name__ == "__main__":
    main()
