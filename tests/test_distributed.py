"""A run shared by several processes (torchrun) is the run of one process, up to the order of
floating-point sums.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from retrain import train
from retrain.config import dump_toml
from retrain.records.run_folder import RunFolder
from retrain.records.token_table import read_tokens
from tests.commands import Ranks
from tests.runs import lines, small

LAUNCHER = [
    sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"
]  # fmt: skip
SHARED: dict[str, Any] = {
    "training": {"batch_size": 3, "updates_per_batch": 2, "minibatches": 2, "top_p": 0.9},
    "loss": {"mode": "ppo", "kl_coef": 0.01, "max_grad_norm": 1.0},
    "evaluation": {"at_end": True, "max_examples": 5},
    "logging": {"tokens_every": 2},
}
"""Three prompts for two processes, so that the shares differ in size; every pass of the learner
takes part."""


def arguments(folder: Path, *flags: str, **sections: dict[str, Any]) -> list[str]:
    file = folder.parent / f"{folder.name}.toml"
    file.write_text(dump_toml(small(folder, **sections)))
    return ["-m", "retrain", str(file), *flags]


def shared(folder: Path, *flags: str, **sections: dict[str, Any]) -> Ranks:
    return Ranks([sys.executable, *arguments(folder, *flags, **sections)])


def finished(ranks: Ranks) -> None:
    output, codes = ranks.communicate(timeout=240)
    assert codes == [0, 0], output


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("alone") / "run"
    train(small(folder, **SHARED), quiet=True)
    return folder


def assert_same_learning(shared: Path, alone: Path) -> None:
    for name in ("emergence/generations.jsonl", "evaluation.jsonl"):
        assert lines(shared / name) == lines(alone / name), name
    ours, theirs = lines(shared / "metrics.jsonl"), lines(alone / "metrics.jsonl")
    assert len(ours) == len(theirs) == 4
    for left, right in zip(ours, theirs, strict=True):
        assert left["num_datums"] == right["num_datums"] > 0
        for name in (
            "loss",
            "grad_norm",
            "ratio_mean",
            "ratio_max",
            "ess",
            "mean_reward",
            "running_correct_rate",
            "entropy_mean",
        ):
            assert left[name] == pytest.approx(right[name], rel=1e-3, abs=1e-6), name
    ours, theirs = (read_tokens(RunFolder(folder).step_tokens(2)) for folder in (shared, alone))
    assert np.array_equal(ours.token_ids, theirs.token_ids)
    np.testing.assert_allclose(ours.log_ratios, theirs.log_ratios, atol=1e-3)


@pytest.mark.slow
def test_two_processes_learn_what_one_does(alone: Path, tmp_path: Path) -> None:
    folder = tmp_path / "shared"
    command = [*LAUNCHER, *arguments(folder, **SHARED)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=240)
    output = run.stdout
    assert run.returncode == 0, output + run.stderr
    assert output.count("Step 0 ") == 1, "one process speaks"
    assert "2 processes share this run" in output
    assert_same_learning(folder, alone)


@pytest.mark.slow
def test_two_processes_train_all_weights_as_one_does(tmp_path: Path) -> None:
    rate = SHARED["training"] | {"lr": 1e-5}  # the lab's would multiply rounding by 100 a step
    sections = SHARED | {"model": {"train": "full"}, "training": rate}
    train(small(tmp_path / "alone", **sections), quiet=True)
    finished(shared(tmp_path / "shared", **sections))
    assert_same_learning(tmp_path / "shared", tmp_path / "alone")
    file = "checkpoints/final/model.safetensors"
    ours, theirs = (load_file(tmp_path / folder / file) for folder in ("shared", "alone"))
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_no_thread_of_the_process_group_outlives_it(tmp_path: Path) -> None:
    """One aborted a process that had done its work, in three of some 200 launches."""
    script = tmp_path / "script.py"
    script.write_text(
        "from pathlib import Path\n"
        "from retrain.distributed import joined\n"
        "with joined() as world:\n"
        "    world.any_rank(True)\n"
        "    import torch.distributed.nn.functional\n"
        "tasks = Path('/proc/self/task').glob('*/comm')\n"
        "print([name for name in map(Path.read_text, tasks) if 'gloo' in name])\n"
    )
    command = [*LAUNCHER, str(script)]
    run = subprocess.run(command, check=True, capture_output=True, text=True, timeout=240)
    assert run.stdout.count("[]") == 2, run.stdout


@pytest.mark.slow
def test_a_shared_run_goes_on_where_it_was_stopped(alone: Path, tmp_path: Path) -> None:
    """A signal to one process stops all of them between two steps."""
    folder = tmp_path / "stopped"
    ranks = shared(folder, **SHARED)
    metrics = folder / "metrics.jsonl"
    while not (metrics.exists() and metrics.read_text().count("\n")):
        assert ranks.codes() == [None, None], ranks.communicate(0)[0]
        time.sleep(0.05)
    leader = int(RunFolder(folder).lock_owner.read_text().split()[1])
    os.kill(leader, signal.SIGTERM)
    output, codes = ranks.communicate(timeout=240)
    assert codes == [143, 143], output
    finished(shared(folder, "--resume", str(folder), **SHARED))
    assert_same_learning(folder, alone)


def test_a_wrong_configuration_is_said_once(alone: Path) -> None:
    output, codes = shared(alone, **SHARED).communicate(timeout=240)
    assert codes == [2, 2], output
    assert output.count("already holds a run") == 1


# --- a sharded base -------------------------------------------------------------------------------


SHARDED: dict[str, Any] = SHARED | {
    "training": SHARED["training"] | {"micro_batch_tokens": 40},
    "backend": {"shard_base": True},
}
"""Few tokens a pass, so that the processes have different numbers of passes to make."""


@pytest.mark.slow
def test_two_processes_that_hold_half_of_the_layers_learn_what_one_does(
    alone: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "sharded"
    finished(shared(folder, **SHARDED))
    assert_same_learning(folder, alone)
