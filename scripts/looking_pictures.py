"""Make the pictures of docs/looking.md by running the page's own Python blocks.

    python scripts/looking_pictures.py

Reads the runs logs/lab_s0 to logs/lab_s4; the page gives the commands that make them. Needs the
extra `report`.
"""

import os
import re
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "looking.md"
_BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks() -> list[str]:
    return _BLOCK.findall(PAGE.read_text(encoding="utf-8"))


def main() -> None:
    os.chdir(ROOT)
    os.environ["SOURCE_DATE_EPOCH"] = "0"  # the same runs give the same bytes
    matplotlib.rcParams |= {
        "svg.hashsalt": "retrain",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.titlesize": "medium",
    }
    names: dict[str, object] = {}
    for block in blocks():
        exec(compile(block, str(PAGE), "exec"), names)
        for picture in re.findall(r'savefig\("([^"]+)"', block):
            print(f"Picture: {picture}")


if __name__ == "__main__":
    main()
