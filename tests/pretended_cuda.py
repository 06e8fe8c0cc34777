"""CUDA devices that are pretended: their tensors say `cuda:0` and hold their numbers on the CPU, so
code for a GPU runs without one.

They show that every branch for CUDA runs, that no operator mixes devices, and that a captured step
reads nothing but its buffers: a capture keeps the operators, puts back what they wrote and makes
NaN of what they returned, as on a GPU, where nothing has run by then, and a copy between host and
device in it is refused, as is what the host waits for. So is, under
`torch.use_deterministic_algorithms`, what raises. They do not show kernels, their rounding or
order, streams, or memory.
"""

import ctypes
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from retrain.model import projection
from retrain.model.varlen import PagedRows, Spans, plain_paged
from tests.plain_attention import plain

_INSIDE = "fpga"
"""What torch's own code takes the device for: one whose gradients need no accelerator."""
_FPGA = 7
"""Its number among the types of devices."""
_COPIES = {"aten::_to_copy", "aten::copy_"}
_INDEXED_BY_HOST = {"aten::index", "aten::index_put_", "aten::_index_put_impl_", "aten::index_put"}
"""Operators that copy indices from the host by themselves."""
_WAITED_FOR = {
    "aten::_local_scalar_dense",
    "aten::nonzero",
    "aten::masked_select",
    "aten::_unique2",
    "aten::unique_dim",
    "aten::equal",
}
"""Operators whose result, or its shape, the host reads."""
_BY_CHANCE = {"aten::put_", "aten::put", "aten::histc", "aten::kthvalue"}
"""Operators that raise on CUDA under `torch.use_deterministic_algorithms`; those that do so by
their arguments are in `_is_by_chance`."""

_PRODUCTS = {
    "aten::mm",
    "aten::addmm",
    "aten::addmm_",
    "aten::bmm",
    "aten::baddbmm",
    "aten::linear",
}
"""Operators that autocast computes in half precision, and which meet two dtypes nowhere else;
autocast itself does not know the device."""


class OnDevice(Tensor):
    """A tensor of the pretended device, and the CPU's tensor with its numbers."""

    @staticmethod
    def __new__(cls, held: Tensor, index: int) -> Self:
        layout = {
            "strides": held.stride(),
            "storage_offset": held.storage_offset(),
            "dtype": held.dtype,
        }
        inside = torch.device(_INSIDE, index)
        return torch.Tensor._make_wrapper_subclass(cls, held.shape, device=inside, **layout)  # type: ignore[attr-defined, no-any-return]

    def __init__(self, held: Tensor, index: int) -> None:
        self.held, self.index = held, index

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda", self.index)

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    def to(self, *args: Any, **kwargs: Any) -> Tensor:  # type: ignore[override]
        """Return itself where nothing changes; torch's own code would see two devices."""
        device, dtype, *_ = torch._C._nn._parse_to(
            *args, **{name: value for name, value in kwargs.items() if name != "copy"}
        )
        stays = (
            device in (None, torch.device("cuda"), self.device)
            and dtype in (None, self.dtype)
            and not kwargs.get("copy")
        )
        return self if stays else super().to(*args, **kwargs)

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def data_ptr(self) -> int:
        return self.held.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.held.untyped_storage()

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        return self.detach()

    @data.setter
    def data(self, new: Tensor) -> None:
        assert isinstance(new, OnDevice)
        self.held = new.held
        Tensor.data.__set__(self, new)  # type: ignore[attr-defined]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})

    def __repr__(self) -> str:  # type: ignore[override]
        return f"OnDevice({self.held!r})"


class Factories(TorchDispatchMode):
    """Makes the operators that name the device, and have no tensor on it, reach `run` too."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})


def run(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operator on the numbers that its tensors hold; its results are on the device that a
    GPU's would be on.
    """
    tensors = _tensors((args, kwargs))
    wrapped = [tensor for tensor in tensors if isinstance(tensor, OnDevice)]
    named = torch.device(kwargs["device"]) if kwargs.get("device") is not None else None
    if kwargs.get("pin_memory"):
        kwargs = kwargs | {"pin_memory": False}
    if not wrapped and (named is None or named.type not in ("cuda", _INSIDE)):
        return func(*args, **kwargs)
    name = func._schema.name
    reads_host = any(tensor.dim() and not isinstance(tensor, OnDevice) for tensor in tensors)
    mixes = len({tensor.index for tensor in wrapped}) > 1 or (
        bool(wrapped) and reads_host and name not in _INDEXED_BY_HOST
    )
    if mixes and name not in _COPIES:
        raise RuntimeError(
            f"{name}: tensors on two devices, of shapes"
            f" {[tuple(tensor.shape) for tensor in tensors]}"
        )
    to_host = (named is not None and named.type == "cpu") or (
        name == "aten::copy_" and not isinstance(args[0], OnDevice)
    )
    graph = Graph.capturing()
    if graph is not None and (
        mixes or reads_host or to_host or name in _WAITED_FOR or _picks_by_mask(name, args)
    ):
        raise RuntimeError(f"{name}: not permitted while a step is captured")
    if torch.are_deterministic_algorithms_enabled() and _is_by_chance(name, args, kwargs):
        raise RuntimeError(f"{name}: has no deterministic implementation")
    index = (named.index or 0) if named is not None else wrapped[0].index
    own = {id(tensor.held): tensor for tensor in wrapped}
    args, kwargs = tree_map_only(OnDevice, lambda tensor: tensor.held, (args, dict(kwargs)))
    kwargs |= {"device": torch.device("cpu")} if named is not None else {}
    if name in _PRODUCTS and {tensor.dtype for tensor in tensors} == {
        torch.bfloat16,
        torch.float32,
    }:
        args = tree_map_only(Tensor, lambda tensor: tensor.bfloat16(), args)
    compute = KERNELS.get(name, func)
    written = [
        value
        for argument, value in zip(func._schema.arguments, args, strict=False)
        if argument.is_write
    ]
    found = (
        compute(*args, **kwargs) if graph is None else graph.record(compute, written, args, kwargs)
    )
    if to_host:
        return found
    return tree_map_only(
        Tensor, lambda out: own[id(out)] if id(out) in own else OnDevice(out, index), found
    )


def _picks_by_mask(name: str, args: Any) -> bool:
    """Return True for an index that is a mask: how many it picks is read by the host."""
    return name in _INDEXED_BY_HOST and any(
        tensor.dtype == torch.bool for tensor in _tensors(args[1])
    )


def _is_by_chance(name: str, args: Any, kwargs: Any) -> bool:
    if name in ("aten::cumsum", "aten::cumsum_"):
        return (kwargs.get("dtype") or args[0].dtype).is_floating_point
    weighted = name == "aten::bincount" and len(_tensors((args, kwargs))) > 1
    indexed = name in ("aten::median", "aten::nanmedian") and len(args) > 1
    multiplied = name.startswith("aten::scatter_reduce") and "prod" in (*args, *kwargs.values())
    return name in _BY_CHANCE or weighted or indexed or multiplied


class Graph:
    """Stands for `torch.cuda.CUDAGraph`: the operators of a capture and the memory that each read
    and wrote.
    """

    _of_thread = threading.local()

    @classmethod
    def capturing(cls) -> "Graph | None":
        """Return the graph that this thread captures."""
        return getattr(cls._of_thread, "graph", None)

    def __init__(self) -> None:
        self._calls: list[tuple[Callable[..., Any], Any, Any, list[Tensor]]] = []
        self._before: list[tuple[Tensor, Tensor]] = []
        self._returned: list[Tensor] = []

    def pool(self) -> tuple[int, int]:
        return 0, 0

    def record(
        self, compute: Callable[..., Any], written: list[Tensor], args: Any, kwargs: Any
    ) -> Any:
        """Compute, and keep what a replay needs; `written` are the tensors that it writes to."""
        inputs = _tensors((args, kwargs))
        self._before += [(value, value.clone()) for value in written]
        found = compute(*args, **kwargs)
        outputs = _tensors(found)
        held = {value.untyped_storage().data_ptr() for value in inputs}
        self._returned += [
            value for value in outputs if value.untyped_storage().data_ptr() not in held
        ]
        self._calls.append((compute, args, kwargs, outputs))
        return found

    @contextmanager
    def captured(self) -> Iterator[None]:
        assert Graph.capturing() is None
        Graph._of_thread.graph = self
        try:
            yield
        finally:
            Graph._of_thread.graph = None
        for value, before in reversed(self._before):
            value.copy_(before)
        for value in self._returned:
            value.fill_(float("nan") if value.is_floating_point() else 0)

    def replay(self) -> None:
        for compute, args, kwargs, outputs in self._calls:
            for output, again in zip(outputs, _tensors(compute(*args, **kwargs)), strict=True):
                if output.untyped_storage().data_ptr() != again.untyped_storage().data_ptr():
                    output.copy_(again)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _flash(  # noqa: PLR0913 - torch's signature
    query: Tensor, key: Tensor, value: Tensor, queries: Tensor, keys: Tensor, most: int,
    longest: int, causal: bool, scale: float,
    window_size: list[int], grouped: bool = False, lengths: Tensor | None = None,
    table: Tensor | None = None, splits: int | None = None,
) -> Any:  # fmt: skip
    """torch_attn::_varlen_attn by matrix products."""
    spans, window = Spans(queries, keys, most, longest), _window(window_size)
    if lengths is None or table is None:
        out = plain(query, key, value, spans, scale, window)
    else:
        out = plain_paged(query, key, value, PagedRows(table, lengths, spans), scale, window)
    return (
        out,
        query.new_zeros(query.shape[1], len(query), dtype=torch.float32),
        torch.zeros(2, dtype=torch.uint64),
    )


def _flash_backward(  # noqa: PLR0913 - torch's signature
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor,
    queries: Tensor, keys: Tensor, most: int,
    longest: int, causal: bool, rng_state: Tensor, scale: float, window_size: list[int],
) -> Any:  # fmt: skip
    """torch_attn::_varlen_attn_backward, by differentiating the same, in a thread: here autograd is
    switched off.
    """

    def differentiated() -> tuple[Tensor, ...]:
        leaves = [tensor.detach().requires_grad_() for tensor in (query, key, value)]
        found = plain(*leaves, Spans(queries, keys, most, longest), scale, _window(window_size))
        return torch.autograd.grad(found, leaves, grad)

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(differentiated).result()


def _window(window_size: list[int]) -> int | None:
    before, after = window_size
    assert after == 0, "the attention of a causal model"
    return None if before < 0 else before + 1


KERNELS: dict[str, Callable[..., Any]] = {
    "torch_attn::_varlen_attn": _flash,
    "torch_attn::_varlen_attn_backward": _flash_backward,
}
"""Operators that have no form for the CPU."""


class _Stream:
    def __init__(self, **named: int) -> None: ...

    def wait_stream(self, other: "_Stream") -> None: ...


class _Event:
    def record(self) -> None: ...

    def synchronize(self) -> None: ...


@contextmanager
def pretended(
    monkeypatch: pytest.MonkeyPatch, *, devices: int = 1, gib: int = 24
) -> Iterator[None]:
    """Make torch say that there are `devices` of compute capability 9.0."""
    library = ctypes.CDLL(str(next(Path(torch.__file__).parent.glob("lib/libc10.*"))))
    guards = (ctypes.c_void_p * (_FPGA + 1)).in_dll(
        library, "_ZN3c104impl26device_guard_impl_registryE"
    )
    guards[_FPGA] = guards[0]  # the CPU's, which guards nothing
    card = SimpleNamespace(
        total_memory=gib << 30, name="pretended", multi_processor_count=132, major=9, minor=0
    )
    answers = {
        "is_available": True, "device_count": devices, "current_device": 0,
        "get_device_properties": card, "get_device_capability": (9, 0),
        "get_device_name": card.name, "mem_get_info": (gib << 30, gib << 30),
        "max_memory_allocated": 0, "memory_allocated": 0,
        "memory_reserved": 0, "reset_peak_memory_stats": None, "synchronize": None,
        "empty_cache": None, "_lazy_init": None,
        "is_bf16_supported": True, "manual_seed_all": None, "device": nullcontext(),
        "stream": nullcontext(), "is_current_stream_capturing": False,
    }  # fmt: skip
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer, **__: answer)
    for name, stand_in in {
        "Stream": _Stream,
        "current_stream": lambda: torch.cuda.Stream(stream_id=0),  # as torch's own
        "Event": _Event,
        "CUDAGraph": Graph,
        "graph": lambda graph, **_: graph.captured(),
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(projection, "WEIGHTS", {OnDevice})
    run_thread = threading.Thread.run

    def run_with_modes(thread: threading.Thread) -> None:
        with _modes():
            run_thread(thread)

    monkeypatch.setattr(threading.Thread, "run", run_with_modes)
    with _modes():
        yield


@contextmanager
def _modes() -> Iterator[None]:
    """What torch holds for each thread."""
    torch._C._set_only_lift_cpu_tensors(True)  # type: ignore[attr-defined]  # torch.tensor(1, device="cuda:0") begins on the CPU
    try:
        with Factories(), torch.autograd.set_multithreading_enabled(False):
            yield
    finally:
        torch._C._set_only_lift_cpu_tensors(False)  # type: ignore[attr-defined]
