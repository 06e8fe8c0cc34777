"""Triton's kernels compile for GPUs of two generations, without one, to machine code that hardly
spills and reads in wide pieces.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs the package triton"
)
BENCHMARK = Path(__file__).resolve().parents[1] / "benchmarks" / "compiled.py"
KERNELS = {
    "add_norm",
    "apply_rope_and_store_kv",
    "attend",
    "join",
    "norm_gradient",
    "apply_rope",
    "apply_rope_gradient",
    "gate",
    "gate_gradient",
    "product",
    "block_sums",
    "pick",
    "cut",
}
MULTIPLY = {"attend", "product", "apply_rope_and_store_kv", "gate"}
"""With an adapter."""
SMALL_FRAME = 32
"""Bytes that a thread may keep in memory: what a call saves, not a tile."""


@pytest.mark.parametrize("capability", ["8.0", "9.0"])
def test_kernels_compile_to_code_that_keeps_tiles_in_registers(
    capability: str, tmp_path: Path
) -> None:
    """In a process of its own: in this one Triton interprets."""
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, str(BENCHMARK), "--capability", capability, "--json"]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = [json.loads(line) for line in done.stdout.splitlines()]
    assert {kernel["kernel"] for kernel in found} == KERNELS
    for kernel in found:
        assert kernel["stack_bytes"] <= SMALL_FRAME and kernel["resident"] >= 2, kernel
        assert kernel["loads"]["16"] > 0, kernel
        assert kernel["products"] > 0 or kernel["kernel"] not in ("attend", "product"), kernel
    assert {kernel["kernel"] for kernel in found if kernel["products"]} == MULTIPLY
