"""What the math reward decides without sympy."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrain.rewards.equality import decide_by_strings
from retrain.rewards.limits import is_refused
from retrain.rewards.normalize import normalize


def nested_fraction(depth: int) -> str:
    return r"\frac{1}{1+" * depth + "1" + "}" * depth


@pytest.mark.parametrize(
    ("answer", "reference", "verdict"),
    [
        ("5", "5", True),
        ("5.", "5", True),
        ("$5$", "5", True),
        ("007", "7", True),
        ("+7", "7", True),
        ("-0", "0", True),
        ("-7", "7", False),
        ("9" * 6000, "9" * 6000, True),
        ("9" * 5999 + "8", "9" * 6000, False),
        (r"\dfrac{1}{2}", r"\frac{1}{2}", True),
        (r"\left( 1, 2 \right)", "(1,2)", True),
        ("", "5", False),
        ("", "", False),
        ("5", "  ", False),
        (r"9^{9^{9^9}}", r"9^{9^{9^9}}", True),
        (r"1\ 234", "1234", True),
        ("$$5$$", "5", True),
        (r"$5\$", "5", True),
        ("$$$", "5", False),
        ("12", "5+7" + " " * 1000 + "+0", False),
        ("0.5", r"\frac{1}{2}", True),
        (r"\sqrt{16}", "4", None),
    ],
)
def test_strings_and_integers_are_decided_at_once(
    answer: str, reference: str, verdict: bool | None
) -> None:
    assert decide_by_strings(answer, reference) is verdict


@given(st.integers(), st.integers())
def test_integers_compare_as_integers(a: int, b: int) -> None:
    assert decide_by_strings(str(a), str(b)) is (a == b)
    assert decide_by_strings(f"{a:+06d}", str(a)) is True


@pytest.mark.parametrize(
    "answer",
    [
        r"9^{9^{9^9}}",
        "9^9^9^9",
        r"9^{9^{9^9}}+1",
        "7^{123456789}",
        "7^{123{,}456{,}789}",
        "7^123456789",
        r"3^{10^8}+1",
        "3^{(10^8)}",
        "3^(10^8)",
        r"2^{9!}",
        "(10^9)!",
        r"\left(10^9\right)!",
        "((9!)!)!",
        "1000000!",
        r"\sum_{i=1}^{10^8}\frac{1}{i^3}",
        nested_fraction(9),
        nested_fraction(15),
        "f{" * 9 + "x" + "}" * 9,
        r"\sin(" * 5 + "x" + ")" * 5,
        r"\sin" * 9 + " x",
        "-" + r"\sin^2" * 5 + " x",
        r"\sin^{2}" * 5 + " x",
        r"\sin\frac{" * 5 + "x" + "}{2}" * 5,
        r"\{" * 9 + "1" + r"\}" * 9,
        r"\binom{" * 5 + "x" + "}{2}" * 5,
        "|x" * 17,
        nested_fraction(40),
        "(" * 300 + "x" + ")" * 300,
        r"\binom{10^8}{5\cdot 10^7}",
        r"\dbinom{100000}{3}",
        "(x+y+z+1)^{15}",
        "(x+1)^{500}",
        "(1+i)^1000",
        "((x+1)^{12}+1)^{12}",
        "(x+1)^{100}(y+1)^{100}",
        "(x+y-1)^{-300}",
        "x" * 1001,
        "{5",
        "5}",
    ],
)
def test_answers_that_cannot_be_evaluated_are_refused(answer: str) -> None:
    assert is_refused(normalize(answer))
    assert decide_by_strings(answer, "4") is False


@pytest.mark.parametrize(
    "answer",
    [
        "2^{2005}",
        r"\frac{1}{2004!}",
        r"x^{2^n}",
        r"2^{n^2+1}",
        "(n^2)!",
        "1,000,000",
        "123456789^2",
        r"10^{-5}",
        r"2^{0.123456}",
        "(0,1]",
        r"\{1,2\}",
        r"\begin{pmatrix}1&2\\3&4\end{pmatrix}",
        nested_fraction(8),
        "+".join([r"\sin x\cos y"] * 10),
        r"\sin(\cos(\tan(x^2)))",
        r"\log_{2}(x)" * 9,
        r"\binom{50}{25}",
        "(x+1)^{100}",
        "(r+5)^2(x-3)^3",
        "(2+3)^{1000}",
        "(-x)^{1000}",
        "x^{50}+y^{50}+(-1)^{n+1}",
        r"\int_0^1\int_0^1\int_0^1 xyz",
        r"\alpha\beta\gamma\delta\pi\theta\mu\nu\xi\rho",
        "|x|+|y|+|z|",
    ],
)
def test_answers_of_an_ordinary_size_are_not_refused(answer: str) -> None:
    assert not is_refused(normalize(answer))


@pytest.mark.parametrize(
    "answer",
    [r"\int e^{\sin x^2}\cos x^3 dx", r"\sum_{i=1}^{1000}\frac{1}{i^3}", r"\prod_{i=1}^{9} i"],
)
def test_an_answer_left_to_be_evaluated_equals_only_itself(answer: str) -> None:
    assert decide_by_strings(answer, "4") is False
    assert decide_by_strings(answer, r"\int_0^1 x dx") is False
    assert decide_by_strings(answer.replace("{1000}", "{1000} "), answer) is True


@given(st.text(alphabet="^!(){}[]0123456789x\\.,- ", max_size=40))
def test_any_string_gets_a_verdict_or_none(answer: str) -> None:
    assert decide_by_strings(answer, "4") in (True, False, None)
