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
    for expected, status in (
        ("[0.5, -0.5]", 0),
        ("[0.5, -0.4]", 1),
        ("[0.5]", 1),
        ('{"error": "ValueError"}', 1),
    ):
        file = tmp_path / "cases.json"
        file.write_text(
            '{"default_tol": {"rtol": 1e-9, "atol": 1e-12}, "cases": [' + case % expected + "]}"
        )
        assert golden.main([str(file)]) == status
    assert "expected -0.4" in capsys.readouterr().out


def test_an_expected_error_must_be_raised(tmp_path: Path) -> None:
    file = tmp_path / "cases.json"
    file.write_text(
        '{"default_tol": {"rtol": 1e-9, "atol": 1e-12}, "cases": [{"id": "x", "op":'
        ' "advantage.maxrl", "inputs": {"rewards": [1.0, "nan"], "eps": 1e-6}, "expected":'
        ' {"error": "ValueError"}}]}'
    )
    assert golden.main([str(file)]) == 0


DIAGONAL = '"lora_A": [[1, 0], [0, 1e-5]], "lora_B": [[1, 0], [0, 1]]'
LIMITS = '"group_size": 16, "throttle_margin": 0.85, "min_batch_size": 2, "max_batch_size": 64'


@pytest.mark.parametrize(
    ("operation", "inputs", "right", "wrong"),
    [
        (
            "squeeze.compress",
            DIAGONAL + ', "rank": 1',
            '{"product": [[1, 0], [0, 0]]}',
            '{"product": [[1, 0], [0, 1e-5]]}',
        ),
        (
            "squeeze.compress",
            DIAGONAL + ', "rank": 1',
            '{"relative_frobenius_error": 9.9999999995e-06}',
            '{"relative_frobenius_error": 1}',
        ),
        ("squeeze.compress", DIAGONAL + ', "rank": 3', '{"error": "ValueError"}', "{}"),
        ("usl.target_batch", '"p_star": 313.0, ' + LIMITS, "16", "17"),
        ("usl.target_batch", '"p_star": 3.0, ' + LIMITS, "2", "0"),
        ("usl.target_batch", '"p_star": null, ' + LIMITS, "64", "2"),
        ("usl.optimal", '"sigma": 0.1, "kappa": 0.0', "null", "1.0"),
    ],
)
def test_the_operations_without_an_example_give_what_their_equations_do(
    operation: str, inputs: str, right: str, wrong: str, tmp_path: Path
) -> None:
    file = tmp_path / "cases.json"
    for expected, status in ((right, 0), (wrong, 1)):
        case = f'{{"id": "x", "op": "{operation}", "inputs": {{{inputs}}}, "expected": {expected}}}'
        file.write_text(f'{{"default_tol": {{"rtol": 1e-9, "atol": 1e-12}}, "cases": [{case}]}}')
        assert golden.main([str(file)]) == status
