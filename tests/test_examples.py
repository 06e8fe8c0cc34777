"""The two pages that show the algorithm and the library: they run, and what they say of themselves
holds.
"""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from retrain.config import load_config
from tests.runs import small_run

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def rl_loop() -> ModuleType:
    return load("rl_loop")


def test_the_page_fits_on_a_page_and_imports_no_trainer() -> None:
    text = (EXAMPLES / "rl_loop.py").read_text(encoding="utf-8")
    assert text.count("\n") <= 260
    assert [line for line in text.splitlines() if "import" in line and "retrain" in line] == [
        "from retrain.data.lab import examples",
        "from retrain.model.text import LAB_MODEL",
    ]


def test_the_page_samples_and_learns_one_policy(
    rl_loop: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    history = rl_loop.main(steps=2, batch_size=8, group_size=4)
    ratios = [
        float(line.split("|ratio-1|<=")[1].split(" ")[0])
        for line in capsys.readouterr().out.splitlines()
    ]
    assert len(history) == 2 and any(0 < mean < 1 for mean in history)
    assert all(0 < ratio < 1e-4 for ratio in ratios)


def test_the_library_page_samples_and_learns_one_policy(capsys: pytest.CaptureFixture[str]) -> None:
    assert (EXAMPLES / "library.py").read_text(encoding="utf-8").count("\n") <= 66
    history = load("library").main(steps=2, batch_size=8)
    steps = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Step ")]
    assert len(history) == len(steps) == 2 and any(0 < mean < 1 for mean in history)
    assert all(
        "rows=32" in line and abs(float(line.split("ratio_max=")[1].split(" ")[0]) - 1) < 1e-4
        for line in steps
    )


def test_the_example_of_full_weights_trains_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = "--max-steps 1 --batch-size 2 --max-tokens 16 --evaluation-max-examples 2 --log-dir"
    small_run(load_config(EXAMPLES / "full.toml", [*flags.split(), str(tmp_path / "run")], {}))
    assert (tmp_path / "run/checkpoints/final/model.safetensors").is_file()
    printed = " ".join(capsys.readouterr().out.split())
    assert (
        f"Run folder: {tmp_path / 'run'} | model: {tmp_path / 'run/checkpoints/final'}" in printed
    )


def test_the_pages_gradient_does_not_depend_on_its_micro_batches(
    rl_loop: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(rl_loop.LAB_MODEL, dtype=torch.float32)
    model = get_peft_model(
        base, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    ).eval()
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.SGD(weights, lr=0.0)
    groups = rl_loop.rollout(model, [[5, 6, 7], [8, 9]], 3, 1, torch.Generator().manual_seed(0))
    for group in groups:
        for episode, advantage in zip(group, (1.0, -0.5, -0.5), strict=True):
            episode.advantage = advantage
            assert 1 not in episode.actions[:-1]  # nothing follows the end-of-sequence token

    def gradient(tokens: int) -> torch.Tensor:
        monkeypatch.setattr(rl_loop, "MICRO_BATCH", tokens)
        _, worst = rl_loop.learn(model, optimizer, groups)
        assert worst < 1e-4
        return torch.cat([weight.grad.reshape(-1).clone() for weight in weights])

    torch.testing.assert_close(gradient(1), gradient(10_000), rtol=1e-4, atol=1e-7)
