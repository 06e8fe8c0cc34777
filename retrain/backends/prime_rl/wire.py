"""The exchange with PRIME-RL's trainer: rows in its format, the ways of a batch, and the policies
that it broadcasts.

A step's rows are msgpack arrays whose entries have the order of the format's fields. The format has
no names and no version, so the order alone identifies a field. The layout comes from PRIME-RL
v0.9.0 (24 August 2026), with `sampling_mask`, which later versions append (#3431), up to commit
0f59b24. A decoder ignores unknown fields at the end and fills in missing fields, so one layout
serves v0.9.0 and later versions. Batch numbers start at 1. Batches travel as files that appear
whole, or as ZMQ messages.

This side receives policies over a file system with the trainer's handshake of four files (v0.9.0,
#3357). For each version the trainer writes `.sender_ready` and waits for `.receiver_ready`, which
is this side's only file; then it writes `.started`, the weights, and `.finished`. Versions count
from 0: version N is the policy after N batches. This module does not import torch.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from retrain.errors import (
    ConfigurationError,
    EnvironmentFailure,
    NotReached,
    ServerFailure,
    first_line,
)
from retrain.system import read_object
from retrain.types import Int32Array, Row

if TYPE_CHECKING:
    from retrain.config.schema import PrimeRLOptions


ENVIRONMENT = "retrain"
"""Name under which the trainer groups its metrics; the format has one per token. The trainer
reserves "all".
"""


@dataclass(frozen=True)
class Sample:
    """One row as the trainer reads it: streams of length [P + T], in which value i belongs to token
    i itself.
    """

    token_ids: Int32Array
    mask: npt.NDArray[np.bool_]
    """True at the actions."""
    logprobs: npt.NDArray[np.float32]
    """The sampler's, at the sampling temperature; 0 outside the actions, where nobody reads
    them."""
    advantages: npt.NDArray[np.float32]
    """0 outside the actions."""
    kept: Sequence[Int32Array] | None = None
    """[T] arrays of the token ids from which the sampler drew each action. It is None for the whole
    vocabulary.
    """

    @classmethod
    def of(cls, row: Row) -> "Sample":
        length = len(row.token_ids)
        mask, logprobs, advantages = (
            np.zeros(length, np.bool_),
            np.zeros(length, np.float32),
            np.zeros(length, np.float32),
        )
        actions = list(row.action_positions())
        mask[actions], logprobs[actions], advantages[actions] = True, row.logprobs, row.advantages
        return cls(row.token_ids, mask, logprobs, advantages, row.kept_ids)

    def masked(self) -> "Sample":
        """Return the same tokens without an action: a pass over it changes nothing."""
        zeros = np.zeros(len(self), np.float32)
        return replace(
            self, mask=np.zeros(len(self), np.bool_), logprobs=zeros, advantages=zeros, kept=None
        )

    def __len__(self) -> int:
        return len(self.token_ids)


def share_out(samples: Sequence[Sample], ranks: int, most_tokens: int) -> list[list[list[Sample]]]:
    """Return [ranks][micro-batches][samples]: every rank gets the same number of micro-batches, as
    the trainer's collectives require.

    A micro-batch holds up to `most_tokens` tokens, or one sample that is longer; 0 gives each
    sample its own. If the number does not divide evenly, a sample without actions fills the gap.
    """
    packs: list[list[Sample]] = []
    for sample in sorted(samples, key=len, reverse=True):  # first fit decreasing
        fitting = (pack for pack in packs if _tokens(pack) + len(sample) <= most_tokens)
        pack = next(fitting, None)
        if pack is None:
            packs.append([sample])
        else:
            pack.append(sample)
    each = -(-len(packs) // ranks)
    shares: list[list[list[Sample]]] = [[] for _ in range(ranks)]
    for pack in sorted(packs, key=_tokens, reverse=True):
        open_shares = [share for share in shares if len(share) < each]
        min(open_shares, key=lambda share: sum(map(_tokens, share))).append(pack)
    filler = [min(samples, key=len).masked()]
    return [share + [filler] * (each - len(share)) for share in shares]


def _tokens(pack: Sequence[Sample]) -> int:
    return sum(map(len, pack))


def encode(micro_batches: Sequence[Sequence[Sample]], temperature: float) -> bytes:
    """Return the batch that one data rank of the trainer receives for one step."""
    import msgspec

    return msgspec.msgpack.encode([_micro_batch(pack, temperature) for pack in micro_batches])


def _micro_batch(pack: Sequence[Sample], temperature: float) -> list[Any]:
    """Return entries 1 to 17 in the trainer's order.

    Every token has a temperature. The trainer divides the logits at position i by entry i, and
    these logits predict token i + 1. The entry of the last context token therefore scores the first
    action.
    """
    lengths = [len(sample) for sample in pack]
    tokens = sum(lengths)
    return [
        _joined([sample.token_ids for sample in pack]),  # input_ids
        _joined([sample.mask for sample in pack]),  # loss_mask
        _joined([sample.advantages for sample in pack]),  # advantages
        _joined([sample.logprobs for sample in pack]),  # inference_logprobs
        _joined([np.arange(length) for length in lengths]),  # position_ids, from 0 in each sample
        lengths,  # sequence_lengths: how the loss splits the stream
        [temperature] * tokens,  # temperatures
        [ENVIRONMENT] * tokens,  # env_names
        lengths,  # seq_lens: how attention splits it
        None,  # ref_logprobs
        None,  # routed_experts
        None,  # mm_kwargs, later mm_refs
        None,  # mm_token_type_ids
        None,  # rl_weights: 1 at every action
        None,  # ce_weights
        None,  # ref_kl_weights
        _sampling_mask(pack),  # sampling_mask
    ]


def _joined(parts: Sequence[npt.NDArray[Any]]) -> list[Any]:
    values: list[Any] = np.concatenate(parts).tolist()
    return values


def _sampling_mask(pack: Sequence[Sample]) -> list[bytes] | None:
    """Return [ids, counts] as int32 bytes: how many ids each position kept, 0 for the whole
    vocabulary, and the ids one after another.
    """
    if all(sample.kept is None for sample in pack):
        return None
    counts: list[Int32Array] = []
    ids: list[Int32Array] = []
    for sample in pack:
        count = np.zeros(len(sample), np.int32)
        if sample.kept is not None:
            count[sample.mask] = [len(kept) for kept in sample.kept]
            ids += sample.kept
        counts.append(count)
    return [
        np.concatenate([np.zeros(0, np.int32), *ids]).astype("<i4").tobytes(),
        np.concatenate(counts).astype("<i4").tobytes(),
    ]


def trained_samples(rows: Sequence[Row]) -> Iterator[Sample]:
    """Yield the rows with a term in the loss; one row without actions if there are none, since the
    trainer waits for every step's batch.
    """
    trained = [row for row in rows if row.trained]
    yield from (Sample.of(row) for row in trained)
    if not trained:
        empty = np.zeros(2, np.float32)
        yield Sample(np.ones(2, np.int32), np.zeros(2, np.bool_), empty, empty)


# -- ways of a batch -------------------------------------------------------------------------------


BATCHES, LATER_NAME = "rollouts", "batches"
"""Folder in which v0.9.0 looks for batches, and the folder of versions since #3444."""
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
        """Raise NotReached if no trainer would receive a batch now."""

    @abstractmethod
    def send(self, batch: int, payloads: Sequence[bytes]) -> None:
        """Send batch number `batch`, its payload for each rank. Raises NotReached if no part of it
        went out.
        """

    def close(self) -> None:  # noqa: B027 - nothing to do unless overridden
        """Close the transport; it is safe to call this twice."""


class FileSystemSender(Sender):
    """Writes `<output_dir>/rollouts/step_<N>/rank_<R>.bin` under a temporary name and renames it,
    so that a reader never sees a part.
    """

    def __init__(self, output_dir: Path) -> None:
        self.folder = output_dir / BATCHES
        self._later = output_dir / LATER_NAME

    def prepare(self, shipped: int) -> None:
        """Remove batches past `shipped`. They come from an interrupted session, and a trainer would
        take them for new batches.

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
        """Return at once, since a file waits for its reader."""

    def send(self, batch: int, payloads: Sequence[bytes]) -> None:
        folder = self.folder / f"step_{batch}"
        folder.mkdir(exist_ok=True)
        for rank, payload in enumerate(payloads):
            aside = folder / f"rank_{rank}.bin.tmp"
            aside.write_bytes(payload)
            aside.rename(folder / f"rank_{rank}.bin")


class ZmqSender(Sender):
    """Publishes on `zmq_port`, a topic per rank; ranks report on the next port that they are ready.

    A publisher silently drops messages without a subscriber. The socket is therefore an XPUB, which
    reports subscriptions and looks like a PUB to a subscriber. The sender sends a batch only while
    every rank has a subscription, also after a restart of either side.
    """

    def __init__(self, options: "PrimeRLOptions") -> None:
        import zmq

        self._options = options
        self._topics = [f"data_rank|{rank}|".encode() for rank in range(options.trainer_ranks)]
        self._missing = set(self._topics)
        self._context = zmq.Context()
        self._batches, self._ready = self._context.socket(zmq.XPUB), self._context.socket(zmq.PULL)
        self._batches.set(zmq.SNDHWM, options.zmq_hwm)
        self._ready.set(zmq.RCVHWM, options.zmq_hwm)
        host = options.zmq_host
        if host == "localhost":
            host = "127.0.0.1"  # ZMQ binds to addresses and interfaces, not names
        try:
            for socket, port in (
                (self._batches, options.zmq_port),
                (self._ready, options.zmq_port + 1),
            ):
                socket.bind(f"tcp://{host}:{port}")
        except zmq.ZMQError as error:
            self.close()
            raise EnvironmentFailure(
                f"[backend.options] zmq_host = {options.zmq_host!r}, zmq_port ="
                f" {options.zmq_port}: {error}. retrain publishes batches on this port and the"
                " next one, so choose two free ports."
            ) from error

    def prepare(self, shipped: int) -> None:
        """Clear nothing: a message without a receiver is gone."""

    def wait_for_trainer(self) -> None:
        options, deadline = self._options, time.monotonic() + self._options.sync_wait_s
        self._hear(_NEWS_S)
        while self._missing and (left := deadline - time.monotonic()) > 0:
            self._hear(min(left, options.sync_poll_s))
        if self._missing:
            raise NotReached(
                f"PRIME-RL's trainer: {len(self._missing)} of {options.trainer_ranks} data"
                f" ranks did not subscribe to tcp://{options.zmq_host}:{options.zmq_port}"
                f" within sync_wait_s = {options.sync_wait_s:g} s. Start the trainer with the"
                " same rollout_transport, or check [backend.options] trainer_ranks."
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
    """Return the number of a folder step_<N>; -1 for any other."""
    digits = folder.name.removeprefix("step_")
    if digits.isdigit():
        return int(digits)
    return -1


def build_sender(options: "PrimeRLOptions", output_dir: Path) -> Sender:
    if options.transport == "zmq":
        return ZmqSender(options)
    return FileSystemSender(output_dir)


# -- policies received -----------------------------------------------------------------------------


OFFERED, ACKNOWLEDGED, STARTED, FINISHED = (
    ".sender_ready",
    ".receiver_ready",
    ".started",
    ".finished",
)
ADAPTER = "adapter_config.json"
TARGET_LAG = 1
"""The oldest version that may sample batch N is N - 1 - TARGET_LAG: the trainer's own orchestrator
works one batch ahead.
"""


@dataclass(frozen=True)
class Policy:
    version: int
    folder: Path
    """PEFT's files or a whole checkpoint, until the trainer has broadcast two more versions."""
    receipt: int
    """Counts received policies; a restarted trainer offers a version again."""

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
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.folder, self.wait_s, self.poll_s = folder, wait_s, poll_s
        self._sleep = sleep
        self.newest: Policy | None = None
        self._receipts = 0

    def take(self, shipped: int) -> Policy:
        """Return the policy after `shipped` batches, or the previous policy if it does not come
        within `wait_s`.

        Raises ServerFailure if both are missing, or if a version is incomplete.
        """
        deadline = time.monotonic() + self.wait_s
        while True:
            self._receive_offers(shipped)
            newest = self.newest
            if newest is not None and newest.version == shipped:
                return newest
            if time.monotonic() > deadline:
                break
            self._sleep(self.poll_s)
        if newest is not None and shipped - TARGET_LAG <= newest.version:
            return newest
        ahead = [version for version, _ in self._versions() if version > shipped]
        if ahead:
            raise ServerFailure(
                f"PRIME-RL's trainer offers policy v{max(ahead)} in {self.folder}, and this run"
                f" has sent {shipped} batches. Resume the trainer at step {shipped}, or give"
                " both sides an empty output_dir and start over."
            )
        have = "no policy has come yet" if newest is None else f"the newest is v{newest.version}"
        raise ServerFailure(
            f"PRIME-RL's trainer did not offer policy v{shipped} in {self.folder} within"
            f" sync_wait_s = {self.wait_s:g} s ({have}). Start it with that output_dir, read"
            " its log, or raise [backend.options] sync_wait_s above its step time."
        )

    def _receive_offers(self, shipped: int) -> None:
        """Acknowledge every offer, also of a version that a restarted trainer offers again. An
        offer past `shipped` cannot come from this run.
        """
        for version, folder in self._versions():
            if version > shipped:
                continue
            # This session acknowledged it, or an earlier session of the run, whose policy continues
            # here.
            if (folder / ACKNOWLEDGED).exists():
                if self.newest is not None and version <= self.newest.version:
                    continue
            else:
                try:
                    (folder / ACKNOWLEDGED).touch()
                except FileNotFoundError:  # a restarting trainer is emptying the folder
                    continue
            deadline = time.monotonic() + self.wait_s
            while not (folder / FINISHED).exists():
                if time.monotonic() > deadline:
                    found = (
                        "began to write it"
                        if (folder / STARTED).exists()
                        else "has not begun to write it"
                    )
                    raise ServerFailure(
                        f"PRIME-RL's trainer offered policy v{version} and heard back, but it"
                        f" {found} and did not finish within sync_wait_s = {self.wait_s:g} s"
                        f" ({folder}). Look at its log, or raise [backend.options] sync_wait_s."
                    )
                self._sleep(self.poll_s)
            policy = Policy(version, folder, receipt=self._receipts)
            check_weights(policy)
            self.newest, self._receipts = policy, self._receipts + 1

    def _versions(self) -> Iterator[tuple[int, Path]]:
        """Return the policies that the trainer has offered, lowest version first."""
        found = ((_number(folder), folder) for folder in self.folder.glob("step_*"))
        yield from sorted(
            (number, folder)
            for number, folder in found
            if number >= 0 and (folder / OFFERED).exists()
        )


def check_weights(policy: Policy) -> None:
    """Raise ServerFailure for a policy without weights or with a truncated file."""
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
            f"Policy v{policy.version} of PRIME-RL's trainer is incomplete despite its mark of"
            f" completion ({first_line(error)} in {policy.folder}). Look at the trainer's disk,"
            " and let it broadcast the version again."
        ) from error
    if not files:
        raise ServerFailure(
            f"Policy v{policy.version} of PRIME-RL's trainer holds no weights (no *.safetensors in"
            f" {policy.folder})."
        )
