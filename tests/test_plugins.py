"""Plugins of every kind: how they are found, what is checked, and the sentence that each mistake
gets.
"""

import itertools
import json
import re
import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from retrain import plugins
from retrain.advantages.pipeline import CreditPipeline
from retrain.config import TrainConfig, load_config
from retrain.errors import ConfigurationError, RunFailed
from retrain.plugins import inspect_call, load_plugin
from retrain.types import (
    Completion,
    Example,
    FinishReason,
    Group,
    Outcome,
    Prompt,
    Score,
    Scored,
    Trajectory,
)

_numbers = itertools.count()
Write = Callable[..., str]


@pytest.fixture
def write(here: Path) -> Write:
    """Writes a module into the current folder and returns its name, new each time, because Python
    caches modules by name.
    """

    def module(source: str, folder: str = ".", name: str = "") -> str:
        name = name or f"plugin_under_test_{next(_numbers)}"
        (here / folder).mkdir(exist_ok=True)
        (here / folder / f"{name}.py").write_text(source)
        return name

    return module


def config(strict: bool = True, **algorithm: object) -> TrainConfig:
    return TrainConfig.model_validate(
        {"algorithm": {"transform_mode": "none", **algorithm}, "plugins": {"strict": strict}}
    )


def step() -> list[Group]:
    def scored(sample: int, logprobs: list[float], score: Score) -> Scored:
        ids = np.arange(len(logprobs), dtype=np.int32)
        stop = FinishReason.STOP
        completion = Completion(0, sample, ids, np.float32(logprobs), None, stop)
        return Scored(Trajectory.of(completion), "", score)

    prompt = Prompt(Example("q", "a"), "q", np.array([1], np.int32))
    right, wrong = Score(Outcome.RIGHT, 1.0), Score(Outcome.WRONG, 0.0)
    return [Group(prompt, 0, [scored(0, [-0.5, -2.0, -0.25], right), scored(1, [-1.0], wrong)])]


def run(configuration: TrainConfig, lam: float = 0.5) -> list[list[float]]:
    """Token advantages of the one group of `step`, whose pieces are "let", " me", " think"."""
    pipeline = CreditPipeline(configuration, lambda ids: ["let", " me", " think"][: len(ids)])
    return [row.tolist() for row in pipeline.assign(step(), 2, lam).groups[0].token_advantages]


def refused(configuration: TrainConfig) -> str:
    with pytest.raises(ConfigurationError) as caught:
        CreditPipeline(configuration, lambda ids: [""] * len(ids))
    message = str(caught.value)
    assert "\n" not in message and message.endswith(".")
    return message


# -- advantages ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "source",
    [
        "def f(rewards): return [2 * r for r in rewards]",
        "def f(rewards, params): return [2 * r for r in rewards]",
        "def f(rewards, *, params=None): return [2 * r for r in rewards]",
        "def f(r, **kwargs): return [2 * x for x in r]",
        "def f(ctx): return [2 * r for r in ctx.rewards]",
        "def f(group: AdvantageContext): return [2 * r for r in group.rewards]",
        "class F:\n    def __call__(self, rewards): return [2 * r for r in rewards]\nf = F()",
        "def f(rewards): return 2 * np.array(rewards)",
    ],
)
def test_every_signature_of_an_advantage_is_called(source: str, write: Write) -> None:
    source = f"import numpy as np\nfrom retrain.advantages import AdvantageContext\n{source}"
    assert run(config(advantage_mode=f"{write(source)}.f")) == [[2.0] * 3, [0.0]]


def test_parameters_reach_the_plain_form_and_the_context(write: Write) -> None:
    plain = write("def f(rewards, params):\n    return [params['scale'] * r for r in rewards]")
    context = write("def f(ctx):\n    return [ctx.params['scale'] * r for r in ctx.rewards]")
    for name in (plain, context):
        scaled = config(advantage_mode=f"{name}.f", advantage_params={"scale": 3.0})
        assert run(scaled) == [[3.0] * 3, [0.0]]


def test_parameters_that_a_function_cannot_take_are_an_error(write: Write) -> None:
    name = write("def f(rewards):\n    return rewards")
    message = refused(config(advantage_mode=f"{name}.f", advantage_params={"scale": 3.0}))
    assert "takes no params" in message and "scale" in message


@pytest.mark.parametrize(
    ("source", "named"),
    [
        (
            "def f(r): return [float(one == max(r)) for one in r]",
            "mean 1 where all rewards are 0, 1 where",
        ),
        ("def f(rewards): return rewards", "mean 1 where all rewards are 1"),
        (
            "import numpy as np\ndef f(r): r = np.float32(r); return (r - r.mean()) / (r.std() + 1e-3)",
            "",
        ),
        ("def f(ctx): return [0.0] * len(ctx.rewards)", ""),
    ],
)
def test_an_advantage_that_moves_a_group_of_equal_rewards_is_named_at_the_start(
    source: str, named: str, write: Write
) -> None:
    name = f"{write(source)}.f"
    notes = CreditPipeline(config(advantage_mode=name), lambda ids: [""] * len(ids)).notes
    assert len(notes) == bool(named) and all(named in note and name in note for note in notes)


def test_an_advantage_that_fails_on_equal_rewards_is_refused_before_the_run(write: Write) -> None:
    name = write("def f(rewards): return [r / (max(rewards) - min(rewards)) for r in rewards]")
    said = refused(config(advantage_mode=f"{name}.f"))
    assert "fails on a small example (ZeroDivisionError" in said


# -- transforms, uncertainty, algorithms -----------------------------------------------------------

SHIFT = """
from retrain.advantages import TransformSpec

def shift(entropies, planning_mask, sepa_lambda):
    return [e if m else e + sepa_lambda for e, m in zip(entropies, planning_mask)]

def make():
    return TransformSpec(name="entropy_shift", use_gtpo=True, needs_planning=True, uses_sepa_controller=True, entropy_transform=shift)

def make_params(params):
    return TransformSpec(name="scaled", post_process=lambda token_advs, ctx: [[params["k"] * a for a in row] for row in token_advs])
"""


def test_a_transform_factory_gives_a_spec_that_acts(write: Write) -> None:
    name = write(SHIFT)
    shifted = run(config(transform_mode=f"{name}.make", advantage_mode="grpo"), lam=1.0)
    # All three tokens are planning, one completion has none.
    assert shifted == run(config(transform_mode="gtpo", advantage_mode="grpo"))
    scaled = {"transform_mode": f"{name}.make_params", "transform_params": {"k": 4.0}}
    assert run(config(**scaled, advantage_mode="grpo")) == [[2.0] * 3, [-2.0]]


def test_a_transform_of_the_context_gives_token_advantages(write: Write) -> None:
    name = write(
        "from retrain.advantages import TransformOutput\ndef f(ctx):\n    return"
        " TransformOutput(token_advs=[[a * (1 + m) + ctx.sepa_lambda for m in row]\n               "
        "                        for a, row in zip(ctx.advantages, ctx.planning_mask)])"
    )
    assert run(config(transform_mode=f"{name}.f", advantage_mode="grpo")) == [[1.5] * 3, [0.0]]


def test_an_uncertainty_plugin_weighs_tokens(write: Write) -> None:
    name = write(
        "def f(logprobs):\n    return [0.0] * (len(logprobs) - 1) + [float(len(logprobs))]\ndef"
        " g(ctx):\n    return f(ctx.logprobs)"
    )
    for function in ("f", "g"):
        kind = {"uncertainty_kind": f"{name}.{function}"}
        for keys in (kind, {"transform_params": kind}):
            found = run(config(transform_mode="gtpo", advantage_mode="grpo", **keys))
            assert found[0] == pytest.approx([0.45, 0.45, 0.6])


def test_an_algorithm_plugin_assigns_the_whole_step(write: Write) -> None:
    name = write(
        "from retrain.advantages import AlgorithmOutput\ndef f(ctx):\n    return"
        " AlgorithmOutput(token_advs=[[[r + ctx.params['b']] * len(lp) for r, lp in zip(rs, lps)]\n"
        "                                       for rs, lps in zip(ctx.rewards, ctx.logprobs)])"
    )
    assert run(config(algorithm_mode=f"{name}.f", params={"b": 1.0})) == [[2.0] * 3, [1.0]]
    masked = run(config(algorithm_mode=f"{name}.f", params={"b": 1.0}, surprisal_mask_rho=0.25))
    assert masked == [[0.0, 2.0, 0.0], [0.0]]


# -- the shape of results --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("return rewards[1:]", "it must give 3 numbers"),
        ("return 1.0", "it must give 3 numbers"),
        ("return None", "list of 3 numbers|3 numbers"),
        ("return [float('nan')] * len(rewards)", "finite"),
        ("return ['a'] * len(rewards)", "list of 3 numbers"),
        ("raise KeyError('scale')", "KeyError"),
    ],
)
def test_a_failed_probe_is_an_error_or_with_strict_off_a_warning(
    body: str, problem: str, write: Write
) -> None:
    name = write(f"def f(rewards):\n    {body}")
    assert re.search(problem, refused(config(advantage_mode=f"{name}.f")))
    warns = config(strict=False, advantage_mode=f"{name}.f")
    lenient = CreditPipeline(warns, lambda ids: [""] * len(ids))
    assert len(lenient.notes) == 1 and re.search(problem, lenient.notes[0])
    with pytest.raises(RunFailed, match="group 0"):
        lenient.assign(step(), 0, 0.0)


def test_a_plugin_that_breaks_later_stops_the_run_naming_the_group(write: Write) -> None:
    raises = "if ctx.step == 2: raise ValueError('step two')"
    name = write(f"def f(ctx):\n    {raises}\n    return ctx.rewards")
    with pytest.raises(RunFailed, match=r"_\d+\.f\" on group 0 failed with ValueError: step two\."):
        run(config(advantage_mode=f"{name}.f"))


def test_a_wrong_length_names_group_and_completion(write: Write) -> None:
    name = write(
        "def f(logprobs):\n    return logprobs[:2] if len(logprobs) == 3 and logprobs[0] == -0.5"
        " else [1.0] * len(logprobs)"
    )
    with pytest.raises(RunFailed, match="group 0, completion 0: uncertainty"):
        run(config(transform_mode="gtpo", uncertainty_kind=f"{name}.f"))


def test_a_factory_must_return_a_spec(write: Write) -> None:
    name = write("def f():\n    return 3")
    assert "returned int" in refused(config(transform_mode=f"{name}.f"))
    assert "returned int" in refused(config(strict=False, transform_mode=f"{name}.f"))


# -- finding ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("no_such.f", "tried plugins.no_such (no such module), no_such (no such module)"),
        ("{broken}.f", "SyntaxError"),
        ("{raising}.f", "RuntimeError: on import"),
        ("{needy}.f", "ModuleNotFoundError: No module named 'a_missing_library'"),
        ("{good}.functoin", "has no functoin, but function"),
        ("{good}.NUMBER", "of type int, and must be a function"),
        ("{good}.three", "its signature is (a, b, c)"),
        ("{good}.keyword", "its signature is (rewards, needed)"),
        (
            "maxlr",
            "not known; it can be grpo, grpo_std, maxrl, none, reinforce, reinforce_pp, rloo",
        ),
    ],
)
def test_a_plugin_that_cannot_be_loaded_is_one_sentence_even_when_not_strict(
    path: str, told: str, write: Write
) -> None:
    modules = {
        "broken": write("def f(:"),
        "raising": write("raise RuntimeError('on import')"),
        "needy": write("import a_missing_library"),
        "good": write(
            "NUMBER = 3\ndef function(rewards): return rewards\ndef three(a, b, c): ...\ndef"
            " keyword(rewards, *, needed): ..."
        ),
    }
    name = path.format(**modules)
    for strict in (True, False):
        with pytest.raises(ConfigurationError) as caught:
            load_plugin("advantage", name, config(strict), plugins_builtins())
        message = str(caught.value)
        assert told in message and f'[algorithm] advantage_mode = "{name}"' in message
        assert "\n" not in message and message.endswith((".", "?"))


def plugins_builtins() -> dict[str, Any]:
    from retrain.advantages.episode import ADVANTAGES

    return dict(ADVANTAGES)


def test_search_paths_come_before_plain_imports(write: Write) -> None:
    name = write("def f(rewards): return [1.0] * len(rewards)")
    assert load_plugin("advantage", f"{name}.f", config())([0.0]) == [1.0]
    first = write("def f(rewards): return [1.0] * len(rewards)")
    write("def f(rewards): return [2.0] * len(rewards)", "plugins", first)
    assert load_plugin("advantage", f"{first}.f", config())([0.0]) == [2.0]


def test_the_folder_of_the_file_is_importable_from_elsewhere(write: Write, tmp_path: Path) -> None:
    name = write("def f(rewards): return [5.0] * len(rewards)", "elsewhere")
    file = tmp_path / "elsewhere" / "run.toml"
    file.write_text(f'[algorithm]\nadvantage_mode = "{name}.f"\ntransform_mode = "none"\n')
    loaded = load_config(file)
    assert load_plugin("advantage", f"{name}.f", loaded)([0.0]) == [5.0]
    write("def f(rewards): return [6.0] * len(rewards)", ".", name)
    sys.modules.pop(name)
    with pytest.raises(ConfigurationError, match="exists twice") as caught:
        load_plugin("advantage", f"{name}.f", loaded)
    assert str(file) in str(caught.value)


def test_a_copy_beside_a_runs_file_comes_before_the_original_where_the_run_began(
    write: Write, tmp_path: Path
) -> None:
    name = write("def f(rewards): return 'original'", "project")
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.toml").touch()
    folders = {"folders": [str(tmp_path / "project")]}
    (run / "environment.json").write_text(json.dumps(folders))
    loaded = load_config(run / "config.toml")
    assert load_plugin("advantage", f"{name}.f", loaded)([]) == "original"
    write("def f(rewards): return 'copy'", "run", name)
    sys.modules.pop(name)
    assert load_plugin("advantage", f"{name}.f", loaded)([]) == "copy"


def test_an_error_names_the_place_that_gave_the_plugin(write: Write) -> None:
    short, file = write("def f(rewards): return []"), Path("mine.toml")
    file.touch()
    for argv, key in (
        (("--advantage-mode", "absent.f"), "[algorithm] advantage_mode"),
        (("--advantage-mode", f"{short}.f"), "[algorithm] advantage_mode"),
        (("--advantage-params", "{x = 1}"), "[algorithm.advantage_params]"),
    ):
        assert refused(load_config(file, argv)).startswith(f"flag {argv[0]}: {key}")
    file.write_text('[algorithm]\nadvantage_mode = "absent.f"')
    assert refused(load_config(file)).startswith("mine.toml: [algorithm]")


def test_the_users_folder_does_not_stay_before_installed_libraries(
    write: Write, tmp_path: Path
) -> None:
    name = write("def f(rewards): return rewards")
    load_plugin("advantage", f"{name}.f", config())
    assert sys.path[0] != str(tmp_path) and str(tmp_path) in sys.path


def test_entry_points_are_found_and_a_name_found_twice_is_an_error(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = write("def f(rewards): return [7.0] * len(rewards)")
    monkeypatch.syspath_prepend(".")
    installed = [EntryPoint(one, f"{name}:f", "retrain.plugins") for one in ("median", "grpo")]
    monkeypatch.setattr(plugins, "installed_plugins", lambda: installed)
    assert load_plugin("advantage", "median", config(), plugins_builtins())([0.0]) == [7.0]
    with pytest.raises(ConfigurationError, match="exists twice"):
        load_plugin("advantage", "grpo", config(), plugins_builtins())
    installed.append(EntryPoint("median", f"{name}:g", "retrain.plugins"))
    with pytest.raises(ConfigurationError, match="exists twice"):
        load_plugin("advantage", "median", config(), plugins_builtins())
    installed[:] = [EntryPoint("lost", "nowhere_at_all:f", "retrain.plugins")]
    with pytest.raises(ConfigurationError, match="nowhere_at_all"):
        load_plugin("advantage", "lost", config(), plugins_builtins())


# -- the other kinds -------------------------------------------------------------------------------


def test_a_reward_tells_which_keywords_it_takes(write: Write) -> None:
    name = write(
        "def plain(response, reference): return 1.0\n"
        "async def rich(response, reference, *, prompt, example, params): return 1.0\n"
        "def everything(response, reference, **kwargs): return 1.0\n"
        "def wrong(response): return 1.0\n"
    )
    some = {"prompt", "example", "params"}
    taken = {"plain": set(), "rich": some, "everything": {*some, "token_count", "finish_reason"}}
    for function, keywords in taken.items():
        loaded = load_plugin("reward", f"{name}.{function}", config())
        assert inspect_call("reward", loaded).keywords == keywords
    form = re.escape("f(response, reference, prompt=..., example=..., params=..., token_count")
    with pytest.raises(ConfigurationError, match=form):
        load_plugin("reward", f"{name}.wrong", config())


def test_a_data_source_must_take_its_params(write: Write) -> None:
    name = write("def source(size, seed=0): return []\ndef held(split): return []")
    with_params = TrainConfig.model_validate({"data": {"params": {"size": 3}}})
    assert load_plugin("data", f"{name}.source", with_params)(3) == []
    assert load_plugin("data", f"{name}.held", config())("train") == []
    with pytest.raises(ConfigurationError, match="size"):
        load_plugin("data", f"{name}.source", config())


def test_an_engine_must_be_a_whole_subclass(write: Write) -> None:
    name = write(
        "from retrain.inference_engine.base import InferenceEngine\n"
        "class Whole(InferenceEngine):\n    def sample(self, requests): return iter(())\n"
        "class Partial(InferenceEngine): ...\n"
        "class Other: ...\n"
    )
    assert load_plugin("engine", f"{name}.Whole", config()).__name__ == "Whole"
    with pytest.raises(ConfigurationError, match="does not define sample"):
        load_plugin("engine", f"{name}.Partial", config())
    with pytest.raises(ConfigurationError, match="is the class Other, and must be a subclass of"):
        load_plugin("engine", f"{name}.Other", config())


def test_an_error_of_several_lines_and_its_notes_are_told_in_one():
    error = ValueError("no.\nmore")
    error.add_note("in row 3.\nsee above")
    assert plugins.describe(error) == "ValueError: no, in row 3"
    assert plugins.describe(ValueError()) == "ValueError"
