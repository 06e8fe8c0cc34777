"""An explanation as a person reads it: what would run first, then tables; a section without content is left out."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from retrain.backends.declared import backend_words, engine_words
from retrain.explain.caveats import POWER
from retrain.parsing import toml_value
from retrain.records.printing import duration

if TYPE_CHECKING:
    from retrain.config.schema import Squeeze
    from retrain.explain.caveats import Power
    from retrain.explain.explanation import ExplainedCondition, Explanation
    from retrain.explain.timing import Schedule
    from retrain.model.memory import Memory

_INDENT = "  "


def to_text(seen: "Explanation") -> str:
    sections = (
        ("", _headline(seen)),
        ("Conditions", _conditions(seen)),
        ("Settings that differ from the defaults", _settings(seen)),
        ("Memory", _memory(seen)),
        ("Time", _time(seen)),
        ("Would be refused", _sentences(seen.refused)),
        ("Unused here", _sentences(seen.unused)),
        ("Warnings", _sentences(seen.warnings)),
    )
    blocks = ["\n".join([title] * bool(title) + content) for title, lines in sections if (content := list(lines))]
    return "\n\n".join(blocks) + "\n"


def table(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> Iterator[str]:
    """Aligned and indented; the columns of `right` to the right, and an empty column left out."""
    columns = [column for column in range(len(rows[0])) if any(row[column] for row in rows)] if rows else []
    widths = {column: max(len(row[column]) for row in rows) for column in columns}
    for row in rows:
        cells = [row[column].rjust(widths[column]) if column in right else row[column].ljust(widths[column]) for column in columns]
        yield (_INDENT + _INDENT.join(cells)).rstrip()


def _sentences(sentences: Sequence[str]) -> Iterator[str]:
    yield from (f"- {sentence}" for sentence in sentences)


# -- what would run ------------------------------------------------------------------------------------------------------


def _headline(seen: "Explanation") -> Iterator[str]:
    if seen.kind == "squeeze":
        yield from _squeeze(seen)
        return
    run, config = seen.runs[0], seen.runs[0].config
    training = config.training
    batch = f"{training.batch_size:,} prompts x {training.group_size:,} completions of up to {training.max_tokens:,} tokens a step"
    if seen.kind == "campaign":
        seeds = list(dict.fromkeys(run.seed for run in seen.runs))
        product = f"{_counted(len(seen.arms), 'condition')} x {_counted(len(seeds), 'seed')} = {_counted(len(seen.runs), 'run')}"
        yield f"Campaign: {product} of {_counted(training.max_steps, 'step')}{_resumed(seen)}"
    else:
        seed = "a seed drawn at the start" if run.seed == -1 else f"seed {run.seed}"
        yield f"Run: {run.condition}, {seed}, {_counted(training.max_steps, 'step')}{_resumed(seen)}"
    facts = [("batch", batch), ("model", config.model.model), ("problems", _problems(seen)), ("folder", _folder(seen))]
    facts += [("engine", f"{config.inference.engine}: {engine_words(seen.engine)}")] if seen.engine else []
    facts += [("backend", f"{config.backend.backend}: {backend_words(seen.backend)}")] if seen.backend else []
    if seen.kind == "run" and seen.arms[0].maximal_lambda is not None:
        facts.insert(1, ("SEPA", f"lambda reaches {seen.arms[0].maximal_lambda:.3g}"))
    if seen.kind == "campaign":
        facts.insert(0, ("seeds", ", ".join(map(str, seeds))))
    yield from table(facts)


def _resumed(seen: "Explanation") -> str:
    return f" ({seen.schedule.steps_done:,} done)" if seen.schedule and seen.schedule.steps_done else ""


def _problems(seen: "Explanation") -> str:
    config = seen.runs[0].config
    if config.environment.provider:
        return f"{config.environment.provider} {config.environment.id}"
    return f"{config.data.source}, reward {' + '.join(config.reward.types)}"


def _folder(seen: "Explanation") -> str:
    if seen.kind == "campaign":
        return f"{seen.runs[0].folder.parent.parent}/runs/<condition>_s<seed>"
    return seen.config.resume.from_ or seen.config.logging.log_dir


def _squeeze(seen: "Explanation") -> Iterator[str]:
    settings, adapter = seen.config.squeeze, seen.adapter
    yield f"Squeeze job: {settings.adapter_path}"
    judged = "the mean over the layers keeps" if settings.rule == "mean" else "the worst layer keeps"
    rows = [("rule", f"the smallest rank at which {judged} {settings.min_variance_retention:.0%} of the variance")]
    if ranks := _ranks(seen):
        rows.insert(0, ("ranks", ", ".join(map(str, ranks))))
    if adapter:
        rows.insert(0, ("adapter", f"rank {adapter.rank}, {len(adapter.layers)} layers, {adapter.num_parameters:,} parameters"))
    if settings.output_path:
        rows.append(("writes", f"{settings.output_path}, {_compressed(settings)}{', and evaluates both' if settings.evaluate else ''}"))
    yield from table(rows)


def _compressed(settings: "Squeeze") -> str:
    if settings.per_layer:
        return "a rank for each layer"
    return f"rank {settings.compress_to}" if settings.compress_to else "the recommended rank"


def _ranks(seen: "Explanation") -> Sequence[int]:
    if seen.config.squeeze.target_ranks or seen.adapter is None:
        return seen.config.squeeze.target_ranks
    from retrain.squeeze.analysis import powers_of_two

    return powers_of_two(seen.adapter.rank)


def _conditions(seen: "Explanation") -> Iterator[str]:
    """Of a campaign; a single run has its one in the headline."""
    if seen.kind != "campaign":
        return
    yield from table(
        [(arm.label, _lambda(arm), ", ".join(f"{key} = {toml_value(value)}" for key, value in arm.sets.items())) for arm in seen.arms]
    )
    if seen.power and seen.power.detectable is not None:
        yield _INDENT + _detectable(seen.power)


def _lambda(arm: "ExplainedCondition") -> str:
    return "" if arm.maximal_lambda is None else f"SEPA's lambda reaches {arm.maximal_lambda:.3g}"


def _detectable(power: "Power") -> str:
    unit = f"in {power.metric}" if power.metric else "standard deviations of the paired differences"
    family = "one comparison" if power.comparisons == 1 else f"{power.comparisons} comparisons (Holm)"
    return f"{power.seeds} seeds find a difference of {power.detectable:.3g} {unit} with probability {POWER:.0%}, over {family}."


def _settings(seen: "Explanation") -> Iterator[str]:
    yield from table([(setting.key, toml_value(setting.value), setting.origin) for setting in seen.settings])


# -- what it takes -------------------------------------------------------------------------------------------------------


def _memory(seen: "Explanation") -> Iterator[str]:
    if seen.memory is None:
        yield from ([_INDENT + seen.memory_unknown] if seen.memory_unknown else [])
        return
    yield from table([*_memory_rows(seen.memory)], right=(1,))


def _memory_rows(memory: "Memory") -> Iterator[tuple[str, str, str]]:
    from retrain.model.memory import size_words

    for part in memory.parts:
        yield part.name, size_words(part.bytes), part.note
    turns = "" if len(memory.peaks) > 1 else "; KV cache and activations take turns"
    for device, peak in memory.peaks.items():
        yield "peak", size_words(peak), f"of {size_words(memory.machine.memory)} on {device}{turns}"


def _time(seen: "Explanation") -> Iterator[str]:
    if seen.schedule is not None:
        yield from table([*_time_rows(seen.schedule)])


def _time_rows(plan: "Schedule") -> Iterator[tuple[str, str, str]]:
    workers = f" / {plan.effective_parallelism} at once" if plan.effective_parallelism > 1 else ""
    runs = f"{_counted(plan.total_runs, 'run')} x " if plan.total_runs > 1 else ""
    done = f", less {plan.steps_done:,} done" if plan.steps_done else ""
    what = f"{runs}{_counted(plan.steps_per_run, 'step')}{done}{workers}"
    if plan.step_time is None or plan.estimated_wall_time_s is None or plan.device_hours is None:
        product = f"{what}; " if runs or done else ""
        yield "steps", f"{plan.steps_left:,}", f"{product}for time and cost measure one with --probe, or give --pilot RUN_DIR"
    else:
        yield "step", _seconds(plan.step_time.seconds), plan.step_time.source
        if plan.step_time.peak_memory_gib is not None:
            yield "measured", f"{plan.step_time.peak_memory_gib:.2f} GiB", "peak memory so far, of the device on CUDA, else of the process"
        yield "in all", duration(plan.estimated_wall_time_s), f"{what}; evaluations and loading aside"
        if plan.cost is not None:
            yield "cost", f"{plan.cost:,.2f}", f"{plan.device_hours:,.2f} device hours at {plan.price_per_hour:g}"
    if plan.recommended:
        yield "workers", str(plan.effective_parallelism), f"recommended max_workers: {plan.recommended.count} ({plan.recommended.because})"


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds < 100 else duration(seconds)


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
