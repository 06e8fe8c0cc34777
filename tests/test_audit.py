"""The audit of a reward: families of answers and the user's own reference answers, with the rates
of its errors.
"""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from retrain.audit.run import Audit, audit_reward, to_text
from retrain.cli.main import main
from retrain.config import config_from_mapping
from retrain.errors import ConfigurationError

GOLD = ["5", "-1250", r"\frac{3}{8}", "0.25", r"\text{Evelyn}", "5"]


@pytest.fixture
def data(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "answers.jsonl"
    lines = [json.dumps({"prompt": f"Question {n}?", "answer": a}) for n, a in enumerate(GOLD)]
    path.write_text("\n".join(lines) + "\n")
    return path  # type: ignore[return-value]


def audit(data: Path, **reward: Any) -> Audit:
    config = {"data": {"source": "jsonl", "path": str(data)}, "reward": reward}
    return audit_reward(config_from_mapping(config), 100, lambda _: None)


def rates(result: Audit) -> dict[str, dict[str, Any]]:
    return {rate["kind"]: rate for rate in result.rates()}


def test_own_answers_are_right_as_they_stand_and_wrong_for_another_problem(data: Path) -> None:
    own = rates(audit(data, type="match"))["your reference answers"]
    assert (own["right_called_wrong"]["judged"], own["right_called_wrong"]["errors"]) == (6, 0)
    # Another problem's answer where it differs (the last is the first), and a box that is cut off.
    assert (own["wrong_called_right"]["judged"], own["wrong_called_right"]["errors"]) == (5 + 6, 0)


def test_every_family_has_right_and_wrong_answers(data: Path) -> None:
    verdicts = audit(data, type="match").verdicts
    sides = Counter((verdict.case.kind, verdict.case.right) for verdict in verdicts)
    for kind in {verdict.case.kind for verdict in verdicts} - {"hostile"}:
        assert sides[kind, True] >= 5 and sides[kind, False] >= 5, kind


def test_match_refuses_most_forms_and_pays_nothing_wrong(data: Path) -> None:
    found = rates(audit(data, type="match"))["all families"]
    assert found["right_called_wrong"]["rate"] > 0.9
    assert found["wrong_called_right"]["errors"] == 0
    low, high = found["right_called_wrong"]["interval"]
    assert low < found["right_called_wrong"]["rate"] < high


def own_reward(folder: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> dict[str, Any]:
    (folder / "lax.py").write_text(f"def score(response, reference):\n    {body}\n")
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.chdir(folder)
    return {"type": "custom", "custom_module": "lax", "workers": 1}


def test_a_reward_that_errs_shows(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = "return None if r'\\boxed{}' in response else reference[:1] in response"
    result = audit(data, **own_reward(tmp_path, monkeypatch, body))
    total = rates(result)["all families"]
    assert total["wrong_called_right"]["rate"] > 0.3
    assert result.could_not_judge == total["could_not_judge"] > 0
    text = to_text(result)
    assert "not judged" in text and "false positives" in text and r"answers in \boxed{}" in text
    assert len(result.errors()) > 50
    assert text.count(" called ") < 12  # a few of them, spread over the families


def test_a_reward_that_judges_nothing_ends_with_exit_code_1(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reward = own_reward(tmp_path, monkeypatch, "raise ValueError('no such column')")
    file = tmp_path / "a.toml"
    file.write_text(
        f'[data]\nsource = "jsonl"\npath = "{data}"\n[reward]\ntype = "custom"\n'
        f'custom_module = "{reward["custom_module"]}"\nworkers = 1\n'
    )
    assert main(["audit", str(file)]) == 1
    assert (
        "could judge none of the completions (lax.score failed with ValueError: no such column)"
        in (capsys.readouterr().err)
    )


def test_the_command_prints_text_and_json(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "a.toml"
    file.write_text(f'[data]\nsource = "jsonl"\npath = "{data}"\n')
    assert main(["audit", str(file), "--examples", "5", "--reward-type", "match"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("Audit of match: ") and "with 5 examples of jsonl" in said
    assert "false negatives (right called wrong), all families: " in said
    assert main(["audit", str(file), "--examples", "5", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["form"] == r"\boxed{}" and result["rates"][-1]["kind"] == "all families"
    assert {"kind", "right", "reference", "response", "reward"} == set(result["errors"][0])


def test_a_reward_that_an_environment_leaves_unused_is_not_audited() -> None:
    guess = {"environment": {"provider": "reasoning_gym", "id": "chain_sum"}}
    with pytest.raises(ConfigurationError, match=r"An audit is about .reward. and .data."):
        audit_reward(config_from_mapping(guess), 2, print)


def test_wrong_usage_is_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", str(tmp_path / "absent.toml")]) == 2
    assert "is not a file; name a configuration" in capsys.readouterr().err
