"""What the Triton kernels of a decoding step compile to for an NVIDIA GPU, without one: registers,
stack, shared memory, widths of loads.

    PYTHONPATH=~/.cache/retrain/triton python benchmarks/compiled.py --capability 9.0    # where
    make test-kernels installs Triton

The kernels are called as a step of Qwen3-4B's shapes calls them (bf16, LoRA of rank 16), and are
compiled instead of launched. Triton brings NVIDIA's assembler, so what is read here is the machine
code that such a GPU would run. Nothing is timed.
"""

import argparse
import json
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from report import add_output, load_average, publish, table
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from retrain.model.kernels import attention, rowwise, sampler
from retrain.model.kernels import products as float8
from retrain.model.packed import quantised

HIDDEN, INNER, HEADS, SIZE, VOCABULARY = 2560, 9728, (32, 8, 8), 128, 151_936
PAGE_TOKENS = 256
REGISTERS_OF_SM, THREADS_OF_SM = 65_536, 2048
SHARED_OF_SM = {80: 164, 89: 100, 90: 228, 100: 228}
"""KiB of a multiprocessor (CUDA C++ Programming Guide, compute capabilities)."""


class Compiled(NamedTuple):
    kernel: str
    programs: int
    """Of one launch."""
    registers: int
    stack_bytes: int
    """Of a thread, in memory: spilled registers and what calls save."""
    shared_bytes: int
    resident: int
    """Programs that one multiprocessor holds at a time."""
    loads: dict[str, int]
    """Loads from memory in the machine code, by their bytes."""
    products: int
    """Instructions of the matrix units."""


class NoLaunch:
    """Triton's driver for a GPU that is not there: kernels are compiled for it."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int) -> int:
        return 0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--capability",
        default="9.0",
        help="compute capability: 8.0 (A100), 8.9 (RTX 40), 9.0 (H100, H200), 10.0 (B200)",
    )
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--json", action="store_true", help="print JSON lines and write nothing")
    add_output(parser)
    given = parser.parse_args()
    load, capability = load_average(), int(given.capability.replace(".", ""))
    found = list(compiled(given.rows, capability))
    if given.json:
        print(*(json.dumps(one._asdict()) for one in found), sep="\n")
        return
    work = (
        f"One step of {given.rows} rows, compute capability {given.capability}, Triton"
        f" {triton.__version__}."
    )
    head = [
        "kernel",
        "programs",
        "registers",
        "stack bytes",
        "shared KiB",
        "programs per SM",
        "loads: 16 bytes",
        "others",
        "matrix units",
    ]
    rows = [
        [
            one.kernel, one.programs, one.registers, one.stack_bytes,
            f"{one.shared_bytes / 1024:.1f}", one.resident,
            one.loads.get("16", 0), sum(count for width,
            count in one.loads.items() if width != "16"), one.products,
        ]
        for one in found
    ]  # fmt: skip
    publish(
        f"compiled-sm{capability}",
        "What the Triton kernels compile to",
        [work, table(head, rows)],
        load,
        given.output,
    )


def compiled(rows: int, capability: int) -> Iterator[Compiled]:
    """Compile every kernel once for each way in which a step calls it."""
    launches: list[tuple[str, Any, tuple[int, ...]]] = []
    own = JITFunction.run

    def compile_only(kernel: Any, *args: Any, grid: Any, **named: Any) -> None:
        launches.append(
            (kernel.fn.__name__, own(kernel, *args, grid=grid, **named | {"warmup": True}), grid)
        )

    driver.set_active(NoLaunch(capability))
    JITFunction.run = compile_only
    Tensor.is_cuda = property(lambda _: True)  # type: ignore[assignment]  # the tensors stand for a GPU's
    call_all(rows)
    seen = set()
    for name, kernel, grid in launches:
        if kernel.hash not in seen:
            seen.add(kernel.hash)
            yield read(name.lstrip("_"), kernel, grid, capability)


def call_all(rows: int) -> None:
    def half(*shape: int) -> Tensor:
        return torch.zeros(*shape, dtype=torch.bfloat16)

    def apart(width: int) -> Tensor:
        """Rows that lie apart, since the adapter's part lies under the weight's."""
        return half(rows, width + 16)[:, :width]

    pages = half(4, PAGE_TOKENS, HEADS[1], SIZE), half(4, PAGE_TOKENS, HEADS[1], SIZE)
    index, ones, halves = (
        torch.zeros(rows, dtype=torch.int64),
        torch.ones(rows),
        torch.full((rows,), 0.5, dtype=torch.float64),
    )
    rowwise.add_norm(half(rows, HIDDEN), apart(HIDDEN), half(HIDDEN), 1e-6)
    turning, heads_norm = (
        (half(rows, 1, SIZE), half(rows, 1, SIZE)),
        (half(sum(HEADS[:2]), SIZE), 1e-6),
    )
    for of_qkv in (None, (apart(48), half(48, sum(HEADS) * SIZE))):
        rowwise.apply_rope_and_store_kv(
            apart(sum(HEADS) * SIZE), of_qkv, HEADS, turning, heads_norm, pages, index
        )
    for width in (4, 8):  # pages of rows of one part, and of two
        attention.attend(
            half(rows, HEADS[0], SIZE),
            *pages,
            torch.zeros(rows, width, dtype=torch.int32),
            ones.int(),
            SIZE**-0.5,
            None,
        )
    for of_gates in (None, (apart(32), half(32, 2 * INNER))):
        rowwise.gate(apart(2 * INNER), of_gates)
    call_learning(half, apart, turning, heads_norm)
    for inputs, outputs in ((INNER, HIDDEN), (HIDDEN, 2 * INNER)):
        float8.scaled_product(half(rows, inputs), *quantised(half(outputs, inputs)), None)
    sampler.draw(half(rows, VOCABULARY), ones, halves, None)
    sampler.draw(half(rows, VOCABULARY), ones, halves, (index, halves, halves))


def call_learning(
    half: Any, apart: Any, turning: tuple[Tensor, Tensor], heads_norm: tuple[Tensor, float]
) -> None:
    """The kernels between the products of whole sequences."""
    rows, heads = len(turning[0]), sum(HEADS[:2])
    _, scale = rowwise.norm(half(rows, HIDDEN), half(HIDDEN), 1e-6)
    rowwise.norm_gradient(half(rows, HIDDEN), half(rows, HIDDEN), half(HIDDEN), scale)
    qkv = apart(sum(HEADS) * SIZE).unflatten(1, (-1, SIZE))[:, :heads]
    _, scale = rowwise.apply_rope(qkv, *turning, *heads_norm)
    rowwise.apply_rope_gradient(half(rows, heads, SIZE), qkv, *turning, heads_norm[0], scale)
    rowwise.gate_gradient(half(rows, INNER), half(rows, 2 * INNER))


def read(name: str, kernel: Any, grid: tuple[int, ...], capability: int) -> Compiled:
    """Read the machine code of a kernel with the tools that Triton brings."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage, code = (
            subprocess.run(
                [tool, what, file.name], capture_output=True, text=True, check=True
            ).stdout
            for what in ("--dump-resource-usage", "--dump-sass")
        )
    numbers = {
        key: int(value) for key, value in re.findall(r"(REG|STACK|SHARED|LOCAL):(\d+)", usage)
    }
    threads, shared = 32 * kernel.metadata.num_warps, max(kernel.metadata.shared, numbers["SHARED"])
    resident = min(
        REGISTERS_OF_SM // (numbers["REG"] * threads),
        THREADS_OF_SM // threads,
        32,
        (SHARED_OF_SM[capability] << 10) // max(shared, 1024),
    )
    loads = Counter(
        str(int(bits or 32) // 8)
        for bits in re.findall(
            r"\bLDG(?:STS)?\.E(?:\.BYPASS|\.CONSTANT)*(?:\.(?:U|S)?(\d+))?", code
        )
    )
    programs = 1
    for count in grid:
        programs *= count
    products = len(re.findall(r"\b(?:HMMA|HGMMA|UTCHMMA)\b", code))
    return Compiled(
        name,
        programs,
        numbers["REG"],
        numbers["STACK"] + numbers["LOCAL"],
        shared,
        resident,
        dict(loads),
        products,
    )


if __name__ == "__main__":
    main()
