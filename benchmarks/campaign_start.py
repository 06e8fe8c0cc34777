"""Memory and start of eight parallel runs: `python benchmarks/campaign_start.py`.

Memory of the whole (proportional set size: a page that n processes share counts 1/n for each),
seconds until all runs have passed their gate and sample step 0, and seconds of the whole. `--model`
takes a folder.
"""

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
from report import add_output, load_average, publish, table

from retrain.campaign import launch
from retrain.campaign.plan import CampaignRun, plan_campaign
from retrain.config import config_from_mapping
from retrain.records.run_folder import OUTPUT

RUNS = 8
_POLL_S = 0.02
_MEASURE_S = 0.5


def runs_in(
    folder: Path, model: str, steps: int, tokens: int = 64, conditions: int = 4
) -> list[CampaignRun]:
    """Conditions x seeds, 2 x 4 completions of `tokens` tokens a step."""
    names = [(mode, transform) for transform in ("none", "gtpo") for mode in ("grpo", "maxrl")]
    modes = [{"advantage_mode": a, "transform_mode": t} for a, t in names[:conditions]]
    config = config_from_mapping(
        {
            "campaign": {
                "seeds": [*range(RUNS // conditions)],
                "max_steps": steps,
                "conditions": modes,
            },
            "model": {"model": model, "lora_rank": 16},
            "data": {"source": "lab"},
            "reward": {"type": "match"},
            "training": {"batch_size": 2, "group_size": 4, "max_tokens": tokens},
            "evaluation": {"at_end": False},
            "logging": {"log_dir": str(folder)},
        }
    )
    return list(plan_campaign(config, folder).runs)


def resident() -> tuple[int, int]:
    """Proportional and anonymous private bytes of the processes that this one started."""
    shares, private = 0, 0
    for process in psutil.Process().children(recursive=True):
        try:
            lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()[1:]
        except OSError:  # it has ended
            continue
        sizes = {name: int(rest.split()[0]) * 1024 for name, rest in (x.split(":") for x in lines)}
        shares += sizes["Pss"]
        private += sizes["Private_Dirty"]
    return shares, private


def measure(folder: Path, *settings: Any) -> dict[str, float]:
    """`settings`: those of `runs_in`."""
    runs = runs_in(folder, *settings)
    launcher = launch.Subprocesses([()] * RUNS)
    began = time.monotonic()
    jobs = {run.name: launcher.start(run, slot) for slot, run in enumerate(runs)}
    at_step_0: dict[str, float] = {}
    peak, look_at = (0, 0), 0.0
    while jobs:
        now = time.monotonic() - began
        for run in runs:
            log = run.folder / OUTPUT
            if run.name not in at_step_0 and log.exists() and "Parity gate" in log.read_text():
                at_step_0[run.name] = now
        if now > look_at:
            peak = max(peak, resident())
            # Reading the pages of large processes takes time from them: a twentieth at most.
            took = time.monotonic() - began - now
            look_at = now + max(_MEASURE_S, 20 * took)
        for name, job in list(jobs.items()):
            outcome = job.poll()
            if outcome is not None:
                assert outcome.status == "done", outcome
                del jobs[name]
        time.sleep(_POLL_S)
    whole = time.monotonic() - began
    launcher.close()
    return {
        "pss": peak[0],
        "private": peak[1],
        "first": min(at_step_0.values()),
        "all": max(at_step_0.values()),
        "whole": whole,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure how a campaign's workers start.")
    parser.add_argument("--model", default="lab")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=64, help="of a completion")
    parser.add_argument(
        "--conditions", type=int, choices=(1, 2, 4), default=4, help="of 8 runs; the rest are seeds"
    )
    add_output(parser)
    arguments = parser.parse_args()
    load = load_average()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(
            Path(folder), arguments.model, arguments.steps, arguments.tokens, arguments.conditions
        )
    names = {
        "pss": ("memory of the whole, MiB", 1 << 20),
        "private": ("of it private and written, MiB", 1 << 20),
        "first": ("seconds until the first run is at step 0", 1),
        "all": ("seconds until all runs are at step 0", 1),
        "whole": ("seconds of all", 1),
    }
    rows = [[words, f"{found[key] / unit:.1f}"] for key, (words, unit) in names.items()]
    name = Path(arguments.model).name
    publish(
        f"campaign-start-{name}",
        f"{RUNS} parallel runs of {name}, {arguments.steps} steps of 2 x 4 x {arguments.tokens} tokens,"
        f" {arguments.conditions} conditions x {RUNS // arguments.conditions} seeds",
        [table(["", "eight runs"], rows)],
        load,
        arguments.output,
    )


if __name__ == "__main__":
    main()
