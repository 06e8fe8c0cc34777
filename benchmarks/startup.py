"""Time of `retrain --help` and of a refused flag, in a fresh process each: python benchmarks/startup.py

The promise is `retrain --help` under 0.3 s. Best and median of 20, so that other work on the machine does not count.
2026-11-21, 2 cores shared with seven other jobs, Python 3.11.7: --help 0.033 / 0.044 s, version 0.21 / 0.38 s,
init --help 0.15 / 0.19 s, a refused flag (it loads the schema) 0.62 / 0.84 s.
"""

import statistics
import subprocess
import sys
import time

LIMIT_S = 0.3
_REPEATS = 20
_COMMANDS = (["--help"], ["version"], ["init", "--help"], ["nowhere.toml", "--lrr", "1"])


def measure(arguments: list[str]) -> list[float]:
    """Seconds of each repeat."""
    command = [sys.executable, "-c", "import sys; from retrain.cli.main import main; sys.exit(main())", *arguments]
    seconds = []
    for _ in range(_REPEATS):
        began = time.perf_counter()
        subprocess.run(command, capture_output=True, check=False)
        seconds.append(time.perf_counter() - began)
    return seconds


def main() -> int:
    best_of_help = LIMIT_S
    for arguments in _COMMANDS:
        seconds = measure(arguments)
        print(f"retrain {' '.join(arguments):<28} best {min(seconds):.3f} s, median {statistics.median(seconds):.3f} s")
        if arguments == ["--help"]:
            best_of_help = min(seconds)
    return 0 if best_of_help < LIMIT_S else 1


if __name__ == "__main__":
    sys.exit(main())
