"""Write docs/errors.md: the printed cases of tests/wrong_inputs.py and the sentence that each gets.

Every case is run through the command line: `python scripts/wrong_inputs.py`.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.wrong_inputs import CASES, answer  # noqa: E402

PAGE = ROOT / "docs" / "errors.md"
PRINTED = [case for case in CASES if case.printed]


def page() -> str:
    rows = []
    for case in PRINTED:
        code, said = answer(case)
        sentence = " ".join(said).replace("|", "\\|")
        rows.append(f"| {case.title} | {code} | {sentence} |")
    return "\n".join(
        [
            "# Wrong inputs and what they are answered",
            "",
            (
                "Made by `python scripts/wrong_inputs.py`, which runs every case through the"
                " command line."
            ),
            (
                "Exit codes: 1 the run failed, 2 wrong usage or configuration, 3 the machine lacks"
                " something."
            ),
            "",
            "| what is wrong | exit | the sentence |",
            "|---|---|---|",
            *rows,
            "",
        ]
    )


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"{len(PRINTED)} cases: {PAGE}")
