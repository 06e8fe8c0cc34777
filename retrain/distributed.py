"""Data parallelism: the processes that torchrun started act as one run.

Prompts are sampled and scored, and rows are learned, by shares. What the processes exchange is small: scored groups as objects, one
vector of adapter gradients an update. Each of them then holds the same groups, computes the same credit and takes the same optimizer
step, so the state is replicated and only the leader writes it down.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from torch import Tensor


_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """In a child: have the kernel kill this process when `parent`, which forked it, dies (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the call
        os._exit(1)


_SPINS = "20000"


def spin_briefly() -> None:
    """Must run before torch is imported, which reads the variables. What the user has set stays."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", _SPINS)


T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """The processes of a run, all of which call the same methods in the same order."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    """Of the processes on this computer: the number of the GPU that is this one's."""

    @property
    def leader(self) -> bool:
        """The one that writes the run's folder and speaks."""
        return self.rank == 0

    def share(self, items: Sequence[T]) -> Sequence[T]:
        """The part of `items` that belongs to this process; every item is in exactly one part."""
        return items[self.rank :: self.size]

    def gather(self, item: T) -> list[T]:
        """Everyone's item, in the order of ranks."""
        if self.size == 1:
            return [item]
        import torch

        items: list[T | None] = [None] * self.size
        torch.distributed.all_gather_object(items, item)
        return items  # type: ignore[return-value]  # filled by the call

    def from_leader(self, item: T) -> T:
        """The leader's item, which need not exist elsewhere."""
        if self.size == 1:
            return item
        import torch

        items = [item if self.leader else None]
        torch.distributed.broadcast_object_list(items, src=0)
        return items[0]  # type: ignore[return-value]  # the leader's is a T

    def anyone(self, flag: bool) -> bool:
        """Whether it is so in any process."""
        if self.size == 1:
            return flag
        import torch

        seen = torch.tensor([int(flag)])  # on the processor, where nothing waits for a GPU's queue
        torch.distributed.all_reduce(seen, op=torch.distributed.ReduceOp.MAX)
        return bool(seen.item())

    def in_step(self, items: Iterable[T]) -> Iterator[T | None]:
        """Items of this process one by one, then None for as long as another has some: everyone takes equally many turns."""
        for item in items:
            self.anyone(True)
            yield item
        while self.anyone(False):
            yield None

    def sum(self, tensors: "Sequence[Tensor]") -> None:
        """Replace each tensor by its sum over the processes, all in one message; the results are the same bytes everywhere."""
        if self.size == 1:
            return
        import torch

        flat = torch.cat([tensor.detach().float().reshape(-1) for tensor in tensors])
        torch.distributed.all_reduce(flat)
        for tensor, summed in zip(tensors, torch.split(flat, [tensor.numel() for tensor in tensors]), strict=True):
            tensor.detach().copy_(summed.view_as(tensor))


ALONE = World()


@contextmanager
def joined() -> Iterator[World]:
    """The world of this process: that of torchrun's variables RANK, WORLD_SIZE and LOCAL_RANK, else this process alone."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        yield ALONE
        return
    world = World(int(os.environ["RANK"]), size, int(os.environ.get("LOCAL_RANK", "0")))
    import torch

    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(world.local_rank)
    # Objects travel by gloo, gradients by nccl where there are GPUs.
    torch.distributed.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
    try:
        yield world
    finally:
        torch.distributed.destroy_process_group()
