"""Campaigns written in the real format without training: what a comparison reads, with numbers that
a test chooses.
"""

import hashlib
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from retrain.cli.main import main
from retrain.config import TrainConfig, config_from_mapping, dump_toml
from retrain.config.overrides import deep_merge
from retrain.records.entries import EvaluationRecord, StepRecord
from retrain.records.jsonl import JsonlWriter
from retrain.records.run_folder import RunFolder
from retrain.records.summary import RunSummary
from tests.runs import SMALL, small

JUDGED = {"reward": {"type": "match"}}
"""In place of the small runs' random reward, which would make every arm a control."""


def problems(right: Sequence[int], samples: int = 1, tasks: int = 1) -> list[EvaluationRecord]:
    """One held-out problem for each number of right answers."""
    return [
        EvaluationRecord(
            0,
            f"problem-{index}",
            f"task-{index % tasks}",
            samples,
            count,
            0,
            count / samples if samples else None,
        )
        for index, count in enumerate(right)
    ]


def write_run(
    folder: Path,
    seed: int,
    rates: Sequence[float | None] = (0.5, 0.5),
    held_out: Sequence[EvaluationRecord] = (),
    *,
    finished: bool = True,
    max_steps: int | None = None,
    environment: Mapping[str, Any] | None = None,
    measured: Mapping[str, Any] | None = None,
    seconds: float = 1.0,
    tokens: int = 1,
    **sections: dict[str, Any],
) -> Path:
    """A run with these correct rates, evaluated at its last step; it replaces one there.

    In a campaign's `runs` it has the label that its folder's name gives. No two folders' runs have
    equal metrics. `measured` are further fields of every step.
    """
    training = {"seed": seed, "max_steps": max_steps or len(rates)} | sections.pop("training", {})
    label = folder.name.rpartition("_s")[0] if folder.parent.name == "runs" else ""
    logging = {"label": label} if label else {}
    config = small(
        folder,
        **{
            **JUDGED,
            **sections,
            "training": training,
            "logging": logging | sections.pop("logging", {}),
        },
    )
    files = RunFolder(folder)
    files.create()
    files.metrics.unlink(missing_ok=True)
    files.evaluation.unlink(missing_ok=True)
    files.config.write_text(dump_toml(config), encoding="utf-8")
    files.environment.write_text(
        json.dumps(
            {"data_sha256": "the lab's", "heldout_sha256": {"lab": "the lab's"}}
            | (environment or {})
        ),
        encoding="utf-8",
    )
    norm = zlib.crc32(folder.name.encode()) / 2**32
    records = [
        StepRecord(
            step,
            config.condition_label,
            correct_rate=rate,
            mean_reward=rate,
            grad_norm=norm,
            **(measured or {}),
        )
        for step, rate in enumerate(rates)
    ]
    _write_lines(files.metrics, [record.to_json() for record in records])
    if held_out:
        _write_lines(files.evaluation, [item.to_json() | {"step": len(rates)} for item in held_out])
    if finished:
        summary = RunSummary(
            "done",
            config.condition_label,
            seed,
            len(rates),
            seconds,
            tokens,
            None,
            None,
            records[-1],
            "checkpoints/final",
        )
        files.summary.write_text(json.dumps(summary.to_json()), encoding="utf-8")
    return folder


def seal(folder: Path, **state: Any) -> None:
    """Record the files of a run in trainer_state.json, as a real run does at its end; `state`
    replaces what the run itself would write.
    """
    files, summary = RunFolder(folder), json.loads(RunFolder(folder).summary.read_text())
    logs = filter(Path.is_file, (files.metrics, files.evaluation))
    found = {path.name: path.read_bytes() for path in logs}
    extents = {
        name: {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        for name, data in found.items()
    }
    content = {"seed": summary["seed"], "step": summary["steps"], "files": extents} | state
    files.trainer_state.write_text(json.dumps(content), encoding="utf-8")


def _write_lines(path: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    with closing(JsonlWriter(path)) as writer:
        for line in lines:
            writer.write(line)


def write_manifest(folder: Path, entries: Sequence[Mapping[str, Any]]) -> Path:
    """Each entry needs condition and seed; the rest is filled in."""
    runs = []
    for entry in entries:
        name = f"{entry['condition']}_s{entry['seed']}"
        runs.append(
            {
                "name": name,
                "status": "done",
                "dir": f"runs/{name}",
                "started": None,
                "ended": None,
                "reason": None,
                **entry,
            }
        )
    folder.mkdir(parents=True, exist_ok=True)
    content = {
        "timestamp": "20261121_120000",
        "conditions": list(dict.fromkeys(run["condition"] for run in runs)),
        "seeds": list(dict.fromkeys(run["seed"] for run in runs)),
        "runs": runs,
    }
    (folder / "manifest.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


@contextmanager
def manifest_of(campaign: Path) -> Iterator[dict[str, Any]]:
    """The content of its manifest.json, to be changed."""
    path = campaign / "manifest.json"
    content = json.loads(path.read_text())
    yield content
    path.write_text(json.dumps(content))


def modes_of(label: str) -> dict[str, str]:
    return dict(zip(("advantage_mode", "transform_mode"), label.split("+"), strict=True))


def write_arms(
    folder: Path,
    labels: Iterable[str],
    seeds: Iterable[int],
    own: Callable[[str, int], Mapping[str, Any]],
) -> Path:
    """A campaign of these conditions; `own` gives the arguments of each run's `write_run`."""
    entries = [{"condition": label, "seed": seed} for seed in seeds for label in labels]
    for entry in entries:
        label, seed = entry["condition"], entry["seed"]
        write_run(folder / f"runs/{label}_s{seed}", seed, **own(label, seed))
    return write_manifest(folder, entries)


EIGHT = [50, 48, 53, 51, 49, 52, 50, 47]


def shifted(by: Sequence[int]) -> list[int]:
    return [right + extra for right, extra in zip(EIGHT, by, strict=True)]


def compared(capsys: Any, *arguments: str | Path) -> dict[str, Any]:
    assert main(["compare", *map(str, arguments), "--json"]) == 0, capsys.readouterr().err
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


def shown(capsys: Any, *arguments: str | Path) -> str:
    assert main(["compare", *map(str, arguments)]) == 0, capsys.readouterr().err
    return " ".join(capsys.readouterr().out.split())


def write_campaign(
    folder: Path, arms: Mapping[str, Sequence[int]], asked: int = 100, **sections: dict[str, Any]
) -> Path:
    """Condition "advantage+transform" -> right answers of `asked` problems, for seeds 1, 2, ..."""
    entries = []
    for condition, right in arms.items():
        for seed, count in enumerate(right, start=1):
            own = {"algorithm": modes_of(condition), **sections}
            answers = problems([1] * count + [0] * (asked - count))
            write_run(folder / "runs" / f"{condition}_s{seed}", seed, held_out=answers, **own)
            entries.append({"condition": condition, "seed": seed})
    return write_manifest(folder, entries)


def write_planned(
    folder: Path, arms: Mapping[str, Sequence[int]], asked: int = 100, **campaign: Any
) -> Path:
    """A campaign as `retrain` leaves it, with its plan: condition -> right answers of `asked`
    problems, for seeds 1, 2, ...
    """
    from retrain.campaign import Manifest, Status, plan_campaign

    seeds = list(range(1, 1 + len(next(iter(arms.values())))))
    planned = {"seeds": seeds, "max_steps": 2, "conditions": [*map(modes_of, arms)]}
    plan = plan_campaign(planned_config(planned | campaign), folder)
    manifest = Manifest.of_plan(plan, datetime(2026, 11, 21, 12), "1111")
    for run in plan.runs:
        right = arms[run.condition][run.seed - 1]
        write_run(
            run.folder,
            run.seed,
            held_out=problems([1] * right + [0] * (asked - right)),
            algorithm=run.config.algorithm.model_dump(exclude_unset=True),
            evaluation=run.config.evaluation.model_dump(exclude_unset=True),
        )
        seal(run.folder)
        manifest[run.name].status = Status.DONE
    manifest.write()
    return folder


def planned_config(campaign: Mapping[str, Any], **sections: dict[str, Any]) -> TrainConfig:
    """A campaign of the small runs."""
    base = {name: dict(section) for name, section in SMALL.items()} | JUDGED | sections
    for name in ("seed", "max_steps"):
        base["training"].pop(name)
    return config_from_mapping({**base, "campaign": dict(campaign)})


def timed_pilot(folder: Path) -> Path:
    """Six seeds of grpo+none and maxrl+none that do not differ, with 50 problems x 4 samples and
    their times.
    """
    rng = np.random.default_rng(0)
    difficulty, entries = rng.uniform(0.2, 0.8, 50), []
    for seed in range(1, 7):
        for label in ("grpo+none", "maxrl+none"):
            rates = np.clip(difficulty + rng.normal(0, 0.05), 0, 1)
            run = write_run(
                folder / "runs" / f"{label}_s{seed}",
                seed,
                held_out=problems(rng.binomial(4, rates).tolist(), samples=4),
                seconds=800.0,
            )
            timed = {"time_sample_s": 6.4, "step_time_s": 8.0, "batch_size": 2, "group_size": 4}
            metrics = [
                json.loads(line) | timed
                for line in (run / "metrics.jsonl").read_text().splitlines()
            ]
            (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in metrics))
            entries.append({"condition": label, "seed": seed})
    return write_manifest(folder, entries)


BASE: dict[str, Any] = deep_merge(
    SMALL,
    {
        "reward": {"type": "match"},
        "evaluation": {"max_examples": 4},
        "training": {"save_every": 1, "max_tokens": 96},
    },
)
BASE["training"].pop("seed")
BASE["training"].pop("max_steps")
CAMPAIGN: dict[str, Any] = {
    "seeds": [1, 2],
    "max_steps": 2,
    "conditions": [
        {"advantage_mode": "grpo", "transform_mode": "none"},
        {
            "advantage_mode": "maxrl",
            "transform_mode": "gtpo",
            "label": "weighted",
            "gtpo.beta": 0.3,
        },
    ],
}


def sections(
    folder: Path, campaign: dict[str, Any] | None = None, **others: dict[str, Any]
) -> dict[str, Any]:
    there = {"campaign": CAMPAIGN | (campaign or {}), "logging": {"log_dir": str(folder)}}
    return deep_merge(deep_merge(BASE, there), others)
