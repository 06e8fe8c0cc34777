"""A base of which every process holds a part computes what a whole one does, whoever has more or
less to do.
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sharded import CASES, observe

from retrain.config import TrainConfig, config_from_toml
from retrain.distributed import ALONE, World
from retrain.errors import ConfigurationError
from retrain.model.load import shards_of
from retrain.run.loop import train
from tests.commands import Ranks
from tests.learner_models import config_for
from tests.marks import first_of

Seen = dict[str, Any]


@pytest.fixture(scope="module", params=first_of(CASES))
def case(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def processes(case: str, tmp_path_factory: pytest.TempPathFactory) -> list[Seen]:
    """What each of two processes saw. A pass that one of them leaves out is waited for until the
    time is up.
    """
    folder = tmp_path_factory.mktemp("sharded")
    program = str(Path(__file__).with_name("sharded.py"))
    output, codes = Ranks([sys.executable, program, str(folder), case]).communicate(timeout=200)
    assert codes == [0, 0], output
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(2)]


def test_a_sharded_base_samples_and_learns_what_a_whole_one_does(
    processes: list[Seen], case: str
) -> None:
    alone = observe(case, ALONE)
    if case == "bf16":  # of 8 bits: sums in another order are another token now and then
        for seen in processes:
            np.testing.assert_allclose(seen["results"][0], alone["results"][0], rtol=0.03)
        return
    assert len({len(tokens) for tokens in alone["tokens"][1].values()}) > 2, (
        "completions of several lengths"
    )
    for seen in processes:
        assert seen["tokens"] == alone["tokens"]
        np.testing.assert_allclose(seen["results"], alone["results"], rtol=1e-3, atol=1e-6)
        for name, weight in alone["adapter"].items():
            assert (seen["adapter"][name] - weight).norm() < 1e-3 * weight.norm(), name
        for ours, theirs in zip(seen["logprobs"], alone["logprobs"], strict=True):
            np.testing.assert_allclose(ours, theirs, atol=1e-3)


def test_the_processes_end_with_the_same_adapter(processes: list[Seen]) -> None:
    first, second = (process["adapter"] for process in processes)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_each_process_holds_half_of_every_layer(processes: list[Seen]) -> None:
    for process in processes:
        assert process["held"]
        assert all(2 * here == total for here, total in process["held"])


def test_memory_is_predicted_as_what_a_process_holds(processes: list[Seen]) -> None:
    for process in processes:
        counted, predicted = process["footprint"]
        assert counted.weights == predicted.weights
        assert counted.kept_per_token == pytest.approx(predicted.kept_per_token, rel=0.05)


# -- what cannot be sharded ------------------------------------------------------------------------


def test_one_process_has_nobody_to_share_with(tmp_path: Path) -> None:
    config = config_for(backend={"shard_base": True}, logging={"log_dir": str(tmp_path / "run")})
    with pytest.raises(ConfigurationError, match="torchrun"):
        train(config, quiet=True)
    assert not (tmp_path / "run").exists(), "the folder is free for the run as it was meant"
    with pytest.raises(ConfigurationError, match="torchrun"):
        shards_of(config.backend, ALONE)
    assert shards_of(config_for().backend, World(size=2)) is ALONE


@pytest.mark.parametrize(
    ("toml", "words"),
    [
        ("[model]\nload_in_4bit = true", "4 bits"),
        ('[inference]\ndtype = "bf16"', "whole copy"),
        ("[campaign]", "campaign"),
    ],
)
def test_what_a_sharded_base_excludes_is_refused_in_one_sentence(toml: str, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words) as refusal:
        config_from_toml(f"{toml}\n[backend]\nshard_base = true")
    assert len(refusal.value.problems) == 1


def test_a_backend_that_is_not_local_is_refused() -> None:
    with pytest.raises(ConfigurationError, match='shard_base = true with backend = "tinker"'):
        config_from_toml('[backend]\nbackend = "tinker"\nshard_base = true')


def test_a_run_may_go_on_with_its_base_whole_or_in_parts() -> None:
    from retrain.config import config_hash, resume_differences

    whole, parts = TrainConfig(), config_from_toml("[backend]\nshard_base = true")
    assert config_hash(whole) == config_hash(parts)
    assert not resume_differences(whole, parts)
