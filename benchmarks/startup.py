"""Time of the commands that need no torch, each in a fresh process: `python benchmarks/startup.py`.

`retrain --help` is meant to take less than 0.3 s, and each of the others, `status` over forty runs
among them, less than 0.5 s; the exit code is 1 if one does not, or if it imports torch. Best and
median, since other work disturbs some; user and system time of the best, which a busy machine
disturbs less. Bytecode is kept, as pip and a first call leave it.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from report import add_output, load_average, publish, table

LIMITS_S = {"--help": 0.3}
LIMIT_S = 0.5
_REPEATS = 20
_RUNS = 40
_KEPT = os.environ | {"PYTHONDONTWRITEBYTECODE": ""}
_PROGRAM = """
import atexit, sys
atexit.register(lambda: sys.stderr.write("imports torch" * ("torch" in sys.modules)))
from retrain.cli.main import main
sys.exit(main())
"""


def write_runs(folder: Path) -> None:
    """Folders as forty ended runs of the lab leave them, with fifty steps each."""
    config = (Path(__file__).parents[1] / "examples/lab.toml").read_text(encoding="utf-8")
    for number in range(_RUNS):
        run = folder / f"run-{number}"
        run.mkdir(parents=True)
        marks = {".retrain.json": {"kind": "run"}, "summary.json": {"status": "done"}}
        for name, value in marks.items():
            (run / name).write_text(json.dumps(value), encoding="utf-8")
        (run / "config.toml").write_text(config, encoding="utf-8")
        lines = [
            {"step": step, "condition": "grpo+none", "correct_rate": 0.5} for step in range(50)
        ]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (run / "metrics.jsonl").write_text(text, encoding="utf-8")


def measure(arguments: list[str], repeats: int) -> tuple[list[float], float, bool]:
    """Seconds of each repeat, the least processor time, and whether torch was imported."""
    seconds, processor, torch = [], [], False
    for _ in range(repeats):
        began, used = time.perf_counter(), os.times()
        command = [sys.executable, "-c", _PROGRAM, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, env=_KEPT, check=False)
        seconds.append(time.perf_counter() - began)
        after = os.times()
        processor.append(
            after.children_user - used.children_user + after.children_system - used.children_system
        )
        torch = torch or done.stderr.endswith("imports torch")
    return seconds, min(processor), torch


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure the start-up of the command line.")
    parser.add_argument("--repeats", type=int, default=_REPEATS)
    add_output(parser)
    options = parser.parse_args()
    load = load_average()
    rows, slow = [], False
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_runs(folder / "logs")
        commands = (
            ["--help"],
            ["man"],
            ["init", "--output", str(folder / "a.toml"), "--force"],
            ["plugins"],
            ["status", str(folder / "logs")],
            ["nowhere.toml", "--lrr", "1"],
        )
        for arguments in commands:
            seconds, processor, torch = measure(arguments, options.repeats)
            slow = slow or torch or min(seconds) > LIMITS_S.get(arguments[0], LIMIT_S)
            name = " ".join(["retrain", *arguments]).replace(f"{scratch}/", "")
            best = f"{min(seconds):.3f}", f"{statistics.median(seconds):.3f}", f"{processor:.3f}"
            rows.append([f"`{name}`", *best, "yes" if torch else "no"])
    publish(
        "startup",
        "Start-up of the command line",
        [table(["command", "best s", "median s", "processor s", "torch"], rows)],
        load,
        options.output,
    )
    return int(slow)


if __name__ == "__main__":
    sys.exit(main())
