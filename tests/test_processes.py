"""What the operating system says of a process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from retrain.system import peak_resident_bytes, resident_bytes


def test_the_memory_of_a_process_is_read_in_bytes() -> None:
    assert 1 << 20 < resident_bytes(os.getpid()) < 64 << 30
    assert resident_bytes(os.getpid()) <= 1.1 * peak_resident_bytes()
    assert resident_bytes(2**22 + 1) == 0


def test_the_module_that_every_process_imports_first_is_light() -> None:
    code = (
        "import sys, retrain.system;"
        " sys.exit(bool({'torch', 'numpy', 'psutil'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


CAMPAIGN = """
[model]
model = "lab"
[data]
source = "lab"
[reward]
type = "custom"
custom_module = "mine"
custom_function = "score"
[training]
max_steps = 1
batch_size = 2
group_size = 2
max_tokens = 4
[evaluation]
max_examples = 2
[campaign]
parallel = true
max_workers = 1
seeds = [1]
[[campaign.conditions]]
advantage_mode = "grpo"
transform_mode = "none"
[logging]
log_dir = "campaign"
"""
COMMANDS = """
import sys
from retrain.cli.main import main
for words in ("c.toml --quiet", "eval campaign/runs/grpo+none_s1 --trust", "report campaign"):
    code = main(words.split())
    assert code == 0, words
"""


@pytest.mark.slow
def test_a_file_named_like_a_standard_module_replaces_none(tmp_path: Path) -> None:
    """Run the program's commands, and the workers of a campaign and of rewards."""
    for name in sys.stdlib_module_names:
        (tmp_path / f"{name}.py").write_text("raise RuntimeError(f'{__file__} was imported')\n")
    (tmp_path / "mine.py").write_text("def score(response, reference):\n    return 1.0\n")
    (tmp_path / "c.toml").write_text(CAMPAIGN)

    def python(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, *arguments], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        logs = "".join(log.read_text() for log in tmp_path.rglob("output.log"))
        assert done.returncode == 0, done.stdout + done.stderr + logs
        return done.stdout

    python("-P", "-c", COMMANDS)  # as the program `retrain` starts
    for name in sys.stdlib_module_names - {"json", "random"}:  # runpy imports some of the others
        (tmp_path / f"{name}.py").unlink()
    python("-m", "retrain", "version")
