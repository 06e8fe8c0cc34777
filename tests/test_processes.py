"""What the operating system says of a process."""

import os
import subprocess
import sys

from retrain.system import peak_resident_bytes, resident_bytes


def test_the_memory_of_a_process_is_read_in_bytes() -> None:
    assert 1 << 20 < resident_bytes(os.getpid()) < 64 << 30
    assert resident_bytes(os.getpid()) <= 1.1 * peak_resident_bytes()
    assert resident_bytes(2**22 + 1) == 0


def test_the_module_that_every_process_imports_first_is_light() -> None:
    loaded = (
        "import sys, retrain.system; print([name for name in ('torch', 'numpy', 'psutil') if"
        " name in sys.modules])"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", loaded], capture_output=True, text=True, check=True
        ).stdout.strip()
        == "[]"
    )
