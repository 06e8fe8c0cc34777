"""Ways of a batch to PRIME-RL's trainer: files that appear whole, or ZMQ messages. Batches are
numbered from 1.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from retrain.errors import ConfigurationError, EnvironmentFailure, NotReached

if TYPE_CHECKING:
    from retrain.config.schema import PrimeRLOptions

BATCHES, LATER_NAME = "rollouts", "batches"
"""Where v0.9.0 looks for batches, and where versions since #3444 do."""
_MARKER = ".made-by-retrain"
_NEWS_S = 0.02
"""ZMQ needs a moment to report that a subscriber has gone."""


class Sender(ABC):
    """One per run; a message per data rank of the trainer and step."""

    @abstractmethod
    def prepare(self, shipped: int) -> None:
        """Prepare, once, before the first batch: `shipped` batches went out before."""

    @abstractmethod
    def wait_for_trainer(self) -> None:
        """Raise NotReached where no trainer would receive a batch that is sent now."""

    @abstractmethod
    def send(self, batch: int, payloads: Sequence[bytes]) -> None:
        """Send batch number `batch`, its payload for each rank. Raises NotReached where none of it
        was sent.
        """

    def close(self) -> None:  # noqa: B027 - nothing to do unless overridden
        """Close the transport; it is safe to call this twice."""


class FileSystemSender(Sender):
    """`<output_dir>/rollouts/step_<N>/rank_<R>.bin`, written beside its place and renamed, so that
    a reader never sees a part.
    """

    def __init__(self, output_dir: Path) -> None:
        self.folder = output_dir / BATCHES
        self._later = output_dir / LATER_NAME

    def prepare(self, shipped: int) -> None:
        """Batches past `shipped` are left over from an interrupted session, and a trainer would
        take them for new ones: they go.

        Raises ConfigurationError for batches that another program wrote.
        """
        marker = self.folder / _MARKER
        foreign = self.folder.exists() and any(self.folder.iterdir()) and not marker.exists()
        self.folder.mkdir(parents=True, exist_ok=True)
        if not self._later.exists():
            self._later.symlink_to(BATCHES, target_is_directory=True)
        if foreign or not self._later.samefile(self.folder):
            raise ConfigurationError(
                f"{self.folder if foreign else self._later} holds batches that this retrain did not"
                " write, and a trainer would learn from them; give the trainer and"
                " [backend.options] output_dir an empty folder."
            )
        marker.touch()
        for file in self.folder.glob("step_*/rank_*.bin*"):
            if _number(file.parent) > shipped:
                file.unlink()

    def wait_for_trainer(self) -> None:
        """A file waits for its reader."""

    def send(self, batch: int, payloads: Sequence[bytes]) -> None:
        folder = self.folder / f"step_{batch}"
        folder.mkdir(exist_ok=True)
        for rank, payload in enumerate(payloads):
            aside = folder / f"rank_{rank}.bin.tmp"
            aside.write_bytes(payload)
            aside.rename(folder / f"rank_{rank}.bin")


class ZmqSender(Sender):
    """Publishes on `zmq_port`, a topic per rank, and is told on the next port which ranks are
    ready.

    A publisher drops what nobody subscribes to, in silence. The socket is an XPUB, which a
    subscriber cannot tell from a PUB and which reports subscriptions: a batch is sent only while
    every rank has one, also after either side has started anew.
    """

    def __init__(
        self, options: "PrimeRLOptions", clock: Callable[[], float] = time.monotonic
    ) -> None:
        import zmq

        self._options, self._clock = options, clock
        self._topics = [f"data_rank|{rank}|".encode() for rank in range(options.trainer_ranks)]
        self._missing = set(self._topics)
        self._context = zmq.Context()
        self._batches, self._ready = self._context.socket(zmq.XPUB), self._context.socket(zmq.PULL)
        self._batches.set(zmq.SNDHWM, options.zmq_hwm)
        self._ready.set(zmq.RCVHWM, options.zmq_hwm)
        host = (
            "127.0.0.1" if options.zmq_host == "localhost" else options.zmq_host
        )  # ZMQ binds to addresses and interfaces, not names
        try:
            for socket, port in (
                (self._batches, options.zmq_port),
                (self._ready, options.zmq_port + 1),
            ):
                socket.bind(f"tcp://{host}:{port}")
        except zmq.ZMQError as error:
            self.close()
            raise EnvironmentFailure(
                f"[backend.options] zmq_host = {options.zmq_host!r}, zmq_port = {options.zmq_port}:"
                f" {error}; batches are published on this port and the next one, so choose two that"
                " are free on this machine."
            ) from error

    def prepare(self, shipped: int) -> None:
        """A message that was not received is gone, so there is nothing to clear."""

    def wait_for_trainer(self) -> None:
        options, deadline = self._options, self._clock() + self._options.sync_wait_s
        self._hear(_NEWS_S)
        while self._missing and (left := deadline - self._clock()) > 0:
            self._hear(min(left, options.sync_poll_s))
        if self._missing:
            raise NotReached(
                f"PRIME-RL's trainer is not connected: {len(self._missing)} of"
                f" {options.trainer_ranks} data ranks did not subscribe to"
                f" tcp://{options.zmq_host}:{options.zmq_port} within sync_wait_s ="
                f" {options.sync_wait_s:g} s; start the trainer with the same rollout_transport, or"
                " check [backend.options] trainer_ranks."
            )

    def _hear(self, seconds: float) -> None:
        """Take note of subscriptions that come and go within `seconds`."""
        import zmq

        while self._batches.poll(int(seconds * 1000)):
            message = self._batches.recv()
            (self._missing.discard if message[:1] == b"\x01" else self._missing.add)(message[1:])
            self._missing &= set(self._topics)
            seconds = 0
        while self._ready.poll(0):
            self._ready.recv(zmq.NOBLOCK)  # each rank's own greeting, sent once in its life

    def send(self, batch: int, payloads: Sequence[bytes]) -> None:  # noqa: ARG002 - a trainer counts the messages
        self.wait_for_trainer()
        for topic, payload in zip(self._topics, payloads, strict=True):
            self._batches.send_multipart([topic, payload])

    def close(self) -> None:
        for socket in (self._batches, self._ready):
            socket.close(linger=2000)  # milliseconds: the last batch may still be on its way
        self._context.term()


def _number(folder: Path) -> int:
    digits = folder.name.removeprefix("step_")
    if digits.isdigit():
        return int(digits)
    return -1


def build_sender(options: "PrimeRLOptions", output_dir: Path) -> Sender:
    if options.transport == "zmq":
        return ZmqSender(options)
    return FileSystemSender(output_dir)
