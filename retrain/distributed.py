"""Data parallelism: the processes that torchrun started act as one run.

Each rank samples and scores its share of the prompts and learns its share of the rows. Ranks
exchange little: scored groups as objects, and one vector of adapter gradients per update. Every
rank then holds the same groups, computes the same credit and takes the same optimizer step. All
ranks thus have the same state, and rank 0 alone writes it down.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """The ranks of a run. The methods are collective: every rank calls the same ones in the same
    order.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    """Rank on this node; also its GPU index."""

    @property
    def is_rank_zero(self) -> bool:
        """Rank 0 writes files and prints."""
        return self.rank == 0

    def share(self, items: Sequence[T]) -> Sequence[T]:
        """Return this rank's part of `items`, which every rank holds. Each item belongs to one
        rank. Not collective.
        """
        return items[self.rank :: self.size]

    def gather(self, item: T) -> list[T]:
        """Return the items of all ranks, in the order of ranks, on every rank."""
        if self.size == 1:
            return [item]
        import torch

        items: list[T | None] = [None] * self.size
        torch.distributed.all_gather_object(items, item)
        return items  # type: ignore[return-value]  # filled by the call

    def broadcast(self, item: T) -> T:
        """Return rank 0's item on every rank, whatever the other ranks pass."""
        if self.size == 1:
            return item
        import torch

        items = [item if self.is_rank_zero else None]
        torch.distributed.broadcast_object_list(items, src=0)
        return items[0]  # type: ignore[return-value]  # rank 0 passed a T

    def any_rank(self, flag: bool) -> bool:
        """Return True on every rank if `flag` is true on any of them."""
        if self.size == 1:
            return flag
        import torch

        seen = torch.tensor([int(flag)])  # on the CPU, where nothing waits for a GPU's queue
        torch.distributed.all_reduce(seen, op=torch.distributed.ReduceOp.MAX)
        return bool(seen.item())

    def in_lockstep(self, items: Iterable[T]) -> Iterator[T | None]:
        """Yield the items of this rank, then None until every rank has used up its own, so that all
        ranks iterate equally often.
        """
        for item in items:
            self.any_rank(True)
            yield item
        while self.any_rank(False):
            yield None

    def sum(self, tensors: "Sequence[Tensor]") -> None:
        """Replace each tensor by its sum over the ranks, in one message; the sums are the same
        bytes on every rank.
        """
        if self.size == 1:
            return
        import torch

        flat = torch.cat([tensor.detach().float().reshape(-1) for tensor in tensors])
        torch.distributed.all_reduce(flat)
        for tensor, summed in zip(
            tensors, torch.split(flat, [tensor.numel() for tensor in tensors]), strict=True
        ):
            tensor.detach().copy_(summed.view_as(tensor))


ALONE = World()


@contextmanager
def joined() -> Iterator[World]:
    """Join the world that torchrun describes in RANK, WORLD_SIZE and LOCAL_RANK until the block
    ends; yield `ALONE` without torchrun.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        yield ALONE
        return
    world = World(int(os.environ["RANK"]), size, int(os.environ.get("LOCAL_RANK", "0")))
    import torch

    # Its functions take the group of the moment as a default. Imported later, by transformers, they
    # would keep gloo's threads beyond `destroy_process_group`, into the end of the process, where
    # such a thread can abort it.
    import torch.distributed.nn.functional

    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(world.local_rank)
    # Objects travel by gloo, gradients by nccl where there are GPUs.
    torch.distributed.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
    try:
        yield world
    finally:
        torch.distributed.destroy_process_group()
