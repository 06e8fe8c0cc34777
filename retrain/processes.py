"""The process and its children, as the operating system sees them: threads that wait, death with
the parent, resident memory.

Imported by every process at its start, so nothing heavy is imported here.
"""

import ctypes
import os
import resource
import signal
import sys

_PR_SET_PDEATHSIG = 1
_SPIN_COUNT = "20000"
_ALLOCATOR = {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"}
"""Names of torch's allocator settings; the second is the one before 2.9."""


def prepare_torch() -> None:
    """Set the variables that torch reads when it is imported, unless the user has set them; call
    this before importing torch.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        # Idle OpenMP threads spin for a moment only, so that processes which share the cores do not
        # starve each other.
        os.environ.setdefault("GOMP_SPINCOUNT", _SPIN_COUNT)
    if not _ALLOCATOR & os.environ.keys():
        # Segments of a fixed size that the KV cache leaves behind are no use to activations: out of
        # memory would depend on what ran before.
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


def die_with_parent(parent: int) -> None:
    """In a child: have the kernel kill this process when `parent`, which forked it, dies
    (Linux).
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the call
        os._exit(1)


def resident_bytes(pid: int) -> int:
    """Return the resident memory of a process; 0 if it has ended or belongs to another user."""
    import psutil  # here, since most processes never ask

    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return 0


def peak_resident_bytes() -> int:
    """Return the largest resident memory that this process has had so far, without its children."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # psutil has no peak on Linux
    if sys.platform == "darwin":
        return peak
    return peak * 1024
