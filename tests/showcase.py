"""A campaign with something for every part of a report: curves, evaluations, SEPA, a squeeze table,
and completions that mean harm.
"""

import json
from pathlib import Path

import numpy as np
from campaigns import write_manifest
from runs import small

from retrain.config import dump_toml
from retrain.records.entries import EvaluationRecord, GenerationRecord, StepRecord
from retrain.records.jsonl import encode_line
from retrain.records.run_folder import RunFolder
from retrain.records.summary import RunSummary

CONDITIONS = ("grpo+none", "maxrl+none", "maxrl+gtpo", "maxrl+gtpo_hicra", "maxrl+gtpo_sepa")
HOSTILE = (
    "</pre><script>document.title = 'owned'; fetch('https://evil.example/')</script>",
    '<img src="https://evil.example/x.png" onerror="document.title = \'owned\'">',
    "\x1b]0;owned\x07\x1b[31mred\u202etxt.exe\u2066 and\x00 nul \ud800 \u2028next\u2029\x85",
    "{{ 7 * 191 }} ${1337} <!-- --> &lt;b&gt; \\boxed{42}",
    "x" * 3000,
    "مرحبا let me check: 1+1=2",
)
SQUEEZE = {
    "recommended_rank": 8,
    "rule": "mean",
    "threshold": 0.95,
    "table": [
        {"rank": rank, "mean": mean, "min": low, "max": high, "energy": mean, "error": 0.1}
        for rank, mean, low, high in (
            (1, 0.41, 0.2, 0.7),
            (2, 0.62, 0.4, 0.86),
            (4, 0.83, 0.66, 0.95),
            (8, 0.96, 0.9, 0.99),
            (16, 1, 1, 1),
        )
    ],
}


def write_showcase(
    folder: Path, *, seeds: int = 6, steps: int = 24, conditions: int = 3, problems: int = 40
) -> Path:
    rng = np.random.default_rng(0)
    entries = []
    for place, condition in enumerate(CONDITIONS[-conditions:]):
        for seed in range(1, seeds + 1):
            name = f"{condition}_s{seed}"
            _write_run(
                RunFolder(folder / "runs" / name),
                condition,
                seed,
                steps,
                0.06 * place,
                problems,
                rng,
            )
            entries.append({"condition": condition, "seed": seed})
    write_manifest(folder, entries)
    manifest = folder / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"squeeze": SQUEEZE}))
    return folder


def _write_run(
    folder: RunFolder,
    condition: str,
    seed: int,
    steps: int,
    gain: float,
    problems: int,
    rng: np.random.Generator,
) -> None:
    advantage, _, transform = condition.partition("+")
    config = small(
        folder.path,
        algorithm={"advantage_mode": advantage, "transform_mode": transform},
        training={"seed": seed, "max_steps": steps},
        reward={"type": "match"},
    )
    folder.create()
    folder.config.write_text(dump_toml(config))
    luck = rng.normal(0, 0.02)
    rates = [
        0.36 + (0.35 + gain + luck) * (1 - np.exp(-step / (0.4 * steps))) + rng.normal(0, 0.03)
        for step in range(steps)
    ]
    records = [_step(step, steps, condition, rate, rng) for step, rate in enumerate(rates)]
    folder.metrics.write_bytes(b"".join(encode_line(record.to_json()) for record in records))
    answers = [
        answer
        for step in (0, steps // 2, steps)
        for answer in _answers(step, rates[max(0, step - 1)], problems, rng)
    ]
    folder.evaluation.write_bytes(b"".join(encode_line(answer.to_json()) for answer in answers))
    folder.generations.parent.mkdir()
    folder.generations.write_bytes(
        b"".join(
            encode_line(_generation(step, sample).to_json())
            for step in range(steps)
            for sample in range(6)
        )
    )
    summary = RunSummary(
        "done", condition, seed, steps, 1.0, 1, None, None, records[-1], "checkpoints/final"
    )
    folder.summary.write_text(json.dumps(summary.to_json()))


def _step(
    step: int, steps: int, condition: str, rate: float, rng: np.random.Generator
) -> StepRecord:
    planning = "hicra" in condition or "sepa" in condition
    return StepRecord(
        step,
        condition,
        loss=0.01,
        correct_rate=rate,
        mean_reward=rate,
        informative_fraction=0.9 - 0.4 * step / steps,
        completion_tokens_mean=50 + 10 * step / steps + rng.normal(0, 1),
        truncated_fraction=0.1,
        entropy_mean=0.3 * np.exp(-2 * step / steps) + rng.normal(0, 0.004),
        plan_entropy_mean=0.5 * np.exp(-step / steps) + rng.normal(0, 0.01) if planning else None,
        sepa_lambda=min(1.0, 1.5 * step / steps) if "sepa" in condition else None,
        time_sample_s=1.2,
        time_reward_s=0.05,
        time_credit_s=0.02,
        time_learn_s=0.7,
        step_time_s=2.0 + rng.normal(0, 0.02),
        tokens_per_s=3000 + rng.normal(0, 100),
    )


def _answers(
    step: int, rate: float, problems: int, rng: np.random.Generator
) -> list[EvaluationRecord]:
    right = rng.random(problems) < rate
    return [
        EvaluationRecord(step, f"problem-{index}", "lab", 1, int(one), 0, float(one))
        for index, one in enumerate(right)
    ]


def _generation(step: int, sample: int) -> GenerationRecord:
    outcome = ("right", "wrong", "could_not_judge")[sample % 3]
    reward = {"right": 1.0, "wrong": 0.0, "could_not_judge": None}[outcome]
    text = HOSTILE[sample % len(HOSTILE)]
    return GenerationRecord(
        step,
        f"<b>lab-{sample}</b>",
        sample,
        f"prompt {text}",
        text,
        reward,
        outcome,
        reward,
        "stop",
        7,
    )
