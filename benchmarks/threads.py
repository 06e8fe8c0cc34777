"""One step of the lab's size on one core and on all cores, on a quiet machine and beside a busy
process.

    python benchmarks/threads.py

Each line is a process of its own, limited by OMP_NUM_THREADS. Seconds of the best and the worst of
--repeats steps after a warm-up step.
"""

import argparse
import os
import subprocess
import sys
import time

from processes import start_child
from report import add_output, load_average, publish, table

STEP = """
import sys, time
import numpy as np
import torch
from retrain.backends.local.backend import LocalBackend
from retrain.config import config_from_mapping
from retrain.inference_engine.base import NoiseKey, SampleRequest
from retrain.types import Row
config = config_from_mapping(
    {"model": {"model": "lab", "lora_rank": 16}, "training": {"seed": 0, "temperature": 1.0}}
)
backend = LocalBackend(config, eos_ids=(10**6,))  # no token ends a completion: every row has 80
requests = [SampleRequest(np.arange(5, 35, dtype=np.int32), 8, 80, 1.0, NoiseKey(0, 0, 0, slot)) for slot in range(16)]
for step in range(1 + int(sys.argv[1])):
    start = time.monotonic()
    done = list(backend.engine.sample(requests))
    middle = time.monotonic()
    rows = [
        Row(np.concatenate([requests[c.request].prompt_ids, c.token_ids]), ((30, 110),), c.logprobs, np.ones(80, np.float32), c.request)
        for c in done
    ]
    backend.train(rows, step)
    print(middle - start, time.monotonic() - middle)
backend.close()
"""
BUSY = "while True: pass"


def measure(cores: int, beside: bool, repeats: int) -> list[str]:
    environment = os.environ | {"OMP_NUM_THREADS": str(cores)}
    other = start_child([sys.executable, "-c", BUSY]) if beside else None
    try:
        time.sleep(3 if beside else 0)
        command = [sys.executable, "-c", STEP, str(repeats)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    finally:
        if other:
            other.kill()
            other.wait()
    steps = [[float(part) for part in line.split()] for line in done.stdout.splitlines()[1:]]
    parts = [
        f"{min(part):.2f} to {max(part):.2f}"
        for part in (*zip(*steps, strict=True), [sum(step) for step in steps])
    ]
    return [str(cores), "busy" if beside else "quiet", *parts]


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure a step of the lab beside a busy process.")
    parser.add_argument("--repeats", type=int, default=10)
    add_output(parser)
    arguments = parser.parse_args()
    load = load_average()
    every = len(os.sched_getaffinity(0))
    rows = [
        measure(cores, beside, arguments.repeats)
        for beside in (False, True)
        for cores in sorted({1, every})
    ]
    head = ["cores", "machine", "sampling s", "learning s", "step s (best to worst)"]
    publish("threads", "A step on several cores", [table(head, rows)], load, arguments.output)


if __name__ == "__main__":
    main()
