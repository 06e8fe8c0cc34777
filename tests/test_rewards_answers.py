"""Answers with a known verdict, in the forms that people and models write: what `math` refuses and
what it pays, by family; and what `match` never pays.
"""

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from retrain.audit.run import audit_reward
from retrain.config import TrainConfig, config_from_mapping
from retrain.errors import ConfigurationError
from retrain.rewards import score_answers
from retrain.rewards.equality import decide_by_strings
from retrain.rewards.normalize import normalize
from retrain.types import Example

DATA = Path(__file__).parent / "data"
Rows = list[dict[str, Any]]


def rows(text: str) -> Rows:
    return [json.loads(line) for line in text.splitlines()]


UNSEEN = rows((DATA / "unseen_answers.jsonl").read_text(encoding="utf-8"))
SEEN = rows((DATA / "seen_answers.jsonl").read_text(encoding="utf-8"))
AUDIT = rows(files("retrain.audit").joinpath("answers.jsonl").read_text(encoding="utf-8"))


def rates(reward: dict[str, Any], pairs: Rows) -> tuple[float, float]:
    """The rate of right answers called wrong, and of wrong answers called right."""
    rewards = score_answers(reward, [(row["response"], row["reference"]) for row in pairs])
    assert None not in rewards
    errors = {True: [], False: []}  # type: dict[bool, list[bool]]
    for row, given in zip(pairs, rewards, strict=True):
        errors[row["right"]].append((given == 1.0) is not row["right"])
    return tuple(sum(errors[right]) / len(errors[right]) for right in (True, False))  # type: ignore[return-value]


def test_math_judges_families_that_no_rule_was_made_from() -> None:
    refused, paid = rates({"type": "math", "workers": 1, "deadline_s": 60.0}, UNSEEN + AUDIT)
    assert refused < 0.06
    assert paid < 0.02


@pytest.mark.slow
def test_math_judges_the_answers_that_its_rules_were_made_from() -> None:
    refused, paid = rates({"type": "math", "workers": 1, "deadline_s": 60.0}, SEEN)
    assert refused < 0.08
    assert paid == 0.0


def test_match_pays_nothing_wrong() -> None:
    assert rates({"type": "match"}, SEEN + UNSEEN + AUDIT)[1] == 0.0


TWINS = [
    # A letter, a base, words: what is beside the number counts.
    ("4t", "4", False),
    (r"4\text{ t}", "4", True),
    ("8_9", "8", False),
    (r"52_{\text{eight}}", "52_8", True),
    ("5 cm", "5", True),
    (r"5\text{ cm}", r"5\text{ m}", False),
    (r"5\text{ or more}", "5", False),
    (r"5\text{ is too small}", "5", False),
    (r"\text{The answer is } 5", "5", True),
    (r"\text{It is not } 5", "5", False),
    ("The answer is 5", "5", True),
    ("The answer is not 5", "5", False),
    ("x is 5", "5", True),
    ("x is not 5", "5", False),
    ("5 of 6", "5", False),
    ("5 of the apples", "5", True),
    ("5 dollars per day", "5", True),
    (r"\text{wrong}: 5", "5", False),
    (r"\text{cannot be}: 5", "5", False),
    (r"\text{It isn't equal to}: 5", "5", False),
    (r"\text{anything but}: 5", "5", False),
    (r"\text{least common multiple}: 5", "5", True),
    (r"\text{The answer is not}: 5", "5", False),
    (r"\text{boys with no pets}: 5", "5", True),
    (r"\text{no way}: 5", "5", False),
    (r"5\text{ six}", "5", False),
    ("5 (six)", "5", False),
    ("5 (five)", "5", True),
    (r"21\text{ apples (twenty-one)}", "21", True),
    (r"5\text{ apples for two people}", "5", True),
    ("5..", "5", False),
    ("5/", "5", False),
    (r"5/\text{hour}", "5", True),
    # An equation answers a plain value by its left side.
    ("0 = 13", "13", False),
    ("5x+1 = 13", "13", False),
    ("f(3) = 13", "13", True),
    ("x/y=13", "13", True),
    (r"\frac{dy}{dx}=2x", "2x", True),
    (r"\frac{dx}{dy}=2x", r"\frac{dy}{dx}=2x", False),
    (r"\frac xy=13", r"\frac yx=13", False),
    (r"\frac{x^2}{y}=13", "13", False),
    ("1+1=3", "3", False),
    ("6+7=13", "13", True),
    ("x+y=x+y", "x-y=x-y", False),
    ("x=x", "x", False),
    ("x=2x/2", "x", False),
    ("y=x", "x", True),
    ("x+y=y+x", "y+x=x+y", True),
    # Numbers are exact, or agree relatively.
    (r"(\frac12)^{100}", r"(\frac12)^{101}", False),
    (r"1.6\times10^{-19}", r"9.1\times10^{-31}", False),
    ("1e-07", "0.0000001", True),
    ("0.33333333333333", r"\frac13", False),
    # Structures.
    ("(3,2,1)", r"\{1,2,3\}", False),
    ("1,2,2", "1,1,2", False),
    (r"\{5,6)", "5", False),
    ("3 to 4", "3:4", True),
    (r"\text{no solution}", r"\emptyset", True),
    (r"\text{no solution}", "0", False),
    ("10:30", "5:15", False),
    ("1:2", "0.5", False),
    ("x<3", r"(-\infty,3)", True),
    (r"x\le3", r"(-\infty,3)", False),
    (r"|x|\ge3", r"(-\infty,-3]\cup[3,\infty)", True),
    (r"|x|>\frac32", r"x<-\frac32\text{ or }x>\frac32", True),
    (r"|x|\ge3", r"[3,\infty)", False),
    (r"|x|\le a", "[-a,a]", True),
    ("|x|<3", "[-3,3]", False),
    ("3>|x|", "(-3,3)", True),
    ("2|x|<6", "(-6,6)", False),
    ("|z|<1", "(-1,1)", False),
    ("3", r"x \ge 3", False),
    (r"\begin{pmatrix}0&1\\1&0\end{pmatrix}", r"\begin{pmatrix}1&0\\0&1\end{pmatrix}", False),
    (r"{\bf\begin{pmatrix}1\\2\end{pmatrix}}", r"\begin{pmatrix}1\\2\end{pmatrix}", True),
    (
        r"\begin{pmatrix}x\\y\end{pmatrix}=\begin{pmatrix}1\\2\end{pmatrix}",
        r"\begin{pmatrix}1\\2\end{pmatrix}",
        True,
    ),
    (r"{\{-1\} \cup [0,7)}", r"\{-1\}\cup[0,7)", True),
    (r"n\equiv 1\ (\text{mod } 6)", r"n \equiv 1 \pmod 6", True),
    (r"n\equiv 1 \pmod 4", r"n \equiv 1 \pmod 6", False),
    # Forms, each beside its wrong twin.
    ("¾", r"\frac34", True),
    ("¾", "3", False),
    ("x²", "x^2", True),
    ("x²", "x2", False),
    ("4{2}", "42", False),
    (r"{\bf 13}", "13", True),
    (r"\textbf{(A) }13", "13", True),
    (r"\textbf{(A) }13", "B", False),
    ("100, 200", "100200", False),
    (r"100\text{ }200", "100200", False),
    ("1,000", "1000", True),
    # A plus is silent only where a value begins.
    ("|-5|+1", "6", True),
    ("||3|-5|", "2", True),
    ("3|x-1|", "|x-1|+3", False),
    ("x^*1", "x^*+1", False),
    # Numbers of a date or a range are no arithmetic.
    ("2018", "2024-01-05", False),
    ("2024–1–5", "2024-01-05", True),
    ("20-30", "10-20", False),
    ("1/10120", "01/05/2024", False),
    (r"10^\circ-20^\circ", "10-20", True),
    ("2=7-5", "2", True),
    (r"\frac{8}{63}\approx0.127", r"\frac{8}{63}", True),
    (r"x=\sqrt{2}\approx1.41", r"\sqrt2", True),
    (r"\frac{8}{63}\approx0.127", "0.127", False),
    # The decimals behind an exact number round it.
    (r"\frac12\approx0.9", r"\frac12", False),
    (r"\frac23\approx0.66", r"\frac23", True),
    (r"\frac13\approx1", r"\frac13", False),
    (r"\frac12\approx0.5\approx0.9", r"\frac12", False),
    (r"\frac12\simeq0.9\simeq0.5", r"\frac12", False),
    (r"x^2\simeq4", "x^2", False),
    ("x", r"x\simeq3.14", False),
    (r"x=\frac{2}{21}\approx1.23", r"\frac{2}{21}", False),
    (r"-\frac18≈-0.13", r"-\frac18", True),
    (r"\pi\approx5.5", r"\pi", False),
    (r"100\pi\approx314\text{ cm}^2", r"100\pi\text{ cm}^2", True),
    (r"100\pi\approx316\text{ cm}^2", r"100\pi\text{ cm}^2", False),
    (r"\log_27\approx2.807", r"\log_27", True),
    (r"\log_27\approx2.809", r"\log_27", False),
    (r"x\approx1.41", "1.41", True),
    (r"5\approx6.0", "5", False),
    ("x=2=7-5", "2", True),
    ("x=7-5=2", "2", True),
    (r"(20\text{ cm}-30\text{ cm})", "20-30", True),
    # A box inside another one is a part of it.
    (r"6 or \boxed{5}", "5", False),
    (r"-\boxed{5}", "-5", True),
    # A percent sign divides a share, and may be the unit of other numbers.
    (r"0.5\%", r"\frac12", False),
    (r"50\%", "0.5", True),
    # A word may multiply.
    ("24 zeros", "24", True),
    (r"5\text{ per mille}", "5", False),
    (r"5\text{ nano}", "5", False),
    # Brackets, units, powers of ten, roots, and what shows nothing.
    ("e^(2x)", "e^{2x}", True),
    ("3(4)", "12", True),
    (r"3\left(\frac12\right)", "3.5", False),
    (r"\binom42\binom31", "9", False),
    ("3(4)(5)", "60", True),
    ("3[4]", "7", False),
    (r"(2)\frac12", "2.5", False),
    (r"2\cdot(3)(4)", "14", False),
    (r"\binom42\binom31", "18", True),
    ("C(10,3)", "120", True),
    ("C(5,2)C(3,1)", "30", True),
    (r"2C(4,2)\frac{1}{3}", "4", True),
    ("C(3,2)", "C(3,1)", False),  # points
    ("A(1,2),B(3,4),C(3,2)", "A(1,2),B(3,4),C(3,1)", False),
    (r"^{10}C_3", "120", True),
    (r"x^{10}C_3", "120x", False),
    (r"3\binom42", "9", False),
    (r"3\binom42", "18", True),
    (r"\frac93\frac75", "4.4", False),
    (r"\frac63(4)", "8", True),
    ("(2)(3)", "6", True),
    ("1+(2)(3)", "7", True),
    ("6(6)(x+5)", "36x+180", True),
    ("6(6)(x+5)", "12x+60", False),
    (r"3\cdot4(5)", "27", False),
    ("5|-3|+|-2|", "17", True),
    (r"2\frac23\pi", r"\frac{8\pi}3", True),
    ("5_2+1", "6", False),
    ("{-221_3}", "-221_3", True),
    ("f^{-1}(x)", "1/f(x)", False),
    (r"\vec a\times\vec b", r"\vec b\times\vec a", False),
    ("2^-1", "0.5", True),
    ("2^-1", "2-1", False),
    (r"2\cdot\mathbf x", "2x", True),
    (r"\cos7.5", r"\cos7.5^\circ", False),
    (r"\tan22.5^\circ", r"\sqrt2-1", True),
    (r"\sin^230^\circ", r"\frac14", True),
    (r"\cos(90^\circ-x)", r"\sin x", True),
    (r"\sin(x+30^\circ)", r"\sin(x+30)", False),
    (r"\sin(30^\circ+45^\circ)", r"\sin75^\circ", True),
    (r"\sin(\frac x2+30^\circ)", r"\sin(30^\circ+\frac x2)", True),
    (r"\cos\theta^\circ", r"\cos\theta", False),
    (r"\lg100", "2", True),
    (r"\lg8", "3", False),
    (r"5^\circ30'", "150", False),
    (r"\ln2\cdot3", r"\ln6", False),
    (r"\ln2\cdot\ln3", r"\ln3\ln2", True),
    (r"\sin(30^\circ)\cdot2", r"\frac{\sqrt3}2", False),
    ("6.5", "2.5(4)", False),
    ("0.6", "0.1(6)", False),
    ("0.36", "1.2.3", False),
    ("1,2,...", "1,2", False),
    ("(12)(26)", "(13)(24)", False),
    ("3, 10", "(1) 3, (2) 5", False),
    ("30", "(1) 3 (2) 5", False),
    (r"\text{ABC}", "ABC", True),
    ("60 km/h", "60", True),
    ("9.8 m/s^2", r"9.8\text{ m/s}", False),
    ("9.8 m/s^2", "9.8", True),
    ("5m/s", "5 m/s", True),
    (r"5\text{ m/s}", "5 m/s", True),
    ("5m/s", r"\frac{5m}{s}", True),
    ("5 m/s", r"\frac{5m}{s}", True),
    ("5 m/s", r"2\frac{5m}{s}", False),
    (r"60\frac{\text{km}}{\text{h}}", "60", True),
    ("5", r"\frac{5m}{s}", False),
    (r"\frac{5\text{ apples}}{x}", "5", False),
    ("25 pct", r"25\%", True),
    ("20 Pa", "20", True),
    ("5 kN", "5", True),
    ("12 gm", r"12\text{ g}", True),
    ("10^2.5", "10^{2.5}", True),
    ("1.2x10^+5", "120000", True),
    ("20J", "20", False),
    ("3 x 10^5", r"3\times10^5", True),
    ("3*10^-5", r"3\times10^{-5}", True),
    (r"2\sqrt[3]{-27}", "-6", True),
    ("sqrt12", r"2\sqrt3", True),
    (r"\sqrt12", r"2\sqrt3", False),
    ("2x/2", "x", True),
    (r"x<5\text{ and }x\ge3", r"3\le x<5", True),
    (r"x<-1\text{ and }x>1", r"(-\infty,-1)\cup(1,\infty)", False),
    (r"x<1\text{ and }x>3", "(3,1)", False),
    ("3<x<1", "(3,1)", False),
    (r"x<1, x>3\text{ and }", "(3,1)", False),
    ("3!!", "720", False),
    # A capital is another letter.
    ("r+R", "R+r", True),
    (r"\pi(R-r)(R+r)", r"\pi(R^2-r^2)", True),
    ("R-r", "0", False),
    ("2r", "2R", False),
    (r"\sigma-\Sigma", r"\Sigma-\sigma", False),
    (r"x_{R}+x_r", "x_R+x_r", True),
    (r"\frac\Phi\phi", r"\frac{\Phi}{\phi}", True),
    (r"\gamma-x", r"-x+\gamma", True),
    ("(1+I)^2", "2I", False),
]
"""Answer, reference, and the verdict: each rule with a wrong answer that looks alike."""


def test_each_rule_beside_its_wrong_twin() -> None:
    pairs = [(rf"\boxed{{{answer}}}", reference) for answer, reference, _ in TWINS]
    rewards = score_answers({"type": "math", "workers": 1, "deadline_s": 60.0}, pairs)
    wrong = [twin for twin, reward in zip(TWINS, rewards, strict=True) if reward != float(twin[2])]
    assert not wrong


@pytest.mark.parametrize(
    ("answer", "normalized"),
    [
        (r"\frac\pi2", r"\frac{\pi}{2}"),
        (r"\dfrac{12}{5,\!525}", r"\frac{12}{5525}"),
        (r"\sqrt\pi", r"\sqrt{\pi}"),
        (r"\textcolor{red}{13}", "13"),
        ("**13**", "13"),
        ("1.5e3", r"1.5\times10^{3}"),
        (r"5 \text{ million}", r"5\times10^{6}"),
        ("2¾", r"2\frac{3}{4}"),
        (r"0.\overline{36}", r"\frac{4}{11}"),
        (r"\begin{aligned} x &= 5 \end{aligned}", "x=5"),
        ("(1,234)", "(1,234)"),
        ("{1+2}/{3}", "(1+2)/3"),
    ],
)
def test_one_form_for_all_ways_to_write_it(answer: str, normalized: str) -> None:
    assert normalize(answer) == normalized


@pytest.mark.parametrize(
    "text", [r"\{-::\{-", "(((:", "", ",", r"\pm", r"\frac", "]", r"\begin{cases}"]
)
def test_a_broken_answer_is_judged(text: str) -> None:
    assert not decide_by_strings(text, "4")
    assert decide_by_strings(text, text) is bool(text)


def test_the_door_takes_a_table_a_configuration_and_examples() -> None:
    pairs = [(r"\boxed{5}", "5"), (r"\boxed{6}", "5"), (r"\boxed{5}", "")]
    assert score_answers({"type": "match"}, pairs) == [1.0, 0.0, 0.0]
    config = TrainConfig.model_validate({"reward": {"type": "match"}})
    assert score_answers(config, [(r"\boxed{5}", Example("How many?", "5"))]) == [1.0]


@pytest.mark.parametrize(
    ("table", "said"), [({"type": "overlong"}, "negative"), ({"typ": 1}, "typ")]
)
def test_the_door_refuses_a_wrong_table(table: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        score_answers(table, [])


def test_the_door_and_an_audit_refuse_what_judges_whole_groups() -> None:
    refused = pytest.raises(ConfigurationError, match="judges the completions of a prompt together")
    with refused:
        score_answers({"type": "majority"}, [(r"\boxed{5}", "5")])
    config = config_from_mapping({"data": {"source": "lab"}, "reward": {"type": "majority"}})
    with refused:
        audit_reward(config, 1, lambda _: None)
