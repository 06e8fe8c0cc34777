"""Whether sampled tokens are draws from the trained policy: the statistics, the sequential test,
and what a run says.
"""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import faulty_engines
import numpy as np
import pytest
import torch
from runs import lines, small, small_run

from retrain.config.values import MAX_TESTED
from retrain.errors import ConfigurationError
from retrain.inference_engine.base import Truncation
from retrain.model.calibration import DISTANCES, tempered_scores
from retrain.model.head import Head
from retrain.run.calibration import (
    AT_ONCE,
    ONE_IN,
    SHARED_FROM,
    TOLERANCE,
    WARNED_FROM,
    WIDE_TOLERANCE,
    Calibration,
    how_many,
    paired_rows,
    pairs_first,
    shared_warning,
    tolerance,
    warning,
)
from retrain.run.dialogues import Watcher
from retrain.run.parts import Parts, load_parts, training_plan
from retrain.run.rollout import Sampler
from retrain.types import Group, Outcome, Row, Score

HOT: dict[str, Any] = {"temperature": 1.5, "batch_size": 8, "group_size": 8, "max_tokens": 40}
"""At which a token tells seven times as much as at temperature 1."""
CONFIG = small(Path("nowhere"), training=HOT)
USUAL = CONFIG.inference
MOST = USUAL.model_copy(update={"calibration_completions": MAX_TESTED})


def logits_of(rows: int, vocabulary: int) -> tuple[Head, torch.Tensor]:
    """A head that hands random hidden states on as logits."""
    random = torch.Generator().manual_seed(rows)
    hidden = 3 * torch.randn(rows, vocabulary, generator=random)
    hidden[0] *= 20  # nearly certain
    return Head(torch.eye(vocabulary)), hidden


@pytest.mark.parametrize("truncation", [Truncation(), Truncation(top_k=5, top_p=0.9, min_p=0.01)])
def test_the_scores_are_those_of_their_definition(truncation: Truncation) -> None:
    head, hidden = logits_of(40, 12)
    z = hidden.double() / 0.8
    targets = z.argmax(-1)
    if truncation.active:
        below = z < z.topk(truncation.top_k).values[:, -1:]
        z = z.masked_fill(below, -torch.inf)
        p = z.softmax(-1)
        order = p.sort(descending=True)
        cut = order.values.cumsum(-1) - order.values >= truncation.top_p
        cut |= order.values < truncation.min_p * order.values[:, :1]
        z = z.masked_fill(torch.zeros_like(cut).scatter(-1, order.indices, cut), -torch.inf)
    scores = tempered_scores(head, hidden, targets, 0.8, 0.03, *astuple(truncation)).double()
    logp = z.log_softmax(-1)
    own, kept, p = logp.gather(-1, targets[:, None])[:, 0], logp.isfinite(), logp.exp()
    finite = torch.where(kept, logp, 0.0)
    mean = (p * finite).sum(-1)
    assert torch.allclose(scores[:, 0], mean - own, atol=1e-5)
    assert torch.allclose(scores[:, 1], (p * (finite - mean[:, None]).square()).sum(-1), atol=1e-4)

    def tempered(tilt: float) -> torch.Tensor:
        return ((1 - tilt) * logp).log_softmax(-1).gather(-1, targets[:, None])[:, 0]

    for column, (sign, distance) in enumerate(
        [(sign, distance) for sign in (1, -1) for distance in DISTANCES]
    ):
        expected = tempered(sign * (0.03 + distance)) - tempered(sign * 0.03)
        assert torch.allclose(scores[:, 2 + column], expected, atol=2e-5)
    below = (p * (torch.arange(12) < targets[:, None])).sum(-1)
    assert torch.allclose(scores[:, -2], below + own.exp() / 2 - 0.5, atol=1e-6)
    assert torch.allclose(scores[:, -1], (1 - p.pow(3).sum(-1)) / 12, atol=1e-6)


def test_a_ratio_has_mean_one_at_the_tolerance_and_less_within_it() -> None:
    """What the bound on false warnings rests on, without a random number: the mean over the whole
    vocabulary, of samplers at, within and beyond the tolerance.
    """
    head, hidden = logits_of(30, 12)
    z, every = hidden.repeat_interleave(12, 0), torch.arange(12).repeat(30)
    ratios = tempered_scores(head, z, every, 1.0, 0.03, 0, 1.0, 0.0)[:, 2:-2].double().exp()
    flatter = ratios[:, : len(DISTANCES)]
    means = {
        tilt: (((1 - tilt) * hidden.double()).softmax(-1).flatten()[:, None] * flatter)
        .view(30, 12, -1)
        .sum(1)
        for tilt in (-0.2, 0.0, 0.03, 0.2)
    }
    assert torch.allclose(means[0.03], torch.ones_like(means[0.03]), atol=1e-5)
    for inside in (-0.2, 0.0):
        assert (means[inside] < 1 + 1e-5).all() and (means[inside] < 0.9999).any()
    assert (means[0.2] > 1 - 1e-5).all() and (means[0.2] > 1.001).any()


def drawn(z: torch.Tensor, factor: float, random: torch.Generator) -> torch.Tensor:
    """[streams, T] tokens of logits [T, V], at `factor` times the temperature 1."""
    return torch.multinomial((z / factor).softmax(-1), 200, replacement=True, generator=random).T


def test_streams_from_fixed_logits_keep_the_rate_of_false_warnings() -> None:
    """200 sound streams of 1,000 tokens, tested after every 50: none warns at 1 in 10,000, and no
    more than a tenth reach 10. `benchmarks/sampling_calibration.py` draws the many.
    """
    head, hidden = logits_of(1000, 12)
    random = torch.Generator().manual_seed(1)
    highest = {}
    for factor in (1.0, 0.8):
        tokens = drawn(hidden, factor, random)
        scores = np.stack(
            [tempered_scores(head, hidden, one, 1.0, 0.03, 0, 1.0, 0.0).numpy() for one in tokens]
        )
        evidence = np.full(len(tokens), -np.inf)
        for number, stream in enumerate(scores):
            total = Calibration()
            for part in np.split(stream, 20):
                step = Calibration.of([], [part])
                assert step is not None
                total = total.after(step)
                evidence[number] = max(evidence[number], total.evidence)
            assert total.tokens == 1000 and total.warned == (evidence[number] >= WARNED_FROM)
        highest[factor] = evidence
    assert (highest[1.0] >= 1.0).mean() <= 0.1 and highest[1.0].max() < WARNED_FROM
    assert (highest[0.8] >= WARNED_FROM).mean() > 0.7


@pytest.fixture(scope="module")
def parts() -> Iterator[Parts]:
    with closing(load_parts(CONFIG, None, lambda line: None)) as loaded:
        yield loaded


def rollout_of(parts: Parts, engine: str, step: int) -> list[Group]:
    """The first draws of a step by a double of faulty_engines; "" is the backend's own engine."""
    backend: Any = parts.backend
    sampler = backend.engine
    if engine:
        make = getattr(faulty_engines, engine)
        model, eos_ids = backend._adapter.peft_model, parts.text.eos_ids
        sampler = make(CONFIG, model=model, eos_ids=eos_ids, device="cpu")
    drawn = Sampler(sampler, parts.sampler.scorer, parts.sampler.text)
    watcher = Watcher(check=lambda: None, completion=lambda _: None)
    batch = parts.prompts.batch(8 * step, 8, 0)
    return drawn.draw(batch, step, training_plan(CONFIG.training), watcher).first_draws


def calibration_of(parts: Parts, engine: str, steps: int) -> Calibration:
    total = Calibration()
    for step in range(steps):
        rows = paired_rows(rollout_of(parts, engine, step), MOST, 0, step)
        scores = parts.backend.tempered_scores(rows, 1.5, Truncation(), TOLERANCE)
        assert scores is not None
        found = Calibration.of(rows, scores)
        assert found is not None
        total = total.after(found)
    return total


def test_a_sound_engine_is_within_the_tolerance(parts: Parts) -> None:
    total = calibration_of(parts, "", 3)
    assert total.effect is not None and abs(total.effect) < TOLERANCE
    assert total.evidence < 0 and not total.warned and total.tokens > 3000
    assert max(map(abs, total.shared)) < 3 and not total.shares


@pytest.mark.parametrize(
    ("fault", "steps", "flat"),
    [
        pytest.param("Colder", 6, False, marks=pytest.mark.slow),
        ("HidesTopP", 2, False),
        ("Penalises", 2, True),
    ],
)
def test_a_faulty_sampler_is_found_with_its_side(
    fault: str, steps: int, flat: bool, parts: Parts
) -> None:
    total = calibration_of(parts, fault, steps)
    assert total.warned and total.is_flat is flat
    assert total.effect is not None and (total.effect > TOLERANCE) is flat
    told = warning(3, total, total, TOLERANCE, 1.5)
    assert ("are flatter" in told) is flat and ("are sharper" in told) is not flat
    assert "since the start as if" in told
    # A step of few completions may lie on the other side by chance.
    step = replace(total, surprise=-total.surprise)
    assert warning(3, step, total, TOLERANCE, 1.5).partition(" (calib")[0] in told


@pytest.mark.parametrize(("fault", "which"), [("OneSeed", 0), ("RepeatsNoise", 1)])
def test_noise_that_completions_share_is_found(fault: str, which: int, parts: Parts) -> None:
    total = calibration_of(parts, fault, 1)
    assert total.shares and not total.warned
    assert total.shared[which] > SHARED_FROM > total.shared[1 - which]
    told = shared_warning(3, total)
    assert ("of one number in different prompts" in told) is (which == 1)


def test_two_improbable_tokens_at_one_place_are_no_shared_noise() -> None:
    """Of a step whose other tokens are nearly certain: the deviation of the products is 0.003."""
    scores = [np.zeros((50, 14), np.float32) for _ in range(2)]
    for one in scores:
        one[:, -1] = 5e-4
        one[7, -2] = 0.49
    rows = [
        Row(np.arange(51, dtype=np.int32), ((1, 51),), *np.zeros((2, 50), np.float32), 0, sample)
        for sample in range(2)
    ]
    step = Calibration.of(rows, scores)
    assert step is not None and step.products[0] > 60 * step.products[1] ** 0.5 > 0
    total = Calibration().after(step)
    assert not total.shares and 0 < total.shared[0] < 1


def test_a_fault_that_begins_late_is_found(parts: Parts) -> None:
    """A server that comes back with other defaults, after many sound steps."""
    sound, other = (
        Calibration.of([], [np.random.default_rng(0).normal(mean, 0.01, (1, 14))])
        for mean in (-2.0, 4.0)
    )
    assert sound is not None and other is not None
    total = Calibration()
    for _ in range(300):
        total = total.after(sound)
    assert -6 < total.evidence < 0 and not total.warned
    for _ in range(8):
        total = total.after(other)
    assert total.warned


def test_what_is_tested_is_chosen_before_any_reward_is_known(parts: Parts) -> None:
    groups = rollout_of(parts, "", 0)
    many = [replace(group, slot=8 * copy + group.slot) for copy in range(3) for group in groups]
    unjudged = Score(Outcome.COULD_NOT_JUDGE, None)
    others = [
        replace(group, members=[replace(member, score=unjudged) for member in group.members])
        for group in many
    ]
    for inference, count in ((MOST, MAX_TESTED), (USUAL, AT_ONCE)):
        rows = paired_rows(many, inference, 0, 1)
        assert len(rows) == count < sum(map(len, many))
        assert [row.key for row in paired_rows(others, inference, 0, 1)] == [
            row.key for row in rows
        ]
        assert [row.key for row in paired_rows(many, inference, 0, 3)] != [row.key for row in rows]


@pytest.mark.parametrize("drawn", [1, 8, 16, 100, 128, 1000])
def test_one_completion_of_32_is_tested_and_none_is_left_out_for_good(drawn: int) -> None:
    counts = [how_many(USUAL, drawn, step) for step in range(1280)]
    assert counts[0] >= AT_ONCE and set(counts) <= {*range(0, MAX_TESTED + 1, AT_ONCE)}
    assert sum(counts) == pytest.approx(1280 * drawn / ONE_IN, abs=AT_ONCE)
    assert max(counts) - min(counts) <= AT_ONCE


def test_more_are_tested_where_they_are_asked_for_and_64_at_most() -> None:
    assert how_many(USUAL, 10**6, 5) == MAX_TESTED
    few = USUAL.model_copy(update={"calibration_completions": 3})
    assert [how_many(few, drawn, 5) for drawn in (8, 10**6)] == [3, 3]
    for wrong in (0, 65):
        with pytest.raises(ConfigurationError, match=r"\[inference\] calibration_completions"):
            small(Path("nowhere"), inference={"calibration_completions": wrong})


def test_each_completion_is_as_likely_and_four_hold_pairs_of_both_kinds() -> None:
    slots, samples = np.divmod(np.arange(30), 5)
    taken = np.zeros(30)
    for step in range(600):
        four = pairs_first(slots, samples, 0, step)[:AT_ONCE]
        assert len(set(slots[four])) == len(set(samples[four])) == 2
        taken[four] += 1
    # 80 expected of each, give or take 9
    assert taken.min() > 40 and taken.max() < 120
    assert sorted(pairs_first(slots, samples, 0, 0)) == list(range(30))


@pytest.mark.slow
def test_a_run_records_it_warns_once_and_is_the_same_to_the_byte(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of an engine that cuts more than it is asked for. Its log-probs, which are those of what it
    draws from, are another check's.
    """
    inference = {"engine": "faulty_engines.AnotherTopP", "mismatch_limit": 0.0}
    for name in ("on", "off"):
        more: dict[str, Any] = {}
        if name == "on":
            more = {"calibration": True, "calibration_completions": MAX_TESTED}
        training = HOT | {"max_steps": 2}
        small_run(small(tmp_path / name, inference=inference | more, training=training))
    said = capsys.readouterr().out
    assert said.count("does not sample from the trained policy") == 1
    assert "up to 64 completions of each step are scored once more" in said
    first, second = lines(tmp_path / "on/metrics.jsonl")
    assert second["calibration_evidence"] > max(WARNED_FROM, first["calibration_evidence"])
    assert second["calibration_tokens"] > first["calibration_tokens"]
    assert second["calibration_lambda"] < -TOLERANCE > second["calibration_lambda_total"]
    assert lines(tmp_path / "off/metrics.jsonl")[1]["calibration_tokens"] is None
    for file in ("checkpoints/final/adapter_model.safetensors", "emergence/generations.jsonl"):
        assert (tmp_path / "on" / file).read_bytes() == (tmp_path / "off" / file).read_bytes()


def test_the_tolerance_is_wide_where_rounding_is_not_known() -> None:
    plain = small(Path("nowhere")).inference
    assert tolerance(plain, 0.7, in_process=True) == TOLERANCE
    assert tolerance(plain, 0.69, in_process=True) == WIDE_TOLERANCE
    assert tolerance(plain, 1.0, in_process=False) == WIDE_TOLERANCE
    eight = small(Path("nowhere"), inference={"kv_cache_dtype": "int8"}).inference
    assert tolerance(eight, 1.0, in_process=True) == WIDE_TOLERANCE
    half = small(Path("nowhere"), inference={"dtype": "bf16"}).inference
    assert tolerance(half, 1.0, in_process=True) == TOLERANCE
