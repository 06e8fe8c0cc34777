"""How often `[inference] calibration` warns of sound and of faulty samplers, and after how many
steps: `python benchmarks/sampling_calibration.py` prints a table and writes it to results/; with
`--tested 4 --steps 3000 --streams 10000 --faulty 1000` for steps that test fewer, and with `--model
models/smollm2-135m --prompts 4 --max-tokens 32 --batches 3 --steps 40` for another model.

Each sampler writes completions with the lab model, after which the learner's logits are recorded.
Tokens are then drawn anew from what the sampler makes of these logits, or of its own in bf16, so
streams of any length are fresh; a step is 8 prompts x 4 completions, all tested unless fewer are
asked for.
"""

import argparse
import sys
from collections.abc import Callable
from contextlib import closing
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from report import add_output, load_average, publish, table
from scipy import stats
from torch import Tensor

from retrain.config import TrainConfig
from retrain.inference_engine.torch_engine import TorchEngine
from retrain.model.calibration import DISTANCES, tempered_scores
from retrain.model.head import Head, kept_counts
from retrain.model.truncation import keep_only
from retrain.run.calibration import (
    MIN_VARIANCE,
    SHARED_FROM,
    TOLERANCE,
    WARNED_FROM,
    WIDE_TOLERANCE,
    Calibration,
    Places,
    pair_products,
    pairs_first,
)
from retrain.run.dialogues import Watcher
from retrain.run.parts import Parts, load_parts, training_plan
from retrain.run.rollout import Sampler
from retrain.types import Row

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
import faulty_engines
from runs import small

_SLOPES = torch.tensor([-1.0, 0.0, *(-d for d in DISTANCES), *DISTANCES])
"""By which D, V and the ratios of a token grow with its log-prob."""


@dataclass(frozen=True)
class Fault:
    """A sampler: its engine with other attributes, and the logits from which it draws in place of
    [T, V] `z`, where the tokens marked in [T, V] `seen` stand before.
    """

    name: str
    engine: str
    attributes: dict[str, float]
    draws: Callable[[Tensor, Tensor], Tensor]
    is_sound: bool = False


def hotter(factor: float, *, is_sound: bool = False) -> Fault:
    name = "sound" if factor == 1 else f"T x {factor:g}"
    return Fault(name, "Colder", {"factor": factor}, lambda z, _: z / factor, is_sound)


def cut(top_p: float) -> Fault:
    def draws(z: Tensor, _: Tensor) -> Tensor:
        z = z - z.amax(-1, keepdim=True)
        keep_only(z, z.argmax(-1), kept_counts(z, 0, top_p, 0.0))
        return z

    return Fault(f"top_p {top_p:g}", "AnotherTopP", {"top_p": top_p}, draws)


def penalised(penalty: float) -> Fault:
    def draws(z: Tensor, seen: Tensor) -> Tensor:
        return torch.where(seen, torch.where(z > 0, z / penalty, z * penalty), z)

    return Fault(f"penalty {penalty:g}", "Penalises", {"penalty": penalty}, draws)


SAMPLERS = (
    hotter(1, is_sound=True), hotter(0.97, is_sound=True), hotter(1.03, is_sound=True),
    cut(0.8), cut(0.95), hotter(0.9), hotter(1.1), hotter(0.95), hotter(1.05),
    penalised(1.1), penalised(1.05),
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, default=100_000, help="of sound samplers")
    parser.add_argument("--faulty", type=int, default=10_000, help="streams of the others")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batches", type=int, default=8, help="recorded, of 8 x 4 completions")
    parser.add_argument("--copies", type=int, default=1000, help="of a batch, each drawn anew")
    parser.add_argument("--prompts", type=int, default=8, help="of a step")
    parser.add_argument("--group", type=int, default=4, help="completions of each prompt")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--tested", type=int, help="completions of a step; by default all")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--model", default="lab")
    parser.add_argument("--bf16", action="store_true", help="the sampler's weights")
    parser.add_argument("--sound", action="store_true", help="sound samplers alone")
    add_output(parser)
    given, load = parser.parse_args(), load_average()
    given.tested = given.tested or given.prompts * given.group
    rows, shared = measured(given)
    head = ["sampler", "lambda"]
    for tolerance in (TOLERANCE, WIDE_TOLERANCE):
        head += [f"warned of at {tolerance:g}", "Wilson 95%", "steps: median, 90%"]
    name, weights = Path(given.model).name, "bf16" if given.bf16 else "the learner's precision"
    what = (
        f"Streams warned of within {given.steps} steps of {given.prompts} x {given.group}"
        f" completions of {name}, of at most {given.max_tokens} tokens, of which {given.tested} are"
        f" tested, at temperature {given.temperature:g}, untouched adapter, the sampler in"
        f" {weights}, at two tolerances. Sound are the first three: they are within the tolerance."
        f" Steps are drawn from {given.batches} x {given.copies} copies of recorded batches."
    )
    of_model = "" if given.model == "lab" else f"-{name}"
    of_model += "-bf16" if given.bf16 else ""
    publish(
        f"sampling-calibration{of_model}-{given.tested}-at-{given.temperature:g}",
        "Calibration: warnings by sampler",
        [what, table(head, rows), shared],
        load,
        given.output,
    )


def measured(given: argparse.Namespace) -> tuple[list[list[Any]], str]:
    """Rows of the table, and a sentence on shared noise."""
    torch.set_num_threads(1)
    rows, shared = [], ""
    training = {"batch_size": given.prompts, "group_size": given.group}
    training |= {"max_tokens": given.max_tokens, "temperature": given.temperature}
    config = small(Path("nowhere"), training=training, model={"model": given.model})
    with closing(load_parts(config, None, lambda _: None)) as parts:
        backend: Any = parts.backend
        model = backend._adapter.peft_model
        own = deepcopy(model).bfloat16() if given.bf16 else model
        for sampler in (one for one in SAMPLERS if one.is_sound or not given.sound):
            recorded = [batch_of(parts, config, sampler, own, n) for n in range(given.batches)]
            row: list[Any] = [sampler.name]
            for tolerance in (TOLERANCE, WIDE_TOLERANCE):
                sums = sums_drawn_anew(recorded, sampler, tolerance, given.copies, given.tested)
                count = given.streams if sampler.is_sound else given.faulty
                row += [f"{sums[:, 0].sum() / sums[:, 1].sum():+.3f}"] if len(row) == 1 else []
                row += warnings_of(sums, count, given.steps)
            if sampler.name == "sound":
                products = products_drawn_anew(recorded, given.copies, given.tested)
                shared = shared_noise_of(products, given.streams, given.steps)
            rows.append(row)
            print(row, flush=True)
    return rows, shared


@dataclass(frozen=True)
class Batch:
    """What the learner makes of a batch of completions: logits at the run's temperature, and the
    tokens before each place.
    """

    rows: list[Row]
    logits: list[Tensor]
    """[T, V] of each row."""
    drawn: list[Tensor]
    """The same by the sampler's weights."""
    seen: list[Tensor]
    """[T, V] of each row, True for tokens of the prompt and of the completion so far."""


@dataclass(frozen=True)
class Recorded(Head):
    """Hands recorded logits on in place of hidden states."""

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        return torch.add(hidden, 0.0, out=out)


@torch.no_grad()
def batch_of(parts: Parts, config: TrainConfig, sampler: Fault, own: Any, number: int) -> Batch:
    """Completions that the sampler itself wrote, with weights of its own."""
    backend: Any = parts.backend
    model = backend._adapter.peft_model
    make = type(sampler.name, (getattr(faulty_engines, sampler.engine),), sampler.attributes)
    engine: TorchEngine = make(None, model=own, eos_ids=parts.text.eos_ids, device="cpu")
    watcher = Watcher(check=lambda: None, completion=lambda _: None)
    plan = training_plan(config.training)
    asked = Sampler(engine, parts.sampler.scorer, parts.sampler.text)
    size = config.training.batch_size
    groups = asked.draw(parts.prompts.batch(size * number, size, 0), number, plan, watcher).groups
    rows, logits, drawn, seen = [], [], [], []
    for group in groups:
        for one in group.trajectories:
            (row,) = Row.of(group.prompt, one, np.zeros(one.num_actions, np.float32), group.slot)
            start, stop = row.spans[0]
            ids = torch.from_numpy(row.token_ids.astype(np.int64))
            z, q = (
                by(ids[None]).logits[0, start - 1 : stop - 1].float() / plan.temperature
                for by in (model, own)
            )
            marks = torch.zeros(len(ids), z.shape[1]).scatter_(1, ids[:, None], 1.0)
            rows.append(row)
            logits.append(z)
            drawn.append(q)
            seen.append(marks.cumsum(0)[start - 1 : stop - 1] > 0)
    return Batch(rows, logits, drawn, seen)


Floats = npt.NDArray[np.float64]


def chosen(batch: Batch, copies: int, tested: int) -> list[Places]:
    """The rows that are tested in each of so many copies of a batch."""
    slots, samples = np.array([(row.group, row.sample) for row in batch.rows], np.int64).T
    return [pairs_first(slots, samples, 0, copy)[:tested] for copy in range(copies)]


def sums_drawn_anew(
    batches: list[Batch], sampler: Fault, tolerance: float, copies: int, tested: int
) -> Floats:
    """[steps, 12] sums of `tempered_scores` of steps whose tokens are drawn anew."""
    random = torch.Generator().manual_seed(0)
    sums = []
    for batch in batches:
        total = torch.zeros(copies, 12, dtype=torch.float64)
        counts = torch.zeros(len(batch.rows), copies, 1, dtype=torch.float64)
        for copy, places in enumerate(chosen(batch, copies, tested)):
            counts[places, copy] = 1.0
        for z, own_z, seen, counted in zip(
            batch.logits, batch.drawn, batch.seen, counts, strict=True
        ):
            q, logp, best = sampler.draws(own_z, seen).softmax(-1), z.log_softmax(-1), z.argmax(-1)
            drawn = torch.multinomial(q, copies, replacement=True, generator=random)
            head = Recorded(torch.empty(z.shape[1], 0))
            known = tempered_scores(head, z, best, 1.0, tolerance, 0, 1.0, 0.0)[:, :12]
            # Each score but V is linear in the token's own log-prob.
            own = logp.gather(-1, drawn) - logp.gather(-1, best[:, None])
            of_row = known.sum(0) + own.sum(0, dtype=torch.float64)[:, None] * _SLOPES
            total += counted * of_row
        sums.append(total.numpy())
    return np.concatenate(sums)


def products_drawn_anew(batches: list[Batch], copies: int, tested: int) -> Floats:
    """[steps, 4] pair products of sound steps whose tokens are drawn anew."""
    random = torch.Generator().manual_seed(1)
    products = []
    for batch in batches:
        places = []
        for z, own_z in zip(batch.logits, batch.drawn, strict=True):
            p = z.softmax(-1)
            drawn = torch.multinomial(own_z.softmax(-1), copies, replacement=True, generator=random)
            place = (p.cumsum(-1) - p / 2 - 0.5).gather(-1, drawn)
            variance = (1 - p.pow(3).sum(-1)) / 12
            places.append(torch.stack([place, variance[:, None].expand_as(place)]).numpy())
        products += [
            pair_products(
                [batch.rows[place] for place in own], [places[place][:, :, copy].T for place in own]
            )
            for copy, own in enumerate(chosen(batch, copies, tested))
        ]
    return np.array(products)


def warnings_of(sums: Floats, streams: int, steps: int) -> list[str]:
    """How many streams of steps drawn from `sums` are warned of, and when."""
    random = np.random.default_rng(0)
    ratios = np.full((streams, sums.shape[1] - 2), -np.inf)
    found = np.zeros(streams, np.int64)
    follower = Calibration()
    for number in range(1, steps + 1):
        taken = random.integers(len(sums), size=streams)
        # As Calibration.after has it, which the first stream is compared with.
        ratios = np.logaddexp(ratios, -np.log(number * (number + 1))) + sums[taken, 2:]
        evidence = np.logaddexp.reduce(ratios, axis=1) - np.log(ratios.shape[1])
        found[(found == 0) & (evidence >= WARNED_FROM * np.log(10))] = number
        own = sums[taken[0]]
        follower = follower.after(
            Calibration(1, own[0], own[1], ratios=own[2:], products=[0.0] * 4)
        )
        assert np.isclose(follower.evidence * np.log(10), evidence[0])
    warned = found[found > 0]
    low, high = stats.binomtest(len(warned), streams).proportion_ci(method="wilson")
    when = "-"
    if len(warned):
        # over all streams: one that is never warned of counts as later than all others
        late = np.where(found > 0, found, steps + 1)
        median, most = np.quantile(late, [0.5, 0.9], method="inverted_cdf")
        when = ", ".join(str(n) if n <= steps else f"> {steps}" for n in (median, most))
    return [
        f"{len(warned):,} of {streams:,}",
        f"{100 * low:.3f}% to {100 * high:.3f}%",
        when,
    ]


def shared_noise_of(products: Floats, streams: int, steps: int) -> str:
    """How many sound streams are told that completions share noise."""
    random = np.random.default_rng(1)
    total, highest = np.zeros((streams, 4)), np.zeros(streams)
    for _ in range(steps):
        total += products[random.integers(len(products), size=streams)]
        z = total[:, ::2] / np.sqrt(np.maximum(total[:, 1::2], MIN_VARIANCE))
        highest = np.maximum(highest, z.max(1))
    told = int((highest >= SHARED_FROM).sum())
    low, high = stats.binomtest(told, streams).proportion_ci(method="wilson")
    return (
        f"Shared noise: {told:,} of {streams:,} sound streams reach {SHARED_FROM:g} standard"
        f" deviations within {steps} steps (Wilson 95%: {100 * low:.3f}% to {100 * high:.3f}%);"
        f" the highest of all is {highest.max():.2f}, the median of their highest"
        f" {np.median(highest):.2f}."
    )


if __name__ == "__main__":
    main()
