"""Time of `retrain --help` and of a refused flag, each in a fresh process: `python
benchmarks/startup.py`.

`retrain --help` is meant to take less than 0.3 s; the exit code is 1 if it does not. Best and
median of 20, since other work disturbs some.
"""

import argparse
import statistics
import subprocess
import sys
import time

from report import add_output, load_average, publish, table

LIMIT_S = 0.3
_REPEATS = 20
_COMMANDS = (["--help"], ["version"], ["init", "--help"], ["nowhere.toml", "--lrr", "1"])


def measure(arguments: list[str]) -> list[float]:
    """Seconds of each repeat."""
    command = [
        sys.executable,
        "-c",
        "import sys; from retrain.cli.main import main; sys.exit(main())",
        *arguments,
    ]
    seconds = []
    for _ in range(_REPEATS):
        began = time.perf_counter()
        subprocess.run(command, capture_output=True, check=False)
        seconds.append(time.perf_counter() - began)
    return seconds


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure the start-up of the command line.")
    add_output(parser)
    output = parser.parse_args().output
    load = load_average()
    found = {" ".join(["retrain", *arguments]): measure(arguments) for arguments in _COMMANDS}
    rows = [
        [f"`{name}`", f"{min(seconds):.3f}", f"{statistics.median(seconds):.3f}"]
        for name, seconds in found.items()
    ]
    publish(
        "startup",
        "Start-up of the command line",
        [table(["command", "best s", "median s"], rows)],
        load,
        output,
    )
    return 0 if min(found["retrain --help"]) < LIMIT_S else 1


if __name__ == "__main__":
    sys.exit(main())
