"""What `[inference] calibration` records of sound engines while an adapter is trained: `python
benchmarks/calibration_runs.py` makes whole runs on the lab, prints a table and writes it to
results/. With `--engine vllm --url http://127.0.0.1:8000` a server samples (`retrain serve vllm`).

With `--fault top_p=0.8 temperature=+10%` the engine samples so and retrain knows nothing of it: a
proxy rewrites the requests on their way to the server. Each run ends where it is warned of.

Every completion of a step is tested. What each run did is kept in `--state`, so that a benchmark
that was stopped goes on where it was.
"""

import argparse
import json
import random
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from report import add_output, load_average, publish, table
from scipy import stats

from retrain.config import TrainConfig
from retrain.errors import RetrainError, RunFailed
from retrain.run.calibration import SHARED_FROM, WARNED_FROM
from retrain.run.loop import take_step
from retrain.run.session import Session
from retrain.tracking.base import Verbosity

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
import faulty_engines
from faulty_proxy import faulty_proxy
from runs import lines, small

COMPLETIONS = (4, 8)
"""Prompts and completions of each, of a step."""
SETTINGS: dict[str, tuple[Any, ...]] = {
    "training.temperature": (0.7, 1.0),
    "training.top_p": (1.0, 0.95, 0.8),
    "inference.dtype": ("auto", "bf16"),
}
"""Values that are drawn with equal probability. A server has its own precision, and truncates only on
a GPU."""
ENGINES = {
    "temperature": (faulty_engines.Colder, "factor"),
    "top_p": (faulty_engines.AnotherTopP, "top_p"),
    "repetition_penalty": (faulty_engines.Penalises, "penalty"),
}
"""The engine in this process that has a fault, and its attribute."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=24)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--engine", default="pytorch")
    parser.add_argument("--url", default="", help="of the server that samples")
    parser.add_argument("--fault", nargs="+", default=[], help="KEY=NUMBER or KEY=+10%%")
    parser.add_argument("--state", type=Path, help="by default a file of this engine and --steps")
    add_output(parser)
    given, load = parser.parse_args(), load_average()
    if min(given.runs, given.steps) < 1:
        parser.error("--runs and --steps must be at least 1")
    given.state = given.state or Path(f"calibration-runs-{given.engine}-{given.steps}.jsonl")
    torch.set_num_threads(1)
    try:
        done = list(taken_runs(given))
    except RetrainError as error:
        parser.exit(error.exit_code, f"{parser.prog}: {error}\n")
    name, what, found = "runs", "trained adapters", paragraphs(done, given.steps)
    if given.fault:
        name, what, found = "faults", "faulty samplers", faulty_paragraphs(done, given.steps)
    publish(
        f"calibration-{name}-{given.engine}",
        f"Calibration of {what}, sampled by {given.engine}",
        found,
        load,
        given.output,
    )


def taken_runs(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The runs that are kept, and those that are missing, one of each fault after the other."""
    done = lines(given.state) if given.state.exists() else []
    yield from done
    known = {(run["number"], run.get("fault", "")) for run in done}
    wanted = [(number, fault) for number in range(given.runs) for fault in given.fault or [""]]
    for number, fault in wanted:
        if (number, fault) not in known:
            run = made(number, fault, given)
            with given.state.open("a", encoding="utf-8") as state:
                state.write(json.dumps(run) + "\n")
            print(run, flush=True)
            yield run


def made(number: int, fault: str, given: argparse.Namespace) -> dict[str, Any]:
    """Take a run, and return its settings and what was recorded of it."""
    rng = random.Random(number)
    chosen = {key: rng.choice(values) for key, values in SETTINGS.items()}
    if given.url:
        del chosen["inference.dtype"], chosen["training.top_p"]
    if fault:
        # All of them are then compared at one temperature.
        chosen = {}
    batch_size, group_size = COMPLETIONS
    sections: dict[str, Any] = {
        "reward": {"type": "match"},
        "inference": {
            "calibration": True,
            "calibration_completions": batch_size * group_size,
        },
        "training": {
            "seed": number,
            "max_steps": given.steps,
            "batch_size": batch_size,
            "group_size": group_size,
            "max_tokens": 96,
            "max_examples": 4096,
            "save_every": 0,
        },
    }
    for key, value in chosen.items():
        section, name = key.split(".")
        sections[section][name] = value
    if fault:
        # What the step's own comparison would stop is read from log_ratio_mean.
        sections["inference"]["mismatch_limit"] = 0.0
    with TemporaryDirectory() as scratch, sampler(fault, given) as engine:
        sections["inference"] |= engine
        config = small(Path(scratch) / "run", **sections)
        gate = taken(config, fault)
        records = lines(Path(config.logging.log_dir) / "metrics.jsonl")
    rates, last = [record["correct_rate"] for record in records], records[-1]
    return {
        "number": number,
        "fault": fault,
        "settings": chosen,
        "gate": gate,
        "steps": len(records),
        "log_ratio": max(record["log_ratio_mean"] or 0.0 for record in records),
        "tokens": last["calibration_tokens"],
        "first": sum(rates[:5]) / len(rates[:5]),
        "last": sum(rates[-5:]) / len(rates[-5:]),
        "lambda": last["calibration_lambda_total"],
        "evidence": max(record["calibration_evidence"] for record in records),
        "shared": max(
            max(record["calibration_shared_prompt"], record["calibration_shared_number"])
            for record in records
        ),
    }


@contextmanager
def sampler(fault: str, given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The keys of [inference] that name an engine with this fault, which lasts inside."""
    name, _, value = fault.partition("=")
    if not fault:
        yield {"engine": given.engine, "url": given.url}
    elif given.url:
        with faulty_proxy(given.url) as (address, traffic):

            def bent_request(path: str, request: bytes) -> bytes:
                if not path.endswith("/completions"):
                    return request
                body = json.loads(request)
                return json.dumps(body | {name: bent(body.get(name, 1.0), value)}).encode()

            traffic.asked = bent_request
            yield {"engine": given.engine, "url": address}
    else:
        engine, attribute = ENGINES[name]
        setattr(engine, attribute, bent(1.0, value))
        yield {"engine": f"faulty_engines.{engine.__name__}"}


def bent(asked: float, value: str) -> float:
    """`value`, or `asked` changed by it where it is a percentage."""
    if value.endswith("%"):
        return asked * (1 + float(value[:-1]) / 100)
    return float(value)


def taken(config: TrainConfig, fault: str, *, skip_parity: bool = False) -> str:
    """Take the steps; those of a faulty engine up to the one that is warned of, and without the
    parity gate where it stops the run. Return what the gate then said.
    """
    try:
        with Session.open(
            config, overwrite=True, verbosity=Verbosity.SILENT, skip_parity=skip_parity
        ) as session:
            while not session.is_finished:
                take_step(session)
                if fault and session.state.calibration["warned"]:
                    break
    except RunFailed as error:
        if skip_parity or not fault:
            raise
        taken(config, fault, skip_parity=True)
        return str(error)
    return ""


def paragraphs(runs: list[dict[str, Any]], steps: int) -> Iterable[str]:
    warned = [run for run in runs if run["evidence"] >= WARNED_FROM or run["shared"] >= SHARED_FROM]
    low, high = stats.binomtest(len(warned), len(runs)).proportion_ci(method="wilson")
    yield (
        f"{len(warned)} of {len(runs)} runs were warned of; Wilson interval (95%) {100 * low:.1f}%"
        f" to {100 * high:.1f}%. Lab model, {steps} steps of {COMPLETIONS[0]} prompts x"
        f" {COMPLETIONS[1]} completions, lr 1e-3, all tested, one thread."
    )
    keys = list(dict.fromkeys(key for run in runs for key in run["settings"]))
    head = ["run", *(f"`{key}`" for key in keys), "tokens", "right, first and last 5 steps"]
    head += ["lambda", "highest evidence", "most alike, sd"]
    yield table(head, (row(run, keys) for run in runs))


def row(run: dict[str, Any], keys: Iterable[str]) -> list[object]:
    return [
        run["number"],
        *(run["settings"].get(key, "") for key in keys),
        f"{run['tokens']:,}",
        f"{run['first']:.0%}, {run['last']:.0%}",
        f"{run['lambda']:+.4f}",
        f"{run['evidence']:.2f}",
        f"{run['shared']:.1f}",
    ]


def faulty_paragraphs(runs: list[dict[str, Any]], steps: int) -> Iterable[str]:
    yield (
        f"Runs of at most {steps} steps of {COMPLETIONS[0]} prompts x {COMPLETIONS[1]} completions"
        " of the lab model at temperature 1, lr 1e-3, all tested, each up to its warning. Where the"
        " parity gate stopped a run, it was taken again without the gate; `mismatch_limit` was off."
    )
    head = ["the engine has", "runs", "stopped by the gate", "warned of"]
    head += ["steps until warned of: median, range", "tokens a step", "lambda", "evidence"]
    head += ["highest `log_ratio_mean`"]
    faults = dict.fromkeys(run["fault"] for run in runs)
    by_fault = ([run for run in runs if run["fault"] == fault] for fault in faults)
    yield table(head, (faulty_row(own, steps) for own in by_fault))
    said = {run["fault"]: run["gate"] for run in runs if run["gate"]}
    if said:
        yield "What the gate said of one run of each:"
        yield "\n".join(f"- `{fault}`: {gate}" for fault, gate in said.items())


def faulty_row(runs: list[dict[str, Any]], steps: int) -> list[object]:
    found = {name: [run[name] for run in runs] for name in runs[0]}
    # One that is never warned of counts as later than all others.
    late = [
        taken if evidence >= WARNED_FROM else steps + 1
        for taken, evidence in zip(found["steps"], found["evidence"], strict=True)
    ]
    which = np.quantile(late, [0.5, 0, 1], method="inverted_cdf")
    median, first, last = (str(n) if n <= steps else f"> {steps}" for n in which)
    return [
        f"`{runs[0]['fault']}`",
        len(runs),
        sum(map(bool, found["gate"])),
        sum(n <= steps for n in late),
        f"{median}, {first} to {last}",
        f"{sum(found['tokens']) / sum(found['steps']):,.0f}",
        f"{min(found['lambda']):+.3f} to {max(found['lambda']):+.3f}",
        f"{min(found['evidence']):.1f} to {max(found['evidence']):.1f}",
        f"{max(found['log_ratio']):.1e}",
    ]


if __name__ == "__main__":
    main()
