"""Teachers of `[algorithm] teacher`: their log-probs against an independent forward in float64,
what distilling optimizes, and what is refused.
"""

import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from retrain.advantages.pipeline import CreditPipeline
from retrain.advantages.step import Segments, StepTokens
from retrain.backends.local.backend import LocalBackend
from retrain.config import TrainConfig, config_from_mapping, dump_toml, replaced
from retrain.data.chat import encode_texts
from retrain.errors import ConfigurationError, RunFailed
from retrain.run import teacher as teachers
from retrain.run.dialogues import Watcher
from retrain.run.parts import RunParts, load_parts, load_prompts, load_text, training_plan
from retrain.run.rollout import Rollout
from retrain.types import Example, Group, Row
from tests.commands import Ranks
from tests.marks import first_of
from tests.runs import lines, small, small_run, timeless
from tests.split import two_devices

GUESSING: dict[str, Any] = {
    "environment": {
        "provider": "retrain.environments.lab.NumberGuessing",
        "args": {"largest": 10, "turns": 3},
    },
    "training": {"max_tokens": 72},
}


def distilling(folder: Path, reference: str = "base", **sections: dict[str, Any]) -> TrainConfig:
    modes = {"algorithm_mode": "distill", "reference": reference}
    return small(folder, **{**sections, "algorithm": {**modes, **sections.get("algorithm", {})}})


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an adapter that differs from the base at every layer."""
    folder = tmp_path_factory.mktemp("teacher")
    backend = LocalBackend(small(folder / "run"))
    with backend.trial_adapter(7) as trial:
        trial.set(0.3)
        backend.save_adapter(folder / "adapter")
    backend.close()
    return folder / "adapter"


def quiet(_: str) -> None:
    """Say nothing."""


def drawn(parts: RunParts, config: TrainConfig) -> Rollout:
    """The first step of a run, sampled."""
    engine = parts.backend.engine
    engine.sync(parts.backend.save_adapter, 0)
    prompts = parts.prompts.batch(0, config.training.batch_size, config.training.seed)
    watcher = Watcher(lambda: None, lambda _: None)
    return parts.sampler.draw(prompts, 0, training_plan(config.training), watcher)


def in_float64(backend: LocalBackend, rows: Sequence[Row], temperature: float) -> list[float]:
    """Log-probs of the rows' actions by the adapted model as it stands, one row at a time."""
    model: Any = backend._weights.peft_model.double()
    found: list[float] = []
    for row in rows:
        ids = torch.from_numpy(row.token_ids.astype(np.int64))[None]
        with torch.no_grad():
            logits = model(input_ids=ids, use_cache=False).logits[0] / temperature
        distribution = torch.log_softmax(logits, -1)
        found += [
            float(distribution[place - 1, int(row.token_ids[place])])
            for place in row.action_positions()
        ]
    return found


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "micro-batches": {"training": {"micro_batch_tokens": 64}},
    "truncated": {"training": {"top_p": 0.9, "temperature": 1.3}},
    "turns": GUESSING,
}


@pytest.mark.parametrize("reference", ["base", "gold", "adapter"])
@pytest.mark.parametrize("settings", SETTINGS)
def test_log_probs_are_those_of_an_independent_forward(
    reference: str, settings: str, trained: Path, tmp_path: Path
) -> None:
    named = str(trained) if reference == "adapter" else reference
    config = distilling(tmp_path, named, **SETTINGS[settings])
    parts = load_parts(config, None, quiet)
    backend = parts.backend
    assert isinstance(backend, LocalBackend) and parts.teacher
    with backend.trial_adapter(11) as trial:  # the policy is no longer the base
        trial.set(0.2)
        groups = drawn(parts, config).usable_groups
        ours = parts.teacher.logprobs(groups)
        if reference == "gold":  # the policy itself
            told = [parts.teacher._rows(group, number) for number, group in enumerate(groups)]
            rows = [row for rows in told for row in rows]
            theirs = in_float64(backend, rows, config.training.temperature)
    if reference != "gold":
        rows = [row for group in groups for row in rows_of(group)]
        if reference == "adapter":
            backend._weights.load(trained)
        theirs = in_float64(backend, rows, config.training.temperature)
    parts.close()
    assert len(ours) == sum(one.num_actions for group in groups for one in group.trajectories) > 50
    assert np.abs(ours - theirs).max() < 2e-4


def rows_of(group: Group) -> list[Row]:
    zeros = [np.zeros(one.num_actions, np.float32) for one in group.trajectories]
    pairs = zip(group.trajectories, zeros, strict=True)
    return [row for one, zero in pairs for row in Row.of(group.prompt, one, zero, 0)]


@pytest.mark.parametrize("settings", ["plain", "turns"])
def test_the_answer_stands_in_the_prompt_and_the_sampled_tokens_stay(
    settings: str, tmp_path: Path
) -> None:
    hint = {"teacher_prompt": "{prompt} [{answer}] {prompt}"}
    config = distilling(tmp_path, "gold", **{**SETTINGS[settings], "algorithm": hint})
    parts = load_parts(config, None, quiet)
    assert parts.teacher
    for group in drawn(parts, config).usable_groups:
        given, told = rows_of(group), list(parts.teacher._rows(group, 0))
        question = group.prompt.messages[-1]["content"]
        for before, after in zip(given, told, strict=True):
            own, new = before.spans[0][0], after.spans[0][0]
            assert (before.token_ids[own:] == after.token_ids[new:]).all()
            lengths = ([stop - start for start, stop in one.spans] for one in (before, after))
            assert next(lengths) == next(lengths)
            text = parts.text.decode(after.token_ids[:new])
            wanted = f"{question} [{group.prompt.example.reference}] {question}"
            assert text == parts.text.decode(before.token_ids[:own]).replace(question, wanted)
    parts.close()


def test_a_reply_that_repeats_the_question_is_not_given_the_answer(tmp_path: Path) -> None:
    """A turn that restarts has the replies before it ahead of its first action."""
    config = distilling(tmp_path, "gold")
    text = load_text(config.model, quiet)
    prompt = load_prompts(config, text, None, quiet).prompts[0]
    question = prompt.messages[-1]["content"]
    given = f"{prompt.text}{question}7"
    ids = encode_texts(text.tokenizer, [given])[0]
    action, nothing = np.append(ids, ids[-1:]), np.zeros(1, np.float32)
    row = Row(action, ((len(ids), len(ids) + 1),), nothing, nothing, 0)
    backend: Any = None
    told = teachers.Teacher(config.algorithm, text, backend)._with_answer(row, prompt)
    hint = f"{question}\n\nThe correct answer is {prompt.example.reference}."
    assert text.decode(told.token_ids[: told.spans[0][0]]) == given.replace(question, hint, 1)


def test_a_teacher_leaves_the_policy_as_it_was(trained: Path, tmp_path: Path) -> None:
    config = distilling(tmp_path, str(trained))
    parts = load_parts(config, None, quiet)
    groups = drawn(parts, config).usable_groups
    parts.backend.save_adapter(tmp_path / "before")
    assert parts.teacher
    parts.teacher.logprobs(groups)
    parts.backend.save_adapter(tmp_path / "after")
    parts.close()
    files = (tmp_path / when / "adapter_model.safetensors" for when in ("before", "after"))
    assert len({file.read_bytes() for file in files}) == 1


# -- distilling ------------------------------------------------------------------------------------


def step_of(policy: torch.Tensor, tokens: Sequence[int], teacher: torch.Tensor) -> StepTokens:
    """Completions of one token each, of one group."""
    place = torch.tensor(tokens)
    return StepTokens(
        rewards=[[float(token % 2) for token in tokens]],
        segments=Segments([1] * len(tokens)),
        logprobs=policy[place].detach().numpy(),
        entropies=None,
        planning=np.zeros(len(tokens), np.bool_),
        in_loss=np.ones(len(tokens), np.bool_),
        teacher=teacher[place].numpy,
    )


def credit(**algorithm: Any) -> CreditPipeline:
    config = config_from_mapping({"algorithm": {"reference": "base", **algorithm}})
    return CreditPipeline(config, lambda ids: [""] * len(ids))


def test_distilling_follows_the_gradient_of_the_reverse_kl_divergence() -> None:
    """Expected over all tokens of a distribution, A grad log p is -grad KL(policy || teacher)."""
    torch.manual_seed(0)
    logits = torch.randn(17, dtype=torch.float64, requires_grad=True)
    teacher = torch.log_softmax(torch.randn(17, dtype=torch.float64), -1)
    policy = torch.log_softmax(logits, -1)
    tokens = range(17)
    found = credit(algorithm_mode="distill").compute(step_of(policy, tokens, teacher), 0, 0.0).final
    chance = policy.exp().detach()
    gain = (chance * torch.from_numpy(found) * policy).sum()
    (ours,) = torch.autograd.grad(gain, logits, retain_graph=True)
    divergence = (policy.exp() * (policy - teacher)).sum()
    (theirs,) = torch.autograd.grad(-divergence, logits)
    assert torch.allclose(ours, theirs, atol=1e-14)


def test_the_log_ratio_is_added_to_an_advantage_with_its_weight() -> None:
    policy, teacher = (torch.log_softmax(torch.arange(6.0) * slope, -1) for slope in (0.1, -0.3))
    step = step_of(policy, range(6), teacher)
    pure = credit(algorithm_mode="distill").compute(step, 0, 0.0)
    both = credit(advantage_mode="grpo", transform_mode="distill", teacher_coef=0.25)
    assigned = both.compute(step, 0, 0.0)
    assert pure.final == pytest.approx((teacher - policy).numpy())
    assert assigned.final == pytest.approx(assigned.stages["episode"] + 0.25 * pure.final)
    assert pure.informative.all()


def test_the_trained_gradient_is_that_of_the_reverse_kl_estimate(
    trained: Path, tmp_path: Path
) -> None:
    """One step of a run against autograd through float64 logits: the mean over tokens of
    (log p_teacher - log p) grad log p.
    """
    config = distilling(tmp_path, str(trained), training={"lr": 0.0, "batch_size": 1})
    parts = load_parts(config, None, quiet)
    backend = parts.backend
    assert isinstance(backend, LocalBackend) and parts.teacher
    groups = drawn(parts, config).usable_groups
    rows = parts.credit.assign(groups, 0, 0.0, parts.teacher.logprobs).rows()
    backend.train(rows, 0)
    ours = torch.cat([gradient.flatten() for gradient in backend._learner.optimizer.gradients()])
    own = {name: value.detach().clone() for name, value in backend._weights.parameters.items()}
    backend._weights.load(trained)
    teacher = torch.tensor(in_float64(backend, rows, 1.0), dtype=torch.float64)
    backend._weights.set(own)
    backend._learner.optimizer.zero_gradients()
    model: Any = backend._weights.peft_model
    logprobs = []
    for row in rows:
        ids = torch.from_numpy(row.token_ids.astype(np.int64))[None]
        distribution = torch.log_softmax(model(input_ids=ids, use_cache=False).logits[0], -1)
        logprobs += [
            distribution[place - 1, int(row.token_ids[place])] for place in row.action_positions()
        ]
    policy = torch.stack(logprobs)
    loss = -((teacher - policy.detach()) * policy).mean()
    parameters = list(backend._weights.parameters.values())
    theirs = torch.cat([part.flatten() for part in torch.autograd.grad(loss, parameters)])
    parts.close()
    assert float((ours - theirs).norm() / theirs.norm()) < 1e-4


# -- a run -----------------------------------------------------------------------------------------


def test_in_split_mode_the_learner_teaches(trained: Path, tmp_path: Path) -> None:
    """With a checkpoint at every step it is the run on one device."""
    sections: dict[str, Any] = {"training": {"max_steps": 2, "save_every": 1}}
    single = small_run(distilling(tmp_path / "single", str(trained), **sections), quiet=True)
    sections["backend"] = {"devices": "gpu:0,gpu:1"}
    with two_devices():
        split = small_run(distilling(tmp_path / "split", str(trained), **sections), quiet=True)
    assert timeless(single.folder / "metrics.jsonl") == timeless(split.folder / "metrics.jsonl")


@pytest.mark.slow
@pytest.mark.parametrize("reference", ["gold", "adapter"])
def test_two_processes_are_taught_as_one(reference: str, trained: Path, tmp_path: Path) -> None:
    """Each scores its own completions; the first step, before sums differ in their last bits, has
    the same samples and the same loss.
    """
    teacher = str(trained) if reference == "adapter" else reference
    sections: dict[str, Any] = {"training": {"max_steps": 2}}
    alone = small_run(distilling(tmp_path / "alone", teacher, **sections), quiet=True)
    file, shared = tmp_path / "shared.toml", tmp_path / "shared"
    file.write_text(dump_toml(distilling(shared, teacher, **sections)), encoding="utf-8")
    ranks = Ranks([sys.executable, "-m", "retrain", str(file), "--skip-parity"])
    output, codes = ranks.communicate(timeout=240)
    assert codes == [0, 0], output
    one, two = (lines(folder / "metrics.jsonl") for folder in (alone.folder, shared))
    assert len(one) == len(two) == 2
    assert two[0]["loss"] == pytest.approx(one[0]["loss"], rel=1e-4)
    assert two[0]["grad_norm"] == pytest.approx(one[0]["grad_norm"], rel=1e-3)


@pytest.mark.parametrize("settings", ["plain", pytest.param("turns", marks=pytest.mark.slow)])
def test_a_distilling_run_resumes_byte_for_byte(settings: str, tmp_path: Path) -> None:
    sections = SETTINGS[settings]
    straight = small_run(distilling(tmp_path / "straight", "gold", **sections), quiet=True)
    cut = distilling(tmp_path / "cut", "gold", **sections)
    small_run(replaced(cut, {"training.max_steps": 2}), quiet=True)
    small_run(replaced(cut, {"resume.from": str(tmp_path / "cut")}), quiet=True)
    assert timeless(straight.folder / "metrics.jsonl") == timeless(tmp_path / "cut/metrics.jsonl")
    for folder in (straight.folder, tmp_path / "cut"):
        assert all(line["informative_fraction"] == 1 for line in lines(folder / "metrics.jsonl"))
    weights = "checkpoints/final/adapter_model.safetensors"
    assert (straight.folder / weights).read_bytes() == (tmp_path / "cut" / weights).read_bytes()


READERS = """
def reads(ctx):
    for own, theirs in zip(ctx.token_ids, ctx.reference_logprobs):
        assert len(own) == len(theirs) and max(theirs) <= 0
    return [0.0] * len(ctx.rewards)

def blind(ctx):
    return [0.0] * len(ctx.rewards)

def transform(ctx):
    from retrain.advantages import TransformOutput
    gaps = [[t - p for t, p in zip(*row)] for row in zip(ctx.reference_logprobs, ctx.logprobs)]
    return TransformOutput(gaps)

def algorithm(ctx):
    from retrain.advantages import AlgorithmOutput
    assert [group.reference_logprobs for group in ctx.groups] == ctx.reference_logprobs
    return AlgorithmOutput([
        [[t - p for t, p in zip(*row)] for row in zip(*group)]
        for group in zip(ctx.reference_logprobs, ctx.logprobs)
    ])
"""


@pytest.fixture
def readers(here: Path) -> None:
    (here / "readers.py").write_text(READERS)


STAGES = [
    ({"advantage_mode": "readers.blind"}, 0),
    ({"advantage_mode": "none", "transform_mode": "readers.transform"}, 1),
    ({"advantage_mode": "readers.reads"}, 1),
    ({"algorithm_mode": "readers.algorithm"}, 1),
]


@pytest.mark.usefixtures("readers")
@pytest.mark.parametrize(("modes", "calls"), first_of(STAGES, quick=2), ids=str)
def test_a_step_is_scored_once_and_only_where_a_stage_reads_it(
    modes: dict[str, str], calls: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = 0
    real = LocalBackend.reference_logprobs

    def counted(self: LocalBackend, rows: Sequence[Row]) -> Any:
        nonlocal count
        count += 1
        return real(self, rows)

    monkeypatch.setattr(LocalBackend, "reference_logprobs", counted)
    algorithm = {"reference": "gold", **modes}
    sections = {"training": {"max_steps": 2}, "algorithm": algorithm}
    one = small_run(small(tmp_path / "run", **sections), quiet=True)
    assert count == 2 * calls
    if modes.get("transform_mode") or modes.get("algorithm_mode"):
        built_in = distilling(tmp_path / "built_in", "gold", training={"max_steps": 2})
        other = small_run(built_in, quiet=True)
        weights = "checkpoints/final/adapter_model.safetensors"
        assert (one.folder / weights).read_bytes() == (other.folder / weights).read_bytes()


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.usefixtures("readers")
@pytest.mark.parametrize("modes", [modes for modes, calls in STAGES if calls], ids=str)
def test_a_plugin_that_reads_a_teacher_where_there_is_none_is_named(modes: dict[str, str]) -> None:
    with pytest.raises(ConfigurationError, match=r"readers.*has no teacher .*; set .* teacher"):
        CreditPipeline(config_from_mapping({"algorithm": modes}), lambda ids: [""] * len(ids))


def settings_of(folder: Path, trained: Path, **changes: Any) -> Path:
    """A copy of the teacher whose settings differ."""
    shutil.copytree(trained, folder)
    file = folder / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    return folder


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"base_model_name_or_path": "a/b"}, "= a/b, and .model. model gives lab"),
        ({"r": 8}, "has r = 8, and .model. lora_rank gives 4"),
        ({"lora_alpha": 32}, "has lora_alpha = 32, and .lora. alpha gives 8"),
        ({"use_rslora": True}, "has use_rslora = True, and .lora. use_rslora gives False"),
    ],
)
def test_an_adapter_that_cannot_teach_is_refused_before_the_model_is_loaded(
    changes: dict[str, Any], sentence: str, trained: Path, tmp_path: Path
) -> None:
    folder = settings_of(tmp_path / "other", trained, **changes)
    with pytest.raises(ConfigurationError, match=sentence):
        teachers.check_teacher(distilling(tmp_path, str(folder)))


def test_a_base_in_the_current_folder_is_the_same_from_any_other(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = tmp_path / "base"
    base.mkdir()
    folder = settings_of(tmp_path / "other", trained, base_model_name_or_path=str(base))
    monkeypatch.chdir(tmp_path)
    teachers.check_teacher(distilling(tmp_path, str(folder), model={"model": "./base"}))


def test_the_weights_of_another_shape_are_refused_too(trained: Path, tmp_path: Path) -> None:
    folder = settings_of(tmp_path / "other", trained, r=2, lora_alpha=4)
    config = distilling(tmp_path / "run", str(folder), model={"lora_rank": 2})
    with pytest.raises(ConfigurationError, match=r"\[algorithm\] teacher = .* does not fit"):
        small_run(config, quiet=True)


def test_a_problem_without_an_answer_has_no_gold_teacher(tmp_path: Path) -> None:
    examples = [Example("1+1=?", "2", example_id="one"), Example("1+2=?", "", example_id="two")]
    check = teachers.check_answers
    with pytest.raises(ConfigurationError, match="answer of every problem, and two has none"):
        check(distilling(tmp_path, "gold"), examples)
    check(distilling(tmp_path, "base"), examples)


def test_a_prompt_that_grows_past_the_context_is_a_sentence(tmp_path: Path) -> None:
    long = {"teacher_prompt": "{prompt} {answer}" + 9999 * "1 "}
    config = distilling(tmp_path, "gold", algorithm=long)
    parts = load_parts(config, None, quiet)
    groups = drawn(parts, config).usable_groups
    assert parts.teacher
    with pytest.raises(RunFailed, match=r"lower .training. max_tokens, or shorten teacher_prompt"):
        parts.teacher.logprobs(groups)
    parts.close()
