"""One step of the lab's size with 1 and 2 threads, alone and beside a busy process, with libgomp's default spinning and with ours.

    python benchmarks/threads.py

Each line is a process of its own, since libgomp reads its variables once. Seconds of the third of three repeats.
"""

import argparse
import os
import subprocess
import sys
import time

from report import add_output, load_average, publish, table

STEP = """
import sys, time
import numpy as np
import torch
torch.set_num_threads(int(sys.argv[1]))
from retrain.backends.local.backend import LocalBackend
from retrain.config import config_from_mapping
from retrain.inference_engine.base import NoiseKey, SampleRequest
from retrain.types import Row
config = config_from_mapping({"model": {"model": "lab", "lora_rank": 16}, "training": {"seed": 0, "temperature": 1.0}})
backend = LocalBackend(config, eos_ids=(10**6,))  # no token ends a completion: every row has 80
requests = [SampleRequest(np.arange(5, 35, dtype=np.int32), 8, 80, 1.0, NoiseKey(0, 0, 0, slot)) for slot in range(16)]
for step in range(3):
    start = time.monotonic()
    done = list(backend.engine.sample(requests))
    middle = time.monotonic()
    rows = [
        Row(np.concatenate([requests[c.request].prompt_ids, c.token_ids]), ((30, 110),), c.logprobs, np.ones(80, np.float32), c.request)
        for c in done
    ]
    backend.train(rows, step)
print(f"{middle - start:.2f} {time.monotonic() - middle:.2f}")
"""
BUSY = "import torch; a = torch.randn(600, 600)\nwhile True: a @ a"


def measure(threads: int, spins: str | None, beside: bool) -> list[str]:
    environment = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    if spins:
        environment["GOMP_SPINCOUNT"] = spins
    other = subprocess.Popen([sys.executable, "-c", BUSY]) if beside else None
    try:
        time.sleep(3 if beside else 0)
        done = subprocess.run([sys.executable, "-c", STEP, str(threads)], env=environment, capture_output=True, text=True, check=True)
    finally:
        if other:
            other.kill()
            other.wait()
    sample, learn = done.stdout.split()
    return [str(threads), spins or "default", "busy" if beside else "quiet", sample, learn]


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure how threads wait beside a busy process.")
    add_output(parser)
    output = parser.parse_args().output
    load = load_average()
    rows = [measure(threads, spins, beside) for beside in (False, True) for threads, spins in ((1, None), (2, None), (2, "20000"))]
    head = ["threads", "GOMP_SPINCOUNT", "machine", "sampling s", "learning s"]
    publish("threads", "How threads wait", [table(head, rows)], load, output)


if __name__ == "__main__":
    main()
