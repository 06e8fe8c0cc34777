"""`[schedule]`: what a step's values are, that every part reads them, that a
resumed run goes on with them, and what is refused.
"""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrain.advantages.pipeline import CreditPipeline
from retrain.advantages.resolve import small_step
from retrain.cli.main import main
from retrain.config import (
    config_from_mapping,
    config_from_toml,
    config_hash,
    dump_toml,
    replaced,
    unused_keys,
)
from retrain.config.load import arms
from retrain.config.moving import movable, scheduled, value_at, with_values
from retrain.config.plan import Plan
from retrain.errors import ConfigurationError
from retrain.run.observer import StepObserver
from retrain.run.rollout import Rollout
from retrain.tracking import Tracker
from retrain.xray.resolve import _step
from tests.marks import first_of
from tests.runs import small, small_run, timeless
from tests.split import two_devices

WEIGHTS = "checkpoints/final/adapter_model.safetensors"


def test_keys_that_belong_to_a_scheduled_one_are_in_use() -> None:
    """[loss] kl_estimator has no effect at kl_coef = 0, and one where a schedule lifts that."""
    loss = {"loss": {"kl_estimator": "k2"}}
    lifted = {"schedule": {"loss.kl_coef": [[0, 0.0], [10, 0.1]]}}
    assert "kl_estimator" in unused_keys(config_from_mapping(loss))[0]
    assert not unused_keys(config_from_mapping(loss | lifted))
    plain = {"algorithm": {"transform_mode": "none", "uncertainty_kind": "predictive_variance"}}
    masked = {"schedule": {"algorithm.surprisal_mask_rho": [[0, 0.0], [10, 0.2]]}}
    assert "uncertainty_kind" in unused_keys(config_from_mapping(plain))[0]
    assert not unused_keys(config_from_mapping(plain | masked))


def test_a_value_between_two_points_may_be_refused_too() -> None:
    """dual_clip is off at 0, and else above 1: nothing between may be trained with."""
    ppo = {"loss": {"mode": "ppo"}}
    config_from_mapping(ppo | {"schedule": {"loss.dual_clip": [[0, 0.0], [1, 3.0], [9, 2.0]]}})
    told = r"dual_clip = 0\.[23].* by \[schedule\] at step"
    for points in ([[0, 0.0], [10, 3.0]], [[0, 3.0], [10, 0.0]]):
        with pytest.raises(ConfigurationError, match=told):
            config_from_mapping(ppo | {"schedule": {"loss.dual_clip": points}})


def test_a_mask_that_only_a_schedule_gives_is_a_mask() -> None:
    masked = {"algorithm": {"advantage_mode": "grpo", "transform_mode": "entropy_mask"}}
    points = {"algorithm.surprisal_mask_rho": [[0, 0.5], [9, 0.2]]}
    config = config_from_mapping(masked | {"schedule": points})
    assert CreditPipeline(config, lambda ids: [""] * len(ids)).spec.needs_rho
    off = {"algorithm.surprisal_mask_rho": [[0, 0.5], [9, 0.0]]}
    with pytest.raises(ConfigurationError, match=r"surprisal_mask_rho above 0.* at step 9"):
        config_from_mapping(masked | {"schedule": off})


@given(
    st.lists(st.tuples(st.integers(0, 50), st.floats(-1e3, 1e3)), min_size=1, max_size=5),
    st.integers(0, 60),
)
def test_a_schedule_is_linear_between_its_points(
    points: list[tuple[int, float]], step: int
) -> None:
    rising = sorted(dict(points).items())
    expected = np.interp(step, [at for at, _ in rising], [value for _, value in rising])
    assert value_at(rising, step) == pytest.approx(expected)


def test_a_file_names_keys_dotted_and_a_stored_one_reads_back() -> None:
    quoted = '[schedule]\n"loss.kl_coef" = [[0, 0.1], [4, 0.0]]\n'
    bare = "[schedule]\nloss.kl_coef = [[0, 0.1], [4, 0.0]]\n"
    one, other = config_from_toml(quoted), config_from_toml(bare)
    assert one == other == config_from_toml(dump_toml(one))
    assert scheduled(one, 1) == {"loss.kl_coef": pytest.approx(0.075)}
    assert config_hash(one) == config_hash(other) != config_hash(config_from_toml(""))


def test_a_condition_schedules_keys_beside_those_of_the_base() -> None:
    head = '[schedule]\n"gtpo.beta" = [[0, 0.1]]\n[campaign]\nseeds = [1]\n'
    modes = '[[campaign.conditions]]\nadvantage_mode = "grpo"\ntransform_mode = "gtpo"\n'
    quoted, bare = '"loss.kl_coef"', "loss.kl_coef"
    own = [f"{modes}schedule.{name} = [[0, 0.1], [9, 0.0]]\n" for name in (quoted, bare)]
    found = arms(config_from_toml(head + modes + 'label = "base"\n' + own[0]))
    kl = {"loss.kl_coef": [[0, 0.1], [9, 0.0]]}
    assert found[0].schedule.points == {"gtpo.beta": [[0, 0.1]]}
    assert found[1].schedule.points == {"gtpo.beta": [[0, 0.1]], **kl}
    assert arms(config_from_toml(head + own[1]))[0].schedule == found[1].schedule
    anew = own[0] + 'schedule.points = {"gtpo.beta" = [[0, 0.2]]}\n'
    again = arms(config_from_toml(head + anew))[0].schedule
    assert again.points == {"gtpo.beta": [[0, 0.2]], **kl}
    with pytest.raises(ConfigurationError, match=r'"loss.mode" is not a key that a'):
        config_from_toml(head + modes + 'schedule."loss.mode" = [[0, 1]]\n')
    with pytest.raises(ConfigurationError, match=r"schedule.kontrol is not a key"):
        config_from_toml(head + modes + 'schedule.kontrol = "x"\n')


def test_a_whole_number_of_a_table_stays_one() -> None:
    path = "algorithm.advantage_params"
    algorithm = {"advantage_mode": "a.b", "advantage_params": {"k": 8, "x": 1.0}}
    points = {f"{path}.k": [[0, 8], [4, 1]], f"{path}.x": [[0, 1], [4, 2]]}
    config = config_from_mapping({"algorithm": algorithm, "schedule": points})
    values = scheduled(config, 1)
    assert values == {f"{path}.k": 6, f"{path}.x": 1.25}
    moved = with_values(config, values).algorithm.advantage_params
    assert moved == {"k": 6, "x": 1.25} and config.algorithm.advantage_params["k"] == 8


LOSS = {
    "loss.kl_coef": {"loss": {"kl_coef": 0.3}},
    "loss.entropy_coef": {"loss": {"entropy_coef": 0.3}},
    "loss.clip_low": {"loss": {"mode": "ppo", "clip_low": 0.3}, "training": {"minibatches": 4}},
    "loss.max_grad_norm": {"loss": {"max_grad_norm": 0.3}},
    "training.lr": {"training": {"lr": 0.3}},
    "training.temperature": {
        "training": {"temperature": 0.3},
        "algorithm": {"transform_mode": "distill", "reference": "base"},
    },
    "algorithm.surprisal_mask_rho": {"algorithm": {"surprisal_mask_rho": 0.3}},
    "algorithm.advantage_params.eps": {"algorithm": {"advantage_params": {"eps": 0.3}}},
    "gtpo.beta": {"gtpo": {"beta": 0.3}, "algorithm": {"transform_mode": "gtpo"}},
    "loss.params.tau_neg": {"loss": {"mode": "sapo", "params": {"tau_neg": 0.3}}},
}


@pytest.mark.parametrize("path", first_of(LOSS, quick=3))
def test_a_flat_schedule_is_the_run_with_that_value(path: str, tmp_path: Path) -> None:
    """The schedule starts from another value in the file, which no step may read."""
    fixed = small(tmp_path / "fixed", **{"training": {"max_steps": 2}, **LOSS[path]})
    *table, param = path.split(".")
    start: dict[str, Any] = {".".join(table): {param: 0.7}} if table[1:] else {path: 0.7}
    moving = {**start, "schedule.points": {path: [[0, 0.3]]}}
    moved = replaced(fixed, {**moving, "logging.log_dir": str(tmp_path / "moved")})
    runs = [small_run(config, quiet=True) for config in (fixed, moved)]
    metrics = [timeless(run.folder / "metrics.jsonl") for run in runs]
    for line in metrics[1]:
        assert line.pop("scheduled") == {path: 0.3}
    assert metrics[0] == metrics[1]
    first, second = ((run.folder / WEIGHTS).read_bytes() for run in runs)
    assert first == second


def test_log_probs_before_the_temperature_tell_no_chance_in_a_step_that_moved_it(
    tmp_path: Path,
) -> None:
    config = small(tmp_path / "run")
    engine = SimpleNamespace(capabilities=SimpleNamespace(logprobs="raw"), layout_seconds=0.0)
    parts: Any = SimpleNamespace(
        has_turns=False,
        sources=[SimpleNamespace(config=config)],
        backend=SimpleNamespace(engine=engine),
    )
    observer = StepObserver(Plan.of(config), parts, Tracker())
    step: Any = SimpleNamespace(rollout=Rollout([]))
    assert observer._identical_chance(step, {}) is not None
    assert observer._identical_chance(step, {"scheduled": {"training.temperature": 0.7}}) is None


def test_credit_reads_the_parameters_of_the_step() -> None:
    params = {"advantage_params": {"eps": 1.0}}
    config = config_from_mapping({"algorithm": {"transform_mode": "none", **params}})
    pipeline = CreditPipeline(config, lambda ids: [""] * len(ids))
    episode = pipeline._episode
    assert episode is not None
    small = small_step(config)
    before = episode(small, 0)
    pipeline.use(with_values(config, {"algorithm.advantage_params.eps": 1e-6}))
    assert episode(small, 0) != before
    pipeline.use(config)
    assert episode(small, 0) == before


def test_a_mask_may_begin_after_the_first_step() -> None:
    """Nothing reads uncertainties in a file whose surprisal_mask_rho is 0."""
    algorithm = {"advantage_mode": "grpo", "transform_mode": "none"}
    points = {"algorithm.surprisal_mask_rho": [[0, 0.0], [4, 0.2]]}
    late = config_from_mapping({"algorithm": algorithm, "schedule": points})
    masked = config_from_mapping({"algorithm": algorithm | {"surprisal_mask_rho": 0.1}})
    pipeline = CreditPipeline(late, lambda ids: [""] * len(ids))
    step = _step([[1.0, 0.0]])
    kept = []
    for number in (0, 2):
        pipeline.use(with_values(late, scheduled(late, number)))
        assert (pipeline._uncertainty_of(step, number) is None) is (number == 0)
        kept.append(pipeline.compute(step, number, 0.0).kept_fraction)
    always = CreditPipeline(masked, lambda ids: [""] * len(ids)).compute(step, 2, 0.0)
    assert kept == [None, always.kept_fraction] != [None, None]


SCHEDULE: dict[str, Any] = {
    "points": {"loss.kl_coef": [[0, 0.3], [5, 0.0]], "training.temperature": [[1, 1.0], [4, 0.7]]}
}


@pytest.mark.parametrize("devices", first_of(["cpu", "gpu:0,gpu:1"]))
def test_a_moving_run_resumes_byte_for_byte(devices: str, tmp_path: Path) -> None:
    """In split mode a step's values are fixed when its sampling begins."""
    sections: dict[str, Any] = {
        "schedule": SCHEDULE,
        "training": {"max_steps": 7, "save_every": 4},
        "backend": {"devices": devices},
    }
    with two_devices() if "," in devices else nullcontext():
        straight = small_run(small(tmp_path / "straight", **sections), quiet=True)
        config = small(tmp_path / "cut", **sections)
        small_run(replaced(config, {"training.max_steps": 4}), quiet=True)
        small_run(replaced(config, {"resume.from": str(tmp_path / "cut")}), quiet=True)
    metrics = [timeless(folder / "metrics.jsonl") for folder in (straight.folder, tmp_path / "cut")]
    assert metrics[0] == metrics[1]
    values = [line["scheduled"] for line in metrics[0]]
    assert values[3]["loss.kl_coef"] == pytest.approx(0.12)
    assert (straight.folder / WEIGHTS).read_bytes() == (tmp_path / "cut" / WEIGHTS).read_bytes()


def test_a_resumed_run_may_not_move_otherwise(tmp_path: Path) -> None:
    config = small(tmp_path / "run", schedule=SCHEDULE)
    small_run(replaced(config, {"training.max_steps": 1}), quiet=True)
    other = replaced(config, {"schedule.points": {}, "resume.from": str(tmp_path / "run")})
    with pytest.raises(ConfigurationError, match=r"\[schedule\] points"):
        small_run(other, quiet=True)


def test_explain_shows_what_will_move(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.toml"
    file.write_text(dump_toml(small(tmp_path / "run", schedule=SCHEDULE)))
    assert main(["explain", str(file)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "loss.kl_coef 0.3 at step 0, 0 at step 5" in said


# -- what is refused -------------------------------------------------------------------------------

REFUSED = {
    "mode": ({"loss.mode": [[0, 1]]}, r'"loss.mode" is not a key that .* loss.kl_coef'),
    "near": ({"loss.kl_coeff": [[0, 1]]}, 'did you mean "loss.kl_coef"'),
    "falling": ({"loss.kl_coef": [[4, 1], [2, 0]]}, "rising steps"),
    "none": ({"loss.kl_coef": []}, "rising steps"),
    "number": ({"loss.kl_coef": 0.1}, '"loss.kl_coef" is 0.1, and must be a list of points'),
    "pair": ({"loss.kl_coef": [[4, 1, 2]]}, r"the point \[4, 1, 2\], and a point is"),
    "text": ({"loss.kl_coef": [[0, "much"]]}, "and a point is .step, value."),
    "half": ({"loss.kl_coef": [[0.5, 1.0]]}, "a step is a whole number"),
    "range": ({"loss.kl_coef": [[0, 0.1], [9, -1.0]]}, r"kl_coef = -1.* by \[schedule\] at step 9"),
    "param": ({"algorithm.advantage_params.k": [[0, 1]]}, "which holds none of that name"),
}


def test_a_key_without_its_section_is_told_how_to_name_it() -> None:
    points = "temperature = [[0, 1.0], [9, 0.5]]"
    with pytest.raises(ConfigurationError, match=r'not a key; write "training\.temperature"'):
        config_from_toml(f"[schedule]\n{points}\n")
    condition = f'[[campaign.conditions]]\nadvantage_mode = "grpo"\nschedule.{points}\n'
    with pytest.raises(ConfigurationError, match=r'write schedule\."training\.temperature"'):
        config_from_toml(f'{condition}transform_mode = "none"\n')


@pytest.mark.parametrize("name", REFUSED)
def test_a_wrong_schedule_is_a_sentence(name: str, tmp_path: Path) -> None:
    points, sentence = REFUSED[name]
    with pytest.raises(ConfigurationError, match=sentence) as caught:
        small(tmp_path, schedule={"points": points})
    assert len(caught.value.problems) == 1


def test_the_rate_has_one_schedule(tmp_path: Path) -> None:
    moving = {"schedule": {"training.lr": [[0, 1e-3], [4, 1e-4]]}}
    small(tmp_path, **moving)
    with pytest.raises(ConfigurationError, match=r"has a schedule already, .training. lr_schedule"):
        small(tmp_path, training={"lr_schedule": "linear"}, **moving)


def test_a_service_keeps_its_settings_and_credit_moves_here(tmp_path: Path) -> None:
    tinker = {"backend": "tinker"}
    config_from_mapping({"backend": tinker, "schedule": {"gtpo.beta": [[0, 0.1], [4, 0.2]]}})
    with pytest.raises(ConfigurationError, match='tinker": its learner keeps the settings'):
        config_from_mapping({"backend": tinker, "schedule": {"training.lr": [[0, 0.1]]}})


def test_every_movable_key_is_a_number() -> None:
    from retrain.config.keys import keys_by_path

    assert len(movable()) > 12
    assert all(keys_by_path()[path].kinds == {float} for path in movable())
