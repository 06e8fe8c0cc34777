"""What `retrain compare` says of five campaigns.

    python scripts/five_campaigns.py --output logs/five

The campaigns are simulated and written in the real format: a clear winner, a null, a condition of
which one run collapses, one whose answers could not all be judged, and one that loses runs.
The texts are those of tests/data/five_campaigns.md.
"""

import argparse
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from campaigns import write_manifest, write_run  # noqa: E402

from retrain.analysis.compare import compare_campaign  # noqa: E402
from retrain.analysis.comparison_text import to_text  # noqa: E402
from retrain.analysis.verdict import TestSettings  # noqa: E402
from retrain.records.entries import EvaluationRecord  # noqa: E402

SEEDS = (42, 101, 202, 303, 404, 505, 606, 707)
PROBLEMS, SAMPLES = 200, 4
WIDTH = 120
BASE, OTHER = "grpo+none", "maxrl+none"


def campaign(
    folder: Path,
    effects: Mapping[str, float],
    *,
    collapsed: tuple[str, int] | None = None,
    unjudged: Mapping[str, float] | None = None,
    failed: Mapping[str, tuple[int, ...]] | None = None,
) -> Path:
    """`effects` are in logits; `unjudged` is the fraction of a condition's wrong answers that were
    lost, `failed` its failed seeds.
    """
    rng = np.random.default_rng(7)
    difficulty = rng.normal(0.3, 1.3, PROBLEMS)
    entries = []
    for seed in SEEDS:
        shared = rng.normal(0, 0.1)
        for label, effect in effects.items():
            logits = (
                difficulty
                + shared
                + effect
                + rng.normal(0, 0.1)
                - (5.0 if collapsed == (label, seed) else 0.0)
            )
            right = rng.binomial(SAMPLES, 1 / (1 + np.exp(-logits)))
            lost = rng.binomial(SAMPLES - right, (unjudged or {}).get(label, 0.0))
            advantage, _, transform = label.partition("+")
            write_run(
                folder / "runs" / f"{label}_s{seed}",
                seed,
                held_out=list(_answers(right, lost)),
                finished=seed not in (failed or {}).get(label, ()),
                seconds=float(rng.normal(2300, 60)),
                tokens=int(rng.normal(4.1e6, 5e4)),
                algorithm={"advantage_mode": advantage, "transform_mode": transform},
                evaluation={"samples": SAMPLES},
            )
            status = (
                {"status": "failed", "reason": "out of memory"}
                if seed in (failed or {}).get(label, ())
                else {}
            )
            entries.append({"condition": label, "seed": seed, **status})
    return write_manifest(folder, entries)


def _answers(right: np.ndarray, lost: np.ndarray) -> Iterator[EvaluationRecord]:
    for index, (count, missing) in enumerate(zip(right.tolist(), lost.tolist(), strict=True)):
        judged = SAMPLES - missing
        yield EvaluationRecord(
            0,
            f"problem-{index}",
            "math",
            judged,
            count,
            missing,
            count / judged if judged else None,
        )


def five(folder: Path) -> dict[str, Path]:
    """Title -> the campaign's folder."""
    family = {
        BASE: 0.0,
        OTHER: 0.55,
        "maxrl+gtpo": 0.05,
        "maxrl+gtpo_hicra": -0.02,
        "maxrl+gtpo_sepa": 0.03,
    }
    return {
        "A clear winner": campaign(folder / "winner", family),
        "A null": campaign(folder / "null", {BASE: 0.0, OTHER: 0.0}),
        "One run collapses": campaign(
            folder / "collapse", {BASE: 0.0, OTHER: 0.15}, collapsed=(OTHER, 606)
        ),
        "Answers that could not be judged": campaign(
            folder / "unjudged", {BASE: 0.0, OTHER: 0.0}, unjudged={OTHER: 0.3}
        ),
        "Failed runs": campaign(
            folder / "failed", {BASE: 0.0, OTHER: 0.45}, failed={OTHER: (202, 404)}
        ),
    }


def texts(folder: Path) -> Iterator[tuple[str, str]]:
    """Title and text of each campaign."""
    for title, path in five(folder).items():
        yield title, to_text(compare_campaign(path, TestSettings()), WIDTH)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--output", type=Path, default=Path("logs/five"), help="folder for the campaigns"
    )
    for title, text in texts(parser.parse_args().output):
        print(f"## {title}\n\n```text\n{text}```\n")


if __name__ == "__main__":
    main()
