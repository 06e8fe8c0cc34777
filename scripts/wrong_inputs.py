"""Write docs/errors.md: the printed cases of tests/wrong_inputs.py and the sentence that each gets.

Every case is run through the command line: `python scripts/wrong_inputs.py`.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.wrong_inputs import CASES, Case, answer  # noqa: E402

PAGE = ROOT / "docs" / "errors.md"
PRINTED = [case for case in CASES if case.printed]


def page() -> str:
    rows = [row(case, *answer(case)) for case in PRINTED]
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


def row(case: Case, code: int, said: list[str]) -> str:
    """The page's line of a case that ended with `code` and printed `said`."""
    sentence = " ".join(said).replace("|", "\\|")
    return f"| {case.title} | {code} | {sentence} |"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"{len(PRINTED)} cases: {PAGE}")
