"""`match` compares strings, exactly or as the MATH paper does."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrain.rewards import hendrycks_is_equiv
from retrain.rewards.answers import answers_match


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (r"\dfrac{1}{2}", r"\frac{1}{2}"),
        (r"\tfrac12", r"\frac{1}{2}"),
        (r"\frac1{2}", r"\frac{1}{2}"),
        (r"\frac1b", r"\frac{1}{b}"),
        ("0.5", r"\frac{1}{2}"),
        (".5", r"\frac{1}{2}"),
        ("1/2", r"\frac{1}{2}"),
        ("-3/4", r"\frac{-3}{4}"),
        (r"\left(1,2\right)", "(1,2)"),
        ("x=5", "5"),
        ("x = 5", "5"),
        (r"10\%", "10"),
        (r"\$5", "5"),
        (r"90^\circ", "90"),
        (r"90^{\circ}", "90"),
        (r"5\text{ cm}", "5"),
        (r"\sqrt3", r"\sqrt{3}"),
        (r"2\sqrt2+\sqrt{5}", r"2\sqrt{2}+\sqrt5"),
        (r"1,\!000", "1,000"),
        ("a\nb", "ab"),
        ("{.5}x", "{0.5}x"),
        ("1 + .5", "1+0.5"),
        (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}1\2\end{pmatrix}"),
    ],
)
def test_forms_of_one_answer_are_equivalent(a: str, b: str) -> None:
    assert hendrycks_is_equiv(a, b)
    assert hendrycks_is_equiv(b, a)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("1,000", "1000"),
        ("a+b=5", "5"),
        ("x=y=5", "5"),
        ("1.0/2", r"\frac{1.0}{2}"),
        ("01/2", r"\frac{01}{2}"),
        (r"5\text{cm}", "5"),
        (r"1\text{ a}2\text{ b}", "1"),
        (r"\sqrt", r"\sqrt{}"),
        (r"\frac", "frac"),
        (r"\frac1", r"\frac{1}"),
        ("2", "3"),
    ],
)
def test_what_the_paper_keeps_apart_stays_apart(a: str, b: str) -> None:
    assert not hendrycks_is_equiv(a, b)


def test_a_string_that_cannot_be_normalized_equals_itself() -> None:
    for text in (r"1\text{ a}2\text{ b}", r"\sqrt", r"\frac", ""):
        assert hendrycks_is_equiv(text, text)


@given(st.text(alphabet="\\{}fracsqt 0123456789./=%$^-x\n", max_size=30))
def test_every_string_is_equivalent_to_itself(text: str) -> None:
    assert hendrycks_is_equiv(text, text)
    assert not hendrycks_is_equiv(text, None)
    assert not hendrycks_is_equiv(None, text)


def test_nothing_matches_an_empty_reference() -> None:
    assert not answers_match("", "", "none")
    assert not answers_match("", " ", "hendrycks")
    assert not answers_match(r"\text{ cm}", r"\text{ dogs}", "hendrycks")
    assert not answers_match(r"\text{ cm}", r"\%", "hendrycks")


def test_exact_match_forgives_only_outer_space() -> None:
    assert answers_match(" 5 ", "5", "none")
    assert not answers_match("5.0", "5", "none")
    assert not answers_match(r"\dfrac{1}{2}", r"\frac{1}{2}", "none")
    assert answers_match(r"\dfrac{1}{2}", r"\frac{1}{2}", "hendrycks")
