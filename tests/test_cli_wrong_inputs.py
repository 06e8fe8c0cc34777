"""A user's mistake gets its exit code and one sentence that names what is wrong; no traceback."""

import pytest

from scripts.wrong_inputs import PAGE, PRINTED, row
from tests.wrong_inputs import Case, answer


def test_the_page_of_wrong_inputs_has_no_other_rows() -> None:
    rows = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line[:2] == "| "]
    titles = [line.split(" | ")[0].removeprefix("| ") for line in rows[1:]]
    assert titles == [case.title for case in PRINTED]


@pytest.mark.faults("wrong files and command lines")
@pytest.mark.parametrize("case", PRINTED, ids=lambda case: case.title)
def test_a_wrong_input_is_answered_in_one_sentence(case: Case) -> None:
    code, said = answer(case)
    assert code == case.code, said
    assert len(said) == 1
    assert case.says in said[0]
    assert said[0].rstrip().endswith((".", "?", ")", "`"))
    # Here, since scripts/docs_check.py would have to run every case again.
    page = PAGE.read_text(encoding="utf-8").splitlines()
    assert row(case, code, said) in page, "docs/errors.md differs; run scripts/wrong_inputs.py"
