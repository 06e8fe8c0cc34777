"""What `retrain diff` and `retrain verify` say of a change that was planted: `python
benchmarks/planted.py` prints two tables and writes them to results/.

A run of two steps on the lab is made once, and made again with one change for each pair: another
key, one byte of the data, one flipped verdict, the last bit of one weight of the model, an edited
plugin. A version string is planted in a copy, with the last digit of a loss. The cause that `diff`
names first must be the one that was planted. Places are drawn by the number of the pair.
"""

import argparse
import json
import os
import random
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from report import add_output, load_average, publish, table
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from scipy import stats

import retrain
from retrain.analysis.parting import causes, parting
from retrain.analysis.runs import StoredRun
from retrain.cli.main import main as retrain_command
from retrain.data import lab
from retrain.rewards.scoring import Scorer
from retrain.types import Score

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
from runs import lines, small, small_run

KEYS: dict[str, tuple[Any, ...]] = {
    "training.seed": (4, 5, 6, 7),
    "training.lr": (2e-3, 9e-4, 1.01e-3),
    "training.temperature": (0.9, 0.99, 1.1),
    "training.max_tokens": (23, 22, 16),
    "training.group_size": (3, 5),
    "training.batch_size": (1, 3),
    "training.minibatches": (2,),
    "training.updates_per_batch": (2,),
    "training.weight_decay": (0.1,),
    "training.top_p": (0.9, 0.95),
    "training.top_k": (5, 9),
    "loss.kl_coef": (0.01, 0.1),
    "loss.max_grad_norm": (0.01,),
    "loss.entropy_coef": (0.01,),
    "lora.dropout": (0.1,),
    "model.lora_rank": (2, 8),
    "lora.alpha": (4, 64),
    "data.prompt_template": ("{prompt} ", "{prompt}?"),
    "reward.random_p": (0.4, 0.6),
    "inference.dtype": ("bf16",),
}
PLUGIN = """
def advantage(rewards):
    mean = sum(rewards) / len(rewards)
    return [{factor} * (reward - mean) for reward in rewards]
"""
Planted = tuple[str, str]
"""What was planted, and the words that the first cause must begin with."""


class Bench:
    """A folder with a model, data and a plugin of its own, and the base run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        shutil.copytree(Path(retrain.__file__).parent / "assets" / "lab", folder / "model")
        examples = [
            {"prompt": example.prompt, "answer": example.reference}
            for example in lab.examples("train", 1)[:16]
        ]
        self.data.write_text("".join(json.dumps(example) + "\n" for example in examples))
        self.write_plugin(1.0)
        self.base = self.run("base")

    @property
    def data(self) -> Path:
        return self.folder / "sums.jsonl"

    @property
    def plugin(self) -> Path:
        return self.folder / "planted_plugin.py"

    @property
    def weights(self) -> Path:
        return self.folder / "model" / "model.safetensors"

    def write_plugin(self, factor: float) -> None:
        self.plugin.write_text(PLUGIN.format(factor=factor))

    def run(self, name: str, key: str = "", value: Any = None) -> Path:
        sections: dict[str, Any] = {
            "model": {"model": "model"},
            "data": {"source": "sums.jsonl"},
            "algorithm": {"advantage_mode": "planted_plugin.advantage"},
            "training": {"max_steps": 2, "max_examples": 16},
            "logging": {"tokens_every": 1},
        }
        if key:
            section, option = key.split(".")
            sections.setdefault(section, {})[option] = value
        sys.modules.pop("planted_plugin", None)
        return small_run(small(self.folder / name, **sections), quiet=True).folder

    @contextmanager
    def changed(self, path: Path) -> Iterator[None]:
        """Put a file back afterwards."""
        content = path.read_bytes()
        yield
        path.write_bytes(content)


def key(bench: Bench, number: int, rng: random.Random) -> Planted:
    name = list(KEYS)[number % len(KEYS)]
    bench.run("other", name, rng.choice(KEYS[name]))
    return name, f"keys of the configuration: {name} ("


def byte_of_data(bench: Bench, _: int, rng: random.Random) -> Planted:
    """Change one digit of a problem, so that a line stays a line."""
    with bench.changed(bench.data):
        content = bytearray(bench.data.read_bytes())
        place = rng.choice([at for at, byte in enumerate(content) if chr(byte).isdigit()])
        content[place] = ord("0") + (content[place] - ord("0") + rng.randrange(1, 10)) % 10
        bench.data.write_bytes(content)
        bench.run("other")
    return f"byte {place}", "training data"


def version(bench: Bench, _: int, rng: random.Random) -> Planted:
    other = Path(shutil.copytree(bench.base, bench.folder / "other"))
    path = other / "environment.json"
    environment = json.loads(path.read_text())
    name = rng.choice(sorted(environment["packages"]))
    environment["packages"][name] += "+cu129"
    path.write_text(json.dumps(environment))
    rows = lines(other / "metrics.jsonl")
    row = rng.choice(rows)
    row["loss"] = float(np.nextafter(row["loss"], 1))
    (other / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return name, f"{name} ("


def flipped_verdict(bench: Bench, _: int, rng: random.Random) -> Planted:
    wanted, calls, real = rng.randrange(16), 0, Scorer._score

    def score(scorer: Scorer, parts: Any) -> Score:
        nonlocal calls
        found = real(scorer, parts)
        calls += 1
        if calls != wanted + 1:
            return found
        flipped = Score.of(1.0 - (found.reward or 0.0), 0.5)
        return replace(flipped, parts=(flipped.reward or 0.0,))

    with patch.object(Scorer, "_score", score):
        bench.run("other")
    return f"verdict {wanted}", "a reward verdict"


def last_bit(bench: Bench, _: int, rng: random.Random) -> Planted:
    with bench.changed(bench.weights):
        with safe_open(bench.weights, framework="numpy") as file:
            metadata = file.metadata()
        arrays = load_file(bench.weights)
        name = rng.choice(sorted(arrays))
        flat = arrays[name].reshape(-1)
        place = rng.randrange(len(flat))
        flat[place] = np.nextafter(flat[place], flat.dtype.type(np.inf))
        save_file(arrays, bench.weights, metadata=metadata)
        bench.run("other")
    return f"{name}[{place}]", "files of the model"


def edited_plugin(bench: Bench, _: int, rng: random.Random) -> Planted:
    with bench.changed(bench.plugin):
        bench.write_plugin(1 + rng.choice((-1, 1)) * 10 ** -rng.uniform(0.5, 5))
        bench.run("other")
    return bench.plugin.name, "the plugin planted_plugin.advantage"


KINDS: dict[str, tuple[Callable[[Bench, int, random.Random], Planted], int]] = {
    "a key": (key, 40),
    "a digit of the data": (byte_of_data, 30),
    "a version string": (version, 30),
    "a flipped verdict": (flipped_verdict, 40),
    "the last bit of a weight": (last_bit, 30),
    "an edited plugin": (edited_plugin, 30),
}
"""How each change is planted, and in how many pairs."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--share", type=float, default=1.0, help="share of the 200 pairs")
    add_output(parser)
    given, load = parser.parse_args(), load_average()
    torch.set_num_threads(1)
    output, started = given.output.resolve(), Path.cwd()
    with TemporaryDirectory() as scratch:
        os.chdir(scratch)
        try:
            found = [*verified(Path(scratch)), *pairs(Path(scratch), given.share)]
        finally:
            os.chdir(started)
    publish("planted", "Planted changes, found by diff and verify", found, load, output)


def pairs(folder: Path, share: float) -> Iterator[str]:
    bench = Bench(folder)
    rows, missed, right, total = [], [], 0, 0
    for kind, (plant, wanted) in KINDS.items():
        named = equal = 0
        count = max(1, round(share * wanted))
        for number in range(count):
            place, words = plant(bench, number, random.Random(f"{kind} {number}"))
            ours, theirs = StoredRun(bench.base), StoredRun(bench.folder / "other")
            parted = parting(ours, theirs, range(3))
            first = next(causes(ours, theirs, parted), "nothing")
            named += first.startswith(words)
            equal += parted is None
            if not first.startswith(words):
                missed.append(f"{kind} {number} ({place}): {first}.")
                print(missed[-1], flush=True)
            shutil.rmtree(bench.folder / "other")
        rows.append([kind, count, named, equal])
        print(rows[-1], flush=True)
        right, total = right + named, total + count
    low, high = stats.binomtest(right, total).proportion_ci(method="wilson")
    yield (
        f"`diff` names the planted cause first in {right} of {total} pairs; Wilson interval (95%)"
        f" {100 * low:.1f}% to {100 * high:.1f}%. Two steps of 2 prompts x 4 completions,"
        " `tokens_every = 1`."
    )
    yield table(["planted", "pairs", "cause named first", "records equal all the same"], rows)
    yield from missed


# -- verify ----------------------------------------------------------------------------------------


def verified(folder: Path) -> Iterator[str]:
    """What verify says of runs of four steps on the lab."""
    rows = []
    for name, spoil in SPOILED.items():
        sections: dict[str, Any] = {
            "logging": {"tokens_every": 1},
            "training": {"batch_size": 8, "max_tokens": 48},
        }
        run = small_run(small(folder / "run", **sections), quiet=True).folder
        threads = nullcontext()
        if spoil is None:
            threads = threaded(2)
        else:
            spoil(run)
        said = StringIO()
        with threads, redirect_stdout(said), redirect_stderr(StringIO()):
            code = retrain_command(["verify", str(run), "--steps", "0:4"])
        words = " ".join(said.getvalue().replace(str(run), "RUN").split())
        rows.append([name, code, words])
        print(rows[-1], flush=True)
        shutil.rmtree(run)
    yield "`retrain verify RUN --steps 0:4` of four steps of 8 prompts x 4 completions, made with one thread."
    yield table(["the run", "exit code", "what is said"], rows)


@contextmanager
def threaded(count: int) -> Iterator[None]:
    torch.set_num_threads(count)
    yield
    torch.set_num_threads(1)


def flipped_bit_of_metrics(run: Path) -> None:
    metrics = run / "metrics.jsonl"
    content = bytearray(metrics.read_bytes())
    content[content.index(b'"loss": ') + 11] ^= 1  # a digit of step 0's
    metrics.write_bytes(content)


def flipped_bit_of_tokens(run: Path) -> None:
    flip(run / "tokens" / "step_2.safetensors")


def flipped_bit_of_adapter(run: Path) -> None:
    flip(run / "checkpoints" / "final" / "adapter_model.safetensors")


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-9] ^= 1
    path.write_bytes(content)


def another_torch(run: Path) -> None:
    """Its version string, and the last digit of a loss."""
    path = run / "environment.json"
    environment = json.loads(path.read_text())
    environment["packages"]["torch"] = "2.12.0"
    path.write_text(json.dumps(environment))
    flipped_bit_of_metrics(run)


def nothing(run: Path) -> None:
    """A sound run."""


SPOILED: dict[str, Callable[[Path], None] | None] = {
    "as it was": nothing,
    "one bit of metrics.jsonl": flipped_bit_of_metrics,
    "one bit of a step's stored tokens": flipped_bit_of_tokens,
    "one bit of the last adapter": flipped_bit_of_adapter,
    "verified with two threads": None,
    "another version of torch recorded, and a digit of a loss": another_torch,
}

if __name__ == "__main__":
    main()
