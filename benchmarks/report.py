"""The dated result file of a benchmark: title, command, machine, versions, then its tables. Every
benchmark publishes through it.
"""

import argparse
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from math import comb
from pathlib import Path

import numpy as np

from retrain.records.environment import describe_environment

RESULTS = Path(__file__).parent / "results"


def load_average() -> float:
    """Load average of the last minute; take it before the first measurement, since a benchmark is
    itself a load.
    """
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else float("nan")


def command_line() -> str:
    return shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]])


def machine_line(load: float) -> str:
    """Processor, memory, load before the run, and the revision of this repository."""
    found = describe_environment("cpu")
    git = found["git"]
    revision = (
        f"{git['revision'][:10]}{' with changes' if git['changed'] else ''}"
        if git
        else "no git revision"
    )
    return (
        f"{found['cpu']}, {found['cpu_count']} cores, {found['memory_gib']} GiB, load average"
        f" {load:.1f} before the run; Python {found['python']}, {revision}"
    )


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def versions_line(*found: Mapping[str, str]) -> str:
    """Names and versions of the packages of several environments, each once."""
    return ", ".join(
        dict.fromkeys(
            f"{name} {version}" for versions in found for name, version in versions.items()
        )
    )


def median_interval(values: list[float]) -> tuple[float, float, float, float]:
    """(median, low, high, coverage) of the widest pair of order statistics of at least 95%."""
    ordered, count = sorted(values), len(values)
    rank = max(
        (
            k
            for k in range(count // 2)
            if 2 * sum(comb(count, i) for i in range(k + 1)) / 2**count <= 0.05
        ),
        default=0,
    )
    return (
        float(np.median(ordered)),
        ordered[rank],
        ordered[count - 1 - rank],
        1 - 2 * sum(comb(count, i) for i in range(rank + 1)) / 2**count,
    )


def add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the dated file")


def publish(name: str, title: str, paragraphs: Sequence[str], load: float, folder: Path) -> Path:
    """Print the report and write it to `folder`/`name`-DATE.md."""
    today = datetime.now(UTC).date().isoformat()
    text = (
        "\n\n".join(
            [
                f"# {title}, {today}",
                f"Command: `{command_line()}`\n\n{machine_line(load)}.",
                *paragraphs,
            ]
        )
        + "\n"
    )
    print(text, end="", flush=True)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{today}.md"
    path.write_text(text, encoding="utf-8")
    return path


def publish_simulation(
    name: str,
    title: str,
    document: str | None,
    paragraphs: Callable[[int], Iterable[str]],
    campaigns: int,
    what: str = "campaigns per row",
) -> None:
    """The command line of a benchmark that simulates campaigns: `paragraphs` takes their number,
    `campaigns` is its default.
    """
    parser = argparse.ArgumentParser(
        description=document, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--campaigns", type=int, default=campaigns, help=f"simulated {what}")
    add_output(parser)
    arguments = parser.parse_args()
    load, started = load_average(), time.monotonic()
    found = [
        *paragraphs(arguments.campaigns),
        f"numpy {np.__version__}, one core; {time.monotonic() - started:.0f} s in all.",
    ]
    publish(name, title, found, load, arguments.output)
