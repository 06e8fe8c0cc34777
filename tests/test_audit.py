"""The verifier audit: its cases deserve the verdicts they are given, and its rates, intervals and
pages say what the reward did.
"""

import json
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from retrain.audit.cases import EQUIVALENT, HOSTILE, NEAR_MISSES, NOTHING, Case, Kind, cases_of
from retrain.audit.run import Audit, CaseResult, Rate, audit_reward
from retrain.audit.text import to_text
from retrain.cli.main import main
from retrain.config import config_from_mapping
from retrain.errors import ConfigurationError
from retrain.rewards import extract_boxed
from retrain.types import Example, Outcome, Score

GOLD = {
    "100": "5",
    "101": "-1250",
    "102": r"\frac{3}{8}",
    "103": r"-\frac 12",
    "104": "0.25",
    "105": r"\left[0,\frac{1}{2}\right)",
    "106": "4,6,14",
    "107": r"\{1,2,3\}",
    "108": r"45\%",
    "109": r"\$18.90",
    "110": r"135^\circ",
    "111": r"575\text{ students}",
    "112": r"\text{Evelyn}",
    "113": "14,\\!400",
    "114": "x^2+2x",
    "115": r"2\sqrt{3}",
    "116": "6+9i",
}


def cases(reference: str, *, hostile: bool = True) -> list[Case]:
    return list(cases_of(Example("?", reference, example_id="1"), hostile=hostile))


def forms(reference: str) -> dict[str, str]:
    return {case.name: case.answer for case in cases(reference)}


def test_a_reward_that_an_environment_leaves_unused_is_not_audited() -> None:
    guess = {"environment": {"provider": "reasoning_gym", "id": "chain_sum"}}
    with pytest.raises(ConfigurationError, match=r"so .reward. and .data., .* are unused here"):
        audit_reward(config_from_mapping(guess), 2, print)


# -- cases -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reference", "expected"),
    [
        (
            r"\frac{3}{8}",
            {
                "a decimal for a fraction": "0.375",
                "a/b for a fraction": "3/8",
                "a fraction not in lowest terms": r"\frac{6}{16}",
            },
        ),
        (
            r"\frac{1}{3}",
            {"a fraction upside down": r"\frac{3}{1}", r"\frac ab without braces": r"\frac13"},
        ),
        (
            "-1250",
            {
                "1,000 for 1000": "-1,250",
                "another sign": "1250",
                "one more": "-1249",
                "an integer with .0": "-1250.0",
            },
        ),
        ("14,\\!400", {"1000 for 1,000": "14400"}),
        ("4,6,14", {"a list in another order": "14, 6, 4", "a list without its last item": "4, 6"}),
        (
            r"[0,\infty)",
            {
                "an inequality for an interval": r"0 \le x",
                "a round for a square bracket": r"(0,\infty)",
            },
        ),
        (
            r"(2,5]",
            {"an inequality for an interval": r"2 < x \le 5", "x in an interval": r"x \in (2,5]"},
        ),
        (r"45\%", {"without the percent sign": "45", "a percent off by one": r"46\%"}),
        (
            r"575\text{ students}",
            {"without its unit": "575", "the right unit, another number": r"576\text{ students}"},
        ),
        (r"135^\circ", {"without the degree sign": "135", "degrees off by one": r"136^\circ"}),
        ("6+9i", {"a sum in another order": "9i+6", "minus for plus": "6-9i"}),
        (
            "0.25",
            {
                "a decimal without its leading zero": ".25",
                "a fraction for a decimal": r"\frac{1}{4}",
            },
        ),
    ],
)
def test_an_answer_is_rewritten_and_changed_as_a_person_would(
    reference: str, expected: dict[str, str]
) -> None:
    assert forms(reference).items() >= expected.items()


@pytest.mark.parametrize(
    ("reference", "absent"),
    [
        ("(1,2)", "x in an interval"),
        (r"\frac{x+2}{7}", "a sum in another order"),
        ("0", "another sign"),
    ],
)
def test_what_does_not_apply_is_left_out(reference: str, absent: str) -> None:
    assert absent not in forms(reference)


def test_every_form_of_the_tables_applies_to_some_answer() -> None:
    seen = {
        case.name
        for reference in [*GOLD.values(), "17", "12, 10", "[1,2]"]
        for case in cases(reference)
    }
    assert {*EQUIVALENT, *NEAR_MISSES, *NOTHING, *HOSTILE} <= seen


def test_a_rewriting_has_the_value_of_the_gold_answer_and_a_near_miss_another() -> None:
    """Where both are plain numbers, by exact arithmetic."""
    compared = 0
    for reference in ("5", "-1250", "0.25", "7", "12"):
        for case in cases(reference, hostile=False):
            text = (
                (case.answer or "x")
                .replace("$", "")
                .replace(",", "")
                .replace("x = ", "")
                .rstrip(".")
            )
            try:
                value = Fraction(text)
            except ValueError:
                continue
            assert (value == Fraction(reference)) is case.right, case
            compared += 1
    assert compared > 50


def test_completions_give_the_answer_of_their_case() -> None:
    for reference in GOLD.values():
        for case in cases(reference, hostile=False):
            if case.kind is Kind.NOTHING:
                assert not extract_boxed(case.response)
            else:
                assert extract_boxed(case.response) == case.answer.strip(), case.name


# -- rates -----------------------------------------------------------------------------------------


def judged(
    example: str, name: str, outcome: Outcome, kind: Kind = Kind.GOLD, seconds: float = 0.001
) -> CaseResult:
    case = Case(Example("?", "5", example_id=example), kind, name, "5", r"\boxed{5}")
    return CaseResult(
        case, Score(outcome, None if outcome is Outcome.COULD_NOT_JUDGE else 0.0, "why"), seconds
    )


RIGHT, WRONG, UNKNOWN = Outcome.RIGHT, Outcome.WRONG, Outcome.COULD_NOT_JUDGE


def test_a_rate_counts_errors_of_either_side_and_leaves_out_what_could_not_be_judged() -> None:
    rate = Rate(
        "",
        [
            judged("1", "a", RIGHT),
            judged("1", "b", WRONG),
            judged("2", "a", UNKNOWN),
            judged("2", "b", WRONG),
        ],
    )
    assert (len(rate.cases), rate.errors, rate.could_not_judge, rate.error_rate) == (4, 2, 1, 2 / 3)
    wrong = Rate(
        "", [judged("1", "a", RIGHT, Kind.NEAR_MISS), judged("2", "a", WRONG, Kind.HOSTILE)]
    )
    assert wrong.errors == 1
    nothing = Rate("", [judged("1", "a", UNKNOWN)])
    assert (nothing.error_rate, nothing.interval) == (None, (0.0, 1.0))


def test_the_interval_is_wilsons_and_wider_where_cases_of_an_example_are_alike() -> None:
    alone = Rate("", [judged(str(n), "a", WRONG if n < 10 else RIGHT) for n in range(40)])
    assert alone.interval == pytest.approx((0.1419, 0.4019), abs=0.003)  # Wilson's for 10 of 40
    alike = Rate("", [judged(str(n // 4), "a", WRONG if n < 40 else RIGHT) for n in range(160)])
    assert alike.error_rate == alone.error_rate and alike.interval == pytest.approx(
        alone.interval, abs=1e-9
    )
    none = Rate("", [judged(str(n), "a", RIGHT) for n in range(40)])
    assert none.interval == pytest.approx((0.0, 0.0876), abs=1e-3)


def test_the_worst_come_one_of_each_form_and_gold_answers_first() -> None:
    items = (
        [judged("1", "rewritten", WRONG, Kind.REWRITING)] * 5
        + [judged("2", "gold", WRONG)]
        + [judged("3", "near", RIGHT, Kind.NEAR_MISS)]
    )
    audit = Audit("r", "s", 3, [*items, judged("4", "slow", RIGHT, seconds=9.0)], 1.0)
    assert [item.case.name for item in audit.worst(5)] == ["gold", "rewritten", "near"]
    assert [item.case.name for item in audit.slowest(1)] == ["slow"]
    assert [rate.name for rate in audit.forms] == ["gold", "rewritten", "slow", "near"]


# -- a whole audit ---------------------------------------------------------------------------------


@pytest.fixture
def data(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "answers.jsonl"
    path.write_text(
        "".join(
            json.dumps({"prompt": f"Question {n}?", "answer": answer}) + "\n"
            for n, answer in GOLD.items()
        )
    )
    return path  # type: ignore[return-value]


def audit(data: Path, **reward: Any) -> Audit:
    return audit_reward(
        config_from_mapping({"data": {"source": "jsonl", "path": str(data)}, "reward": reward}),
        100,
        lambda _: None,
    )


def test_what_is_known_of_match_and_math_comes_out(data: Path) -> None:
    exact, lenient, math = (
        audit(data, type="match"),
        audit(data, type="match", normalize="hendrycks"),
        audit(data, type="math", workers=2),
    )
    for each in (exact, lenient, math):
        rates = {rate.name: rate for rate in each.kinds}
        assert (
            each.examples == len(GOLD)
            and rates["gold answer"].errors == 0
            and rates["near miss"].errors == 0
        )
        assert rates["empty or truncated"].errors == 0 and not any(
            item.could_not_judge for item in each.judged
        )
    rates = [each.false_negatives.error_rate or 0.0 for each in (exact, lenient, math)]
    assert rates[0] > rates[1] + 0.1 > rates[2] + 0.2
    assert {item.case.name for item in lenient.judged if not item.case.right and item.is_error} == {
        "two answers"
    }


def test_a_broken_reward_shows(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lax.py").write_text(
        "def score(response, reference):\n    return None if not response.strip() else"
        " reference[:1] in response\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    result = audit(data, type="custom", custom_module="lax", workers=1)
    assert (result.false_positives.error_rate or 0) > 0.3
    assert sum(item.could_not_judge for item in result.judged) == 2 * len(
        GOLD
    )  # empty and white space
    assert "near miss" in to_text(result) and "called right" in to_text(result)


def test_the_command_prints_text_json_and_a_page(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, page = tmp_path / "a.toml", tmp_path / "pages" / "audit.html"
    file.write_text(f'[data]\nsource = "jsonl"\npath = "{data}"\n')
    assert (
        main(
            ["audit", str(file), "--examples", "5", "--reward-type", "match", "--output", str(page)]
        )
        == 0
    )
    said = capsys.readouterr().out
    assert (
        said.startswith("Audit of match on 5 examples of jsonl")
        and "right answers called wrong" in said
    )
    assert main(["audit", str(file), "--examples", "5", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (
        result["examples"] == 5
        and result["cases"]
        == result["false_negatives"]["cases"] + result["false_positives"]["cases"]
    )
    html = page.read_text()
    assert (
        "Audit of match" in html
        and "<script" not in html
        and "http" not in html.partition("</head>")[2]
    )


def test_wrong_usage_is_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", str(tmp_path / "absent.toml")]) == 2
    assert "is not a file; name a configuration" in capsys.readouterr().err
