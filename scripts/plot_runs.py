"""Learning curves of one or more runs in one picture: training correct rate, and held-out pass@1
with its interval.

    python scripts/plot_runs.py RUN... --output curve.svg
    # and a metric of the run's environment
    python scripts/plot_runs.py logs/guess --metric heeded --output curve.svg

Reads metrics.jsonl and evaluation.jsonl of each run's folder. Needs the extra `report`.
"""

import argparse
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from retrain.records.evaluation import clustered_interval
from retrain.records.jsonl import read_jsonl
from retrain.records.run_folder import RunFolder

_COLORS = ("#1b6ca8", "#d1495b", "#2e8b57", "#8e5ea2", "#c98a1b", "#555555")
_WINDOW = 5
"""Steps of the running mean: the correct rate of one step, over some hundred completions, varies by
several points."""
_SHIFT = 0.3
"""Horizontal distance in steps between the held-out points of two runs, which would overlap."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path, help="run folders")
    parser.add_argument("--output", type=Path, required=True, help="the picture: .svg or .png")
    parser.add_argument("--title", default="")
    parser.add_argument(
        "--metric", default="", help="also the mean of this metric of the environment, a share"
    )
    arguments = parser.parse_args()
    draw(arguments.runs, arguments.output, arguments.title, arguments.metric)
    print(f"Picture: {arguments.output}")
    for run in arguments.runs:
        print(
            f"Files:   {run}/"
            f" ({', '.join(sorted(path.name for path in run.iterdir() if not path.name.startswith('.')))})"
        )


def draw(runs: list[Path], output: Path, title: str = "", metric: str = "") -> None:
    plt.rcParams["svg.hashsalt"] = "retrain"  # the same runs give the same bytes
    figure, axes = plt.subplots(figsize=(7.2, 4.0), layout="constrained")
    conditions = [
        next((line["condition"] for line in read_jsonl(RunFolder(run).metrics)), run.name)
        for run in runs
    ]
    labels = conditions if len(set(conditions)) == len(runs) else [run.name for run in runs]
    for index, (run, label) in enumerate(zip(runs, labels, strict=True)):
        shift = (index - (len(runs) - 1) / 2) * _SHIFT
        _draw_run(
            axes,
            RunFolder(run),
            _COLORS[index % len(_COLORS)],
            label,
            shift,
            several=len(runs) > 1,
        )
        if metric:
            lines = [
                line
                for line in read_jsonl(RunFolder(run).metrics)
                if metric in line["environment_metrics"]
            ]
            values = _running_mean([line["environment_metrics"][metric] for line in lines])
            steps = [line["step"] + 1 for line in lines]
            axes.plot(
                steps,
                values,
                color=_COLORS[(index + 1) % len(_COLORS)],
                linestyle="--",
                label=f"{label}, {metric}",
            )
    axes.set(xlabel="step", ylabel="correct completions", ylim=(0, 1), title=title or None)
    axes.yaxis.set_major_formatter(matplotlib.ticker.PercentFormatter(1.0))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    handles, names = axes.get_legend_handles_labels()
    legend = dict(zip(names, handles, strict=True))  # All runs' points have one name.
    figure.legend(legend.values(), legend.keys(), loc="outside upper left", ncols=2, frameon=False)
    figure.savefig(output, metadata={"Date": None} if output.suffix == ".svg" else None)
    plt.close(figure)


def _draw_run(
    axes: Any, folder: RunFolder, color: str, label: str, shift: float, *, several: bool
) -> None:
    lines = [line for line in read_jsonl(folder.metrics) if line["correct_rate"] is not None]
    steps, rates = [line["step"] + 1 for line in lines], [line["correct_rate"] for line in lines]
    axes.plot(steps, rates, color=color, alpha=0.25, linewidth=1)
    axes.plot(
        steps,
        _running_mean(rates),
        color=color,
        linewidth=2,
        label=label if several else f"{label}, training",
    )
    points = held_out(folder)
    if points:
        at = sorted(points)
        means = [points[step][0] for step in at]
        below = [points[step][0] - points[step][1] for step in at]
        above = [points[step][2] - points[step][0] for step in at]
        style = {
            "fmt": "o",
            "color": "black" if not several else color,
            "capsize": 3,
            "markersize": 5,
        }
        axes.errorbar(
            [step + shift for step in at],
            means,
            yerr=[below, above],
            label="held-out pass@1, 95% interval",
            **style,
        )


def held_out(folder: RunFolder) -> dict[int, tuple[float, float, float]]:
    """Completed steps -> (pass@1, low, high), with the interval over the problems."""
    means: dict[int, list[float]] = defaultdict(list)
    samples: Counter[int] = Counter()
    if folder.evaluation.exists():
        for line in read_jsonl(folder.evaluation):
            if line["samples"]:
                means[line["step"]].append(line["correct"] / line["samples"])
                samples[line["step"]] += line["samples"]
    return {
        step: (sum(values) / len(values), *clustered_interval(values, samples[step]))
        for step, values in means.items()
    }


def _running_mean(values: list[float]) -> list[float]:
    return [
        sum(window) / len(window)
        for window in (
            values[max(0, index - _WINDOW + 1) : index + 1] for index in range(len(values))
        )
    ]


if __name__ == "__main__":
    main()
