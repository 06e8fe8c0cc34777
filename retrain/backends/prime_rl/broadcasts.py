"""Policies that PRIME-RL's trainer broadcasts over a file system, received with its handshake of
four files (v0.9.0, #3357).

For each version the trainer writes `.sender_ready` and waits for `.receiver_ready`, which is this
side's only file; then it writes `.started`, the weights, and `.finished`. Versions count from 0:
version N is the policy after N batches.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from retrain.errors import ServerFailure, first_line
from retrain.parsing import read_object

OFFERED, ACKNOWLEDGED, STARTED, FINISHED = (
    ".sender_ready",
    ".receiver_ready",
    ".started",
    ".finished",
)
ADAPTER = "adapter_config.json"
TARGET_LAG = 1
"""Batch N may be sampled with version N - 1 - TARGET_LAG at the earliest: the trainer's own
orchestrator works one batch ahead."""


@dataclass(frozen=True)
class Policy:
    version: int
    folder: Path
    """PEFT's files or a whole checkpoint, until the trainer has broadcast two more versions."""
    receipt: int
    """Counts what was received; a trainer that starts anew offers a version again."""

    @property
    def is_adapter(self) -> bool:
        return (self.folder / ADAPTER).exists()


class Broadcasts:
    """Receives every version that the trainer offers, since it waits for each one."""

    def __init__(
        self,
        folder: Path,
        *,
        wait_s: float,
        poll_s: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.folder, self.wait_s, self.poll_s = folder, wait_s, poll_s
        self._clock, self._sleep = clock, sleep
        self.newest: Policy | None = None
        self._receipts = 0

    def take(self, shipped: int) -> Policy:
        """Return the policy after `shipped` batches; where it does not come within `wait_s`, the
        one before.

        Raises ServerFailure where neither came, or where a version is incomplete.
        """
        deadline = self._clock() + self.wait_s
        while True:
            self._receive_offers(shipped)
            newest = self.newest
            if newest is not None and newest.version == shipped:
                return newest
            if self._clock() > deadline:
                break
            self._sleep(self.poll_s)
        if newest is not None and shipped - TARGET_LAG <= newest.version:
            return newest
        ahead = [version for version, _ in self._versions() if version > shipped]
        if ahead:
            raise ServerFailure(
                f"PRIME-RL's trainer offers policy v{max(ahead)} in {self.folder}, and this run has"
                f" sent {shipped} batches: resume the trainer at step {shipped}, or give both sides"
                " an empty output_dir and start anew."
            )
        if newest is None:
            have = "no policy has come yet"
        else:
            have = f"the newest is v{newest.version}"
        raise ServerFailure(
            f"PRIME-RL's trainer did not offer policy v{shipped} in {self.folder} within"
            f" sync_wait_s = {self.wait_s:g} s ({have}): start it with that output_dir, read its"
            " log, or raise [backend.options] sync_wait_s above the time of one of its steps."
        )

    def _receive_offers(self, shipped: int) -> None:
        """Acknowledge every offer, also of a version that a restarted trainer offers again. None
        past `shipped` can be of this run.
        """
        for version, folder in self._versions():
            if version > shipped:
                continue
            if (folder / ACKNOWLEDGED).exists():
                if self.newest is not None and version <= self.newest.version:
                    continue
            else:
                try:
                    (folder / ACKNOWLEDGED).touch()
                except FileNotFoundError:  # a trainer that starts anew is emptying the folder
                    continue
            deadline = self._clock() + self.wait_s
            while not (folder / FINISHED).exists():
                if self._clock() > deadline:
                    found = (
                        "began to write it"
                        if (folder / STARTED).exists()
                        else "has not begun to write it"
                    )
                    raise ServerFailure(
                        f"PRIME-RL's trainer offered policy v{version}, which was acknowledged, but"
                        f" it {found} and did not finish within sync_wait_s = {self.wait_s:g} s"
                        f" ({folder}): look at its log, or raise [backend.options] sync_wait_s."
                    )
                self._sleep(self.poll_s)
            policy = Policy(version, folder, receipt=self._receipts)
            check_weights(policy)
            self.newest, self._receipts = policy, self._receipts + 1

    def _versions(self) -> Iterator[tuple[int, Path]]:
        """Return the policies that the trainer has offered, lowest version first."""
        found = (
            (folder.name.removeprefix("step_"), folder) for folder in self.folder.glob("step_*")
        )
        yield from sorted(
            (int(digits), folder)
            for digits, folder in found
            if digits.isdigit() and (folder / OFFERED).exists()
        )


def check_weights(policy: Policy) -> None:
    """Raise ServerFailure for a policy without weights, and for a file of which a part is
    missing.
    """
    from safetensors import SafetensorError, safe_open

    files = sorted(policy.folder.glob("*.safetensors"))
    try:
        for file in files:
            with safe_open(file, framework="numpy"):
                pass
        if policy.is_adapter:
            read_object(policy.folder / ADAPTER)
    except (SafetensorError, OSError, ValueError) as error:
        raise ServerFailure(
            f"Policy v{policy.version} of PRIME-RL's trainer is incomplete although it is marked as"
            f" finished: {first_line(error)} in {policy.folder}; look at the trainer's disk, and"
            " let it broadcast the version again."
        ) from error
    if not files:
        raise ServerFailure(
            f"Policy v{policy.version} of PRIME-RL's trainer holds no weights (no *.safetensors in"
            f" {policy.folder})."
        )
