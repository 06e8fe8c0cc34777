"""What every environment must hold, whichever library it comes from."""

import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from retrain import train
from retrain.config import TrainConfig
from retrain.config.schema import Model
from retrain.environments.base import Observation
from retrain.environments.episodes import EpisodeHost
from retrain.errors import Interrupted
from retrain.model.text import load_text_model
from retrain.records.token_table import read_tokens
from retrain.run.session import Session
from retrain.types import Example, Score
from tests.runs import lines, small
from tests.trajectories import replies_of_rendered


def scripted(
    host: EpisodeHost, example: Example, replies: Sequence[str], tools: Sequence[str] = ()
) -> tuple[list[str], Score]:
    """Play an episode: what was said to each reply but the last, and the verdict. `tools`: names
    that must be offered.
    """
    episode, said = host.begin(example, seed=0), []
    answer = episode.answer(lambda: None)
    assert isinstance(answer, Observation), answer
    assert [tool["function"]["name"] for tool in answer.tools] == list(tools)
    for reply in replies:
        episode.reply(reply, last=False)
        answer = episode.answer(lambda: None)
        if isinstance(answer, Score):
            assert reply == replies[-1], f"the episode ended early: {answer}"
            return said, answer
        said.append(answer.messages[-1]["content"])
    raise AssertionError(f"the episode goes on after {replies}: {said}")


def check_trained(folder: Path, environment: dict[str, Any], turns: int) -> None:
    """A short run learns: its records hold turns and metrics, the tokens of every turn have ratio
    1, their ids are what the template renders, and a run that is cut within a step resumes to the
    same bytes.
    """
    sections = {
        "training": {"max_steps": 2, "batch_size": 4, "max_tokens": 60 if turns == 1 else 128},
        "evaluation": {"at_end": True, "max_examples": 2},
    }
    logging = {"tokens_every": 1, "generations_per_step": 99}
    config = small(folder, environment=environment, logging=logging, **sections)
    train(config, quiet=True)
    first = lines(folder / "metrics.jsonl")[0]
    records = lines(folder / "emergence/generations.jsonl")
    assert first["environment_metrics"] and first["reward_could_not_judge"] == 0
    assert max(record["turns"] for record in records) == turns
    assert first["trajectories_rewritten"] == 0, "a conversation that only goes on must be one row"
    assert len(lines(folder / "evaluation.jsonl")) == 2
    table = read_tokens(folder / "tokens/step_0.safetensors")
    assert table.log_ratios is not None
    known = table.log_ratios[~np.isnan(table.log_ratios)]
    assert not len(known) or np.abs(known).max() < 1e-4
    text = load_text_model(Model(model="lab"))
    assert max(replies_of_rendered(text, folder / "tokens/step_0.safetensors")) <= turns
    check_resumes(folder, config)


def check_resumes(straight: Path, config: TrainConfig) -> None:
    """The run `config`, stopped in its last step when every reply is sampled, and resumed, has the
    bytes of the run that went through.
    """
    folder = straight.parent / "cut"
    cut = config.model_copy(
        update={"logging": config.logging.model_copy(update={"log_dir": str(folder)})}
    )
    real = Session.turn_to_learning

    def stop(session: Session, used: int) -> None:
        if session.state.step == config.training.max_steps - 1:
            raise Interrupted("cut", signal.SIGINT)
        real(session, used)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Interrupted):
        patch.setattr(Session, "turn_to_learning", stop)
        train(cut, quiet=True)
    train(
        cut.model_copy(update={"resume": cut.resume.model_copy(update={"from_": str(folder)})}),
        quiet=True,
    )
    for name in (
        "emergence/generations.jsonl",
        "evaluation.jsonl",
        "checkpoints/final/adapter_model.safetensors",
    ):
        assert (straight / name).read_bytes() == (folder / name).read_bytes(), name


def check_learns(folder: Path, environment: dict[str, Any]) -> None:
    """A game whose number is always 1, with two guesses, is won by a third at first and nearly
    always after five updates.
    """
    training = {"max_steps": 6, "group_size": 16, "max_tokens": 64, "lr": 5e-3}
    grpo = {"advantage_mode": "grpo"}
    config = small(folder, environment=environment, training=training, algorithm=grpo)
    train(config, quiet=True)
    rewards = [record["mean_reward"] for record in lines(folder / "metrics.jsonl")]
    assert rewards[-1] > rewards[0] + 0.25, rewards
