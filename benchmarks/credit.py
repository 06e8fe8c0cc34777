"""Time of credit assignment on one core: `python benchmarks/credit.py` prints a table and writes it
under benchmarks/results/.

The step has 128 completions of 10,240 tokens (16 groups of 8) with random log-probs. The text for
the detector is English words with a planning phrase about every hundred words. No operation uses
more than one thread.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial

import numpy as np
from report import add_output, load_average, publish, table

from retrain.advantages.pipeline import CreditPipeline
from retrain.advantages.planning import DEFAULT_GRAMS, RegexDetector
from retrain.advantages.step import Segments, StepTokens
from retrain.advantages.transforms import TRANSFORMS
from retrain.config import TrainConfig

GROUPS, GROUP_SIZE, TOKENS = 16, 8, 10_240
TEXT = (
    "so we the first number and divide both sides by two which gives that x is then , let us now"
    " sum all of them . therefore"
)
WORDS = TEXT.split()


def step_tokens(rng: np.random.Generator) -> StepTokens:
    segments = Segments([TOKENS] * (GROUPS * GROUP_SIZE))
    return StepTokens(
        rewards=(rng.random((GROUPS, GROUP_SIZE)) < 0.4).astype(float).tolist(),
        segments=segments,
        logprobs=-rng.exponential(0.4, segments.total),
        entropies=rng.exponential(0.5, segments.total),
        planning=rng.random(segments.total) < 0.03,
        in_loss=np.ones(len(segments), dtype=np.bool_),
    )


def pieces(rng: np.random.Generator) -> list[str]:
    """One completion of TOKENS pieces: phrases are split into words, and a third of the words into
    two pieces.
    """
    made: list[str] = []
    while len(made) < TOKENS:
        phrase = rng.random() < 0.01
        for word in (str(rng.choice(DEFAULT_GRAMS)) if phrase else str(rng.choice(WORDS))).split():
            cut = int(rng.integers(1, len(word))) if len(word) > 1 and rng.random() < 0.33 else 0
            made.extend([f" {word[:cut]}", word[cut:]] if cut else [f" {word}"])
    return made[:TOKENS]


def seconds(function: Callable[[], object], repeats: int) -> float:
    """Median CPU seconds over the repeats, after one warm-up call; other processes do not count."""
    function()
    times = []
    for _ in range(repeats):
        started = time.process_time()
        function()
        times.append(time.process_time() - started)
    return float(np.median(times))


def measure(repeats: int) -> str:
    rng = np.random.default_rng(0)
    tokens = step_tokens(rng)
    total = tokens.segments.total
    lines: list[list[object]] = []

    def add(what: str, count: int, duration: float) -> None:
        lines.append([what, f"{count:,}", f"{duration:.3f}", f"{count / duration / 1e6:.1f}"])

    for name, spec in TRANSFORMS.items():
        if spec.distils:
            continue  # its time is the teacher's, a model
        rho = 0.2 if spec.needs_rho else 0.0
        config = TrainConfig.model_validate(
            {"algorithm": {"transform_mode": name, "surprisal_mask_rho": rho}}
        )
        pipeline = CreditPipeline(config, lambda ids: [""] * len(ids))
        add(
            f"{name}" + (f", rho = {rho}" if rho else ""),
            total,
            seconds(partial(pipeline.compute, tokens, 0, 0.5), repeats),
        )
    completions = [pieces(rng) for _ in range(8)]
    detector = RegexDetector()
    count = sum(len(completion) for completion in completions)
    add(
        "planning phrases (18 grams)",
        count,
        seconds(lambda: [detector.detect(completion) for completion in completions], repeats),
    )
    accented = [
        [piece.replace("e", "\u00e9\u2019") for piece in completion] for completion in completions
    ]
    add(
        "planning phrases, text beyond Latin-1",
        count,
        seconds(lambda: [detector.detect(completion) for completion in accented], repeats),
    )
    return table(["what", "tokens", "CPU seconds (median)", "million tokens/s"], lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="Time of credit assignment on one core.")
    parser.add_argument("--repeats", type=int, default=5)
    add_output(parser)
    arguments = parser.parse_args()
    load = load_average()
    about = (
        f"One core; {GROUPS * GROUP_SIZE} completions of {TOKENS:,} tokens, maxrl. numpy"
        f" {np.__version__}."
    )
    publish(
        "credit", "Credit assignment", [about, measure(arguments.repeats)], load, arguments.output
    )


if __name__ == "__main__":
    main()
