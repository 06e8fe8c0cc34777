"""`retrain contrast`: identities between algorithms, the gradient that training takes, and what a
user sees.
"""

import dataclasses
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from xml.etree import ElementTree

import numpy as np
import pytest
import torch

from retrain.advantages.step import Segments
from retrain.advantages.transforms import sure_sentence, top_share
from retrain.analysis.power import Rule, seeds_needed
from retrain.analysis.runs import StoredRun
from retrain.backends.local.backend import LocalBackend
from retrain.cli.main import main
from retrain.config import TrainConfig, config_from_mapping, replaced
from retrain.config.load import trusted
from retrain.contrast import batch as batches
from retrain.contrast.batch import Arm, Batch, load_base, opened, read_arms, take_batch
from retrain.contrast.gradients import Contrast, _credit, _masks, contrast, halves
from retrain.contrast.text import sentences
from retrain.errors import ConfigurationError
from retrain.records.token_table import read_tokens
from retrain.run.notes import notes
from retrain.run.parts import Parts
from tests.runs import lines, small, small_run

Captured = pytest.CaptureFixture[str]
STEP = 1


def quiet(_: str) -> None: ...


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> StoredRun:
    config = small(
        tmp_path_factory.mktemp("logs") / "run",
        algorithm={"advantage_mode": "grpo"},
        training={"max_steps": 2, "batch_size": 3, "save_every": 1},
        evaluation={"max_examples": 4, "at_end": True},
        logging={"tokens_every": 1},
    )
    return StoredRun(small_run(config, quiet=True).folder)


@pytest.fixture(scope="module")
def loaded(run: StoredRun) -> Iterator[tuple[Parts, LocalBackend, Batch]]:
    with opened(run.path, load_base(run.path, False), STEP, quiet) as (parts, backend, state):
        batch = take_batch(run.path, parts, state, prompts=None, texts=False, say=quiet)
        yield parts, backend, batch


def measured(
    loaded: tuple[Parts, LocalBackend, Batch], run: StoredRun, tmp_path: Path, *conditions: str
) -> Contrast:
    file = tmp_path / "arms.toml"
    file.write_text(f"conditions = [{', '.join(conditions)}]\n")
    arms = read_arms(run.config, file, trust=False, say=quiet)
    return contrast(*loaded, arms, 8, quiet)


def arm(advantage: str, transform: str = "none", **more: str | float) -> str:
    """A condition as an inline table."""
    keys = {"advantage_mode": advantage, "transform_mode": transform} | more
    words = [f"{key.replace('__', '.')} = {json.dumps(value)}" for key, value in keys.items()]
    return f"{{{', '.join(words)}}}"


def test_the_gradient_is_the_one_that_training_took(
    loaded: tuple[Parts, LocalBackend, Batch], run: StoredRun, tmp_path: Path
) -> None:
    assert loaded[2].source.startswith("recorded")
    seen = measured(loaded, run, tmp_path, arm("grpo"), arm("grpo", "gtpo"))
    taken = lines(run.folder.metrics)[STEP]["grad_norm"]
    assert seen.arms[0].norm == pytest.approx(taken, rel=1e-5)


@pytest.mark.slow
def test_a_step_with_scheduled_keys_has_the_gradient_that_training_took(tmp_path: Path) -> None:
    """The schedule starts at the file's values and moves all that a gradient depends on."""
    config = small(
        tmp_path / "run",
        algorithm={"advantage_mode": "grpo", "transform_mode": "gtpo"},
        training={"max_steps": 2, "save_every": 1},
        logging={"tokens_every": 1},
        schedule={
            "points": {
                "training.temperature": [[0, 1.0], [1, 0.6]],
                "loss.kl_coef": [[0, 0.0], [1, 0.5]],
                "gtpo.beta": [[0, 0.1], [1, 0.9]],
            },
        },
    )
    moving = StoredRun(small_run(config, quiet=True).folder)
    with opened(moving.path, load_base(moving.path, False), STEP, quiet) as (parts, backend, state):
        batch = take_batch(moving.path, parts, state, prompts=None, texts=False, say=quiet)
        later = arm("grpo", "gtpo", label="later")[:-1] + ", schedule = { points = {} } }"
        seen = measured((parts, backend, batch), moving, tmp_path, arm("grpo", "gtpo"), later)
    taken = lines(moving.folder.metrics)[STEP]["grad_norm"]
    assert seen.arms[0].norm == pytest.approx(taken, rel=1e-5) != seen.arms[1].norm


def test_a_batch_that_was_not_recorded_is_drawn_again_as_the_run_drew_it(
    loaded: tuple[Parts, LocalBackend, Batch], run: StoredRun
) -> None:
    with opened(run.path, run.config, STEP, quiet) as (parts, _, state):
        drawn = take_batch(run.path, parts, state, prompts=None, texts=True, say=quiet)
    assert drawn.source.startswith("drawn")
    recorded = loaded[2].groups
    for one, other in zip(drawn.groups, recorded, strict=True):
        assert one.rewards == other.rewards
        for own, stored in zip(one.trajectories, other.trajectories, strict=True):
            assert own.token_ids.tolist() == stored.token_ids.tolist()
            assert own.logprobs.tolist() == stored.logprobs.tolist()
        assert one.prompt.token_ids.tolist() == other.prompt.token_ids.tolist()


def test_identities_between_algorithms_come_out_exactly(
    loaded: tuple[Parts, LocalBackend, Batch], run: StoredRun, tmp_path: Path
) -> None:
    seen = measured(
        loaded,
        run,
        tmp_path,
        arm("grpo"),
        arm("grpo", label="itself"),
        arm("rloo"),
        arm("grpo", loss__mode="ppo", label="ppo"),
        arm("grpo", loss__mode="gspo", label="gspo"),
    )
    base, itself, rloo, one, other = seen.arms
    assert [one.cosine for one in seen.arms] == pytest.approx([1.0] * 5, abs=1e-6)
    assert itself.norm == base.norm and itself.halves == base.halves
    assert rloo.norm / base.norm == pytest.approx(4 / 3, rel=1e-5)
    assert one.norm == pytest.approx(other.norm, rel=1e-5)
    said = list(sentences(seen))
    assert f"the baseline's gradient times {4 / 3:.4f}" in next(s for s in said if "rloo" in s)


def test_the_parts_of_a_batch_share_out_its_update(
    loaded: tuple[Parts, LocalBackend, Batch], run: StoredRun, tmp_path: Path
) -> None:
    """Every token in one part: its gradient is the whole's."""
    conditions = (arm("grpo"), arm("grpo", loss__kl_coef=0.1, label="kl"))
    whole = measured(loaded, run, tmp_path, *conditions)
    with pytest.MonkeyPatch.context() as patch:
        length = whole.tokens
        mask = np.arange(length) % 3 == 0
        patch.setattr("retrain.contrast.gradients._masks", lambda _: (mask, ~mask, mask | ~mask))
        split = measured(loaded, run, tmp_path, *conditions)
    for one in split.arms:
        _, third, others, everything = one.shares.values()
        assert third + others == pytest.approx(everything, abs=1e-5)
    assert split.arms[0].shares["last quarter"] == pytest.approx(1.0, abs=1e-5)
    # KL's own gradient is no token's advantage.
    assert split.arms[1].shares["last quarter"] != pytest.approx(1.0, abs=1e-3)


def test_the_predicted_change_of_held_out_answers_is_the_measured_one(
    run: StoredRun, tmp_path: Path
) -> None:
    from retrain.contrast.gradients import _blocks, _credit, _gold_row

    with opened(run.path, run.config, STEP, quiet) as (parts, backend, state):
        batch = take_batch(run.path, parts, state, prompts=None, texts=False, say=quiet)
        seen = measured((parts, backend, batch), run, tmp_path, arm("grpo"), arm("rloo"))
        credit, _ = _credit(parts, batch, Arm("", run.config))
        gradient = _blocks(backend, run.config, credit, STEP).sum(axis=0)
        assert parts.evaluator is not None
        rows = [_gold_row(parts, *one) for one in enumerate(parts.evaluator.prompts)]

        def logprob() -> float:
            return float(np.mean([own.sum() for own in backend.logprobs(rows)]))

        parameters = list(backend._adapter.parameters.values())
        whole = torch.from_numpy(gradient / np.linalg.norm(gradient)).float()
        length = run.config.training.lr * backend.num_trainable**0.5

        def moved(share: float) -> float:
            pieces = whole.split([one.numel() for one in parameters])
            with torch.no_grad():
                for one, step in zip(parameters, pieces, strict=True):
                    one.sub_(step.view_as(one), alpha=share * length)
            return logprob()

        ahead = moved(1 / 32)
        behind = moved(-1 / 16)
    assert seen.arms[0].gold == pytest.approx(16 * (ahead - behind), rel=0.1)
    assert seen.arms[1].gold == pytest.approx(seen.arms[0].gold, rel=1e-5)


def test_an_arm_without_gradient_says_so(
    loaded: tuple[Parts, LocalBackend, Batch],
    run: StoredRun,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "contrast_plugin.py").write_text(
        "def none(rewards):\n    return [0.0 for _ in rewards]\n"
    )
    seen = measured(loaded, run, tmp_path, arm("grpo"), arm("contrast_plugin.none"))
    assert seen.arms[1].is_flat and seen.arms[1].cosine == 0
    assert "none+none: no gradient on this batch." in list(sentences(seen))
    turned = measured(loaded, run, tmp_path, arm("contrast_plugin.none"), arm("grpo"))
    assert "has no gradient on this batch, so nothing" in next(sentences(turned))


@pytest.mark.parametrize(("signal", "noise", "expected"), [(1.0, 0.0, 1.0), (0.0, 1.0, 0.0)])
def test_halves_agree_by_signal_over_signal_and_noise(
    signal: float, noise: float, expected: float
) -> None:
    blocks = signal + noise * np.random.default_rng(0).standard_normal((16, 20_000))
    low, middle, high = halves(blocks @ blocks.T)
    assert low <= middle <= high
    assert middle == pytest.approx(expected, abs=0.02)
    mixed = 1 + np.random.default_rng(1).standard_normal((16, 20_000)) * np.sqrt(8)
    # Each half is a signal of 8 and a noise of sqrt(8 * 8) in every direction: S / (S + N) = 1/2.
    assert halves(mixed @ mixed.T)[1] == pytest.approx(0.5, abs=0.02)
    # Two blocks have one halving, three have a block against two.
    assert halves(np.array([[1.0, 0.5], [0.5, 4.0]])) == pytest.approx((0.25, 0.25, 0.25))
    assert halves(np.eye(3) + 1)[1] == pytest.approx(2 / np.sqrt(2 * 6))


def test_seeds_grow_as_arms_are_alike_and_noisy(
    loaded: tuple[Parts, LocalBackend, Batch], run: StoredRun, tmp_path: Path
) -> None:
    seen = measured(loaded, run, tmp_path, arm("grpo"), arm("maxrl"))

    def of(cosine: float, agrees: float) -> tuple[int | None, str]:
        arms = [dataclasses.replace(seen.arms[0], halves=agrees)]
        arms.append(dataclasses.replace(seen.arms[1], cosine=cosine, halves=agrees))
        one = dataclasses.replace(seen, arms=arms, steps=30)
        return one.seeds_for(arms[1]), next(sentences(one))

    alike, said = of(0.999, 0.31)
    assert alike is not None and alike > 100
    assert "cosine 0.999, while one arm agrees with itself by 0.31: 8 seeds will not tell" in said
    apart, said = of(0.3, 0.6)
    assert apart is not None and apart <= 8 and "8 seeds can tell them apart" in said
    assert of(0.9, -0.1)[0] is None and "noise alone" in of(0.9, -0.1)[1]
    # Halves that agree by S / (S + N) have a noise of N / S, and the whole half of that: 1/2 and
    # 3/2 of the two arms. Directions that differ by 1/4 in square, over 32 steps: sqrt(32 / 4 / 2).
    base = dataclasses.replace(seen.arms[0], halves=0.5)
    other = dataclasses.replace(seen.arms[1], halves=0.25, cosine=0.875)
    assert dataclasses.replace(seen, arms=[base, other], steps=32).effect(other) == 2.0
    for family in (1, 2):
        one = dataclasses.replace(seen, arms=[base, *[other] * family], steps=32)
        assert one.seeds_for(other) == seeds_needed(2.0, 1.0, Rule(family))
    assert seeds_needed(2.0, 1.0, Rule(1)) < seeds_needed(2.0, 1.0, Rule(2))


def test_what_a_recipe_sets_beyond_a_gradient_is_noted(run: StoredRun, tmp_path: Path) -> None:
    file = tmp_path / "arms.toml"
    file.write_text(f'conditions = [{arm("grpo")}, {{algorithm_mode = "dapo"}}]\n')
    plain, dapo = read_arms(run.config, file, trust=False, say=quiet)
    assert not plain.note and "training.dynamic_sampling" in dapo.note


def test_an_advantage_that_keeps_something_has_what_the_run_kept(
    loaded: tuple[Parts, LocalBackend, Batch],
    run: StoredRun,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "kept_here.py").write_text(
        "class Above:\n"
        "    level = 0.0\n"
        "    def __call__(self, rewards): return [reward - self.level for reward in rewards]\n"
        "    def state(self): return {'level': self.level}\n"
        "    def load(self, state): self.level = state['level']\n"
        "class Another(Above): pass\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    own, other = (
        replaced(trusted(run.config), {"algorithm.advantage_mode": f"kept_here.{name}"})
        for name in ("Above", "Another")
    )
    parts = dataclasses.replace(loaded[0], credit=cast(Any, SimpleNamespace(config=own)))
    batch = dataclasses.replace(loaded[2], kept={"level": 0.25})

    def episode(batch: Batch, config: TrainConfig) -> Any:
        return _credit(parts, batch, Arm("", config))[0].stages_float32()["episode"]

    anew = episode(loaded[2], own)
    np.testing.assert_allclose(episode(batch, own), anew - 0.25, rtol=1e-6)
    np.testing.assert_array_equal(episode(batch, other), anew)


def test_quarters_are_of_each_completion(
    loaded: tuple[Parts, LocalBackend, Batch], run: StoredRun
) -> None:
    """The middle of a token says in which quarter it lies."""
    credit, _ = _credit(loaded[0], loaded[2], Arm("", run.config))
    group = SimpleNamespace(members=[credit.sources[0].members[0]] * 5)
    tokens = SimpleNamespace(segments=Segments([4, 0, 8, 1, 3]))
    _, first, last = _masks(cast(Any, SimpleNamespace(tokens=tokens, sources=[group])))
    assert np.flatnonzero(first).tolist() == [0, 4, 5, 13]
    assert np.flatnonzero(last).tolist() == [3, 10, 11, 15]


def test_the_command_prints_draws_and_gives_json(
    run: StoredRun, tmp_path: Path, capsys: Captured
) -> None:
    arms, picture = tmp_path / "arms.toml", tmp_path / "c.svg"
    arms.write_text(
        "[campaign]\nconditions = ["
        f"{arm('grpo')}, {arm('maxrl', training__lr=0.01, reward__random_p=0.9)}]\n"
    )
    command = [
        "contrast",
        str(run.path),
        "--step",
        "1",
        "--arms",
        str(arms),
        "--figure",
        str(picture),
    ]
    assert main(command) == 0
    said = capsys.readouterr()
    assert "recorded at step 1" in said.out and "maxrl+none" in said.out
    for text in said:  # before, and beside the result that it qualifies
        assert "maxrl+none: training.lr, reward.random_p is left out: all arms are given" in text
    assert ElementTree.parse(picture).getroot().tag.endswith("svg")
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["label"] for one in found["arms"]] == ["grpo+none", "maxrl+none"]
    assert found["cosines"][0][1] == pytest.approx(found["arms"][1]["cosine"])


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["empty.toml"], "empty.toml names no arms"),
        (["one.toml"], "one.toml names one arm"),
        (["two.toml", "--figure", "c.gif"], "ends in none of"),
        (["two.toml", "--step", "7"], "checkpoints here: 1, 2"),
        (["FOREIGN"], "names Python code that a contrast would execute"),
    ],
)
def test_what_cannot_be_contrasted_is_refused_in_a_sentence(
    run: StoredRun,
    tmp_path: Path,
    arguments: list[str],
    sentence: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Captured,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty.toml").write_text("[training]\nlr = 0.1\n")
    Path("one.toml").write_text(f"conditions = [{arm('grpo')}]\n")
    Path("two.toml").write_text(f"conditions = [{arm('grpo')}, {arm('maxrl')}]\n")
    foreign = run.path / "foreign.toml"
    foreign.write_text(f"conditions = [{arm('grpo')}, {arm('evil.run')}]\n")
    given = [str(foreign) if one == "FOREIGN" else one for one in arguments]
    assert main(["contrast", str(run.path), "--arms", *given]) != 0
    error = capsys.readouterr().err
    assert sentence in error and "Traceback" not in error


def test_code_that_a_runs_own_config_names_waits_for_trust(run: StoredRun, tmp_path: Path) -> None:
    folder = tmp_path / "foreign"
    folder.mkdir()
    text = run.folder.config.read_text().replace('type = "random"', 'type = "evil.reward"')
    assert "evil.reward" in text
    (folder / "config.toml").write_text(text)
    with pytest.raises(ConfigurationError, match="add --trust"):
        load_base(folder, False)
    assert load_base(folder, True).reward.types == ["evil.reward"]


def test_a_campaigns_file_brings_its_arms_and_its_seeds(tmp_path: Path) -> None:
    arms = [{"advantage_mode": name, "transform_mode": "none"} for name in ("grpo", "rloo")]
    config = config_from_mapping({"campaign": {"seeds": [5, 6, 7], "conditions": arms}})
    found = read_arms(config, None, trust=False, say=quiet)
    assert [one.label for one in found] == ["grpo+none", "rloo+none"]
    assert isinstance(found[0], Arm) and found[0].config.training.seed == 5
    assert batches.planned_seeds(config, tmp_path) == 3


def warnings_of(config: TrainConfig) -> list[str]:
    return [note for note in notes(config) if "of the gradient comes from" in note]


def test_a_run_whose_transform_weighs_the_tokens_of_a_sure_model_is_warned(
    run: StoredRun, tmp_path: Path
) -> None:
    """By the tokens that the run has stored, else by what the lab's folder says of it."""
    new = {"logging.log_dir": str(tmp_path)}
    (packaged,) = warnings_of(replaced(run.config, new | {"algorithm.transform_mode": "gtpo"}))
    assert packaged.startswith("92% of the gradient") and "agree by 0.15" in packaged
    (stored,) = warnings_of(replaced(run.config, {"algorithm.transform_mode": "gtpo"}))
    table = read_tokens(run.folder.step_tokens(STEP))
    assert stored.startswith(f"{top_share(table.logprobs):.0%} of the gradient")
    assert not warnings_of(run.config)
    assert not warnings_of(
        replaced(run.config, new | {"algorithm.transform_mode": "gtpo", "model.model": "a/b"})
    )


def test_a_sure_model_is_warned_of() -> None:
    assert sure_sentence(0.95, 0.6).startswith("95% of the gradient comes from 5% of the tokens")
    assert "agree by 0.60" in sure_sentence(0.95, 0.6) and not sure_sentence(0.4)
    sure, unsure = np.log(np.full(95, 1.0 - 1e-6)), np.log(np.full(5, 0.5))
    assert top_share(np.concatenate([sure, unsure])) == pytest.approx(1.0)
    assert top_share(np.log(np.full(100, 0.5))) == pytest.approx(0.05)
    assert top_share(np.zeros(10)) == 0


def test_a_run_whose_checkpoints_are_all_damaged_is_not_taken_for_an_untrained_one(
    run: StoredRun, tmp_path: Path, capsys: Captured
) -> None:
    copy = Path(shutil.copytree(run.path, tmp_path / "copy"))
    for path in copy.glob("checkpoints/step_*/adapter_model.safetensors"):
        path.write_bytes(b"")
    for command in ("contrast", "eval"):
        assert main([command, str(copy)]) == 1
        said = capsys.readouterr().err
        assert "No checkpoint in" in said and said.count("trying the previous one") == 1


def test_more_prompts_than_a_step_may_have_are_refused(run: StoredRun, capsys: Captured) -> None:
    assert main(["contrast", str(run.path), "--prompts", "99999999999"]) == 2
    assert "give 250000 at most" in capsys.readouterr().err
