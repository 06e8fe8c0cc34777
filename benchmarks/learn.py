"""The learning pass: seconds, memory, loss and gradient.

    python benchmarks/learn.py --model models/smollm2-135m

One pass is all forward and backward passes of a step and the optimizer's update, at learning rate
0. The first pass warms up, and the best of the others counts. Memory is resident memory: before the
first pass (libraries, weights, adapter), and its peak during the passes. Neither counts
the processes that share the rows of a small model. The reference for loss and gradient is each row
alone through peft and transformers, in fp32 and in float64. The float64 one shows how much of the
difference is rounding.
"""

import argparse
import math
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from common import make_adapter, settings_of
from processes import Worker
from report import add_output, load_average, publish, table, versions_line
from safetensors.numpy import load_file

RANK = 16
HEAD = ("seconds", "CPU seconds", "GiB before", "peak GiB", "GiB of the pass", "loss difference")
HEAD += ("gradient error", "of float64")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="lab", help='a model folder, or "lab"')
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument(
        "--ragged", action="store_true", help="completions of tokens / 8 to tokens tokens"
    )
    parser.add_argument("--passes", type=int, default=2, help="passes, the first of which warms up")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument(
        "--micro-batch-tokens",
        type=int,
        default=0,
        help="[training] micro_batch_tokens; 0 lets retrain choose",
    )
    add_output(parser)
    return parser.parse_args()


def relative_error(found: Mapping[str, np.ndarray], reference: Mapping[str, np.ndarray]) -> float:
    """||g - g_ref|| / ||g_ref|| over all parameters, in float64."""
    if found.keys() != reference.keys():
        raise ValueError(
            f"gradients of other parameters: {sorted(found.keys() ^ reference.keys())[:3]}"
        )
    difference = sum(
        float(np.square(found[name].astype(np.float64) - reference[name]).sum())
        for name in reference
    )
    return math.sqrt(
        difference
        / sum(float(np.square(value.astype(np.float64)).sum()) for value in reference.values())
    )


def main() -> None:
    arguments = parse_arguments()
    load = load_average()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        common = settings_of(arguments) | {
            "adapter": str(folder / "adapter"),
            "logprobs": str(folder / "logprobs.safetensors"),
            "rank": RANK,
            "ragged": arguments.ragged,
            "training": {"micro_batch_tokens": arguments.micro_batch_tokens},
        }
        common["vocabulary"] = make_adapter(common, common["adapter"])
        references = []
        for dtype in ("float32", "float64"):
            file = str(folder / f"{dtype}.safetensors")
            plainly = {**common, "kind": "reference", "dtype": dtype}
            with Worker(sys.executable, "learn_worker.py", plainly) as plain:
                found = plain.ask(logprobs=common["logprobs"], gradient=file)
            references.append(load_file(file))
        file = str(folder / "gradient.safetensors")
        with Worker(sys.executable, "learn_worker.py", {**common, "kind": "retrain"}) as worker:
            passes = [worker.ask(gradient=file) for _ in range(arguments.passes)]
        errors = [relative_error(load_file(file), one) for one in references]
    best, before = (
        min(passes[1:] or passes, key=lambda one: one["seconds"]),
        passes[0]["before_gib"],
    )
    peak = max(one["peak_gib"] for one in passes)
    sizes = [f"{gib:.2f}" for gib in (before, peak, peak - before)]
    row = [f"{best['seconds']:.2f}", f"{best['cpu_seconds']:.2f}", *sizes]
    row += [f"{abs(best['loss'] - found['loss']):.1e}", *(f"{error:.1e}" for error in errors)]
    shape = f"{arguments.prompts}x{arguments.group}x{arguments.tokens}{'-ragged' if arguments.ragged else ''}"
    lengths = "up to " if arguments.ragged else ""
    publish(
        f"learn-{Path(arguments.model).name}-{shape}",
        f"The learning pass, {Path(arguments.model).name}, {arguments.prompts} prompts x"
        f" {arguments.group} completions x {lengths}{arguments.tokens} tokens",
        [
            (
                f"fp32, LoRA r{RANK} on every linear layer, {arguments.threads} threads, loss"
                f" {found['loss']:.6f}; {best['note']}. The fp32 reference is itself"
                f" {relative_error(*references):.1e} off the float64 one."
                f" {versions_line(worker.versions)}."
            ),
            table(HEAD, [row]),
        ],
        load,
        arguments.output,
    )


if __name__ == "__main__":
    main()
