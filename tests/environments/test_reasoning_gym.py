"""reasoning_gym's tasks, as they are installed."""

from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = pytest.mark.environments
if find_spec("reasoning_gym") is None:
    pytest.skip("needs reasoning-gym", allow_module_level=True)

from retrain.environments.episodes import EpisodeHost, play  # noqa: E402
from retrain.environments.reasoning_gym import ReasoningGym  # noqa: E402
from retrain.errors import ConfigurationError  # noqa: E402
from retrain.run.gate import play_references  # noqa: E402
from retrain.types import Outcome, Prompt  # noqa: E402
from tests.environments.checks import check_trained  # noqa: E402


def test_every_task_of_reasoning_gym_makes_problems_and_scores_them() -> None:
    """A task whose example has a single answer must give it full marks; `composite` is a list of
    tasks and needs args.
    """
    import reasoning_gym

    names, without_gold, low = sorted(set(reasoning_gym.factory.DATASETS) - {"composite"}), [], []
    for name in names:
        environment = ReasoningGym(name, {"size": 1, "evaluation_size": 1})
        (example,) = environment.examples("train")
        host = EpisodeHost(environment, max_turns=1, timeout_s=60, correct_threshold=0.5)
        known = environment.reference_replies(example)
        if known is None:
            without_gold.append(name)
        elif play(host, example, known).outcome is not Outcome.RIGHT:
            low.append(name)
        assert play(host, example, ["no answer"]).outcome is Outcome.WRONG, name
        host.close()
    assert len(names) >= 100 and len(without_gold) + len(low) <= 10, (without_gold, low)


def test_training_and_evaluation_problems_differ_and_repeat() -> None:
    args = {"size": 20, "min_terms": 4, "min_digits": 3}
    first, again = ReasoningGym("chain_sum", args), ReasoningGym("chain_sum", args)
    assert first.examples("train") == again.examples("train")
    prompts = {str(item.prompt) for item in first.examples("train")}
    assert not prompts & {str(item.prompt) for item in first.examples("evaluation")}


def test_a_pattern_of_ones_own_finds_the_answer() -> None:
    args = {"size": 1, "evaluation_size": 1, "instruction": "", "answer": r"(-?\d+)"}
    environment = ReasoningGym("chain_sum", args)
    (example,) = environment.examples("train")
    assert "<answer>" not in str(example.prompt)
    host = EpisodeHost(environment, max_turns=1, timeout_s=60, correct_threshold=0.5)
    known = environment.reference_replies(example)
    assert known is not None and play(host, example, known).outcome is Outcome.RIGHT
    for reply, outcome in {
        f"3 and 4: it is {example.reference}": Outcome.RIGHT,
        f"{example.reference}, no, 12345": Outcome.WRONG,
        "no number": Outcome.WRONG,
    }.items():
        assert play(host, example, [reply]).outcome is outcome, reply
    host.close()
    for answer, named in (("(", "regular expression"), (r"\d+", "0 groups")):
        with pytest.raises(ConfigurationError, match=named):
            ReasoningGym("chain_sum", args | {"answer": answer})


def test_an_unknown_task_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigurationError, match='did you mean "chain_sum"'):
        ReasoningGym("chain_sums", {})
    with pytest.raises(ConfigurationError, match="refuses args"):
        ReasoningGym("chain_sum", {"no_such": 1})


def test_the_gate_knows_the_reference_replies() -> None:
    environment = ReasoningGym("chain_sum", {"size": 4})
    host = EpisodeHost(environment, max_turns=1, timeout_s=30, correct_threshold=0.5)
    prompts = [Prompt(example, "", None) for example in environment.examples("train")]  # type: ignore[arg-type]
    assert play_references(host, prompts) == "4/4"
    host.close()


def test_the_lab_trains_on_a_task(tmp_path: Path) -> None:
    args = {
        "min_terms": 2,
        "max_terms": 2,
        "min_digits": 1,
        "max_digits": 1,
        "size": 16,
        "evaluation_size": 4,
        "instruction": "",
    }
    check_trained(
        tmp_path / "run", {"provider": "reasoning_gym", "id": "chain_sum", "args": args}, turns=1
    )
