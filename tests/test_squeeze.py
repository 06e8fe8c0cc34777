"""LoRA-Squeeze against full matrices and against peft itself."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from campaigns import problems
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, PeftModel, get_peft_model
from runs import quiet_run, small
from safetensors.torch import load_file, save_file
from scipy import stats
from torch import Tensor, nn

from retrain.cli.main import main
from retrain.config import TrainConfig, config_from_mapping, replaced
from retrain.errors import ConfigurationError
from retrain.records.evaluation import Evaluation
from retrain.squeeze import (
    analyze_adapter,
    compress_adapter,
    compressed_alpha,
    layer_spectrum,
    recommend_rank,
    run_squeeze,
    squeeze_adapter,
)
from retrain.squeeze.analysis import factorize, tried_ranks
from retrain.squeeze.job import Accuracy

WEIGHTS, SETTINGS = "adapter_model.safetensors", "adapter_config.json"


class Base(nn.Module):
    """Three adapted layers, one of them narrower than the adapter's rank, and a head that is saved
    whole.
    """

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(24, 20)
        self.tall = nn.Linear(20, 40)
        self.narrow = nn.Linear(40, 3)
        self.head = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.narrow(self.tall(self.wide(x))))
        return out


def base() -> Base:
    torch.manual_seed(0)
    return Base()


def peft_adapter(
    folder: Path, *, dtype: torch.dtype = torch.float32, zero: tuple[str, ...] = (), **options: Any
) -> Path:
    """An adapter that peft made and saved, its factors random but for the layers in `zero`."""
    settings = {"r": 8, "lora_alpha": 12, "target_modules": ["wide", "tall", "narrow"]}
    config = LoraConfig(**settings | options)
    model = get_peft_model(base(), config)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_" in name and not any(f".{layer}." in name and "lora_B" in name for layer in zero):
            # Of a falling spectrum, as a trained adapter is.
            decay = 1 / torch.arange(1.0, 1 + min(parameter.shape))
            values = torch.randn(parameter.shape, generator=generator)
            parameter.data = values * (decay if values.shape[1] == len(decay) else decay[:, None])
        if "lora_" in name:
            parameter.data = parameter.data.to(dtype)
    model.save_pretrained(folder)
    return folder


def updates(folder: Path) -> dict[str, Tensor]:
    """The full update of every layer, as peft merges it, in float64."""
    model = PeftModel.from_pretrained(base(), folder)  # type: ignore[arg-type]
    found = {}
    for name, module in model.named_modules():
        if hasattr(module, "get_delta_weight"):
            update = module.double().get_delta_weight("default").detach().double()
            found[name.removeprefix("base_model.model.")] = update
    return found


def cut(update: Tensor, k: int) -> Tensor:
    u, s, vh = torch.linalg.svd(update, full_matrices=False)
    return (u[:, :k] * s[:k]) @ vh[:k]


# -- spectra ---------------------------------------------------------------------------------------

shapes = st.tuples(st.integers(1, 6), st.integers(1, 7), st.integers(1, 7), st.integers(0, 10_000))


@given(shapes)
@settings(max_examples=60, deadline=None)
def test_singular_values_are_those_of_the_full_product(shape: tuple[int, int, int, int]) -> None:
    rank, d_in, d_out, seed = shape
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn(rank, d_in, generator=generator, dtype=torch.float64)
    b = torch.randn(d_out, rank, generator=generator, dtype=torch.float64)
    layer = layer_spectrum(a, b)
    full = torch.linalg.svdvals(b @ a)[: min(rank, d_in, d_out)]
    assert layer.rank == rank and layer.effective_rank == len(full)
    torch.testing.assert_close(
        torch.tensor(layer.singular_values, dtype=torch.float64), full, rtol=1e-9, atol=1e-12
    )
    left, values, right = factorize(a, b, "layer")
    torch.testing.assert_close(left * values @ right.T, b @ a, rtol=1e-9, atol=1e-12)
    for k in range(1, rank + 2):
        error = torch.linalg.matrix_norm(b @ a - cut(b @ a, k)) / torch.linalg.matrix_norm(b @ a)
        assert math.sqrt(1 - layer.retained(k)) == pytest.approx(float(error), abs=1e-7)


def test_variance_is_of_squared_singular_values_and_knows_no_scale() -> None:
    a, b = torch.diag(torch.tensor([1.0, 2.0])), torch.eye(3, 2)
    for factor, scale in ((1.0, 1.0), (1e-20, 5.0), (1e20, 0.1)):
        layer = layer_spectrum(a * factor, b * factor, scale=scale)
        assert layer.retained(1) == pytest.approx(0.8)
        assert layer.retained(2) == layer.retained(9) == 1.0
    with pytest.raises(ValueError):
        layer.retained(0)


def test_shapes_that_do_not_fit_and_numbers_that_are_none_are_errors() -> None:
    for a, b in (
        (torch.ones(2, 3), torch.ones(3, 1)),
        (torch.ones(2, 3, 1), torch.ones(3, 2)),
        (torch.full((1, 2), math.nan), torch.ones(2, 1)),
    ):
        with pytest.raises(ValueError):
            layer_spectrum(a, b)


# -- recommendation --------------------------------------------------------------------------------

LAYERS = [{1: 0.5, 2: 0.9, 4: 1.0}, {1: 0.9, 2: 0.999, 4: 1.0}]


@pytest.mark.parametrize(
    ("layers", "ranks", "threshold", "options", "expected"),
    [
        (LAYERS, [1, 2, 4], 0.9, ("mean", 4), 2),
        (LAYERS, [1, 2, 4], 0.9, ("min", 4), 2),
        (LAYERS, [1, 2, 4], 0.94, ("mean", 4), 2),
        (LAYERS, [1, 2, 4], 0.94, ("min", 4), 4),
        # A threshold met but for rounding is met.
        ([{1: 0.95 - 1e-13, 2: 1.0}], [1, 2], 0.95, ("mean", 2), 1),
        ([{1: 0.95 - 1e-11, 2: 1.0}], [1, 2], 0.95, ("mean", 2), 2),
        ([{1: 0.5, 2: 0.6}], [1, 2], 0.95, ("mean", 8), 8),  # an unmet one keeps the rank
    ],
)
def test_the_mean_over_layers_or_the_worst_layer_decides(
    layers: Any, ranks: list[int], threshold: float, options: Any, expected: int
) -> None:
    assert recommend_rank(layers, ranks, threshold, *options) == expected


def test_default_ranks_are_the_powers_of_two_and_the_source_rank() -> None:
    for rank, expected in ((1, (1,)), (2, (1, 2)), (8, (1, 2, 4, 8)), (12, (1, 2, 4, 8, 12))):
        assert tried_ranks([], rank) == expected


# -- alpha -----------------------------------------------------------------------------------------


@given(st.integers(1, 512), st.integers(1, 512), st.integers(1, 300))
def test_alpha_keeps_the_scale(first: int, second: int, alpha: int) -> None:
    k, r = sorted((first, second))
    assert compressed_alpha(alpha, r, k) / k == pytest.approx(alpha / r, rel=1e-14)
    assert compressed_alpha(alpha, r, k, use_rslora=True) / math.sqrt(k) == pytest.approx(
        alpha / math.sqrt(r), rel=1e-14
    )


def test_alpha_is_never_rounded_away() -> None:
    assert compressed_alpha(16, 128, 4) == 0.5
    assert compressed_alpha(64, 32, 8) == 16 and isinstance(compressed_alpha(64, 32, 8), int)
    with pytest.raises(ValueError):
        compressed_alpha(16, 8, 9)


# -- adapters of peft ------------------------------------------------------------------------------

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "rank-stabilized": {"use_rslora": True},
    "patterns": {"rank_pattern": {"wide": 5, "narrow": 2}, "alpha_pattern": {"wide": 3}},
    "an untrained layer": {"zero": ("tall",)},
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("target", [1, 3, 4, 8, {"wide": 3, "tall": 6, "narrow": 1}], ids=str)
def test_peft_loads_the_truncated_update(
    tmp_path: Path, case: dict[str, Any], target: int | dict[str, int]
) -> None:
    source = peft_adapter(tmp_path / "source", **case)
    compression = compress_adapter(source, tmp_path / "small", target)
    ranks = dict.fromkeys(("wide", "tall", "narrow"), target) if isinstance(target, int) else target
    before, after = updates(source), updates(tmp_path / "small")
    cut_off = whole = 0.0
    for name, update in before.items():
        near = 1e-6 * float(update.abs().max() + 1e-9)
        torch.testing.assert_close(after[name], cut(update, ranks[name]), rtol=0, atol=near)
        cut_off += float((update - cut(update, ranks[name])).square().sum())
        whole += float(update.square().sum())
    expected = math.sqrt(cut_off / whole)
    assert compression.relative_error == pytest.approx(expected, rel=1e-6, abs=1e-6)
    assert 0 < compression.storage_error < 1e-6


def test_a_uniform_rank_needs_no_patterns_and_the_settings_stay(tmp_path: Path) -> None:
    source = peft_adapter(tmp_path / "source", lora_dropout=0.1)
    compress_adapter(source, tmp_path / "small", 2)
    before, after = (
        json.loads((folder / SETTINGS).read_text()) for folder in (source, tmp_path / "small")
    )
    assert {name for name in after if after[name] != before[name]} == {"r", "lora_alpha"}
    assert (after["r"], after["lora_alpha"]) == (2, 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_dtype_of_the_source_is_kept(tmp_path: Path, dtype: torch.dtype) -> None:
    source = peft_adapter(tmp_path / "source", dtype=dtype)
    compression = compress_adapter(source, tmp_path / "small", 4)
    assert {tensor.dtype for tensor in load_file(tmp_path / "small" / WEIGHTS).values()} == {dtype}
    assert compression.storage_error < torch.finfo(dtype).eps


def test_what_the_rank_does_not_touch_is_carried_over(tmp_path: Path) -> None:
    source = peft_adapter(tmp_path / "source", modules_to_save=["head"], bias="all")
    compress_adapter(source, tmp_path / "small", 2)
    before, after = (load_file(folder / WEIGHTS) for folder in (source, tmp_path / "small"))
    assert before.keys() == after.keys()
    others = [name for name in before if "lora_" not in name]
    assert any("head" in name for name in others)
    assert any(name.endswith(("wide.base_layer.bias", "wide.bias")) for name in others)
    assert all(torch.equal(before[name], after[name]) for name in others)


def test_a_layer_of_zeros_can_still_be_trained(tmp_path: Path) -> None:
    source = peft_adapter(tmp_path / "source", zero=("tall",))
    compress_adapter(source, tmp_path / "small", 2)
    tensors = load_file(tmp_path / "small" / WEIGHTS)
    assert not tensors["base_model.model.tall.lora_B.weight"].any()
    assert tensors["base_model.model.tall.lora_A.weight"].all()


def test_mixed_ranks_and_untrained_layers_are_analyzed_by_layer(tmp_path: Path) -> None:
    source = peft_adapter(tmp_path / "source", rank_pattern={"wide": 5}, zero=("tall",))
    analysis = analyze_adapter(source, min_variance_retention=0.9)
    assert analysis.source_rank == 8
    ranks_of = {layer.name: (layer.rank, layer.effective_rank) for layer in analysis.layers}
    assert ranks_of == {"wide": (5, 5), "tall": (8, 8), "narrow": (8, 3)}
    assert analysis.zero_layers == ("tall",)
    trained = [layer for layer in analysis.layers if not layer.is_zero]
    for row in analysis.table:
        values = [layer.retained(row.rank) for layer in trained]
        expected = (sum(values) / 2, min(values), max(values))
        assert (row.mean, row.min, row.max) == pytest.approx(expected)
    ranks = analysis.ranks_per_layer()
    assert ranks["tall"] == 1
    for layer in trained:
        assert layer.retained(ranks[layer.name]) >= 0.9
        assert ranks[layer.name] == 1 or layer.retained(ranks[layer.name] - 1) < 0.9


def test_the_recommended_rank_is_a_row_of_the_table(tmp_path: Path) -> None:
    source = peft_adapter(tmp_path / "source")
    analysis = analyze_adapter(source, min_variance_retention=1.0, target_ranks=[1, 2])
    assert analysis.recommended_rank == 8
    assert [row.rank for row in analysis.table] == [1, 2, 8]


def test_the_error_in_the_table_is_that_of_the_compression(tmp_path: Path) -> None:
    source = peft_adapter(tmp_path / "source", alpha_pattern={"wide": 30})
    errors = {row.rank: row.error for row in analyze_adapter(source).table}
    for rank in (1, 2, 4):
        found = compress_adapter(source, tmp_path / f"rank{rank}", rank).relative_error
        assert found == pytest.approx(errors[rank], rel=1e-9)


# -- refusals --------------------------------------------------------------------------------------


def change_settings(**values: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        settings = json.loads((folder / SETTINGS).read_text())
        (folder / SETTINGS).write_text(json.dumps(settings | values))

    return change


def add_tensor(name: str, *shape: int, value: float = 1.0) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        more = {f"base_model.model.{name}": torch.full(shape, value)}
        save_file(load_file(folder / WEIGHTS) | more, folder / WEIGHTS)

    return change


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda folder: (folder / SETTINGS).unlink(), "no adapter_config.json"),
        (lambda folder: (folder / SETTINGS).write_text("{"), "is not valid JSON"),
        (lambda folder: (folder / WEIGHTS).unlink(), "no adapter_model.safetensors"),
        (lambda folder: (folder / WEIGHTS).write_bytes(b"pickle"), "is not a safetensors file"),
        (change_settings(peft_type="LOHA"), "peft_type 'LOHA'"),
        (change_settings(lora_alpha=None), "lacks a number for r or lora_alpha"),
        (change_settings(use_dora=True), "use_dora"),
        (change_settings(target_parameters=["experts.w"]), "target_parameters"),
        (change_settings(init_lora_weights="pissa_niter_4"), "pissa_niter_4"),
        (change_settings(r=4), "has rank 8, and adapter_config.json says 4"),
        (add_tensor("wide.lora_magnitude_vector.weight", 20), "lora_magnitude_vector"),
        (add_tensor("emb.lora_embedding_A", 8, 5), "lora_embedding_A"),
        (add_tensor("wide.lora_A.weight", 8, 24, 1, 1), "lora_A [8, 24, 1, 1]"),
        (add_tensor("more.lora_A.weight", 8, 24), "lacks base_model.model.more.lora_B.weight"),
        (add_tensor("wide.lora_A.weight", 8, 24, value=math.inf), "wide holds nan or inf"),
    ],
)
def test_what_cannot_be_squeezed_is_refused_in_one_sentence(
    tmp_path: Path, damage: Callable[[Path], None], words: str
) -> None:
    source = peft_adapter(tmp_path / "source")
    damage(source)
    with pytest.raises(ConfigurationError) as refusal:
        analyze_adapter(source)
    assert len(refusal.value.problems) == 1 and words in refusal.value.problems[0]


def test_an_untrained_adapter_has_no_recommendation(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="untrained"):
        analyze_adapter(peft_adapter(tmp_path / "source", zero=("wide", "tall", "narrow")))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"source_rank": 16}, "source_rank = 16"),
        ({"target_ranks": [2, 1]}, "rising order"),
        ({"target_ranks": [2, 2]}, "rising order"),
        ({"target_ranks": [4, 9]}, "from 1 to 8"),
        ({"device": "mps"}, "no float64"),
        (
            {"compress_to": 9, "output_path": "new"},
            "compress_to = 9 is out of range; allowed: 1 to 8",
        ),
        ({"compress_to": 4, "per_layer": True, "output_path": "new"}, "leave one of them out"),
        ({"evaluate": True, "output_path": "new"}, "one rank, one whole-number alpha"),
        ({"output_path": "source"}, "is the adapter itself"),
        ({"output_path": "full"}, "does not come from a squeeze job"),
    ],
)
def test_settings_that_do_not_fit_are_refused_and_nothing_is_written(
    tmp_path: Path, values: dict[str, Any], words: str
) -> None:
    source = peft_adapter(tmp_path / "source", alpha_pattern={"wide": 7})
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").touch()
    before = sorted(tmp_path.rglob("*"))
    if "output_path" in values:
        values = values | {"output_path": str(tmp_path / values["output_path"])}
    with pytest.raises(ConfigurationError, match=words):
        squeeze_adapter(config_from_mapping({"squeeze": values}), source, overwrite=True)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_source_rank_that_is_right_changes_nothing(tmp_path: Path) -> None:
    source = peft_adapter(tmp_path / "source")
    right = config_from_mapping({"squeeze": {"source_rank": 8}})
    assert squeeze_adapter(right, source) == squeeze_adapter(TrainConfig(), source)


# -- the job ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return quiet_run(tmp_path_factory.mktemp("trained") / "run", training={"max_steps": 2}).adapter


def test_accuracy_is_measured_on_the_compressed_update(
    tmp_path: Path, trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sections = {"training": {"max_tokens": 64}, "evaluation": {"max_examples": 6}}
    source = shutil.copytree(trained, tmp_path / "source")
    generator = torch.Generator().manual_seed(0)
    weights = load_file(source / WEIGHTS)
    for name, tensor in weights.items():  # an update of full rank that changes what is written
        if "lora_B" in name:
            weights[name] = 0.3 * torch.randn(tensor.shape, generator=generator)
    save_file(weights, source / WEIGHTS)
    values = {"adapter_path": str(source), "output_path": str(tmp_path / "out"), "evaluate": True}
    config = small(tmp_path / "unused", **sections, reward={"type": "match"}, squeeze=values)
    whole = run_squeeze(replaced(config, {"squeeze.compress_to": 4})).accuracy
    smaller = replaced(config, {"squeeze.compress_to": 1})
    part = run_squeeze(smaller, overwrite=True, quiet=True).accuracy
    assert whole is not None and part is not None
    assert whole.before.problems == whole.after.problems == part.before.problems
    assert whole.before.tokens == whole.after.tokens == part.before.tokens != part.after.tokens
    assert whole.line() in capsys.readouterr().out.splitlines()
    stored = json.loads((tmp_path / "out" / "squeeze.json").read_text())["evaluation"]
    assert stored == json.loads(json.dumps(part.to_json()))
    assert whole.differences == [0.0] * 6
    assert whole.interval is None
    assert "the same accuracy on every problem" in whole.line()


def test_the_cost_of_a_compression_is_told_problem_by_problem() -> None:
    """Hard problems stay hard and easy ones easy, so the difference is known far better than either
    accuracy.
    """
    rng = np.random.default_rng(0)
    easy = rng.random(400) < 0.5
    after = easy & (rng.random(400) > 0.02)
    pair = (Evaluation(0, problems([int(one) for one in right])) for right in (easy, after))
    accuracy = Accuracy(*pair)
    d = after.astype(float) - easy
    assert accuracy.interval == pytest.approx(stats.norm.interval(0.95, d.mean(), stats.sem(d)))
    assert accuracy.interval is not None
    assert accuracy.interval[1] - accuracy.interval[0] < 0.04 < np.diff(accuracy.before.interval)
    assert f": {100 * d.mean():+.1f} pp, 95% interval" in accuracy.line()


def test_a_trained_adapter_is_squeezed_by_a_file_of_squeeze_alone(
    tmp_path: Path, trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out = tmp_path / "squeeze.toml", tmp_path / "small"
    keys = f'adapter_path = "{trained}"\noutput_path = "{out}"\ncompress_to = 2\n'
    file.write_text(f"[squeeze]\n{keys}")
    assert main([str(file)]) == 0
    printed = capsys.readouterr().out
    analysis = analyze_adapter(trained)
    assert f"Recommended rank: {analysis.recommended_rank} (" in printed and "to rank 2:" in printed
    assert (out / "squeeze.png").read_bytes().startswith(b"\x89PNG")
    report = json.loads((out / "squeeze.json").read_text())
    assert report["recommended_rank"] == analysis.recommended_rank
    assert [row["rank"] for row in report["table"]] == [1, 2, 4]
    assert (report["rule"], report["threshold"], report["compression"]["rank"]) == ("mean", 0.95, 2)
    assert main([str(file)]) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert main([str(file), "--overwrite", "--quiet", "--squeeze-compress-to", "1"]) == 0
    assert capsys.readouterr().out == ""
    assert json.loads((out / SETTINGS).read_text())["r"] == 1


def test_an_analysis_alone_draws_its_curve_beside_the_runs_and_touches_no_adapter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = peft_adapter(tmp_path / "logs" / "lab" / "final")
    before = sorted(source.rglob("*"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "squeeze.toml").write_text('[squeeze]\nadapter_path = "logs/lab/final"\n')
    assert main(["squeeze.toml"]) == 0
    picture = Path("logs/squeeze-analysis/logs-lab-final.png")
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert f"Picture: {picture}\n" in capsys.readouterr().out
    assert sorted(source.rglob("*")) == before
    picture.unlink()
    picture.parent.rmdir()
    picture.parent.touch()
    assert main(["squeeze.toml"]) == 0
    assert f"not draw the variance curve: {picture} is not writable" in capsys.readouterr().out
