"""Does a contrast before the first step say which campaigns will find a difference?

    python benchmarks/contrast_predicts.py --output logs/contrast_predicts --seeds 3

Short campaigns on the lab between grpo and each of the arms below. For each, the cosine of one
batch's gradients before the first step, and the mean held-out difference after STEPS steps. It
prints both and their rank correlation. A run that has ended is not made again.
"""

import argparse
import json
from pathlib import Path

import numpy as np
from scipy.stats import spearmanr

from retrain import train
from retrain.config import config_from_mapping, replaced
from retrain.contrast.batch import Arm, opened, read_arms, take_batch
from retrain.contrast.gradients import contrast
from retrain.records.run_folder import RunFolder
from retrain.system import read_object

STEPS = 10
ARMS = [
    {"advantage_mode": "grpo", "transform_mode": "none"},
    {"advantage_mode": "rloo", "transform_mode": "none"},
    {"advantage_mode": "grpo_std", "transform_mode": "none"},
    {"advantage_mode": "maxrl", "transform_mode": "none"},
    {"advantage_mode": "grpo", "transform_mode": "gtpo", "gtpo.beta": 1.0},
    {"advantage_mode": "maxrl", "transform_mode": "gtpo_hicra"},
]
BASE = {
    "model": {"model": "lab", "lora_rank": 16},
    "data": {"source": "lab"},
    "reward": {"type": "match"},
    "training": {
        "batch_size": 16,
        "group_size": 4,
        "max_tokens": 128,
        "temperature": 1.0,
        "lr": 1e-3,
        "lr_schedule": "linear",
        "max_steps": STEPS,
        "save_every": 0,
    },
    "loss": {"max_grad_norm": 1.0},
    "evaluation": {"max_examples": 200, "at_end": True},
}


def main(output: Path, seeds: int) -> None:
    output.mkdir(parents=True, exist_ok=True)
    campaign = {"seeds": list(range(seeds)), "conditions": ARMS, "max_steps": STEPS}
    base = config_from_mapping({**BASE, "campaign": campaign, "logging": {"log_dir": str(output)}})
    arms = read_arms(base, None, trust=False, say=print)
    with opened(output / "none.toml", arms[0].config, None, print) as (parts, backend, state):
        batch = take_batch(output / "none.toml", parts, state, prompts=32, texts=False, say=print)
        seen = contrast(parts, backend, batch, arms, seeds, print)
    (output / "contrast.json").write_text(json.dumps(seen.to_json()))
    accuracy = np.array([[ended(output, arm, seed) for seed in range(seeds)] for arm in arms])
    rows = []
    for arm, found in zip(seen.arms[1:], accuracy[1:], strict=True):
        difference = 100 * (found - accuracy[0])
        rows.append((1 - arm.cosine, abs(float(difference.mean()))))
        print(
            f"{arm.label}: cosine {arm.cosine:.4f}, halves {arm.halves:.2f}, difference"
            f" {difference.mean():+.1f} pp (seeds {np.round(difference, 1).tolist()})"
        )
    one, other = zip(*rows, strict=True)
    correlation = spearmanr(one, other)
    print(
        f"Rank correlation of 1 - cosine and |difference| over {len(rows)} campaigns of {seeds}"
        f" seeds: {correlation.statistic:+.2f} (p {correlation.pvalue:.2f})."
    )


def ended(output: Path, arm: Arm, seed: int) -> float:
    """Held-out pass@1 at the end of a run of this arm."""
    folder = RunFolder(output / f"{arm.label}_s{seed}")
    if not folder.summary.is_file():
        keys = {"logging.log_dir": str(folder.path), "training.seed": seed}
        train(replaced(arm.config, keys), quiet=True, skip_parity=True)
    found = float(read_object(folder.summary)["evaluation"]["after"]["pass@1"])
    print(f"{arm.label}, seed {seed}: {found:.1%}", flush=True)
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("logs/contrast_predicts"))
    parser.add_argument("--seeds", type=int, default=3)
    main(**vars(parser.parse_args()))
