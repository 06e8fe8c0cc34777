"""The learning pass compared with TRL's on the same rows, old log-probs and advantages: seconds,
memory, loss, gradient.

    python benchmarks/learn.py --model models/smollm2-135m --peer-python .venv-peers/bin/python

One pass is all forward and backward passes of a step and the optimizer's update, at learning rate
0. Each setting runs in its own process, one at a time; the first pass warms up, and the best of the
others counts. Memory is resident memory: before the first pass (libraries, weights, adapter), and
its peak during the passes. Loss and gradient over all adapter parameters are compared with each row
alone through peft and transformers, in fp32 and in float64; the latter shows how much of the
difference is rounding.
"""

import argparse
import math
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from common import make_adapter, settings_of
from processes import Worker, WorkerFailed
from report import add_output, load_average, publish, table, versions_line
from safetensors.numpy import load_file

RANK = 16


@dataclass
class Setting:
    name: str
    python: str
    script: str
    settings: dict[str, Any]
    passes: list[dict[str, Any]] = field(default_factory=list)
    before_gib: float = math.nan
    """Resident before the first pass of a process; after it the allocator may keep free memory."""
    peak_gib: float = 0.0
    gradient_error: float = math.nan
    """Relative to each row alone, computed in fp32."""
    exact_error: float = math.nan
    """Relative to each row alone, computed in float64."""
    failure: str = ""

    @property
    def best(self) -> dict[str, Any]:
        return min(self.passes, key=lambda one: one["seconds"])


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
    parser.add_argument(
        "--passes", type=int, default=2, help="passes in one process, the first of which warms up"
    )
    parser.add_argument("--repeats", type=int, default=1, help="processes of each setting")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument(
        "--micro-batch-tokens",
        type=int,
        default=0,
        help="[training] micro_batch_tokens; 0 lets retrain choose",
    )
    parser.add_argument(
        "--peer-python",
        default=".venv-peers/bin/python",
        help="python of an environment with benchmarks/peers.txt",
    )
    parser.add_argument(
        "--trl",
        nargs="*",
        default=["4", "8", "32", "4c", "8c", "32c"],
        help="TRL's per-device batches; c: gradient checkpointing on",
    )
    add_output(parser)
    return parser.parse_args()


def make_settings(arguments: argparse.Namespace, common: Mapping[str, Any]) -> list[Setting]:
    training = (
        {"micro_batch_tokens": arguments.micro_batch_tokens} if arguments.micro_batch_tokens else {}
    )
    made = [
        Setting(
            "retrain",
            sys.executable,
            "learn_worker.py",
            {**common, "kind": "retrain", "training": training},
        )
    ]
    for variant in arguments.trl:
        batch, checkpointing = int(variant.rstrip("c")), variant.endswith("c")
        name = f"TRL, batch {batch}{', checkpointing' if checkpointing else ''}"
        made.append(
            Setting(
                name,
                arguments.peer_python,
                "learn_trl.py",
                {**common, "batch": batch, "checkpointing": checkpointing},
            )
        )
    return made


def measure(
    setting: Setting, passes: int, references: Sequence[Mapping[str, Any]], gradient: Path
) -> dict[str, str]:
    """Runs one process of this setting; returns the versions it found."""
    try:
        with Worker(setting.python, setting.script, setting.settings) as worker:
            answers = [worker.ask() for _ in range(passes - 1)]
            answers.append(worker.ask(gradient=str(gradient)))
            versions = worker.versions
    except WorkerFailed as error:
        if not error.out_of_memory:
            raise
        setting.failure = "not enough memory"
        return {}
    setting.passes += answers[1:] or answers
    setting.before_gib = answers[0]["before_gib"]
    setting.peak_gib = max(setting.peak_gib, *(one["peak_gib"] for one in answers))
    setting.gradient_error, setting.exact_error = (
        relative_error(load_file(gradient), reference) for reference in references
    )
    return versions


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


def rows(settings: list[Setting], loss: float) -> list[list[str]]:
    ours = settings[0].best["seconds"]
    lines = []
    for setting in settings:
        if not setting.passes:
            lines.append([setting.name, setting.failure, *["-"] * 8])
            continue
        best = setting.best
        lines.append(
            [
                setting.name, f"{best['seconds']:.2f}", f"{best['seconds'] / ours:.2f}",
                f"{best['cpu_seconds']:.2f}",
                f"{setting.before_gib:.2f}", f"{setting.peak_gib:.2f}",
                f"{setting.peak_gib - setting.before_gib:.2f}",
                f"{abs(best['loss'] - loss):.1e}", f"{setting.gradient_error:.1e}",
                f"{setting.exact_error:.1e}",
            ]
        )  # fmt: skip
    return lines


def main() -> None:
    arguments = parse_arguments()
    load = load_average()
    versions: list[Mapping[str, str]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        common = settings_of(arguments)
        common |= {
            "tokenizer": common["model"],
            "adapter": str(folder / "adapter"),
            "logprobs": str(folder / "logprobs.safetensors"),
            "rank": RANK,
            "ragged": arguments.ragged,
        }
        common["vocabulary"] = make_adapter(common, common["adapter"])
        references = []
        for dtype in ("float32", "float64"):
            with Worker(
                sys.executable, "learn_worker.py", {**common, "kind": "reference", "dtype": dtype}
            ) as plain:
                found = plain.ask(
                    logprobs=common["logprobs"], gradient=str(folder / f"{dtype}.safetensors")
                )
            references.append(load_file(folder / f"{dtype}.safetensors"))
        settings = make_settings(arguments, common)
        for _ in range(arguments.repeats):
            versions += [
                measure(setting, arguments.passes, references, folder / "gradient.safetensors")
                for setting in settings
            ]
    head = ["setting", "seconds", "time / retrain's", "CPU seconds", "GiB before", "peak GiB",
    "GiB of the pass", "loss difference",
            "gradient error", "of float64"]  # fmt: skip
    shape = f"{arguments.prompts}x{arguments.group}x{arguments.tokens}{'-ragged' if arguments.ragged else ''}"
    lengths = "up to " if arguments.ragged else ""
    publish(
        f"learn-{Path(arguments.model).name}-{shape}",
        f"The learning pass, {Path(arguments.model).name}, {arguments.prompts} prompts x"
        f" {arguments.group} completions x {lengths}{arguments.tokens} tokens",
        [
            (
                f"fp32, LoRA r{RANK} on every linear layer, {arguments.threads} threads, loss"
                f" {found['loss']:.6f}; retrain chose {settings[0].best['note']}. The fp32"
                f" reference is itself {relative_error(*references):.1e} off the float64 one."
                f" {versions_line(*versions)}."
            ),
            table(head, rows(settings, found["loss"])),
        ],
        load,
        arguments.output,
    )


if __name__ == "__main__":
    main()
