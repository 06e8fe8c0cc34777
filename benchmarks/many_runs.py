"""Reading many runs: `python benchmarks/many_runs.py` times status, compare, report and load_runs
on 1,000 runs of 500 steps.

The runs are synthetic, in the real format, and take 1 GB on disk: five conditions, every field of a
step filled, 200 held-out problems at the end.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

import numpy as np
from processes import start_child
from report import add_output, load_average, publish, table

from retrain.config import config_from_mapping, dump_toml
from retrain.records.entries import EvaluationRecord, StepRecord
from retrain.records.jsonl import encode_line
from retrain.records.run_folder import RunFolder
from retrain.records.summary import RunSummary

CONDITIONS = ("grpo+none", "maxrl+none", "maxrl+gtpo", "maxrl+gtpo_hicra", "maxrl+gtpo_sepa")
PROBLEMS = 200

COMMANDS = {
    "retrain status": ("-m", "retrain", "status"),
    "retrain compare": ("-m", "retrain", "compare"),
    "retrain compare --metric correct_rate": (
        "-m",
        "retrain",
        "compare",
        "--metric",
        "correct_rate",
    ),
    "retrain compare --metric auc": ("-m", "retrain", "compare", "--metric", "auc"),
    "retrain report": ("-m", "retrain", "report"),
    "retrain.load_runs": ("-c", "import sys, retrain; retrain.load_runs(sys.argv[1])"),
}


def write_campaign(root: Path, runs: int, steps: int) -> None:
    """Write `runs` runs, the conditions in turn. Every seed of a condition has the same metrics and
    its own held-out answers.
    """
    rng = np.random.default_rng(0)
    metrics = {condition: _metrics(condition, steps, rng) for condition in CONDITIONS}
    entries = []
    for index in range(runs):
        condition, seed = CONDITIONS[index % len(CONDITIONS)], index // len(CONDITIONS)
        name = f"{condition}_s{seed}"
        _write_run(RunFolder(root / "runs" / name), condition, seed, steps, metrics[condition], rng)
        entries.append(
            {
                "name": name,
                "condition": condition,
                "seed": seed,
                "status": "done",
                "dir": f"runs/{name}",
                "reason": None,
            }
        )
    (root / "manifest.json").write_text(json.dumps({"runs": entries}), encoding="utf-8")


def _metrics(condition: str, steps: int, rng: np.random.Generator) -> bytes:
    lines = []
    for step in range(steps):
        numbers = {
            field.name: float(rng.random())
            for field in fields(StepRecord)
            if field.type == float | None
        }
        counts = {
            field.name: int(rng.integers(100))
            for field in fields(StepRecord)
            if field.type == int | None
        }
        lines.append(
            encode_line(StepRecord(step=step, condition=condition, **numbers, **counts).to_json())
        )
    return b"".join(lines)


def _write_run(
    folder: RunFolder,
    condition: str,
    seed: int,
    steps: int,
    metrics: bytes,
    rng: np.random.Generator,
) -> None:
    advantage, _, transform = condition.partition("+")
    config = config_from_mapping(
        {
            "model": {"model": "lab"},
            "data": {"source": "lab"},
            "algorithm": {"advantage_mode": advantage, "transform_mode": transform},
            "training": {"seed": seed, "max_steps": steps},
        }
    )
    folder.create()
    folder.config.write_text(dump_toml(config), encoding="utf-8")
    folder.metrics.write_bytes(metrics)
    right = rng.random(PROBLEMS) < 0.5 + 0.02 * CONDITIONS.index(condition)
    answers = [
        EvaluationRecord(steps, f"problem-{i}", "lab", 1, int(one), 0, float(one))
        for i, one in enumerate(right)
    ]
    folder.evaluation.write_bytes(b"".join(encode_line(answer.to_json()) for answer in answers))
    summary = RunSummary(
        "done", condition, seed, steps, 1.0, 1, None, None, None, "checkpoints/final"
    )
    folder.summary.write_text(json.dumps(summary.to_json()), encoding="utf-8")


def measure(command: Sequence[str], campaign: Path) -> tuple[float, float, float]:
    """(seconds, CPU seconds, peak resident GiB) of one command on the campaign."""
    started = time.monotonic()
    with start_child(
        [sys.executable, *command, str(campaign)], stdout=subprocess.DEVNULL
    ) as process:
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with exit code {process.returncode}")
    unit = 1 if sys.platform == "darwin" else 1024
    return (
        time.monotonic() - started,
        usage.ru_utime + usage.ru_stime,
        usage.ru_maxrss * unit / 2**30,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument(
        "--folder",
        type=Path,
        default=None,
        help="where the runs are written; default: the folder for temporary files",
    )
    add_output(parser)
    arguments = parser.parse_args()
    load = load_average()
    rows = []
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        campaign = Path(name) / "campaign"
        write_campaign(campaign, arguments.runs, arguments.steps)
        for what, command in COMMANDS.items():
            seconds, processor, memory = measure(command, campaign)
            rows.append([what, f"{seconds:.1f}", f"{processor:.1f}", f"{memory:.2f}"])
    found = table(["what", "seconds", "CPU seconds", "peak GiB"], rows)
    publish(
        "many-runs",
        f"Reading {arguments.runs:,} runs of {arguments.steps} steps",
        [found],
        load,
        arguments.output,
    )


if __name__ == "__main__":
    main()
