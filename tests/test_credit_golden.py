"""The formulas against cases computed from the equations with 50 digits."""

from pathlib import Path

import golden
import pytest

CASES = Path(__file__).parent / "data" / "golden_examples.json"


def test_golden_cases_agree(capsys: pytest.CaptureFixture[str]) -> None:
    status = golden.main([str(CASES)])
    printed = capsys.readouterr().out
    assert status == 0, printed
    assert "37 of 37 cases agree" in printed


def test_a_wrong_number_is_a_mismatch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    case = '{"id": "x", "op": "advantage.grpo", "inputs": {"rewards": [1.0, 0.0]}, "expected": %s}'
    for expected, status in (("[0.5, -0.5]", 0), ("[0.5, -0.4]", 1), ("[0.5]", 1), ('{"error": "ValueError"}', 1)):
        file = tmp_path / "cases.json"
        file.write_text('{"default_tol": {"rtol": 1e-9, "atol": 1e-12}, "cases": [' + case % expected + "]}")
        assert golden.main([str(file)]) == status
    assert "expected -0.4" in capsys.readouterr().out


def test_an_expected_error_must_be_raised(tmp_path: Path) -> None:
    file = tmp_path / "cases.json"
    file.write_text(
        '{"default_tol": {"rtol": 1e-9, "atol": 1e-12}, "cases": [{"id": "x", "op": "advantage.maxrl", '
        '"inputs": {"rewards": [1.0, "nan"], "eps": 1e-6}, "expected": {"error": "ValueError"}}]}'
    )
    assert golden.main([str(file)]) == 0
