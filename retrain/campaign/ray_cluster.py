"""The Ray launcher: runs on the cluster at `[campaign] ray_address`, or on a local one that starts
and ends with the campaign.

Ray places the runs and reports lost ones. Each Ray task starts the same worker process as the local
launcher. All machines must have retrain installed and see the campaign's folder under the same
path.
"""

import os
import shutil
import signal
import socket
import time
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from retrain.backends.base import backend_kind
from retrain.campaign.launch import RunOutcome
from retrain.campaign.manifest import Status
from retrain.campaign.plan import CampaignPlan, CampaignRun
from retrain.campaign.subprocesses import start_worker
from retrain.config import config_from_mapping, replaced
from retrain.config.load import given_values
from retrain.config.schema import Campaign, Provenance
from retrain.errors import ConfigurationError, EnvironmentFailure
from retrain.install import install_hint

_POLL_S = 0.2
_CONNECT_TIMEOUT_S = 10.0
_OBJECT_STORE_BYTES = 2**27
"""Object store of a local cluster: only configurations and outcomes pass through it. By default Ray
takes a third of the memory."""
_DEVICES = {1: "gpu:0", 2: "gpu:0,gpu:1"}
"""`[backend] devices` by devices_per_run: a task sees only the GPUs that Ray gave it."""


class RayLauncher:
    """Starts each run as a Ray task. Raises EnvironmentFailure if Ray is not installed or no
    cluster answers.
    """

    def __init__(self, plan: CampaignPlan) -> None:
        self.notes: list[str] = []
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
                f'[campaign] launcher = "ray" needs Ray, which is not installed ({error});'
                f" {install_hint('ray')}."
            ) from error
        self._ray = ray
        self._own_folder = ""
        """Logs and sockets of a local cluster, which Ray itself never deletes."""
        if not plan.settings.ray_address:
            try:
                self._own_folder = mkdtemp(
                    prefix="retrain-ray-", dir="/tmp"
                )  # a path below TMPDIR may be too long for a socket
            except OSError as error:
                raise EnvironmentFailure(
                    '[campaign] launcher = "ray": a local cluster keeps its sockets in /tmp, which'
                    f" cannot be written ({error.strerror}); make it writable, or name a cluster"
                    " with ray_address."
                ) from error
        try:
            self._connect()
            self.workers = self._room(len(plan.runs))
        except BaseException:  # an interrupt too leaves no cluster behind
            self.close()
            raise

    def _connect(self) -> None:
        options: dict[str, Any] = {"address": self._settings.ray_address}
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
                f"[campaign] {where}: no Ray cluster answers ({first}); check `ray status`, or"
                " leave it out."
            ) from error

    def _room(self, runs: int) -> int:
        """Number of runs that fit on the cluster at once: limited by its GPUs, or by its CPUs if it
        has none.
        """
        resources = self._ray.cluster_resources()
        if self._wants_gpus:
            gpus = resources.get("GPU", 0)
        else:
            gpus = 0
        self._gpus = self._share if gpus else 0
        if gpus:
            room = int(gpus / self._share)
        else:
            room = int(resources.get("CPU", 1))
        if room < 1:
            raise ConfigurationError(
                f"[campaign] devices_per_run = {self._settings.devices_per_run} exceeds the"
                f" {gpus:g} GPUs of the cluster; lower it."
            )
        return min(self._settings.max_workers or room, room, runs)

    def start(self, run: CampaignRun, slot: int) -> "RayJob":
        """Submit the run as a task; Ray chooses where it runs."""
        config = replaced(run.config, {"logging.log_dir": str(run.folder.resolve())}, origin="file")
        if self._gpus:
            config = replaced(
                config, {"backend.devices": _DEVICES[self._settings.devices_per_run]}, origin="file"
            )
        path = config.source_path
        task = self._ray.remote(num_cpus=1, num_gpus=self._gpus, max_retries=0)(_perform)
        return RayJob(
            self._ray,
            task.remote(
                given_values(config), str(path.resolve()) if path else "", run.name, str(Path.cwd())
            ),
        )

    def close(self) -> None:
        """Disconnect, which ends a local cluster, and delete the folder of a local cluster."""
        self._ray.shutdown()
        if self._own_folder:
            shutil.rmtree(self._own_folder, ignore_errors=True)


def gpu_share(settings: Campaign) -> float:
    """The GPUs of a run: below 1 if several runs share one. Raises ConfigurationError if a run
    should have several GPUs and share them.
    """
    if settings.devices_per_run > 1 and settings.workers_per_device > 1:
        raise ConfigurationError(
            f"[campaign] devices_per_run = {settings.devices_per_run} and workers_per_device ="
            f" {settings.workers_per_device}: Ray gives a run either whole GPUs or a part of one;"
            " leave one of the two keys at 1."
        )
    return settings.devices_per_run / settings.workers_per_device


class RayJob:
    """One run as a Ray task."""

    def __init__(self, ray: Any, task: Any) -> None:
        self._ray = ray
        self._task = task

    def poll(self) -> RunOutcome | None:
        """The run's outcome; None while it is running."""
        done, _ = self._ray.wait([self._task], timeout=0)
        if not done:
            return None
        try:
            status, reason, lost = self._ray.get(self._task)
        except self._ray.exceptions.RayError as error:
            return RunOutcome(
                Status.FAILED, f"Ray lost the run ({type(error).__name__})", lost=True
            )
        return RunOutcome(Status(status), reason, lost)

    def stop(self, signal_number: int) -> None:
        """Ask the run to stop: Ray raises KeyboardInterrupt in the task, which sends SIGINT to the
        worker process.
        """
        self._ray.cancel(self._task, force=False)

    def kill(self) -> None:
        """End the task at once."""
        self._ray.cancel(self._task, force=True)


def _perform(values: dict[str, Any], path: str, name: str, folder: str) -> tuple[str, str, bool]:
    """The Ray task: start the worker process and wait for it. The worker ends with this process,
    which holds its standard input.
    """
    os.chdir(
        folder
    )  # paths in a configuration are relative to the folder where the campaign was started
    config = config_from_mapping(values, provenance=Provenance(Path(path) if path else None))
    worker = start_worker(
        CampaignRun(name, config.condition_label, config.training.seed, config), threads=None
    )
    try:
        while True:
            try:
                outcome = worker.poll()
                if outcome is not None:
                    return str(outcome.status), outcome.reason, outcome.lost
                time.sleep(_POLL_S)
            except KeyboardInterrupt:
                worker.stop(signal.SIGINT)
    finally:
        worker.kill()
