"""Throughput of the planning detectors: `python benchmarks/planning.py --encoder FOLDER` prints a
table and writes it to results/.

The completions are English words with a planning phrase about every hundred words, as in credit.py,
a third of the words cut into two tokens. Each detector sees them at two sizes, so the last column
shows the growth of its time beside that of the tokens: 1 is linear. Without --encoder, a folder
with a sentence-transformers model such as all-MiniLM-L6-v2, the regex detector alone is measured.
"""

import argparse
import time

import numpy as np
from credit import pieces
from report import add_output, load_average, publish, table

from retrain.advantages.planning import RegexDetector, SemanticDetector

Detector = RegexDetector | SemanticDetector


def seconds(detector: Detector, completions: list[list[str]], repeats: int) -> float:
    """The best of the repeats, CPU time: other processes do not count."""
    times = []
    for _ in range(repeats):
        began = time.process_time()
        detector.detect_all(completions)
        times.append(time.process_time() - began)
    return min(times)


def rows(name: str, detector: Detector, sizes: tuple[int, int], repeats: int) -> list[list[object]]:
    found: list[list[object]] = []
    before: tuple[int, float] | None = None
    for size in sizes:
        completions = [pieces(np.random.default_rng(seed))[:10_240] for seed in range(size)]
        detector.detect_all(completions[:1])
        tokens = sum(map(len, completions))
        duration = seconds(detector, completions, repeats)
        growth = "" if before is None else f"{(duration / before[1]) / (tokens / before[0]):.2f}"
        found.append([name, f"{tokens:,}", f"{duration:.2f}", f"{tokens / duration:,.0f}", growth])
        before = tokens, duration
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Throughput of the planning detectors.")
    parser.add_argument("--encoder", help="folder of a sentence-transformers model")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument(
        "--completions",
        type=int,
        default=4,
        help="of 10,240 tokens, in the larger step of the semantic detector",
    )
    add_output(parser)
    arguments = parser.parse_args()
    load = load_average()
    lines = rows("regex", RegexDetector(), (16, 128), arguments.repeats)
    about = "One core; one step, its completions of 10,240 tokens each."
    if arguments.encoder:
        import torch

        from retrain.model.sentences import load_sentence_encoder

        torch.set_num_threads(1)
        encode = load_sentence_encoder(arguments.encoder)
        sizes = max(1, arguments.completions // 4), arguments.completions
        lines += rows("semantic", SemanticDetector(encode), sizes, arguments.repeats)
    head = ["detector", "tokens", "CPU seconds", "tokens/s", "growth of time / growth of tokens"]
    publish("planning", "Planning detectors", [about, table(head, lines)], load, arguments.output)


if __name__ == "__main__":
    main()
