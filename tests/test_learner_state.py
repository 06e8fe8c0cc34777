"""What a step may depend on: saved state, seeds, rows; and what may never change the weights."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from retrain.backends.local.backend import LocalBackend, _deterministic
from retrain.backends.local.learner import Learner
from retrain.backends.local.micro_batches import LearnerRow, pack, split_rows
from retrain.backends.rows import check_rows, learning_rate, minibatch_split
from retrain.config.schema import Training
from retrain.errors import ConfigurationError, EnvironmentFailure
from retrain.model.adapter import Adapter, DropoutKey, KeyedDropout
from retrain.model.adapter import philox as torch_philox
from retrain.model.attention import FusedAttention
from retrain.model.load import load_base_model
from retrain.model.text import LAB_MODEL, resolve_model
from retrain.noise import philox
from retrain.types import Row
from tests.learner_models import (
    VOCABULARY,
    config_for,
    distance,
    gradients,
    make_learner,
    make_rows,
    model_folder,
    with_logprobs,
)

TRAIN: dict[str, Any] = {
    "lr": 0.02,
    "weight_decay": 0.1,
    "minibatches": 2,
    "updates_per_batch": 2,
    "lr_schedule": "cosine",
    "max_steps": 6,
}


def weights(learner: Learner) -> dict[str, torch.Tensor]:
    return {
        name: parameter.detach().clone() for name, parameter in learner.weights.parameters.items()
    }


def same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(
        torch.equal(ours[name], theirs[name]) for name in ours
    )


def near(learner: Learner, step: int = 0) -> list[Row]:
    rows = make_rows(seed=step)
    return with_logprobs(rows, learner.logprobs(rows), 0.1)


# --- resume ---------------------------------------------------------------------------------------


def test_saving_and_loading_between_steps_changes_no_byte(tmp_path: Path) -> None:
    config = config_for(training=TRAIN, lora={"dropout": 0.2}, loss={"max_grad_norm": 0.5})
    straight = LocalBackend(config, eos_ids=[3])
    batches = [make_rows(seed=step) for step in range(4)]
    for step in range(2):
        straight.train(batches[step], step)
    straight.save(tmp_path / "half")
    results = [straight.train(batches[step], step) for step in (2, 3)]
    straight.save(tmp_path / "straight")

    resumed = LocalBackend(config, straight.choices, eos_ids=[3])
    resumed.load(tmp_path / "half")
    assert [resumed.train(batches[step], step) for step in (2, 3)] == results
    resumed.save(tmp_path / "resumed")
    names = sorted(path.name for path in (tmp_path / "straight").iterdir())
    assert names == [
        "README.md",
        "adapter_config.json",
        "adapter_model.safetensors",
        "optimizer.json",
        "optimizer.safetensors",
    ]
    assert all(
        (tmp_path / "straight" / name).read_bytes() == (tmp_path / "resumed" / name).read_bytes()
        for name in names
    )


def test_a_checkpoint_before_the_first_step_is_a_checkpoint(tmp_path: Path) -> None:
    config = config_for(training=TRAIN)
    first, second = make_learner(config, untouched=True), make_learner(config)
    first.weights.save(tmp_path)
    first.optimizer.save(tmp_path)
    second.weights.load(tmp_path)
    second.optimizer.load(tmp_path)
    rows = make_rows()
    assert first.train(rows, 0) == second.train(rows, 0)
    assert same(weights(first), weights(second))


def test_the_same_inputs_give_the_same_bytes() -> None:
    config = config_for(training=TRAIN, lora={"dropout": 0.2})
    one, other = make_learner(config), make_learner(config)
    torch.manual_seed(1)
    one.train(make_rows(), 0)
    torch.manual_seed(2)
    other.train(make_rows(), 0)
    assert same(weights(one), weights(other))


# --- non-finite numbers ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "name"), [("advantages", "advantages"), ("logprobs", "sampler log-probs")]
)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_nonfinite_input_never_changes_the_weights(field: str, name: str, value: float) -> None:
    learner = make_learner(config_for(training=TRAIN | {"minibatches": 1}))
    rows = near(learner)
    getattr(rows[4], field)[0] = value
    before = weights(learner)
    result = learner.train(rows, 0)
    assert same(weights(learner), before)
    assert (result.updates, result.nonfinite_updates, result.nonfinite_tensor) == (0, 2, name)
    assert learner.optimizer.steps == 0


@pytest.mark.parametrize(
    ("gradient", "name"),
    [(None, "log-probs"), (np.inf, "gradient of base_model.model"), (1e30, "gradient norm")],
)
def test_a_nonfinite_forward_or_backward_never_changes_the_weights(
    gradient: float | None, name: str
) -> None:
    learner = make_learner(config_for(training=TRAIN))
    rows = near(learner)
    parameter = next(iter(learner.weights.parameters.values()))
    if gradient is not None:
        parameter.register_hook(lambda own: torch.full_like(own, gradient))
    else:
        with torch.no_grad():
            parameter[0, 0] = np.nan
    before = weights(learner)
    result = learner.train(rows, 0)
    after = weights(learner)
    assert all(torch.equal(before[key].nan_to_num(7), after[key].nan_to_num(7)) for key in before)
    assert result.updates == 0 and result.nonfinite_updates == 4
    assert result.nonfinite_tensor.startswith(name)


def test_one_bad_minibatch_does_not_stop_the_others() -> None:
    learner = make_learner(config_for(training=TRAIN | {"updates_per_batch": 1}))
    rows = near(learner)
    rows[0].advantages[0] = np.nan
    before = weights(learner)
    result = learner.train(rows, 0)
    assert (result.updates, result.nonfinite_updates) == (1, 1)
    assert np.isfinite(result.loss) and not same(weights(learner), before)
    assert all(bool(torch.isfinite(value).all()) for value in weights(learner).values())


@pytest.mark.parametrize("loss", [{}, {"old_logprobs": "recomputed", "kl_coef": 0.1}], ids=str)
def test_no_rows_is_no_update(loss: dict[str, Any]) -> None:
    learner = make_learner(config_for(loss=loss, training={"minibatches": 2}))
    result = learner.train([], 0)
    assert (result.loss, result.grad_norm, result.updates) == (None, None, 0)
    assert (result.clip_fraction, result.ratio_min) == (None, None)


@pytest.mark.parametrize("estimator", ["k2", "k3"])
@pytest.mark.parametrize("minibatches", [1, 2])
def test_the_divergence_from_the_base_is_recorded(estimator: str, minibatches: int) -> None:
    loss = {"kl_coef": 0.1, "kl_estimator": estimator}
    learner = make_learner(config_for(loss=loss, training={"minibatches": minibatches}))
    rows = near(learner)
    bare = make_learner(config_for(), untouched=True).logprobs(rows)
    difference = np.concatenate([row.logprobs for row in rows]) - np.concatenate(bare)
    each = {"k2": difference**2 / 2, "k3": np.exp(-difference) - 1 + difference}[estimator]
    assert learner.train(rows, 0).kl_mean == pytest.approx(float(each.mean()), rel=1e-4)
    assert make_learner(config_for()).train(rows, 0).kl_mean is None


# --- dropout --------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["qwen3", "opt"])  # OPT flattens rows and positions
def test_dropout_does_not_depend_on_the_micro_batch(family: str) -> None:
    config = config_for(family, lora={"dropout": 0.4})
    whole, single = make_learner(config), make_learner(config, 1)
    rows = near(whole)
    whole.train(rows, 3)
    single.train(rows, 3)
    assert distance(gradients(single), gradients(whole)) < 1e-5


def test_dropout_changes_with_step_row_and_seed_and_nothing_else() -> None:
    def gradient(step: int, seed: int = 11, offset: int = 0) -> dict[str, torch.Tensor]:
        learner = make_learner(config_for(lora={"dropout": 0.4}, training={"seed": seed}))
        silent = [replace(row, trained=False) for row in make_rows(offset)]
        learner.train([*silent, *make_rows()], step)
        return gradients(learner)

    assert same(gradient(1), gradient(1))
    for other in (gradient(2), gradient(1, seed=12), gradient(1, offset=1)):
        assert distance(other, gradient(1)) > 0.05


def test_the_sampler_and_the_gate_never_see_dropout() -> None:
    rows = make_rows()
    dropped, plain = (make_learner(config_for(lora={"dropout": rate})) for rate in (0.5, 0.0))
    dropped.train(rows, 0)
    plain.train(rows, 0)
    for ours, theirs in zip(dropped.logprobs(rows), plain.logprobs(rows), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_dropout_keeps_the_rate_and_the_mean() -> None:
    key = DropoutKey(1)
    layer = KeyedDropout(0.3, 0, key)
    with key.active(0, range(8), torch.device("cpu")):
        dropped = layer(torch.ones(8, 100, 50))
        assert torch.equal(layer(torch.ones(800, 50)), dropped.flatten(0, 1))
    assert (dropped == 0).float().mean().item() == pytest.approx(0.3, abs=0.01)
    assert dropped.mean().item() == pytest.approx(1, abs=0.02)
    assert torch.equal(layer(torch.ones(1, 2, 3)), torch.ones(1, 2, 3))


@given(
    st.integers(0, 2**32 - 1),
    st.integers(0, 7),
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**32 - 1),
)
def test_torch_and_numpy_draw_the_same_bits(seed: int, stream: int, a: int, d: int) -> None:
    counters = np.array([d, (d + 1) % 2**32, 5])
    ours = torch_philox(seed, stream, (a, 2, 3, torch.from_numpy(counters)))
    np.testing.assert_array_equal(
        ours.numpy().T, philox(seed, stream, (a, 2, 3, counters)).astype(np.int64)
    )


# --- learning rate, minibatches, rows -------------------------------------------------------------


def rates(lr: float, schedule: str, warmup: int, steps: int, horizon: int = 0) -> Training:
    training = {"lr": lr, "lr_schedule": schedule, "lr_warmup_steps": warmup}
    return Training.model_validate(training | {"lr_horizon": horizon, "max_steps": steps})


@given(
    st.sampled_from(["constant", "linear", "cosine"]),
    st.integers(0, 20),
    st.integers(1, 60),
    st.integers(0, 80),
)
def test_learning_rate_is_positive_below_the_peak_and_a_function_of_the_step(
    schedule: Any, warmup: int, steps: int, step: int
) -> None:
    rate = learning_rate(rates(0.1, schedule, warmup, steps), step)
    assert 0 <= rate <= 0.1 + 1e-15
    assert step >= steps or rate > 0
    if step < warmup:
        assert rate == pytest.approx(0.1 * (step + 1) / warmup)
    elif schedule == "constant":
        assert rate == 0.1


def test_schedules_end_where_they_should() -> None:
    assert learning_rate(rates(1.0, "linear", 0, 10), 5) == pytest.approx(0.5)
    assert learning_rate(rates(1.0, "cosine", 0, 10), 5) == pytest.approx(0.5)
    assert learning_rate(rates(1.0, "cosine", 2, 10), 10) == pytest.approx(0)
    assert learning_rate(rates(1.0, "linear", 2, 10), 2) == 1.0
    assert learning_rate(rates(1.0, "linear", 0, 10, horizon=20), 10) == pytest.approx(0.5)
    assert learning_rate(rates(1.0, "linear", 0, 10, horizon=5), 7) == 0


@given(st.integers(1, 12), st.integers(1, 6), st.integers(0, 5))
def test_minibatches_are_a_partition_of_nearly_equal_parts(
    rows: int, count: int, step: int
) -> None:
    batch = [
        LearnerRow(number, row, row.logprobs, row.logprobs)
        for number, row in enumerate(make_rows(rows))
    ]
    parts = minibatch_split(batch, count, 3, step, 0)
    assert sorted(row.number for part in parts for row in part) == list(range(rows))
    assert len(parts) == min(count, rows)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@given(st.integers(1, 12), st.integers(1, 80), st.booleans())
def test_micro_batches_stay_within_the_budget(rows: int, budget: int, share: bool) -> None:
    batch = [
        LearnerRow(number, row, row.logprobs, row.logprobs)
        for number, row in enumerate([*make_rows(rows), *make_rows(rows, seed=1)])
    ]
    kernel, device = FusedAttention(), torch.device("cpu")
    parts = list(split_rows(batch, budget, share=share))
    assert sorted(row.number for part in parts for row in part) == list(range(2 * rows))
    packed = [pack(part, device, kernel, budget, share=share).token_ids.numel() for part in parts]
    assert all(
        len(part) == 1 or tokens <= budget for part, tokens in zip(parts, packed, strict=True)
    )


@pytest.mark.parametrize("spans", [((0, 2),), ((2, 9),), ((3, 4), (2, 3)), ((2, 5),)])
def test_rows_whose_spans_do_not_fit_are_refused(spans: tuple[tuple[int, int], ...]) -> None:
    row = Row(
        np.arange(5, dtype=np.int32), spans, np.zeros(2, np.float32), np.zeros(2, np.float32), 0
    )
    with pytest.raises(ValueError, match="row 0"):
        check_rows([row])


# --- the adapter's folder -------------------------------------------------------------------------


def test_the_saved_adapter_loads_in_peft_as_it_is(tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    learner = make_learner(config_for())
    learner.weights.save(tmp_path)
    assert json.loads((tmp_path / "adapter_config.json").read_text())[
        "base_model_name_or_path"
    ] == model_folder("qwen3")
    loaded = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(model_folder("qwen3")), tmp_path
    )
    ids = torch.arange(4, 20).unsqueeze(0)
    with torch.no_grad():
        torch.testing.assert_close(
            loaded(input_ids=ids).logits, learner.weights.peft_model(input_ids=ids).logits
        )


@pytest.mark.parametrize("name", ["lab", "../lab", "."])
def test_the_saved_adapter_names_its_base_so_that_it_is_found_from_any_folder(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(LAB_MODEL)
    wanted = name if name == "lab" else str(LAB_MODEL)
    config = config_for(model={"model": name})
    base = load_base_model(config, resolve_model(name), torch.device("cpu"))
    Adapter(base, config.model, config.lora, config.training.seed).save(tmp_path)
    assert (
        json.loads((tmp_path / "adapter_config.json").read_text())["base_model_name_or_path"]
        == wanted
    )
    assert f"base_model: {json.dumps(wanted)}" in (tmp_path / "README.md").read_text()


def test_initial_weights_depend_on_the_seed_alone_and_leave_the_base_unchanged() -> None:
    torch.manual_seed(1)
    one = make_learner(config_for(), untouched=True)
    state = torch.random.get_rng_state()
    other = make_learner(config_for(), untouched=True)
    assert torch.equal(state, torch.random.get_rng_state())
    third = make_learner(config_for(training={"seed": 12}), untouched=True)
    assert same(weights(one), weights(other)) and not same(weights(one), weights(third))
    a = [value for name, value in weights(one).items() if "lora_A" in name]
    b = [value for name, value in weights(one).items() if "lora_B" in name]
    assert all(bool((value == 0).all()) for value in b)
    assert all(
        0.5 / value.shape[1] ** 0.5 < float(value.abs().max()) <= 1 / value.shape[1] ** 0.5
        for value in a
    )
    assert not torch.equal(a[0], a[1])


def test_all_linear_layers_of_the_blocks_are_adapted_and_the_head_is_not() -> None:
    names = weights(make_learner(config_for("llama"))).keys()
    layers = {name.split(".")[-3] for name in names}
    assert layers == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


@pytest.mark.parametrize("written", ["all-linear", ["all-linear"]])
def test_peft_s_name_of_all_linear_layers_is_known(written: str | list[str]) -> None:
    found = config_for(lora={"target_modules": written}).lora.target_modules
    assert found == config_for().lora.target_modules


def test_starting_from_an_adapter_takes_its_weights(tmp_path: Path) -> None:
    source = make_learner(config_for())
    source.weights.save(tmp_path)
    begun = make_learner(config_for(lora={"init_from": str(tmp_path)}), untouched=True)
    assert same(weights(begun), weights(source))


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"model": {"lora_rank": 8}}, "r = 4"),
        ({"lora": {"alpha": 3}}, "lora_alpha = 8"),
        ({"lora": {"use_rslora": True}}, "use_rslora = False"),
        ({"lora": {"target_modules": ["q_proj"]}}, "not among the trained weights here"),
    ],
)
def test_starting_from_another_kind_of_adapter_is_refused(
    tmp_path: Path, sections: dict[str, dict[str, Any]], words: str
) -> None:
    make_learner(config_for()).weights.save(tmp_path)
    sections = sections | {"lora": sections.get("lora", {}) | {"init_from": str(tmp_path)}}
    with pytest.raises(ConfigurationError, match=words):
        make_learner(config_for(**sections), untouched=True)


def test_starting_from_an_adapter_with_scales_of_single_layers_is_refused(tmp_path: Path) -> None:
    """Its weights have this run's shapes, and would mean others."""
    make_learner(config_for()).weights.save(tmp_path)
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "alpha_pattern": {"q_proj": 2}}))
    with pytest.raises(ConfigurationError, match=r"init_from = .* has alpha_pattern = "):
        make_learner(config_for(lora={"init_from": str(tmp_path)}), untouched=True)


def test_an_unknown_target_module_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigurationError, match=r"'w_q'.*q_proj"):
        make_learner(config_for(lora={"target_modules": ["w_q"]}))


# --- devices and the backend ----------------------------------------------------------------------


def test_a_named_device_that_is_absent_is_refused_and_the_unset_default_falls_back() -> None:
    from retrain.config import TrainConfig
    from retrain.distributed import World
    from retrain.model.devices import choose_device

    with pytest.raises(EnvironmentFailure, match="gpu:7"):
        choose_device(config_for(backend={"devices": "gpu:7"}).backend)
    with pytest.raises(ConfigurationError, match="torchrun"):
        choose_device(config_for(backend={"devices": "gpu:0,gpu:1"}).backend, World(rank=0, size=2))
    if not torch.cuda.is_available():
        device, note, _ = choose_device(TrainConfig().backend)
        assert device.type == "cpu" and "cpu" in note


@pytest.mark.parametrize("has_units", [False, True])
def test_bf16_on_a_device_without_units_for_it_is_said(
    monkeypatch: pytest.MonkeyPatch, has_units: bool
) -> None:
    from retrain.model import devices

    monkeypatch.setattr(devices, "computes_bf16", lambda: has_units)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda _: has_units)
    asked, auto = config_for(inference={"dtype": "bf16"}), config_for()
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert bool(devices.half_precision_note(asked.model, asked.inference, cpu)) is not has_units
    # "auto" is fp32 on a processor and bf16 on a GPU.
    assert not devices.half_precision_note(auto.model, auto.inference, cpu)
    assert bool(devices.half_precision_note(auto.model, auto.inference, gpu)) is not has_units


def test_attention_is_never_cudnns() -> None:
    torch.backends.cuda.enable_cudnn_sdp(True)
    LocalBackend(config_for(), eos_ids=[3])
    assert not torch.backends.cuda.cudnn_sdp_enabled()


@pytest.mark.parametrize(
    ("family", "dropout", "checkpointing"),
    [("qwen3", 0.0, False), ("qwen3", 0.2, True), ("gemma2", 0.0, False), ("gemma2", 0.2, True)],
)
def test_the_learner_uses_no_operator_that_deterministic_kernels_refuse(
    family: str, dropout: float, checkpointing: bool
) -> None:
    learner = make_learner(
        config_for(family, lora={"dropout": dropout}, loss={"entropy_coef": 0.1}),
        checkpointing=checkpointing,
    )
    with _deterministic(
        torch.device("cuda")
    ):  # the flags are the process's, and this build of torch heeds them on a CPU
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
        assert learner.train(make_rows(), 0).updates == 1
        with pytest.raises(RuntimeError, match="deterministic"):
            torch.zeros(4).put_(torch.tensor([0]), torch.ones(1))
    assert not torch.are_deterministic_algorithms_enabled()


def test_engine_and_learner_are_one_policy_before_and_after_an_update() -> None:
    from retrain.inference_engine.base import NoiseKey, SampleRequest

    backend = LocalBackend(config_for(training={"lr": 0.05}), eos_ids=[3])
    for step in range(2):
        prompts = [
            np.arange(4 + slot, 12 + 2 * slot, dtype=np.int32) % VOCABULARY for slot in range(3)
        ]
        requests = [
            SampleRequest(ids, 2, 12, 0.7, NoiseKey(1, 0, step, slot))
            for slot, ids in enumerate(prompts)
        ]
        rows = []
        for done in backend.engine.sample(requests):
            prompt = prompts[done.request]
            span = (len(prompt), len(prompt) + len(done.token_ids))
            advantages = np.full(len(done.token_ids), 1 - 2 * done.sample, np.float32)
            ids = np.concatenate([prompt, done.token_ids])
            rows.append(Row(ids, (span,), done.logprobs, advantages, done.request))
        result = backend.train(rows, step)
        assert result.ratio_max == pytest.approx(1, abs=1e-4)
        assert result.updates == 1


def test_the_parameter_line_has_pefts_form() -> None:
    backend = LocalBackend(config_for(), eos_ids=[3])
    assert backend.trainable_parameters_line().startswith(
        f"trainable params: {backend.num_trainable:,d} || all params: "
    )
    assert backend.device_name == "cpu"
