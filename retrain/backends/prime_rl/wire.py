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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
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
from retrain.inference_engine.served import ServedAdapter
from retrain.system import read_object
from retrain.types import Row

if TYPE_CHECKING:
    from retrain.config.schema import PrimeRLOptions


ENVIRONMENT = "retrain"
"""Name under which the trainer groups its metrics; the format has one per token. The trainer
reserves "all".
"""


Pack = Sequence[Row]
"""A micro-batch: rows whose tokens follow each other in one stream."""


def trained_rows(rows: Sequence[Row]) -> list[Row]:
    """Return the rows with a term in the loss; one row without actions if there are none, since the
    trainer waits for every step's batch.
    """
    nothing = np.empty(0, np.float32)
    empty = Row(np.ones(2, np.int32), (), nothing, nothing, 0)
    return [row for row in rows if row.trained] or [empty]


def share_out(rows: Sequence[Row], ranks: int, most_tokens: int) -> list[list[list[Row]]]:
    """Return [ranks][micro-batches][rows]: every rank gets the same number of micro-batches, as
    the trainer's collectives require.

    A micro-batch holds up to `most_tokens` tokens, or one row that is longer; 0 gives each row its
    own. If the number does not divide evenly, a row without actions fills the gap.
    """
    longest_first = sorted(rows, key=lambda row: len(row.token_ids), reverse=True)
    packs: list[list[Row]] = []
    for row in longest_first:  # first fit decreasing
        fitting = (pack for pack in packs if _tokens([*pack, row]) <= most_tokens)
        if pack := next(fitting, None):
            pack.append(row)
        else:
            packs.append([row])
    nothing = np.empty(0, np.float32)
    filler = replace(
        longest_first[-1], spans=(), logprobs=nothing, advantages=nothing, kept_ids=None
    )
    packs = sorted(packs, key=_tokens, reverse=True) + [[filler]] * (-len(packs) % ranks)
    return [packs[rank::ranks] for rank in range(ranks)]


def _tokens(pack: Pack) -> int:
    return sum(len(row.token_ids) for row in pack)


def encode(micro_batches: Sequence[Pack], temperature: float) -> bytes:
    """Return the batch that one data rank of the trainer receives for one step."""
    import msgspec

    return msgspec.msgpack.encode([_micro_batch(pack, temperature) for pack in micro_batches])


def _micro_batch(pack: Pack, temperature: float) -> list[Any]:
    """Return entries 1 to 17 in the trainer's order: streams in which value i belongs to token i
    itself, and lengths.

    Every token has a temperature. The trainer divides the logits at position i by entry i, and
    these logits predict token i + 1. The entry of the last context token therefore scores the first
    action. The log-probs come from the sampler, and are 0 outside the actions.
    """
    lengths = [len(row.token_ids) for row in pack]
    tokens, starts = sum(lengths), accumulate(lengths, initial=0)
    actions = [
        start + place
        for start, row in zip(starts, pack, strict=False)
        for place in row.action_positions()
    ]

    def placed(values: npt.ArrayLike, kind: str) -> npt.NDArray[Any]:
        """Return a stream with `values` at the actions, and 0 elsewhere."""
        stream = np.zeros(tokens, kind)
        stream[actions] = values
        return stream

    mask = None
    if any(row.kept_ids is not None for row in pack):
        # [ids, counts] as int32 bytes: how many ids each position kept, 0 for the whole vocabulary,
        # and the ids one after another.
        whole = np.zeros(0, np.int32)
        kept = [ids for row in pack for ids in row.kept_ids or [whole] * row.num_actions]
        counts = placed([len(ids) for ids in kept], "<i4")
        mask = [np.concatenate([whole, *kept]).astype("<i4").tobytes(), counts.tobytes()]
    token_ids, advantages, logprobs = (
        np.concatenate([getattr(row, name) for row in pack])
        for name in ("token_ids", "advantages", "logprobs")
    )
    return [
        token_ids.tolist(),  # input_ids
        placed(1, "?").tolist(),  # loss_mask
        placed(advantages, "f4").tolist(),  # advantages
        placed(logprobs, "f4").tolist(),  # inference_logprobs
        [place for length in lengths for place in range(length)],  # position_ids
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
        mask,  # sampling_mask
    ]


# -- ways of a batch -------------------------------------------------------------------------------


BATCHES, LATER_NAME = "rollouts", "batches"
"""Folder in which v0.9.0 looks for batches, and the folder of versions since #3444."""
_MARKER = ".made-by-retrain"
_NEWS_S = 0.02
"""ZMQ needs a moment to report that a subscriber has gone."""


class FileSystemSender:
    """Writes `<output_dir>/rollouts/step_<N>/rank_<R>.bin` under a temporary name and renames it,
    so that a reader never sees a part.
    """

    def __init__(self, output_dir: Path) -> None:
        self.folder = output_dir / BATCHES
        self._is_prepared = False

    def ready(self, shipped: int) -> None:
        """Remove batches past `shipped`. They come from an interrupted session, and a trainer would
        take them for new batches. A file waits for its reader.

        The first call raises ConfigurationError for batches that another program wrote.
        """
        if not self._is_prepared:
            self._prepare()
        for file in self.folder.glob("step_*/rank_*.bin*"):
            if _number(file.parent) > shipped:
                file.unlink()

    def _prepare(self) -> None:
        marker, later = self.folder / _MARKER, self.folder.with_name(LATER_NAME)
        foreign = self.folder.exists() and any(self.folder.iterdir()) and not marker.exists()
        self.folder.mkdir(parents=True, exist_ok=True)
        if not later.exists():
            later.symlink_to(BATCHES, target_is_directory=True)
        if foreign or not later.samefile(self.folder):
            raise ConfigurationError(
                f"{self.folder if foreign else later} holds batches that this retrain did not"
                " write, and a trainer would learn from them; give the trainer and"
                " [backend.options] output_dir an empty folder."
            )
        marker.touch()
        self._is_prepared = True

    def send(self, batch: int, payloads: Sequence[bytes]) -> None:
        folder = self.folder / f"step_{batch}"
        folder.mkdir(exist_ok=True)
        for rank, payload in enumerate(payloads):
            aside = folder / f"rank_{rank}.bin.tmp"
            aside.write_bytes(payload)
            aside.rename(folder / f"rank_{rank}.bin")

    def close(self) -> None:
        """Do nothing."""


class ZmqSender:
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
        # ZMQ binds to addresses and interfaces, not names.
        host = "127.0.0.1" if options.zmq_host == "localhost" else options.zmq_host
        try:
            self._batches.bind(f"tcp://{host}:{options.zmq_port}")
            self._ready.bind(f"tcp://{host}:{options.zmq_port + 1}")
        except zmq.ZMQError as error:
            self.close()
            raise EnvironmentFailure(
                f"[backend.options] zmq_host = {options.zmq_host!r}, zmq_port ="
                f" {options.zmq_port}: {error}. retrain publishes batches on this port and the"
                " next one, so choose two free ports."
            ) from error

    def ready(self, shipped: int = 0) -> None:  # noqa: ARG002 - a message without a receiver is gone
        """Raise NotReached if no trainer would receive a batch now."""
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
        """Send a batch, its payload for each rank. Raises NotReached if no part of it went out."""
        self.ready()
        for topic, payload in zip(self._topics, payloads, strict=True):
            self._batches.send_multipart([topic, payload])

    def close(self) -> None:
        """Close the sockets; it is safe to call this twice."""
        self._context.destroy(linger=2000)  # milliseconds: the last batch may be on its way


def _number(folder: Path) -> int:
    """Return the number of a folder step_<N>; -1 for any other."""
    digits = folder.name.removeprefix("step_")
    return int(digits) if digits.isdigit() else -1


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
class Policy(ServedAdapter):
    """A policy as servers know it, PEFT's files or a whole checkpoint until the trainer has
    broadcast two more versions. `name` is empty if the trainer updates the base model itself.
    """

    version: int
    receipt: int
    """Counts received policies; a restarted trainer offers a version again."""

    @property
    def salt(self) -> str:
        """Separates the prefix caches of policies."""
        return f"v{self.version}.{self.receipt}"


@dataclass
class Broadcasts:
    """Receives every version that the trainer offers, since it waits for each one."""

    folder: Path
    wait_s: float
    poll_s: float
    sleep: Callable[[float], None] = time.sleep
    newest: Policy | None = None

    def take(self, shipped: int) -> Policy:
        """Return the policy after `shipped` batches, or the previous policy if it does not come
        within `wait_s`.

        Raises ServerFailure if both are missing, or if a version is incomplete.
        """
        deadline = time.monotonic() + self.wait_s
        self._receive_offers(shipped)
        while not (self.newest and self.newest.version == shipped) and time.monotonic() < deadline:
            self.sleep(self.poll_s)
            self._receive_offers(shipped)
        newest = self.newest
        if newest and shipped - TARGET_LAG <= newest.version:
            return newest
        ahead = [version for version, _ in self._versions() if version > shipped]
        if ahead:
            raise ServerFailure(
                f"PRIME-RL's trainer offers policy v{max(ahead)} in {self.folder}, and this run"
                f" has sent {shipped} batches. Resume the trainer at step {shipped}, or give"
                " both sides an empty output_dir and start over."
            )
        have = f"the newest is v{newest.version}" if newest else "no policy has come yet"
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
            mark, newest = folder / ACKNOWLEDGED, self.newest
            if version > shipped or (newest and version <= newest.version and mark.exists()):
                continue
            # An earlier session of the run may have acknowledged it; its policy continues here.
            try:
                mark.touch()
            except FileNotFoundError:  # a restarting trainer is emptying the folder
                continue
            deadline = time.monotonic() + self.wait_s
            while not (folder / FINISHED).exists():
                if time.monotonic() > deadline:
                    started = (folder / STARTED).exists()
                    found = "began to write it" if started else "has not begun to write it"
                    raise ServerFailure(
                        f"PRIME-RL's trainer offered policy v{version} and heard back, but it"
                        f" {found} and did not finish within sync_wait_s = {self.wait_s:g} s"
                        f" ({folder}). Look at its log, or raise [backend.options] sync_wait_s."
                    )
                self.sleep(self.poll_s)
            name = "retrain-policy" if (folder / ADAPTER).exists() else ""
            receipt = newest.receipt + 1 if newest else 0
            policy = Policy(name, folder.resolve(), version, receipt)
            check_weights(policy)
            self.newest = policy

    def _versions(self) -> list[tuple[int, Path]]:
        """Return the policies that the trainer has offered, lowest version first."""
        found = [(_number(folder), folder) for folder in self.folder.glob("step_*")]
        return sorted(one for one in found if one[0] >= 0 and (one[1] / OFFERED).exists())


def check_weights(policy: Policy) -> None:
    """Raise ServerFailure for a policy without weights or with a truncated file."""
    from safetensors import SafetensorError, safe_open

    files = sorted(policy.folder.glob("*.safetensors"))
    try:
        for file in files:
            with safe_open(file, framework="numpy"):
                pass
        if policy.name:
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
