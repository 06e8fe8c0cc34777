"""What a whole run must get right: one policy, shared noise, groups that say what they were, a gate
that stops what is broken.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from itertools import permutations, product
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from retrain import train
from retrain.errors import RunFailed
from retrain.inference_engine.base import InferenceEngine, SampleRequest
from retrain.inference_engine.pytorch import PyTorchEngine
from retrain.records.entries import SftRecord
from retrain.records.run_folder import RunFolder
from retrain.records.token_table import read_tokens
from retrain.rewards import Scorer, ScoreRequest
from retrain.run.dialogues import SamplingPlan, Watcher
from retrain.run.observer import check_updates
from retrain.run.rollout import Rollout, Sampler
from retrain.run.step_record import reward_fields
from retrain.types import (
    Completion,
    Example,
    FinishReason,
    Outcome,
    Prompt,
    Score,
    StepResult,
)
from tests.groups import group
from tests.runs import lines, quiet_run, small


def with_temperature(temperature: float) -> dict[str, Any]:
    return {"training": {"temperature": temperature, "max_steps": 3, "updates_per_batch": 2}}


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_ratio_is_one_before_the_first_optimizer_step_of_every_step(
    tmp_path: Path, temperature: float
) -> None:
    """Also after the weights have changed: the sampler serves the adapter that was just trained."""
    quiet_run(tmp_path / "run", **with_temperature(temperature))
    records = lines(tmp_path / "run" / "metrics.jsonl")
    assert all(record["num_datums"] for record in records)
    for record in records:
        assert record["ratio_max"] == pytest.approx(1, abs=1e-4)
        assert record["ess"] == pytest.approx(1, abs=1e-4)
        assert abs(record["mismatch_k1"]) < 1e-4


def test_conditions_of_one_seed_share_prompts_and_noise(tmp_path: Path) -> None:
    """Common random numbers: before any learning, the arms of a comparison have written the very
    same completions, and record the same entropy of them.
    """
    generations, entropies = [], []
    for advantage, transform in (("grpo", "none"), ("maxrl", "gtpo_hicra")):
        folder = tmp_path / advantage
        algorithm = {"advantage_mode": advantage, "transform_mode": transform}
        quiet_run(folder, algorithm=algorithm, training={"max_steps": 2})
        generations.append(lines(folder / "emergence" / "generations.jsonl"))
        record = lines(folder / "metrics.jsonl")[0]
        assert (record["exec_entropy_mean"] is None) == (transform == "none")
        entropies.append((record["entropy_mean"], record["surprisal_mean"]))
    assert entropies[0] == entropies[1] and None not in entropies[0]
    first, second = (
        [(g["prompt_id"], g["sample"], g["completion"]) for g in arm if g["step"] == 0]
        for arm in generations
    )
    assert first == second
    prompts = [[(g["step"], g["prompt_id"]) for g in arm] for arm in generations]
    assert prompts[0] == prompts[1]


def test_another_seed_gives_other_prompts_and_other_samples(tmp_path: Path) -> None:
    for seed in (1, 2):
        quiet_run(tmp_path / str(seed), training={"seed": seed, "max_steps": 1})
    one, two = (lines(tmp_path / seed / "emergence" / "generations.jsonl") for seed in ("1", "2"))
    assert {g["prompt_id"] for g in one} != {g["prompt_id"] for g in two}


def test_dynamic_sampling_redraws_uniform_groups_with_the_same_prompt(tmp_path: Path) -> None:
    """With a reward of 1 at probability 0.02 nearly every group of 4 is uniform at first."""
    rare = {"type": "random", "random_p": 0.02}
    training = {"max_steps": 1, "batch_size": 4, "max_tokens": 8}
    for name, redraws in (("off", 0), ("on", 30)):
        more = training | {"max_resamples": redraws}
        quiet_run(tmp_path / name, reward=rare, training=more)
    off, on = (lines(tmp_path / name / "metrics.jsonl")[0] for name in ("off", "on"))
    assert on["num_datums"] > off["num_datums"]
    assert on["batch_size"] == off["batch_size"] == 4
    drawn = lines(tmp_path / "on" / "emergence" / "generations.jsonl")
    assert {g["prompt_id"] for g in drawn} == {
        g["prompt_id"] for g in lines(tmp_path / "off" / "emergence" / "generations.jsonl")
    }
    assert max(g["sample"] for g in drawn) >= 4
    assert off["groups_redrawn"] == 0 < on["groups_redrawn"]
    for rate in (
        "correct_rate",
        "running_correct_rate",
        "mean_reward",
        "completion_tokens_mean",
        "truncated_fraction",
    ):
        assert on[rate] == off[rate], (
            "what a redraw gives is selected by its rewards, so the first draws are what is averaged"
        )


def test_the_z_of_length_and_reward_is_in_deviations_of_all_shuffles() -> None:
    """Groups of 4 and of 3 judged completions."""

    def z(first: Sequence[float], second: Sequence[float]) -> float:
        groups = [group(first, [1, 2, 5, 9]), group([*second, None], [4, 4, 7, 9])]
        return float(reward_fields(Rollout(groups, groups))["length_reward_z"])

    shuffles = product(permutations([0.0, 1.0, 0.5, 1.0]), permutations([1.0, 0.0, 0.0]))
    every = [z(first, second) for first, second in shuffles]
    assert np.mean(every) == pytest.approx(0, abs=1e-12)
    assert np.std(every) == pytest.approx(1)
    assert z([0.0, 0.5, 1.0, 1.0], [0.0, 0.0, 1.0]) == max(every) > 0
    equal = group([0.0, 1.0], [3, 3]), group([0.1] * 3, [3, 5, 7]), group([1.0, None], [3, 5])
    assert reward_fields(Rollout([*equal], [*equal]))["length_reward_z"] is None


@pytest.mark.slow
@pytest.mark.parametrize("success", [(0.0, 0.4), (1.0, 0.5), (0.2, 0.2)], ids=str)
def test_redraws_do_not_bias_the_correct_rate(success: tuple[float, float]) -> None:
    """Prompts of these two probabilities of success, groups of 4 with up to 8 redraws, over 400
    steps.
    """
    rng = np.random.default_rng(0)
    prompts = [
        Prompt(Example(str(p), "", info={"p": p}), "", np.zeros(1, np.int32)) for p in success * 4
    ]
    scorer = cast(Scorer, ScorerOf(rng))
    sampler = Sampler(EngineOf(), scorer, lambda ids: "")
    plan = SamplingPlan(group_size=4, max_tokens=1, temperature=1.0, seed=0, stream=0, redraws=8)
    watcher = Watcher(lambda: None, lambda completion: None)
    steps = [sampler.draw(prompts, step, plan, watcher) for step in range(400)]
    assert sum(rollout.redrawn for rollout in steps) > 1000
    rates = [reward_fields(rollout)["correct_rate"] for rollout in steps]
    assert np.mean(rates) == pytest.approx(np.mean(success), abs=0.02)


class EngineOf(InferenceEngine):
    """One token for every completion."""

    capabilities = PyTorchEngine.capabilities

    def sample(self, requests: Sequence[SampleRequest]) -> Iterator[Completion]:
        for number, request in enumerate(requests):
            for sample in range(request.first_sample, request.first_sample + request.count):
                ids, logprobs = np.zeros(1, np.int32), np.zeros(1, np.float32)
                yield Completion(number, sample, ids, logprobs, None, FinishReason.STOP)


class ScorerOf:
    """Right with the probability that the prompt says."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng

    def group(self, size: int) -> "ScorerOf":
        return self

    def submit(self, request: ScoreRequest) -> Future[Score]:
        assert request.example is not None and request.example.info is not None
        right = bool(self.rng.random() < request.example.info["p"])
        future: Future[Score] = Future()
        future.set_result(Score(Outcome.RIGHT if right else Outcome.WRONG, float(right)))
        return future


def test_what_could_not_be_judged_is_left_out_of_its_group_and_of_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = (
        "def score(response, reference):\n    n = sum(map(ord, response))\n    return None if n % 5"
        " == 0 else float(n % 2)\n"
    )
    (tmp_path / "sometimes.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    reward = {"type": "custom", "custom_module": "sometimes", "max_failure_rate": 1.0}
    training, logging = {"max_steps": 2, "batch_size": 4}, {"generations_per_step": 99}
    quiet_run(tmp_path / "run", reward=reward, training=training, logging=logging)
    generations = lines(tmp_path / "run" / "emergence" / "generations.jsonl")
    unknown = [g for g in generations if g["outcome"] == "could_not_judge"]
    assert unknown
    assert all(g["reward"] is None and g["advantage"] is None for g in unknown)
    for record in lines(tmp_path / "run" / "metrics.jsonl"):
        of_step = [g for g in generations if g["step"] == record["step"]]
        rewards = [g["reward"] for g in of_step if g["reward"] is not None]
        assert record["reward_could_not_judge"] == len(of_step) - len(rewards)
        skipped = sum(
            record[f"groups_skipped_{reason}"] for reason in ("all_correct", "all_wrong", "other")
        )
        assert record["informative_fraction"] == 1 - skipped / record["batch_size"]
        assert record["mean_reward"] == pytest.approx(np.mean(rewards))


def test_truncated_completions_that_the_loss_leaves_out_are_not_counted_as_trained(
    tmp_path: Path,
) -> None:
    training = {"max_steps": 1, "batch_size": 4, "max_tokens": 8}
    logging = {"generations_per_step": 99, "tokens_every": 1}
    quiet_run(tmp_path / "run", loss={"mask_truncated": True}, training=training, logging=logging)
    (record,) = lines(tmp_path / "run" / "metrics.jsonl")
    generations = lines(tmp_path / "run" / "emergence" / "generations.jsonl")
    ended = [g for g in generations if g["finish_reason"] == "stop" and g["advantage"]]
    assert record["num_datums"] == len(ended) < len([g for g in generations if g["advantage"]])
    log_ratios = read_tokens(RunFolder(tmp_path / "run").step_tokens(0)).log_ratios
    assert np.count_nonzero(~np.isnan(log_ratios)) == sum(g["num_tokens"] for g in ended)


def test_a_step_without_informative_groups_is_logged_and_changes_no_weight(tmp_path: Path) -> None:
    quiet_run(
        tmp_path / "run", reward={"type": "random", "random_p": 0.0}, training={"max_steps": 2}
    )
    records = lines(tmp_path / "run" / "metrics.jsonl")
    names = ("step", "num_datums", "loss", "groups_skipped_all_wrong")
    found = [[record[name] for name in names] for record in records]
    assert found == [[0, 0, None, 2], [1, 0, None, 2]]


def test_updates_that_are_never_finite_stop_the_run_with_the_weights_unharmed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "huge.py").write_text(
        "def advantage(rewards):\n    return [1e38 if r else -1e38 for r in rewards]\n"
    )
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RunFailed, match=r"3 steps in a row\. .* by \[model\] model"):
        algorithm = {"advantage_mode": "huge.advantage"}
        quiet_run(tmp_path / "run", algorithm=algorithm, training={"max_steps": 9, "lr": 1e-3})
    silent = StepResult(None, None, None, None, None, None, None, 1, 0)  # It tells no loss.
    check_updates([SftRecord(0, None, None, 1e-3, 1, 1, 1.0)] * 3, silent)
    from safetensors.numpy import load_file

    (checkpoint,) = sorted((tmp_path / "run" / "checkpoints").glob("step_*"))[-1:]
    adapter = load_file(checkpoint / "adapter_model.safetensors")
    assert all(np.isfinite(tensor).all() for tensor in adapter.values())
    assert all(not tensor.any() for name, tensor in adapter.items() if "lora_B" in name)


# -- the parity gate, and the faults that it is there for ------------------------------------------


def test_the_gate_stops_a_reward_that_refuses_the_gold_answer(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    # A reference whose braces do not balance can never be boxed.
    (data / "train.jsonl").write_text('{"prompt": "1+1=?", "answer": "{2"}\n' * 8)
    with pytest.raises(RunFailed, match=r"reference answer"):
        train(
            small(tmp_path / "run", data={"source": str(data)}, reward={"type": "match"}),
            quiet=True,
        )
