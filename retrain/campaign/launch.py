"""Start the runs of a campaign: in this process, as processes on devices of this machine, or as
tasks of a Ray cluster.

A process on this machine ends when the campaign's process ends, however it ends. The Ray cluster
runs at `[campaign] ray_address`, or locally, and then it starts and ends with the campaign. Ray
places the runs and reports lost ones. Each Ray task starts the same worker process. All machines
must have retrain installed and see the campaign's folder under the same path.
"""

import contextlib
import gc
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import (
    ExitStack,
    contextmanager,
    redirect_stderr,
    redirect_stdout,
)
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, Protocol

from retrain.analysis.runs import StoredRun
from retrain.backends.base import backend_kind
from retrain.campaign.manifest import Status
from retrain.campaign.plan import CampaignPlan, CampaignRun
from retrain.config import TrainConfig, dump_toml, replaced
from retrain.config.schema import Campaign, Training
from retrain.errors import (
    ConfigurationError,
    EnvironmentFailure,
    Interrupted,
    RetrainError,
    RunFailed,
)
from retrain.install import install_hint
from retrain.records.checkpoint import CheckpointStore
from retrain.records.checkpoint_place import stored_checkpoints
from retrain.records.disk import is_disk, path_error
from retrain.records.redact import harmless
from retrain.records.run_folder import OUTPUT, RunFolder
from retrain.system import Json


@dataclass(frozen=True)
class RunOutcome:
    """The outcome of a run."""

    status: Status
    """DONE, FAILED or INTERRUPTED."""
    reason: str = ""
    """The reason why the run did not finish, as one sentence."""
    lost: bool = False
    """The worker ended without an answer: a signal killed it, or its machine disappeared. A restart
    may help.
    """
    stopped_by: int | None = None
    """The signal that the campaign's own process received while the run's handlers were active."""


class Job(Protocol):
    """A started run."""

    def poll(self) -> RunOutcome | None:
        """Return the run's outcome; None while it is running."""

    def stop(self, signal_number: int) -> None:
        """Ask the run to save a checkpoint and end."""

    def kill(self) -> None:
        """End the run immediately; does nothing if it has ended."""


class Launcher(Protocol):
    """Starts runs, at most `workers` at a time."""

    workers: int

    def start(self, run: CampaignRun, slot: int) -> Job:
        """Start a run. The `slot`, from 0 to workers - 1, differs from the slots of other running
        runs. Raises OSError if the disk refuses its folder.
        """

    def close(self) -> None:
        """Release the resources of the launcher: by default nothing."""
        return


def perform(config: TrainConfig) -> RunOutcome:
    """Train a run in this process, from its checkpoint if an earlier session started it. A failed
    run is an outcome, not an exception.
    """
    from retrain.run.loop import train

    folder = RunFolder(config.folder)
    try:
        # Check this before too, so that a run without an hour left loads no model.
        if not _used_hours(folder.path, config.training):
            # A started run has the marker; without a checkpoint it resumes at step 0.
            train(
                replaced(config, {"resume.from": str(folder.path)}, origin="file")
                if folder.marker.is_file()
                else config
            )
        used = _used_hours(folder.path, config.training)
    except Interrupted as error:
        return RunOutcome(Status.INTERRUPTED, str(error), stopped_by=error.exit_code - 128)
    except RetrainError as error:
        print(harmless(f"retrain: {error}"), file=sys.stderr)
        return RunOutcome(Status.FAILED, " ".join(str(error).split()))
    except Exception as error:  # noqa: BLE001 - an unexpected error ends this run alone; its traceback is kept in the run's output
        print(harmless(traceback.format_exc()), file=sys.stderr)
        known = path_error(error) if isinstance(error, OSError) else None
        if known:
            return RunOutcome(Status.FAILED, str(known))
        return RunOutcome(
            Status.FAILED,
            f"{type(error).__name__}: {' '.join(str(error).split())[:300]} (the traceback is in"
            f" {OUTPUT})",
        )
    if used:
        return RunOutcome(Status.INTERRUPTED, used)
    if config.model.train == "full":
        CheckpointStore(stored_checkpoints(folder)).keep_weights()
    return RunOutcome(Status.DONE)


def _used_hours(folder: Path, training: Training) -> str:
    """Say that `[training] max_hours` came before a run's last step. Returns "" if it did not. A
    damaged summary.json also gives "", since the next session writes that file again.
    """
    try:
        return StoredRun(folder).used_hours(training)
    except RunFailed:
        return ""


@contextmanager
def output_to(folder: Path) -> Iterator[None]:
    """Append everything that Python code prints to the run's output.log."""
    folder.mkdir(parents=True, exist_ok=True)
    with (
        (folder / OUTPUT).open("a", encoding="utf-8", buffering=1) as file,
        redirect_stdout(file),
        redirect_stderr(file),
    ):
        yield


@dataclass(frozen=True)
class EndedJob:
    """A run that has ended when `start` returns."""

    outcome: RunOutcome

    def poll(self) -> RunOutcome:
        return self.outcome

    def stop(self, signal_number: int) -> None: ...

    def kill(self) -> None: ...


def not_started(run: CampaignRun, error: OSError) -> RunOutcome:
    """Return the outcome of a run whose process or whose output.log the system refuses."""
    if is_disk(error):
        reason = f"{run.folder / OUTPUT} is not writable ({error.strerror}); free space there"
    else:
        reason = str(path_error(error) or f"it does not start: {error.strerror}")
    return RunOutcome(Status.FAILED, reason)


class InProcess:
    """Trains one run after the other in this process. It keeps the base model, the tokenizer and
    the prompts loaded between them.
    """

    workers = 1

    def __init__(self, *, loads_models: bool = True) -> None:
        """`loads_models` is False if a remote service holds the model, so that the runs import no
        model library.
        """
        from retrain.run.sharing import shared_parts

        self._shared = ExitStack()
        self._shared.enter_context(shared_parts())
        if loads_models:
            from retrain.model.load import shared_models

            self._shared.enter_context(shared_models())

    def start(self, run: CampaignRun, slot: int) -> EndedJob:
        try:
            with output_to(run.folder):
                outcome = perform(run.config)
        except OSError as error:
            outcome = not_started(run, error)
        gc.collect()  # This frees the optimizer and caches, which are in reference cycles.
        return EndedJob(outcome)

    def close(self) -> None:
        self._shared.close()


# -- processes on this machine ---------------------------------------------------------------------


MAX_REASON = 8000
"""Maximum number of characters of an outcome's reason. A pipe holds the outcome until the campaign
reads it, after the end of the process.
"""
_PIPE_BYTES = 1 << 16
Devices = tuple[str, ...]
"""Device names of torch, for example ("cuda:0",); empty leaves the run's configuration
unchanged.
"""
_DEVICES = ("", "gpu:0", "gpu:0,gpu:1")
"""`[backend] devices` by the number of GPUs: a run sees only its own GPUs."""


def share_devices(plan: CampaignPlan) -> list[Devices]:
    """Return the devices of each worker: groups of `devices_per_run` GPUs, assigned in turn.

    The GPUs come from `[backend] devices`, or else are all GPUs of the machine. Without a GPU only
    `max_workers` limits the workers (0: one for each run). Raises ConfigurationError for more
    workers than the GPUs can hold.
    """
    settings = plan.settings
    pool = _pool(plan)
    room = room_on_gpus(plan)
    if room is None:
        return [()] * (settings.max_workers or len(plan.runs))
    groups = _groups(pool, settings)
    workers = settings.max_workers or min(room, len(plan.runs))
    if workers > room:
        raise ConfigurationError(
            f"[campaign] max_workers = {workers} exceeds the {room} runs that fit on"
            f" {len(pool)} GPUs (devices_per_run = {settings.devices_per_run},"
            f" workers_per_device = {settings.workers_per_device}). Lower it, or set"
            f" workers_per_device = {-(-workers // len(groups))} if the memory of one GPU is"
            " enough for that."
        )
    return [groups[number % len(groups)] for number in range(workers)]


def room_on_gpus(plan: CampaignPlan) -> int | None:
    """Number of runs that fit on the GPUs at once; None without a GPU. Raises ConfigurationError if
    not even one fits.
    """
    pool = _pool(plan)
    if pool:
        return len(_groups(pool, plan.settings)) * plan.settings.workers_per_device
    return None


def _pool(plan: CampaignPlan) -> Devices:
    if plan.config.is_set("backend.devices"):
        named = plan.config.backend.device_list
        return named if all(name.startswith("cuda") for name in named) else ()
    if not backend_kind(plan.config.backend.backend).in_process:
        return ()
    import torch

    return tuple(f"cuda:{index}" for index in range(torch.cuda.device_count()))


def _groups(pool: Devices, settings: Campaign) -> Sequence[Devices]:
    size = settings.devices_per_run
    groups = [pool[start : start + size] for start in range(0, len(pool) - size + 1, size)]
    if not groups:
        raise ConfigurationError(
            f"[campaign] devices_per_run = {size} exceeds the number of devices"
            f" ({', '.join(pool)}); lower it."
        )
    return groups


# -- workers ---------------------------------------------------------------------------------------


class Subprocesses(Launcher):
    """One worker for each slot, on the slot's devices; on a CPU the workers share the cores."""

    def __init__(self, slots: Sequence[Devices]) -> None:
        self._slots = slots
        self.workers = len(slots)

    def start(self, run: CampaignRun, slot: int) -> Job:
        """Start a worker on the devices of `slot`."""
        threads = max(1, (os.cpu_count() or 1) // self.workers)
        return start_worker(run, threads, self._slots[slot])


def start_worker(run: CampaignRun, threads: int, devices: Devices = ()) -> "Worker":
    """Start the worker process of a run. `threads` is its OMP_NUM_THREADS unless the environment
    sets that variable.
    """
    environment = {"OMP_NUM_THREADS": str(threads)} | os.environ | visible(devices, os.environ)
    return _worker_for(_request(run, len(devices)), run.folder, environment)


def visible(devices: Devices, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the CUDA_VISIBLE_DEVICES that restricts a process to these GPUs; `devices` counts
    among the GPUs that `environ` leaves this process.
    """
    names = list(filter(None, environ.get("CUDA_VISIBLE_DEVICES", "").split(",")))
    indices = [int(device.partition(":")[2] or 0) for device in devices]
    chosen = ",".join(names[index] if names else str(index) for index in indices)
    return {"CUDA_VISIBLE_DEVICES": chosen} if devices else {}


def _worker_for(request: bytes, folder: Path, environment: Mapping[str, str]) -> "Worker":
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / OUTPUT).open("ab") as log, _held(signal.SIGINT):
        process = subprocess.Popen(
            [sys.executable, "-P", "-u", "-m", "retrain.campaign.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            start_new_session=True,
            env=environment,
        )
    assert process.stdin is not None
    # The process may have ended already, which `poll` reports.
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(request + b"\n")
        process.stdin.flush()
    return Worker(process)


@contextmanager
def _held(number: signal.Signals) -> Iterator[None]:
    """Block a signal, also in a process that starts inside, until that process unblocks it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [number])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _request(run: CampaignRun, gpus: int, **given: str) -> bytes:
    """Return the run in the form for its worker: on `gpus` GPUs, and with the keys `given`."""
    if gpus:
        given["backend.devices"] = _DEVICES[gpus]
    path = run.config.source_path
    text = dump_toml(replaced(run.config, given, origin="file"))
    return json.dumps({"config": text, "path": str(path) if path else ""}).encode()


class Worker:
    """A worker process. It has its own session, so that Ctrl-C reaches only the campaign, which
    forwards it.
    """

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self._process = process

    def poll(self) -> RunOutcome | None:
        """Return the run's outcome; None while it is running."""
        code = self._process.poll()
        if code is None:
            return None
        assert self._process.stdout is not None
        # A child that a plugin forked and left may hold the pipe for ever, so a read must not wait
        # for its end.
        os.set_blocking(self._process.stdout.fileno(), False)
        answer = b""
        with contextlib.suppress(BlockingIOError):
            answer = os.read(self._process.stdout.fileno(), _PIPE_BYTES)
        self._close_pipes()
        try:
            values = json.loads(answer)
            return RunOutcome(Status(values["status"]), values["reason"])
        except ValueError:  # The pipe has no answer, or only a part.
            pass
        if code < 0:
            how = f"died of {signal.Signals(-code).name}"
        else:
            how = f"ended with exit code {code}"
        return RunOutcome(Status.FAILED, f"its process {how}", lost=True)

    def stop(self, signal_number: int) -> None:
        """Ask the run to save a checkpoint and end."""
        self._process.send_signal(signal_number)

    def kill(self) -> None:
        """End the process at once."""
        self._process.kill()
        self._process.wait()
        self._close_pipes()

    def _close_pipes(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


# -- tasks of a Ray cluster ------------------------------------------------------------------------


_POLL_S = 0.2
_CONNECT_TIMEOUT_S = 10.0
_OBJECT_STORE_BYTES = 2**27
"""Object store of a local cluster: only configurations and outcomes pass through it. By default Ray
takes a third of the memory."""


class RayLauncher:
    """Starts each run as a Ray task. Raises EnvironmentFailure if Ray is missing or no cluster
    answers.
    """

    def __init__(self, plan: CampaignPlan) -> None:
        self._settings = plan.settings
        self._share = gpu_share(plan.settings)
        if plan.config.is_set("backend.devices"):
            devices = plan.config.backend.device_list
        else:
            devices = ("cuda:0",)
        in_process = backend_kind(plan.config.backend.backend).in_process
        self._wants_gpus = in_process and devices[0].startswith("cuda")
        try:
            import ray
        except ImportError as error:
            raise EnvironmentFailure(
                f'[campaign] launcher = "ray" needs Ray, which does not import ({error});'
                f" {install_hint('ray')}."
            ) from error
        self._ray = ray
        self._own_folder = ""
        """Logs and sockets of a local cluster, which Ray itself never deletes."""
        if not plan.settings.ray_address:
            try:
                # A path below TMPDIR may be too long for a socket.
                self._own_folder = mkdtemp(prefix="retrain-ray-", dir="/tmp")
            except OSError as error:
                raise EnvironmentFailure(
                    '[campaign] launcher = "ray" needs a writable /tmp for a local cluster'
                    f" ({error.strerror}); make it writable, or name a cluster with"
                    " ray_address."
                ) from error
        try:
            self._connect()
            self.workers = self._room(len(plan.runs))
        except BaseException:  # An interrupt too leaves no cluster behind.
            self.close()
            raise

    def _connect(self) -> None:
        options: Json = {"address": self._settings.ray_address}
        if self._own_folder:
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # Ray reports usage by default
            # "local" always starts a new cluster; without an address Ray would join one that
            # already runs here.
            options = {
                "address": "local",
                "_temp_dir": self._own_folder,
                "include_dashboard": False,
                "object_store_memory": _OBJECT_STORE_BYTES,
            }
        try:
            host, _, port = self._settings.ray_address.removeprefix("ray://").rpartition(":")
            if port.isdigit():  # Ray itself would retry for minutes where nothing answers
                socket.create_connection(
                    (host.strip("[]"), int(port)), timeout=_CONNECT_TIMEOUT_S
                ).close()
            self._ray.init(**options, log_to_driver=False, logging_level="error")
        except (ConnectionError, RuntimeError, ValueError, OSError) as error:
            where = 'launcher = "ray"'
            if self._settings.ray_address:
                where = f"ray_address = {self._settings.ray_address!r}"
            first = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise EnvironmentFailure(
                f"[campaign] {where}: no Ray cluster answers ({first}). Check `ray status`, or"
                " leave it out."
            ) from error

    def _room(self, runs: int) -> int:
        """Number of runs that fit on the cluster at once: limited by its GPUs, or by its CPUs if it
        has none.
        """
        resources = self._ray.cluster_resources()
        gpus = resources.get("GPU", 0) if self._wants_gpus else 0
        self._gpus = self._share if gpus else 0
        room = int(gpus / self._share) if gpus else int(resources.get("CPU", 1))
        if room < 1:
            raise ConfigurationError(
                f"[campaign] devices_per_run = {self._settings.devices_per_run} exceeds the"
                f" {gpus:g} GPUs of the cluster; lower it."
            )
        return min(self._settings.max_workers or room, room, runs)

    def start(self, run: CampaignRun, slot: int) -> "RayJob":
        """Submit the run as a task; Ray chooses where it runs."""
        folder = str(run.folder.resolve())
        gpus = self._settings.devices_per_run if self._gpus else 0
        request = _request(run, gpus, **{"logging.log_dir": folder})
        task = self._ray.remote(num_cpus=1, num_gpus=self._gpus, max_retries=0)(_perform)
        return RayJob(self._ray, task.remote(request, folder, str(Path.cwd())))

    def close(self) -> None:
        """Disconnect, which ends a local cluster, and delete the folder of a local cluster."""
        self._ray.shutdown()
        if self._own_folder:
            shutil.rmtree(self._own_folder, ignore_errors=True)


def gpu_share(settings: Campaign) -> float:
    """Return the GPUs of a run: below 1 if several runs share one. Raises ConfigurationError if a
    run should have several GPUs and share them.
    """
    if settings.devices_per_run > 1 and settings.workers_per_device > 1:
        raise ConfigurationError(
            f"[campaign] devices_per_run = {settings.devices_per_run} and workers_per_device ="
            f" {settings.workers_per_device}: Ray gives a run either whole GPUs or a part of"
            " one. Leave either key at 1."
        )
    return settings.devices_per_run / settings.workers_per_device


class RayJob:
    """One run as a Ray task."""

    def __init__(self, ray: Any, task: Any) -> None:
        self._ray = ray
        self._task = task

    def poll(self) -> RunOutcome | None:
        """Return the run's outcome; None while it is running."""
        done, _ = self._ray.wait([self._task], timeout=0)
        if not done:
            return None
        try:
            outcome: RunOutcome = self._ray.get(self._task)
        except self._ray.exceptions.RayError as error:
            return RunOutcome(
                Status.FAILED, f"Ray lost the run ({type(error).__name__})", lost=True
            )
        return outcome

    def stop(self, signal_number: int) -> None:
        """Ask the run to stop: Ray raises KeyboardInterrupt in the task, which sends SIGINT to the
        worker process.
        """
        self._ray.cancel(self._task, force=False)

    def kill(self) -> None:
        """End the task at once."""
        self._ray.cancel(self._task, force=True)


def _perform(request: bytes, folder: str, started_in: str) -> RunOutcome:
    """Start the worker process of a Ray task and wait for it. The worker ends with this process,
    which holds its standard input.
    """
    # Paths in a configuration are relative to the folder where the campaign started.
    os.chdir(started_in)
    worker = _worker_for(request, Path(folder), os.environ)
    try:
        while True:
            try:
                outcome = worker.poll()
                if outcome is not None:
                    return outcome
                time.sleep(_POLL_S)
            except KeyboardInterrupt:
                worker.stop(signal.SIGINT)
    finally:
        worker.kill()
