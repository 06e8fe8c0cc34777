"""Predicted memory compared with the peak of resident memory: `python benchmarks/memory.py`.

Each point is a fresh process with one thread that samples and learns, and then does so again: one
prompt of 64 tokens, 8 completions of 96, which are forced. The models are the lab model and one of
SmolLM2-135M's shapes with random weights. The peak is counted above what Python and the imported
modules hold. The exit code is 1 if a prediction is off by more than 5% and 16 MiB.
"""

import argparse
import sys
import tempfile
from typing import Any

from gpu15 import ENDS, MODELS
from processes import Worker
from report import add_output, load_average, publish, table, versions_line

from retrain.model.text import resolve_model

GROUP, PROMPT_TOKENS, TOKENS, STEPS = 8, 64, 96, 2
LIMIT, LIMIT_MIB = 0.05, 16
MIB = 2**20
PARTS = ("weights", "sampler copy", "trained", "KV cache", "sampling pass", "learning pass")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_output(parser)
    output = parser.parse_args().output
    load, lines, off, versions = load_average(), [], False, {}
    shape = {"batch_size": 1, "group_size": GROUP}
    with tempfile.TemporaryDirectory() as folder:
        made = MODELS["smollm2-135m"] | ENDS
        with Worker(sys.executable, "prepare.py", {"threads": 1}) as prepare:
            prepare.ask(make="random", folder=folder, shape=made)
        for name, model, vocabulary in (
            ("lab", resolve_model("lab"), 259),
            ("SmolLM2-135M", folder, made["vocab_size"]),
        ):
            for rank, tokens in ((16, 832), (16, 256), (1, 832), (1, 256)):
                settings: dict[str, Any] = {
                    "model": model, "vocabulary": vocabulary, "rank": rank, "group": GROUP,
                    "prompt_tokens": PROMPT_TOKENS, "threads": 1,
                }  # fmt: skip
                training = shape | {"micro_batch_tokens": tokens}
                with Worker(sys.executable, "memory_point.py", settings) as worker:
                    found = worker.ask(tokens=TOKENS, steps=STEPS, training=training)
                    versions = worker.versions
                error = found["predicted"] / found["peak"] - 1
                off = off or (abs(error) > LIMIT and abs(error) * found["peak"] > LIMIT_MIB * MIB)
                sizes = [found["peak"], found["predicted"], *map(found["parts"].get, PARTS)]
                line = [name, rank, tokens, *(f"{size / MIB:,.1f}" for size in sizes)]
                lines.append([*line, f"{error:+.1%}"])
                print(lines[-1], file=sys.stderr, flush=True)
    head = ["model", "rank", "micro-batch", "peak MiB", "predicted", *PARTS, "error"]
    text = (
        f"LoRA in fp32 on a CPU, {STEPS} steps of {GROUP} completions. {versions_line(versions)}."
    )
    publish("memory", "Predicted memory", [text, table(head, lines)], load, output)
    return int(off)


if __name__ == "__main__":
    sys.exit(main())
