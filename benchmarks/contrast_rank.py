"""Does the cosine of `retrain contrast` foretell which arms a campaign tells apart?

    python benchmarks/contrast_rank.py        # 10 minutes on one core; continues where it stopped

Eight arms are drawn of `POOL` and twenty pairs of them, by a fixed seed. Each arm is trained on the
lab with the same seeds, so a pair is a short campaign, and pairs share arms. One batch at step 0
gives the cosine between the gradients of each pair; the rest is rank correlation.
"""

import argparse
import json
import subprocess
import sys
from itertools import combinations
from pathlib import Path

import numpy as np
from report import add_output, load_average, publish, table

from retrain.analysis.runs import campaign_runs
from retrain.system import Json, toml_value

POOL: dict[str, Json] = {
    "grpo": {"advantage_mode": "grpo", "transform_mode": "none"},
    "grpo_std": {"advantage_mode": "grpo_std", "transform_mode": "none"},
    "maxrl": {"advantage_mode": "maxrl", "transform_mode": "none"},
    "gtpo-1": {"advantage_mode": "maxrl", "transform_mode": "gtpo", "gtpo.beta": 1.0},
    "hicra-1": {"advantage_mode": "maxrl", "transform_mode": "gtpo_hicra", "gtpo.beta": 1.0},
    "mask": {
        "advantage_mode": "grpo",
        "transform_mode": "none",
        "algorithm.surprisal_mask_rho": 0.02,
    },
    "nsr": {
        "algorithm_mode": "w_reinforce",
        "algorithm.advantage_params": {"right": 0.0, "wrong": 1.0},
    },
    "psr": {
        "algorithm_mode": "w_reinforce",
        "algorithm.advantage_params": {"right": 1.0, "wrong": 0.0},
    },
    "w_reinforce": {"algorithm_mode": "w_reinforce"},
    "pkpo": {"algorithm_mode": "pkpo"},
    "opo": {"algorithm_mode": "opo"},
    "asymre": {"algorithm_mode": "asymre"},
    "lite_ppo": {"algorithm_mode": "lite_ppo"},
    "dro": {"algorithm_mode": "dro"},
    "sequence": {
        "advantage_mode": "grpo",
        "transform_mode": "none",
        "loss.aggregation": "sequence_mean",
    },
    "luspo": {"algorithm_mode": "luspo"},
}
DRAW, ARMS, PAIRS = 29, 8, 20
SEEDS = [1, 2]
STEPS = 12
BASE = """
[model]
model = "lab"
lora_rank = 16

[data]
source = "lab"
difficulty = 1

[reward]
type = "match"

[training]
batch_size = 16
group_size = 4
max_tokens = 96
temperature = 1.0
lr = 1e-3
lr_schedule = "linear"

[loss]
max_grad_norm = 1.0

[evaluation]
max_examples = 256
samples = 2
"""
PROMPTS = 32
"""Prompts of the contrast's batch."""
PERMUTATIONS = 10_000


def drawn() -> tuple[list[str], list[tuple[str, str]]]:
    """The arms, and the pairs of them, fixed before any run."""
    rng = np.random.default_rng(DRAW)
    arms = [str(name) for name in rng.choice(list(POOL), ARMS, replace=False)]
    every = list(combinations(arms, 2))
    chosen = sorted(rng.choice(len(every), PAIRS, replace=False))
    return arms, [every[number] for number in chosen]


def run(folder: Path, arms: list[str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    file, runs = folder / "arms.toml", folder / "runs"
    lines = ["[campaign]", f"seeds = {SEEDS}", f"max_steps = {STEPS}"]
    for name in arms:
        settings = POOL[name] | {"label": name}
        lines += ["", "[[campaign.conditions]]"]
        lines += [f"{key} = {toml_value(value)}" for key, value in settings.items()]
    lines += ["", "[logging]", f"log_dir = {toml_value(str(runs))}"]
    file.write_text("\n".join(lines) + "\n" + BASE, encoding="utf-8")
    resumed = ["--resume", str(runs)] if (runs / "manifest.json").is_file() else []
    _retrain(str(file), "--campaign-parallel", "--campaign-max-workers", "1", *resumed)
    seen = folder / "contrast.json"
    if not seen.is_file():
        words = "contrast", str(file), "--trust", "--prompts", str(PROMPTS), "--json"
        seen.write_text(_retrain(*words), encoding="utf-8")


def _retrain(*words: str) -> str:
    command = [sys.executable, "-m", "retrain", *words]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def scores(folder: Path) -> dict[str, list[float]]:
    """Arm -> held-out pass@1 at the end, seed by seed."""
    found: dict[str, dict[int, float]] = {}
    for one in campaign_runs(folder / "runs"):
        lines = one.folder.evaluation.read_text(encoding="utf-8").splitlines()
        problems = [json.loads(line) for line in lines]
        tries = sum(problem["samples"] for problem in problems)
        right = sum(problem["correct"] for problem in problems)
        found.setdefault(one.condition, {})[one.seed] = right / tries
    return {arm: [own[seed] for seed in SEEDS] for arm, own in found.items()}


def ranks(values: np.ndarray) -> np.ndarray:
    """[n] ranks from 0; equal values share the mean of theirs."""
    places = [(values < value).sum() + ((values == value).sum() - 1) / 2 for value in values]
    return np.array(places, dtype=np.float64)


def correlation(one: np.ndarray, other: np.ndarray) -> float:
    return float(np.corrcoef(ranks(one), ranks(other))[0, 1])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=Path("logs/contrast_rank"))
    add_output(parser)
    arguments, load = parser.parse_args(), load_average()
    arms, pairs = drawn()
    run(arguments.folder, arms)
    seen = json.loads((arguments.folder / "contrast.json").read_text(encoding="utf-8"))
    held_out = scores(arguments.folder)
    cosines = np.array(seen["cosines"])
    means = np.array([np.mean(held_out[arm]) for arm in arms])
    left, right = ([arms.index(pair[side]) for pair in pairs] for side in (0, 1))
    apart = 1 - cosines[left, right]
    found = correlation(apart, abs(means[left] - means[right]))
    rng = np.random.default_rng(0)
    shuffled = [rng.permutation(means) for _ in range(PERMUTATIONS)]
    chance = [correlation(apart, abs(one[left] - one[right])) for one in shuffled]
    p = (1 + sum(value >= found - 1e-12 for value in chance)) / (1 + PERMUTATIONS)
    sentence = (
        f"Spearman's rank correlation of 1 - cosine with |difference|, over {PAIRS} pairs:"
        f" **{found:+.2f}**; {100 * p:.1f}% of {PERMUTATIONS:,} permutations of the arms' scores give"
        " as much or more."
    )
    plan = (
        f"{ARMS} of {len(POOL)} arms and {PAIRS} of their pairs by seed {DRAW}; each arm {STEPS} steps"
        f" with the seeds {SEEDS}; cosines of {PROMPTS} prompts at step 0. The rest of the settings:"
        f"\n\n```toml{BASE}```"
    )
    by_arm = [
        (arm, *(f"{score:.1%}" for score in held_out[arm]), f"{one['halves']:.2f}")
        for arm, one in zip(arms, seen["arms"], strict=True)
    ]
    by_pair = [
        (*pair, f"{cosines[i, j]:.4f}", f"{100 * (means[j] - means[i]):+.1f}")
        for pair, i, j in zip(pairs, left, right, strict=True)
    ]
    paragraphs = [
        plan,
        sentence,
        table(("pair", "", "cosine", "difference, points"), sorted(by_pair, key=lambda r: r[2])),
        table(("arm", *(f"pass@1, seed {seed}" for seed in SEEDS), "halves"), by_arm),
    ]
    publish("contrast-rank", "Cosine and later difference", paragraphs, load, arguments.output)


if __name__ == "__main__":
    main()
