"""benchmarks/results/replications: claims of papers, tried on the lab and on a real model, with
what was predicted before the first run.

    python scripts/replications.py                  # all of the lab, each continued where it stopped
    python scripts/replications.py nsr              # one of them
    python scripts/replications.py --pages          # the pages alone, from the runs that are there
    python scripts/replications.py nsr --smollm2 models/smollm2-135m

Claim and prediction stand at the head of each file of examples/replications. Of a page that exists
the section "What it says" is kept: a reader writes it. With --smollm2 they train that model on sums
of reasoning_gym instead, each as its own file says (nsr-smollm2.toml), on a page of its own.
"""

import argparse
import json
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Iterator
from contextlib import suppress
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from retrain.records.entries import StepRecord
from retrain.run.evaluate import evaluate_run
from retrain.types import Outcome

ROOT = Path(__file__).resolve().parents[1]
FILES = ROOT / "examples" / "replications"
PAGES = ROOT / "benchmarks/results/replications"
LAB = ("luck", "nsr", "ranks", "mismatch")
CLAIMS = (*LAB, "lora-or-full")
METRICS = {
    "nsr": ("pass@1", "pass@8", "pass@64"),
    "nsr-smollm2": ("pass@1", "pass@8", "pass@16"),
}
"""Name -> the metrics that its campaign is compared in, the planned one first; else pass@1."""
READING = "## What it says\n"
SMOLLM2 = "-smollm2"
"""Ends the name of a replication on SmolLM2-135M: its file, its page and its folder."""
LUCK = ["--evaluation-max-examples", "30", "--evaluation-samples", "10"]
"""Sample n of every problem is evaluation n: its noise is independent of the others."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "names", nargs="*", help=f"of {', '.join(CLAIMS)}; by default {', '.join(LAB)}"
    )
    parser.add_argument("--pages", action="store_true", help="write the pages, run nothing")
    parser.add_argument("--smollm2", type=Path, help="the folder of the model")
    arguments = parser.parse_args()
    if unknown := sorted(set(arguments.names) - set(CLAIMS)):
        parser.error(f"{', '.join(unknown)} is no replication; choose from {', '.join(CLAIMS)}")
    if arguments.smollm2 and not (ROOT / arguments.smollm2 / "config.json").is_file():
        parser.error(
            f"--smollm2 {arguments.smollm2} holds no model (no config.json);"
            " scripts/get_smollm2.py writes it"
        )
    if not arguments.smollm2 and (real := sorted(set(arguments.names) - set(LAB))):
        parser.error(f"{', '.join(real)} has no campaign on the lab; name the model with --smollm2")
    for claim in arguments.names or LAB:
        name, model = claim, []
        if arguments.smollm2:
            name, model = claim + SMOLLM2, ["--model", str(arguments.smollm2)]
        if not arguments.pages:
            run(name, model)
        write_page(name)


def retrain(*words: str, shown: bool = False) -> str:
    """What a command prints, unless it is `shown`. If it fails it has said why, and this program
    ends with its code. Ctrl-C reaches it too, and is waited for, since it saves.
    """
    command = [sys.executable, "-m", "retrain", *words]
    output = None if shown else subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, stdout=output, text=True) as process:
        while process.returncode is None:
            with suppress(KeyboardInterrupt):
                printed = process.communicate()[0]
    if process.returncode:
        raise SystemExit(process.returncode)
    return printed or ""


def run(name: str, model: list[str]) -> None:
    """Run a replication, or continue it where it stopped."""
    if name == "luck":  # its adapter is the lab's own
        config, folder = "examples/lab.toml", "logs/lab"
    else:
        config, folder = f"examples/replications/{name}.toml", _folder(name)
    changes = model
    if any((ROOT / folder / file).is_file() for file in ("manifest.json", "config.toml")):
        changes = [*model, "--resume", folder]
    luck = name.removesuffix(SMOLLM2) == "luck"
    if not luck or not (ROOT / folder / "checkpoints" / "final").is_dir():
        retrain(config, *changes, shown=True)
    if luck:
        _evaluate(name, ROOT / folder)


def _folder(name: str) -> str:
    """The folder that the file of a campaign names."""
    text = (FILES / f"{name}.toml").read_text(encoding="utf-8")
    return str(tomllib.loads(text)["logging"]["log_dir"])


def _evaluate(name: str, folder: Path) -> None:
    verdicts: list[list[float]] = []

    def keep(_: Any, __: Any, groups: list[Any]) -> None:
        for group in groups:
            scores = [member.score for member in group.members]
            verdicts.append([float(score.outcome is Outcome.RIGHT) for score in scores])

    evaluate_run(folder, overrides=LUCK, log=print, keep=keep)
    file = ROOT / "logs" / "replications" / f"{name}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(verdicts), encoding="utf-8")


# --- a page ---------------------------------------------------------------------------------------


def write_page(name: str) -> None:
    page = PAGES / f"{name}.md"
    reading = ""
    if page.is_file():
        reading = page.read_text(encoding="utf-8").partition(READING)[2]
    PAGES.mkdir(exist_ok=True)
    results = _luck(name) if name.startswith("luck") else _comparisons(name)
    text = "\n".join([*_head(name), *map(_wrapped, results), READING]) + reading
    page.write_text(text, encoding="utf-8")


def _wrapped(line: str) -> str:
    """A paragraph in lines of 100; a row of a table stays as it is."""
    if line.startswith("|"):
        return line
    return textwrap.fill(line, 100, break_long_words=False, break_on_hyphens=False)


def _head(name: str) -> Iterator[str]:
    """The comment at the head of a campaign's file."""
    file = next(FILES.glob(f"{name}.t*"))
    comment = file.read_text(encoding="utf-8").partition("\n\n[")[0]
    lines = [line.removeprefix("# ").removeprefix("#") for line in comment.splitlines()]
    lines = [line for line in lines if line and "make replications" not in line]
    title, *rest = lines
    lab, claim = "../../../docs/lab.md", name.removesuffix(SMOLLM2)
    if name.endswith(SMOLLM2):  # what was found there
        lab = f"{claim}.md"
    yield from (f"# {title.partition(':')[0]}", "")
    for line in [title.partition(": ")[2], *rest]:
        if line.endswith(":"):
            yield from ("", f"## {line[:-1]}", "")
        else:
            yield line.replace(" on the lab", f" on [the lab]({lab})")
    command = [f"make replications ONLY={name}"]
    if name.endswith(SMOLLM2):
        command = ["# needs: hub", f"make replications ONLY={claim} SMOLLM2=models/smollm2-135m"]
    yield from ("", "## Found", "", "```bash", *command, "```", "")


def _comparisons(name: str) -> Iterator[str]:
    folder = _folder(name)
    found = {
        metric: json.loads(retrain("compare", folder, "--json", "--metric", metric))
        for metric in METRICS.get(name, ("pass@1",))
    }
    first = next(iter(found.values()))
    _draw(name, found)
    yield from (f"![Differences]({name}.svg)", "", first["planned"], "")
    for metric, comparison in found.items():
        yield f"| {metric} | mean | difference [95% interval] | pairs | verdict, adjusted p |"
        yield "|---|---|---|---|---|"
        means = {arm["label"]: arm["mean"] for arm in comparison["arms"]}
        yield f"| {comparison['baseline']} | {means.pop(comparison['baseline']):.1%} | | | |"
        for one in comparison["contrasts"]:
            ends = ", ".join(f"{100 * end:+.1f}" for end in one["interval"] or ())
            p = one["equivalence_p_adjusted" if one["word"] == "equivalent" else "p_adjusted"]
            verdict = f"{one['word']}, p {p:.2g}"
            yield (
                f"| {one['condition']} | {means[one['condition']]:.1%} |"
                f" {100 * one['mean_difference']:+.1f} pp [{ends or 'no interval'}] | {one['pairs']} |"
                f" {'none before the last run' if comparison['to_come'] else verdict} |"
            )
        to_come = f"No verdict yet: {comparison['to_come']} runs are still to come."
        yield from ("", to_come if comparison["to_come"] else comparison["answer"], "")
    if name.startswith("mismatch"):
        yield from _doses(folder, [arm["label"] for arm in first["arms"]])


def _doses(folder: str, labels: list[str]) -> Iterator[str]:
    yield from ("| arm | dose: mean \\|learner - sampler\\| in nats per token |", "|---|---|")
    for label in labels:
        steps = [
            record.logprob_diff_mean
            for path in (ROOT / folder / "runs").glob(f"{label}_s*/metrics.jsonl")
            for record in StepRecord.read(path)
        ]
        yield f"| {label} | {fmean(step for step in steps if step is not None):.2g} |"
    yield ""


def _draw(name: str, found: dict[str, Any]) -> None:
    plt.rcParams["svg.hashsalt"] = "retrain"  # the same runs give the same bytes
    figure, axes = plt.subplots(
        1,
        len(found),
        figsize=(2.2 + 2.6 * len(found), 2.6),
        layout="constrained",
        sharey=True,
        squeeze=False,
    )
    for axis, (metric, comparison) in zip(axes[0], found.items()):
        for place, one in enumerate(reversed(comparison["contrasts"])):
            ends = [100 * end for end in one["interval"] or ()]
            axis.plot(ends, [place] * len(ends), color="#1b6ca8")
            axis.plot(100 * one["mean_difference"], place, "o", color="#1b6ca8")
        names = [one["condition"] for one in reversed(comparison["contrasts"])]
        axis.set_yticks(range(len(names)), names)
        axis.set_ylim(-0.6, len(names) - 0.4)
        axis.axvline(0, color="#555555", linewidth=0.8)
        for end in (-1, 1):
            if comparison["margin"]:
                axis.axvline(100 * end * comparison["margin"], color="#c98a1b", linestyle=":")
                axis.set_xlabel("dotted: the margin of equivalence", fontsize=8)
        axis.set_title(f"{metric} minus {comparison['baseline']}, points", fontsize=9)
    figure.savefig(PAGES / f"{name}.svg", metadata={"Date": None})
    plt.close(figure)


def _luck(name: str) -> Iterator[str]:
    file = ROOT / "logs" / "replications" / f"{name}.json"
    if not file.is_file():
        raise SystemExit(f"{file} is not there: leave out --pages, so that the run is made")
    verdicts = json.loads(file.read_text(encoding="utf-8"))
    scores = [fmean(column) for column in zip(*verdicts, strict=True)]
    p = fmean(scores)
    problems = len(verdicts)
    within = sqrt(fmean(fmean(one) * (1 - fmean(one)) for one in verdicts) / problems)
    yield from ("| evaluation | score |", "|---|---|")
    for place, score in enumerate(scores, start=1):
        yield f"| {place} | {score:.1%} |"
    yield ""
    yield (
        f"Mean {100 * p:.1f}%, standard deviation {100 * stdev(scores):.1f} points, from"
        f" {100 * min(scores):.1f} to {100 * max(scores):.1f}. The problems' own pass rates"
        f" predict {100 * within:.1f} points (a little too few, because ten samples estimate them),"
        f" and {100 * sqrt(p * (1 - p) / problems):.1f} with new problems each time."
    )
    yield ""


if __name__ == "__main__":
    main()
