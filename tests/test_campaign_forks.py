"""Workers that are forked from one parent: each trains the run that `retrain` trains alone."""

import hashlib
import json
import os
import shutil
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file

from retrain.backends.local.changes import LocalTrialAdapter
from retrain.campaign import plan_campaign
from retrain.campaign.launch import (
    ForkedProcess,
    ForkedRun,
    ForkParent,
    ForkRefusal,
    InProcess,
    Job,
    RunOutcome,
    Subprocesses,
    Worker,
    no_fork_reason,
    start_worker,
)
from retrain.campaign.manifest import Status
from retrain.campaign.parent import prepare
from retrain.campaign.plan import CampaignRun
from retrain.config import config_from_mapping, dump_toml
from retrain.data.sources import register_source
from retrain.inference_engine.torch_engine import TorchEngine
from retrain.model import load
from retrain.model.packed import kept_pack, shared_packs
from retrain.model.text import LAB_MODEL
from retrain.run import common, gate
from retrain.run.interrupts import Interrupts
from retrain.run.loop import train
from retrain.run.sharing import shared, shared_parts
from retrain.types import Example
from tests.campaigns import sections
from tests.marks import first_of
from tests.runs import lines, timeless

LOOKING = '''
"""An advantage that writes down all that a process may have from its parent."""
import gc, json, os, random, signal, sys, threading
import numpy as np
import torch

def advantage(rewards):
    kinds = [os.readlink(f"/proc/self/fd/{n}").partition(":")[0] for n in os.listdir("/proc/self/fd")
             if os.path.exists(f"/proc/self/fd/{n}") or n in "012"]
    seen = {
        "environ": dict(os.environ),
        "folder": os.getcwd(),
        "path": sys.path,
        "arguments": len(sys.argv),
        "signals": {s.name: str(signal.getsignal(s)).split(" at ")[0] for s in signal.Signals},
        "mask": [int(s) for s in signal.pthread_sigmask(signal.SIG_BLOCK, [])],
        "umask": os.umask(0o022),
        "torch": [
            torch.get_num_threads(), torch.get_num_interop_threads(), str(torch.get_default_dtype()),
            torch.is_grad_enabled(), torch.are_deterministic_algorithms_enabled(),
            torch.get_float32_matmul_precision(), torch.backends.mkldnn.enabled,
            torch.is_inference_mode_enabled(), torch.backends.cuda.flash_sdp_enabled(),
        ],
        "numpy": [np.geterr(), np.get_printoptions()["precision"]],
        "limits": [sys.getrecursionlimit(), gc.get_threshold(), gc.isenabled()],
        "sockets": kinds.count("socket"),
        "leads": os.getsid(0) == os.getpid(),
        "tracing": [sys.gettrace() is None, threading.active_count() < 9],
    }
    drawn = [random.random(), float(np.random.random()), float(torch.rand(1))]
    target = os.environ["SEEN"]
    with open(os.path.join(target, str(os.getpid())), "w") as file:
        json.dump([seen, drawn], file)
    mean = sum(rewards) / len(rewards)
    return [reward - mean for reward in rewards]
'''


def runs_of(folder: Path, **others: Any) -> list[CampaignRun]:
    config = config_from_mapping(sections(folder, others.pop("campaign", {}), **others))
    return list(plan_campaign(config, folder).runs)


def outcome_of(job: Job, seconds: float = 240) -> RunOutcome:
    deadline = time.monotonic() + seconds
    while (outcome := job.poll()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return outcome


def the_same(folder: Path, other: Path) -> None:
    assert timeless(folder / "metrics.jsonl") == timeless(other / "metrics.jsonl"), folder.name
    for file in ("evaluation.jsonl", "checkpoints/final/adapter_model.safetensors"):
        assert (folder / file).read_bytes() == (other / file).read_bytes(), (folder.name, file)


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last bits of a sum depend on the number of threads, so workers have as many as this
    process.
    """
    monkeypatch.setenv("OMP_NUM_THREADS", str(torch.get_num_threads()))


@pytest.mark.slow
def test_a_forked_worker_has_nothing_of_its_parent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("looking.py").write_text(LOOKING)
    looking = [
        {"advantage_mode": "looking.advantage", "transform_mode": transform}
        for transform in ("none", "gtpo")
    ]
    seen = {}
    for name in ("forked", "apart"):
        (tmp_path / name).mkdir()
        monkeypatch.setenv("SEEN", str(tmp_path / name))
        runs = runs_of(tmp_path / f"c_{name}", campaign={"conditions": looking, "seeds": [1]})
        launcher = Subprocesses([(), ()])
        if name == "forked":
            jobs: list[Job] = [launcher.start(run, slot) for slot, run in enumerate(runs)]
        else:
            jobs = [start_worker(run, threads=1) for run in runs]
        assert [outcome_of(job).status for job in jobs] == [Status.DONE] * 2
        if name == "forked":
            assert [note for note in launcher.notes if "starts by itself" in note] == []
        launcher.close()
        seen[name] = [json.loads(file.read_text()) for file in (tmp_path / name).iterdir()]
    everything = [record for name in seen for record, _ in seen[name]]
    for record in everything:
        record["environ"].pop("SEEN")
    assert everything[0] == everything[1] == everything[2] == everything[3]
    drawn = [number for name in seen for _, numbers in seen[name] for number in numbers]
    assert len(set(drawn)) == len(drawn) == 12


@pytest.mark.slow
@pytest.mark.parametrize(
    ("conditions", "seeds"),
    [
        pytest.param(2, 2, id="small"),
        pytest.param(5, 4, id="big", marks=pytest.mark.slow),
    ],
)
def test_a_forked_run_is_the_run_alone(
    conditions: int, seeds: int, tmp_path: Path, threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that was killed and goes on, and beside one that fails."""
    monkeypatch.chdir(tmp_path)
    Path("failing.py").write_text("def advantage(rewards):\n    raise RuntimeError('on purpose')\n")
    modes = [
        {"advantage_mode": "grpo", "transform_mode": "none"},
        {"advantage_mode": "maxrl", "transform_mode": "gtpo"},
        {"advantage_mode": "maxrl", "transform_mode": "none"},
        {"advantage_mode": "maxrl", "transform_mode": "gtpo_hicra"},
        {"advantage_mode": "maxrl", "transform_mode": "gtpo_sepa"},
    ][:conditions]
    campaign = {"conditions": modes, "seeds": list(range(1, seeds + 1))}
    runs = runs_of(tmp_path / "forked", campaign=campaign)
    failing = [{"advantage_mode": "failing.advantage", "transform_mode": "none"}]
    bad = runs_of(tmp_path / "failing", campaign={"conditions": failing, "seeds": [1]})[0]
    launcher = Subprocesses([()] * 4)
    jobs = {0: (bad, launcher.start(bad, 0))}
    waiting, killed, statuses = list(runs), False, {}
    deadline = time.monotonic() + 900
    while waiting or jobs:
        assert time.monotonic() < deadline
        free = next((slot for slot in range(4) if slot not in jobs), None)
        if waiting and free is not None:
            run = waiting.pop(0)
            jobs[free] = run, launcher.start(run, free)
        for slot, (run, job) in list(jobs.items()):
            if not killed and run is runs[0] and (run.folder / "metrics.jsonl").exists():
                owner = (run.folder / ".lock.owner").read_text().split()
                os.kill(int(owner[1]), signal.SIGKILL)
                killed = True
            if (outcome := job.poll()) is not None:
                del jobs[slot]
                statuses[run.folder] = outcome
                if outcome.lost and run is runs[0]:
                    assert outcome.reason == "its process was killed by SIGKILL"
                    waiting.append(run)
        time.sleep(0.02)
    launcher.close()
    assert killed and statuses.pop(bad.folder).status is Status.FAILED
    assert {outcome.status for outcome in statuses.values()} == {Status.DONE}
    for run in runs:
        alone = runs_of(tmp_path / "alone", campaign=campaign)
        (same,) = [other for other in alone if other.name == run.name]
        train(same.config, quiet=True)
        the_same(run.folder, same.folder)


@pytest.mark.slow
def test_forked_workers_end_with_their_parent(tmp_path: Path) -> None:
    run = runs_of(tmp_path, campaign={"max_steps": 500})[0]
    parent = ForkParent(threads=1)
    worker = Worker(parent.fork(run))
    deadline = time.monotonic() + 120
    while not (run.folder / "metrics.jsonl").exists():
        assert worker.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    pid = int((run.folder / ".lock.owner").read_text().split()[1])
    parent._process.kill()
    outcome = outcome_of(worker, 10)
    assert outcome.lost and parent.lost
    with pytest.raises(ProcessLookupError):
        for _ in range(100):
            os.kill(pid, 0)
            time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="forks on Linux alone")
def test_a_signal_that_meets_a_worker_at_its_fork_is_not_forgotten(tmp_path: Path) -> None:
    """It waits at the parent that prepares the run, and comes before Python's first line in the
    worker.
    """
    runs = runs_of(tmp_path, campaign={"max_steps": 500, "seeds": [1]})
    with Interrupts():  # as the campaign: no worker begins with Ctrl-C ignored
        parent = ForkParent(threads=1)
        try:
            for run in runs:
                worker = Worker(parent.fork(run))
                worker.stop(signal.SIGINT)
                assert "SIGINT" in outcome_of(worker).reason
        finally:
            parent.close()


def test_a_run_that_was_stopped_before_its_fork_was_refused_is_not_started(tmp_path: Path) -> None:
    theirs, process = linked()

    class Refuses:
        def fork(self, run: CampaignRun) -> ForkedProcess:
            return process

    job = ForkedRun(runs_of(tmp_path)[0], 1, cast(ForkParent, Refuses()), lambda _: None)
    job.stop(signal.SIGINT)
    assert theirs.recv(10, socket.MSG_DONTWAIT) == bytes([signal.SIGINT])
    theirs.send(json.dumps({"refused": "it left 2 threads"}).encode())
    outcome = job.poll()
    assert outcome and outcome.status is Status.INTERRUPTED
    process.stdout.close()


@pytest.mark.slow
def test_what_runs_of_a_seed_have_in_common_before_step_0_is_made_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gate, evaluation and first completions, also beside another reward and learning rate; not
    those of another seed. Each run has the bytes of the run alone.
    """
    grpo = {"advantage_mode": "grpo", "transform_mode": "none"}
    campaign = {
        "conditions": [
            grpo,
            grpo | {"label": "fast", "lr": 3e-4},
            grpo | {"label": "control", "reward.type": "random"},
        ],
        "seeds": [1, 2],
        "max_steps": 1,
    }
    made: list[str] = []

    def counted(name: str, function: Any) -> Any:
        def wrapped(*arguments: Any, **named: Any) -> Any:
            made.append(name)
            return function(*arguments, **named)

        return wrapped

    monkeypatch.setattr(gate, "_compared", counted("gate", gate._compared))
    monkeypatch.setattr(LocalTrialAdapter, "set", counted("trial", LocalTrialAdapter.set))
    monkeypatch.setattr(TorchEngine, "sample_feed", counted("feed", TorchEngine.sample_feed))
    settings = {
        "reward": {"type": "match"},
        "evaluation": {"at_start": True, "at_end": False, "max_examples": 8},
    }
    runs = runs_of(tmp_path / "together", campaign=campaign, **settings)
    launcher = InProcess()
    try:
        assert [launcher.start(run, 0).poll().status for run in runs] == [Status.DONE] * 6
    finally:
        launcher.close()
    # A sound gate tells no groups of layers apart: eleven more trials each.
    assert made.count("trial") < 2 * 11
    # The control names its judge by another key, and is evaluated by itself.
    assert (made.count("gate"), made.count("feed")) == (2, 6)
    kinds = Counter[str]()
    for file in (tmp_path / "together" / "common").glob("*.json"):
        inputs = json.loads(file.read_text())["inputs"]
        assert file.stem == hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()
        kinds[inputs["result"]] += 1
    assert kinds == {"gate": 2, "evaluation": 4, "completions": 2}
    for number in (1, 2):
        alone = runs_of(tmp_path / "alone", campaign=campaign, **settings)[number]
        train(alone.config, quiet=True)
        the_same(runs[number].folder, alone.folder)
        gates = [
            json.loads((folder / "environment.json").read_text())["parity_gate"]
            for folder in (runs[number].folder, alone.folder)
        ]
        assert gates[0] == gates[1]


@pytest.mark.parametrize(
    ("blocked", "sentence"),
    first_of(
        [
            ("common", "common cannot be used: it is a file, and a folder is expected there;"),
            (".json", ".json cannot be used: it is a folder, and a file is expected there;"),
            (".lock", ".lock cannot be used: it is a folder, and a file is expected there;"),
        ]
    ),
)
def test_what_stands_in_the_place_of_a_common_result_is_named(
    tmp_path: Path, blocked: str, sentence: str
) -> None:
    plain = {"advantage_mode": "grpo", "transform_mode": "none"}
    campaign = {"conditions": [plain, plain | {"label": "again"}], "seeds": [1], "max_steps": 1}
    runs = runs_of(tmp_path, campaign=campaign)
    launcher, common = InProcess(), tmp_path / "common"
    try:
        if blocked == "common":
            common.write_text("")
        else:
            assert launcher.start(runs[0], 0).poll().status is Status.DONE
            for file in common.glob(f"*{blocked}"):
                file.unlink()
                file.mkdir()
        outcome = launcher.start(runs[1], 0).poll()
    finally:
        launcher.close()
    assert outcome.status is Status.FAILED
    assert sentence in outcome.reason and str(common) in outcome.reason
    assert "Errno" not in outcome.reason


def a_pair_and_then(change: Callable[[Path], None], folder: Path, **others: Any) -> list[Path]:
    """The folders of a pair of equal runs; `change` is told of each stored result between them."""
    plain = {"advantage_mode": "grpo", "transform_mode": "none"}
    campaign = {"conditions": [plain, plain | {"label": "again"}], "seeds": [1], "max_steps": 1}
    settings = {
        "reward": {"type": "match"},
        "evaluation": {"at_start": True, "at_end": False, "max_examples": 8},
    }
    runs = runs_of(folder, campaign=campaign, **settings, **others)
    launcher = InProcess()
    try:
        assert launcher.start(runs[0], 0).poll().status is Status.DONE
        for file in (folder / "common").glob("*.json"):
            change(file)
        assert launcher.start(runs[1], 0).poll().status is Status.DONE
    finally:
        launcher.close()
    return [run.folder for run in runs]


@pytest.mark.parametrize("how", first_of(["edited", "cut", "emptied", "of an older form"]))
def test_a_stored_result_that_is_damaged_or_changed_is_made_anew(tmp_path: Path, how: str) -> None:
    """A run neither fails because of it nor takes it as its own. The pair has an equal evaluation and
    equal weights, though the labels differ.
    """

    def change(file: Path) -> None:
        stored = json.loads(file.read_text())
        made = stored["made"]
        if stored["inputs"]["result"] == "evaluation":
            del made["problems"][3:]
        elif stored["inputs"]["result"] == "completions":
            made["completions"][0]["token_ids"][:] = [1] * 4
        if how == "of an older form":
            del stored["made"], stored["sha256"]
        text = json.dumps(stored)
        file.write_text({"cut": text[: len(text) // 2], "emptied": ""}.get(how, text))

    first, second = a_pair_and_then(change, tmp_path)
    for file in ("evaluation.jsonl", "checkpoints/final/adapter_model.safetensors"):
        assert (first / file).read_bytes() == (second / file).read_bytes(), file


@pytest.mark.slow
@pytest.mark.parametrize("what", ["plugin", "device_name", "packages"])
def test_another_machine_or_version_makes_its_own_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """A gate that another engine passed says nothing of this one."""
    monkeypatch.chdir(tmp_path)
    plugin = Path(f"engine_{what}.py")
    plugin.write_text(
        "from retrain.inference_engine.torch_engine import TorchEngine\n"
        "class Mine(TorchEngine):\n"
        "    def __init__(self, config, *, model, eos_ids, device):\n"
        "        super().__init__(model, eos_ids, device)\n"
    )
    before = common.describe_environment

    def change(file: Path) -> None:
        if what == "plugin":
            plugin.write_text(plugin.read_text() + "    edited = True\n")
        else:
            other = {what: "another"}
            monkeypatch.setattr(
                common, "describe_environment", lambda device: before(device) | other
            )

    a_pair_and_then(change, tmp_path, inference={"engine": f"{plugin.stem}.Mine"})
    assert len([*(tmp_path / "common").glob("*.json")]) == 6


@pytest.mark.slow
def test_a_result_that_another_run_made_costs_what_it_cost(tmp_path: Path) -> None:
    """Else the baseline of each pair, which runs first, would seem the slowest condition."""

    def change(file: Path) -> None:
        stored = json.loads(file.read_text())
        if "seconds" in stored["made"]:
            stored["made"]["seconds"] = 1000.0
        digest = hashlib.sha256(json.dumps(stored["made"]).encode()).hexdigest()
        file.write_text(json.dumps(stored | {"sha256": digest}))

    first, second = (
        json.loads((folder / "summary.json").read_text())["seconds"]
        for folder in a_pair_and_then(change, tmp_path)
    )
    assert first < 1000 and 2000 < second < 3000
    (step,) = lines(tmp_path / "runs/again_s1/metrics.jsonl")
    assert step["time_sample_s"] == 1000 and 1000 <= step["step_time_s"] < 1500


@pytest.mark.parametrize("section", ["data", "evaluation"])
def test_a_source_of_the_users_is_asked_by_its_runs_alone(
    section: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that hangs would hold the parent, and Ctrl-C and what a run says of it would wait."""
    asked: list[int] = []

    def source(split: str = "train") -> list[Example]:
        asked.append(1)
        return [Example("1+1=", "2")]

    register_source(f"{section}_of_the_user", source)
    given: dict[str, Any] = {"evaluation": {"at_end": True}}
    given[section] = given.get(section, {}) | {"source": f"{section}_of_the_user"}
    run = runs_of(tmp_path, **given)[0]
    with shared_parts(), load.shared_models(), shared_packs():
        prepare({"config": dump_toml(run.config), "path": ""})
        assert load._model_cache
    assert not asked


@pytest.mark.slow
def test_a_model_folder_that_changes_is_read_anew(tmp_path: Path) -> None:
    """Its weights, and the evaluation before step 0, are those of the run alone."""
    model = shutil.copytree(LAB_MODEL, tmp_path / "model") / "model.safetensors"
    campaign = {
        "conditions": [
            {"advantage_mode": mode, "transform_mode": "none"} for mode in ("grpo", "maxrl")
        ],
        "seeds": [1],
        "max_steps": 1,
    }
    settings = {
        "model": {"model": str(model.parent)},
        "reward": {"type": "match"},
        "evaluation": {"at_start": True, "max_examples": 8},
    }
    runs = runs_of(tmp_path / "together", campaign=campaign, **settings)
    launcher = InProcess()
    try:
        assert launcher.start(runs[0], 0).poll().status is Status.DONE
        half = {name: 0.5 * weight for name, weight in load_file(model).items()}
        save_file(half, model, metadata={"format": "pt"})
        assert launcher.start(runs[1], 0).poll().status is Status.DONE
    finally:
        launcher.close()
    alone = runs_of(tmp_path / "alone", campaign=campaign, **settings)[1]
    train(alone.config, quiet=True)
    the_same(runs[1].folder, alone.folder)


# -- its parts, without a process ------------------------------------------------------------------


def linked() -> tuple[socket.socket, ForkedProcess]:
    link, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
    receiving, sending = os.pipe()
    os.close(sending)
    return theirs, ForkedProcess(link, os.fdopen(receiving, "rb", buffering=0), theirs.close)


def test_a_forked_process_tells_its_end_once_and_takes_signals() -> None:
    theirs, process = linked()
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert theirs.recv(10) == bytes([signal.SIGTERM])
    theirs.send(json.dumps({"code": -11}).encode())
    assert process.poll() == process.poll() == -11
    process.send_signal(signal.SIGTERM)  # it has ended
    process.stdout.close()


def test_of_the_workers_of_a_parent_that_hangs_one_alone_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("retrain.campaign.launch._END_S", 0.5)
    pairs = [linked() for _ in range(4)]

    def end_parent() -> None:
        for theirs, _ in pairs:
            theirs.close()

    for theirs, process in pairs:
        theirs.send(json.dumps({"forked": 1}).encode())
        process._end_parent = end_parent
    began = time.monotonic()
    for _, process in pairs:
        Worker(process).kill()
    assert time.monotonic() - began < 1.5


def test_a_worker_whose_parent_is_lost_was_killed_with_it() -> None:
    theirs, process = linked()
    theirs.send(json.dumps({"forked": 1}).encode())
    theirs.close()
    outcome = Worker(process).poll()
    assert outcome is not None and outcome.lost and "SIGKILL" in outcome.reason


@pytest.mark.parametrize(
    ("said", "reason"),
    [({"refused": "it left 2 threads"}, "it left 2 threads"), (None, "was lost")],
)
def test_what_was_not_forked_is_told_with_its_reason(
    said: dict[str, str] | None, reason: str
) -> None:
    theirs, process = linked()
    if said:
        theirs.send(json.dumps(said).encode())
    theirs.close()
    with pytest.raises(ForkRefusal, match=reason):
        process.poll()
    process.stdout.close()


@pytest.mark.skipif(sys.platform != "linux", reason="forks on Linux alone")
def test_workers_are_forked_on_a_processor_of_linux_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unset = sections(tmp_path, {})
    del unset["backend"]
    plan = plan_campaign(config_from_mapping(unset), tmp_path)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert no_fork_reason(plan) == ""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert "CUDA" in no_fork_reason(plan)
    monkeypatch.setattr(sys, "platform", "darwin")
    assert "darwin" in no_fork_reason(plan)


def test_parts_are_kept_for_an_equal_key_while_they_are_shared() -> None:
    assert shared("key", list) is not shared("key", list)
    with shared_parts():
        kept = shared("key", list)
        assert shared("key", list) is kept
        assert shared("other", list) is not kept
        assert shared(None, list) is not shared(None, list)
    assert shared("key", list) is not kept


def test_packed_copies_are_kept_for_a_weight_while_they_are_shared() -> None:
    weight, other = (torch.nn.Parameter(torch.randn(4, 4)) for _ in range(2))
    assert kept_pack(weight, weight, None) is not kept_pack(weight, weight, None)
    with shared_packs():
        pack = kept_pack(weight, weight, None)
        assert kept_pack(weight, weight, None) is pack
        assert kept_pack(other, other, None) is not pack


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    from retrain.data.prompts import examples_key

    file = tmp_path / "train.jsonl"
    file.write_text('{"prompt": "1 + 1?", "answer": "2"}\n')
    config = config_from_mapping({"data": {"source": str(file)}})
    key = examples_key(config, "train")
    assert key is not None and key == examples_key(config, "train")
    assert key != examples_key(config, "heldout")
    file.write_text(file.read_text() * 2)
    assert examples_key(config, "train") != key
    own = config_from_mapping({"data": {"source": "mine.examples"}})
    assert examples_key(own, "train") is None
    assert dump_toml(own)
