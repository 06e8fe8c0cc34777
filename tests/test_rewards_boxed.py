r"""The answer of a completion is its last box, or there is none."""

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrain.rewards import extract_boxed
from retrain.types import THOUGHT_TAGS


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{42}.", "42"),
        (r"x \boxed{\frac{1}{2}} y", r"\frac{1}{2}"),
        (r"\boxed{a} then \boxed{b}", "b"),
        (r"\fbox{7}", "7"),
        (r"\boxed{1} or \fbox{2}", "2"),
        (r"\boxed {5}", "5"),
        ("\\boxed\n{5}", "5"),
        (r"\boxed{ 5 }", "5"),
        (r"\boxed{}", ""),
        (r"$\boxed 5$ is it", "5"),
        ("\\boxed 5\nand more", "5"),
        (r"$\boxed \frac12$", r"\frac12"),
        (r"\boxed{\boxed{3}}", "3"),
        (r"\boxed{\fbox{\boxed{3}}}", "3"),
        (r"\boxed{1} so \boxed{6 or \boxed{5}}", "6 or 5"),
        (r"\boxed{\boxed{1},\boxed{5}}", "1,5"),
        (r"\boxed{6 or \boxed{5}", "5"),
        ("\\boxed{\n\\boxed{3} }", "3"),
        (r"\boxed 5, that is \boxed{6}", "6"),
        (r"\boxed{\left\{x\right.}", r"\left\{x\right."),
        (r"\boxed{\}}", r"\}"),
        (r"\boxed{\begin{matrix}1\\{2}\end{matrix}}", r"\begin{matrix}1\\{2}\end{matrix}"),
        (r"\boxed{1} and the word \boxedly", "1"),
        (r"\boxed{1} put it in \boxed", "1"),
        (r"\boxed{1} put it in \boxed{} or \boxed{ }", "1"),
    ],
)
def test_the_last_box_is_the_answer(text: str, answer: str) -> None:
    assert extract_boxed(text) == answer


@pytest.mark.parametrize(
    "text",
    [
        "",
        "42",
        r"\boxed",
        r"\boxed{42",
        r"\boxed{1} \boxed{\frac{1}{2}",
        r"\boxed{1\}",
        r"\boxed{4" + "\\",
    ],
)
def test_no_box_and_an_unfinished_box_are_no_answer(text: str) -> None:
    assert extract_boxed(text) is None


_CONTENT = st.recursive(
    st.text(st.characters(exclude_characters="{}\\", exclude_categories=["Cs"]), max_size=5)
    | st.sampled_from([r"\{", r"\}", r"\\"]),
    lambda inner: st.builds(lambda a, b: f"{{{a}}}{b}", inner, inner),
    max_leaves=8,
)


@given(before=st.text(max_size=20).filter(lambda text: "</think>" not in text), content=_CONTENT)
def test_a_balanced_box_gives_back_its_content_and_every_cut_of_it_gives_nothing(
    before: str, content: str
) -> None:
    before = before.replace("\\", "/")
    box = f"\\boxed{{{content}}}"
    assert extract_boxed(before + box) == content.strip()
    for cut in range(len("\\boxed{"), len(box)):
        assert extract_boxed(before + box[:cut]) is None


def test_a_box_in_the_scratchpad_counts_only_when_asked() -> None:
    text = r"<think>maybe \boxed{1}</think> hm </think> I do not know"
    assert extract_boxed(text) is None
    assert extract_boxed(text, after_think=False) == "1"
    assert extract_boxed(text + r" \boxed{2}") == "2"
    assert extract_boxed(r"<think>cut short \boxed{1}") is None
    assert extract_boxed(r"<think>cut short \boxed{1}", after_think=False) == "1"


def test_the_ends_of_thoughts_of_known_models_are_known() -> None:
    ends = "</think> [/THINK] </thinking> </thought> </seed:think> <|channel|>final<|message|>"
    assert set(ends.split()) <= {closing for _, closing in THOUGHT_TAGS}


@pytest.mark.parametrize(("opening", "closing"), THOUGHT_TAGS)
def test_an_answer_stands_behind_the_last_thought_that_ended(opening: str, closing: str) -> None:
    thought = rf"{opening} maybe \boxed{{1}}"
    ended = f"{thought} {closing} so"
    assert extract_boxed(thought) is extract_boxed(ended) is None
    assert extract_boxed(rf"{ended} \boxed{{2}}") == "2"
    assert extract_boxed(rf"{ended} \boxed{{2}}{thought}") is None
    assert extract_boxed(rf"<think> {ended} \boxed{{2}}") == (
        "2" if closing == "</think>" else None
    )


def test_importing_rewards_imports_no_symbolic_mathematics() -> None:
    code = (
        "import sys, retrain.rewards; sys.exit(bool({'sympy', 'math_verify', 'torch'} &"
        " set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
