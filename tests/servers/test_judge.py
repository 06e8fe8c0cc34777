"""The judge reward against vLLM's CPU build: a model that gives verdicts, and one that writes
nothing but arithmetic.

The first is SmolLM2-135M-Instruct, which scripts/servers/smollm2-setup.sh makes from packages.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from faulty_proxy import faulty_proxy
from real_servers import RealServer, started
from runs import lines, small

from retrain import train
from retrain.audit import run as audit
from retrain.config import config_from_mapping
from retrain.errors import EnvironmentFailure, RunFailed, ServerFailure
from retrain.rewards import ScoreRequest, build_scorer
from retrain.types import Example, Outcome

pytestmark = [pytest.mark.servers, pytest.mark.timeout(900)]

SHORT = """\
Problem: {question}
Right answer: {reference}
Student's answer: {completion}
Is the student's answer the right answer? Reply with one word, yes or no."""
"""A model of 135 million parameters does not follow the built-in template."""
SMOLLM2 = Path(os.environ.get("RETRAIN_SERVERS", ".servers")) / "smollm2" / "model"


@pytest.fixture(scope="module")
def smollm2() -> Iterator[RealServer]:
    with started("vllm", (SMOLLM2, ("--max-model-len", "2048"))) as (one,):
        yield one


def judge(url: str, **more: Any) -> dict[str, Any]:
    table = {
        "type": "judge",
        "judge_model": "base",
        "judge_base_url": f"{url}/v1",
        "judge_template": SHORT,
    }
    return table | {"judge_timeout_s": 300.0} | more


def ask(reward: dict[str, Any], *responses: str) -> list[Any]:
    with build_scorer(config_from_mapping({"reward": reward})) as scorer:
        requests = [
            ScoreRequest(text, "4", "", Example("What is 2 + 2?", "4"), 0, 0, n)
            for n, text in enumerate(responses)
        ]
        return [verdict.result(300) for verdict in [scorer.submit(request) for request in requests]]


def test_a_language_model_gives_verdicts_and_the_server_counts_its_tokens(
    smollm2: RealServer,
) -> None:
    scores = ask(judge(smollm2.url), *(f"{n}: the answer is {n}." for n in range(16)))
    readable = [score for score in scores if score.outcome is not Outcome.COULD_NOT_JUDGE]
    assert len(readable) >= 12
    assert all(
        score.usage.prompt_tokens > 50 and score.usage.completion_tokens > 0 for score in scores
    )


def test_a_model_that_writes_no_verdict_could_not_judge(vllm: RealServer) -> None:
    for score in ask(judge(vllm.url), "4", "five"):
        assert (
            score.outcome is Outcome.COULD_NOT_JUDGE
            and score.reward is None
            and score.usage.requests >= 1
        )


def test_a_model_that_the_server_does_not_have_is_refused_before_the_first_step(
    tmp_path: Path, smollm2: RealServer
) -> None:
    with pytest.raises(EnvironmentFailure, match=r"404 Not Found.*judge_model"):
        train(small(tmp_path, reward=judge(smollm2.url, judge_model="absent")), quiet=True)


def test_a_run_is_judged_by_a_language_model(tmp_path: Path, smollm2: RealServer) -> None:
    config = small(
        tmp_path, reward=judge(smollm2.url, max_failure_rate=1.0), training={"max_steps": 2}
    )
    train(config, quiet=True)
    for record in lines(tmp_path / "metrics.jsonl"):
        assert (
            record["judge_requests"] + record["judge_cached"] >= 8
            and record["judge_completion_tokens"] > 0
        )


def test_a_server_that_dies_stops_the_run_and_loses_no_step(
    tmp_path: Path, smollm2: RealServer
) -> None:
    with faulty_proxy(smollm2.url) as (url, traffic):
        train(
            small(tmp_path, reward=judge(url, max_failure_rate=1.0), training={"max_steps": 1}),
            quiet=True,
        )
        traffic.dead = True
        reward = judge(url, max_failure_rate=1.0, judge_timeout_s=2.0)
        resumed = small(
            tmp_path, reward=reward, training={"max_steps": 2}, resume={"from": str(tmp_path)}
        )
        with pytest.raises((EnvironmentFailure, RunFailed), match="does not answer"):
            train(resumed, quiet=True)
    assert len(lines(tmp_path / "metrics.jsonl")) == 1


def test_an_audit_of_a_small_judge_shows_that_it_is_no_verifier(
    tmp_path: Path, smollm2: RealServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On every tenth answer, since each is a request to a model on a CPU."""
    cases = [*audit._families()][::10]
    monkeypatch.setattr(audit, "_families", lambda: cases)
    file = tmp_path / "data.jsonl"
    file.write_text(
        '{"prompt": "What is 2 + 2?", "answer": "4"}\n{"prompt": "What is 7 * 8?", "answer":'
        ' "56"}\n'
    )
    config = config_from_mapping(
        {"data": {"source": "jsonl", "path": str(file)}, "reward": judge(smollm2.url)}
    )
    result = audit.audit_reward(config, 2, lambda _: None)
    assert len(result.verdicts) > len(cases) > 40
    assert len(result.errors()) > 0.3 * len(result.verdicts)


def test_a_model_of_another_shape_behind_the_second_address_is_named(
    tmp_path: Path, vllm: RealServer, smollm2: RealServer
) -> None:
    """As where a list of addresses holds that of another project."""
    inference = {"engine": "vllm", "url": [vllm.url, smollm2.url]}
    with pytest.raises((RunFailed, ServerFailure), match=smollm2.url) as caught:
        train(small(tmp_path, inference=inference), quiet=True)
    print(f"\n{caught.value}")
