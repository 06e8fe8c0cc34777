"""Measurements on the computing device: seconds until it is done, memory, kernels, bandwidth.

On CUDA memory is what torch's allocator has allocated and reserved; on a CPU it is the resident
memory of the process.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from worker import GIB, Measure, measured

_TOP = 15
_NAME_LENGTH = 90
_COPIED_BYTES = {"cuda": 2 << 30, "cpu": 128 << 20}
_COPIES = 10


@contextmanager
def measured_on(device: str) -> Iterator[Measure]:
    """As `measured`; on CUDA the memory of the device: allocated before, peak allocated, peak
    reserved.
    """
    if not device.startswith("cuda"):
        with measured() as result:
            yield result
        return
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    result = Measure(before_gib=torch.cuda.memory_allocated(device) / GIB)
    wall, processor = time.perf_counter(), time.process_time()
    yield result
    torch.cuda.synchronize(device)
    result.seconds, result.cpu_seconds = time.perf_counter() - wall, time.process_time() - processor
    result.peak_gib = torch.cuda.max_memory_allocated(device) / GIB
    result.reserved_gib = torch.cuda.max_memory_reserved(device) / GIB


def copy_bandwidth(device: str) -> float:
    """Return the bytes a second of a large copy, reads and writes counted."""
    source = torch.zeros(_COPIED_BYTES[torch.device(device).type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    target.copy_(source)
    with measured_on(device) as measure:
        for _ in range(_COPIES):
            target.copy_(source)
    return 2 * _COPIES * source.nbytes / measure.seconds


def profiled(run: Callable[[], object], device: str) -> dict[str, Any]:
    """Kernels of a run on CUDA, operators on a CPU: total seconds and calls, and the `top` ones by
    their own time.
    """
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    on_cuda = device.startswith("cuda")
    with profile(
        activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_cuda else [])],
        acc_events=True,
    ) as found:
        run()
        if on_cuda:
            torch.cuda.synchronize(device)
    events = [
        {
            "name": event.key[:_NAME_LENGTH].replace("|", "\\|"),
            "calls": event.count,
            "seconds": (
                (event.self_device_time_total if on_cuda else event.self_cpu_time_total) / 1e6
            ),
        }
        for event in found.key_averages()
        if event.device_type == (DeviceType.CUDA if on_cuda else DeviceType.CPU)
    ]
    events.sort(key=lambda event: -event["seconds"])
    return {
        "seconds": sum(event["seconds"] for event in events),
        "calls": sum(event["calls"] for event in events),
        "top": events[:_TOP],
    }
