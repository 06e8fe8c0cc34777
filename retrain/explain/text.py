"""Print an explanation as text: what would run, then a table per section without the empty
sections.
"""

import textwrap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from retrain.analysis.power import SD_UNIT, Rule, finds
from retrain.backends.declared import backend_words, engine_words
from retrain.config import moving
from retrain.config.plan import Plan
from retrain.records.terminal import GAP, counted, duration, table_lines
from retrain.rewards.scoring import REWARDS
from retrain.system import toml_value
from retrain.xray.text import WEIGHTS

if TYPE_CHECKING:
    from retrain.config import TrainConfig
    from retrain.explain.explanation import Explanation
    from retrain.explain.timing import Schedule


_WIDTH = 120
"""Columns for a fact of the headline."""


def to_text(seen: "Explanation") -> str:
    settings = [
        (setting.key, toml_value(setting.value), setting.origin) for setting in seen.settings
    ]
    sections = (
        ("", _headline(seen)),
        ("Conditions", _conditions(seen)),
        ("Settings that differ from the defaults", table_lines(settings, indent=GAP)),
        ("Supervised stage", (f"{GAP}{line}" for line in seen.traces)),
        ("Memory", _memory(seen)),
        ("Time", table_lines([*_time_rows(seen.schedule)], indent=GAP) if seen.schedule else ()),
        ("Would be refused", _sentences((*seen.refused, *seen.unavailable))),
        ("Without effect", _sentences(seen.unused)),
        ("Warnings", _sentences(seen.warnings)),
    )
    filled = [(title, list(lines)) for title, lines in sections]
    blocks = ["\n".join([title] * bool(title) + lines) for title, lines in filled if lines]
    return "\n\n".join(blocks) + "\n"


def _sentences(sentences: Sequence[str]) -> Iterator[str]:
    yield from (f"- {sentence}" for sentence in sentences)


# -- what would run --------------------------------------------------------------------------------


def _headline(seen: "Explanation") -> Iterator[str]:
    if seen.kind == "squeeze":
        yield from _squeeze(seen)
        return
    yield _size(seen)
    rows: list[tuple[str, str]] = []
    for name, words in _facts(seen):
        lines = textwrap.wrap(words, _WIDTH, break_long_words=False, break_on_hyphens=False)
        rows += [(name if line == 0 else "", part) for line, part in enumerate(lines)]
    yield from table_lines(rows, indent=GAP)


def _size(seen: "Explanation") -> str:
    run = seen.runs[0]
    steps = f"{counted(run.config.training.max_steps, 'step')}{_resumed(seen)}"
    if seen.kind == "campaign":
        return (
            f"Campaign: {counted(len(seen.conditions), 'condition')} x"
            f" {counted(len(seen.seeds), 'seed')} = {counted(len(seen.runs), 'run')} of {steps}"
        )
    seed = "a seed drawn at the start" if run.seed == -1 else f"seed {run.seed}"
    return f"Run: {run.condition}, {seed}, {steps}"


def _facts(seen: "Explanation") -> Iterator[tuple[str, str]]:
    """Name and words of each fact, in the order shown."""
    run, config = seen.runs[0], seen.runs[0].config
    training = config.training
    folder = str(seen.config.folder)
    # A campaign shows these with each of its conditions.
    maximal_lambda = weights = None
    if seen.kind == "campaign":
        yield "seeds", ", ".join(map(str, seen.seeds))
        folder = f"{run.folder.parent.parent}/runs/<condition>_s<seed>"
    else:
        maximal_lambda = seen.conditions[0].maximal_lambda
        weights = seen.conditions[0].weights
    yield (
        "batch",
        (
            f"{training.batch_size:,} prompts x {training.group_size:,} completions of up to"
            f" {training.max_tokens:,} tokens per step"
        ),
    )
    if maximal_lambda is not None:
        yield "SEPA", f"lambda reaches {maximal_lambda:.3g}"
    yield "model", config.model.model
    yield from _problems(seen)
    yield "folder", folder
    if seen.engine:
        sampler = config.inference.engine
        if seen.backend and seen.backend.sampler is not None:
            sampler = "the backend's own"
        yield "engine", f"{sampler}: {engine_words(seen.engine)}"
    if seen.backend:
        yield "backend", f"{config.backend.backend}: {backend_words(seen.backend)}"
    for words in seen.losses:
        yield "loss", words
    for words in moving.words(config):
        yield "schedule", words
    if weights:
        yield "x-ray", f"{WEIGHTS}: {weights}"


def _resumed(seen: "Explanation") -> str:
    if seen.schedule and seen.schedule.steps_done:
        return f" ({seen.schedule.steps_done:,} done)"
    return ""


def _problems(seen: "Explanation") -> Iterator[tuple[str, str]]:
    config = seen.runs[0].config
    for quota, source in zip(seen.mix, Plan.of(config).sources, strict=False):
        counts = (
            f"{quota.first_step:,} of {config.training.batch_size:,} prompts in the first step,"
            f" {quota.last_step:,} in the last, {quota.all_steps:,} in all"
        )
        name = "problems" if quota is seen.mix[0] else ""
        yield name, f"{quota.task}: {counts}; {_source_words(source.config)}"
    if not seen.mix:
        yield "problems", _source_words(config)


def _source_words(config: "TrainConfig") -> str:
    if config.environment.provider:
        return f"{config.environment.provider} {config.environment.id}"
    own = any(kind not in REWARDS or kind == "custom" for kind in config.reward.types)
    hint = "; `retrain audit` measures how often it errs" if own else ""
    return f"{config.data.source}, reward {' + '.join(config.reward.types)}{hint}"


def _squeeze(seen: "Explanation") -> Iterator[str]:
    settings, adapter = seen.config.squeeze, seen.adapter
    yield f"Squeeze job: {settings.adapter_path}"
    judged = (
        "the mean over the layers keeps" if settings.rule == "mean" else "the worst layer keeps"
    )
    rows = []
    if adapter:
        size = f"{len(adapter.layers)} layers, {adapter.num_parameters:,} parameters"
        rows.append(("adapter", f"rank {adapter.rank}, {size}"))
    ranks = _ranks(seen)
    if ranks:
        rows.append(("ranks", ", ".join(map(str, ranks))))
    kept = f"{settings.min_variance_retention:.0%} of the variance"
    rows.append(("rule", f"the smallest rank at which {judged} {kept}"))
    if settings.output_path:
        fixed = f"rank {settings.compress_to}" if settings.compress_to else "the recommended rank"
        ranks_written = "a rank for each layer" if settings.per_layer else fixed
        both = ", and evaluates both" if settings.evaluate else ""
        rows.append(("writes", f"{settings.output_path}, {ranks_written}{both}"))
    yield from table_lines(rows, indent=GAP)


def _ranks(seen: "Explanation") -> Sequence[int]:
    if seen.adapter is None:
        return seen.config.squeeze.target_ranks
    from retrain.squeeze.analysis import tried_ranks

    return tried_ranks(seen.config.squeeze.target_ranks, seen.adapter.rank)


def _conditions(seen: "Explanation") -> Iterator[str]:
    """Lines for the conditions of a campaign; the headline names the condition of a single run."""
    if seen.kind != "campaign":
        return
    rows = []
    for condition in seen.conditions:
        reached = condition.maximal_lambda
        sepa = "" if reached is None else f"SEPA's lambda reaches {reached:.3g}"
        rows.append(
            (
                condition.label,
                f"weights {condition.weights}" if condition.weights else "",
                sepa,
                ", ".join(f"{key} = {toml_value(value)}" for key, value in condition.sets.items()),
            )
        )
    yield from table_lines(rows, indent=GAP)
    yield f"{GAP}W{WEIGHTS[1:]}: `retrain xray` says more."
    power = seen.power
    if power and power.detectable is not None:
        unit = f"in {power.metric}" if power.metric else SD_UNIT
        found = finds(power.seeds, power.detectable, Rule(power.comparisons), unit)
        yield f"{GAP}{found}; `retrain compare` gives the same after the runs, in points."


# -- what it takes ---------------------------------------------------------------------------------


def _memory(seen: "Explanation") -> Iterator[str]:
    if seen.memory is None:
        yield from ([GAP + seen.memory_unknown] if seen.memory_unknown else [])
        return
    from retrain.model.memory import byte_words

    memory = seen.memory
    turns = "" if len(memory.peaks) > 1 else "; sampling and learning take turns"
    whole = byte_words(memory.machine.memory)
    rows = [(part.name, byte_words(part.bytes), part.note) for part in memory.parts]
    rows += [
        ("peak", byte_words(peak), f"of {whole} on {device}{turns}")
        for device, peak in memory.peaks.items()
    ]
    yield from table_lines(rows, right=(1,), indent=GAP)


def _time_rows(schedule: "Schedule") -> Iterator[tuple[str, str, str]]:
    parallel = schedule.effective_parallelism
    workers = f" / {parallel} at once" if parallel > 1 else ""
    runs = f"{counted(schedule.total_runs, 'run')} x " if schedule.total_runs > 1 else ""
    done = f", less {schedule.steps_done:,} done" if schedule.steps_done else ""
    what = f"{runs}{counted(schedule.steps_per_run, 'step')}{done}{workers}"
    step = schedule.step_time
    if step is None:
        product = f"{what}; " if runs or done else ""
        yield (
            "steps",
            f"{schedule.steps_left:,}",
            f"{product}for time and cost, measure one with --probe or give --pilot RUN_DIR",
        )
    else:
        yield (
            "step",
            f"{step.seconds:.2f} s" if step.seconds < 100 else duration(step.seconds),
            step.source,
        )
        if step.peak_memory_gib is not None:
            yield (
                "measured",
                f"{step.peak_memory_gib:.2f} GiB",
                "peak memory so far, of the device on CUDA, else of the process",
            )
        yield (
            "in all",
            duration(schedule.estimated_wall_time_s or 0.0),
            f"{what}; evaluations, loading and [sft] aside",
        )
        if schedule.cost:
            yield (
                "cost",
                f"{schedule.cost:,.2f}",
                f"{schedule.device_hours or 0.0:,.2f} device hours at {schedule.price_per_hour:g}",
            )
    best = schedule.recommended
    if best:
        yield (
            "workers",
            str(parallel),
            f"recommended max_workers: {best.count} ({best.because})",
        )
