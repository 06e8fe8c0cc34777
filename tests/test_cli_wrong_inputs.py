"""A user's mistake gets its exit code and one sentence that names what is wrong; no traceback."""

import pytest

from tests.wrong_inputs import CASES, Case, answer


@pytest.mark.faults("wrong files and command lines")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.says)
def test_a_wrong_input_is_answered_in_one_sentence(case: Case) -> None:
    code, said = answer(case)
    assert code == case.code, said
    assert len(said) == 1
    assert case.says in said[0]
    assert said[0].rstrip().endswith((".", "?", ")", "`"))
