"""Check what a run would refuse or say of its plugins, rewards, data files, packages and model."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Self

from retrain.config import TrainConfig, replaced
from retrain.config.names import DATA_FILE_SUFFIXES
from retrain.config.plan import Plan, sources_of
from retrain.data import NoHeldOutSplit, contamination_note, load_examples
from retrain.data.chat import messages_of
from retrain.data.prompts import query_of
from retrain.data.sources import HUB_SOURCES, SOURCES, Benchmark, Query
from retrain.data.traces import trace_query
from retrain.errors import ConfigurationError, EnvironmentFailure
from retrain.model.hub import is_offline
from retrain.model.text import load_model_config, load_text_model, resolve_model
from retrain.records.terminal import counted
from retrain.rewards import boxed_reference, build_scorer
from retrain.rewards.pairs import judge_answers
from retrain.run.notes import answer_notes
from retrain.run.parts import check_device, check_packages, check_plugins
from retrain.run.start import refuse_resume
from retrain.run.supervised import SupervisedStage
from retrain.types import Example


@dataclass
class InputProblems:
    """Warnings of runs about their plugins, rewards, data files and packages."""

    refused: list[str] = field(default_factory=list)
    """The run refuses them with exit code 2."""
    lacking: list[str] = field(default_factory=list)
    """This machine lacks them, which gives exit code 3."""
    warnings: list[str] = field(default_factory=list)
    traces: list[str] = field(default_factory=list)
    """Lines about the supervised stage of the first run that has one."""

    @classmethod
    def of(cls, configs: Sequence[TrainConfig], *, here: bool) -> Self:
        """Return the problems of all runs. `here` is False if the prediction is for another
        machine, whose devices are unknown.
        """
        found = cls()
        checks: list[Callable[[TrainConfig], str | None]] = [
            check_inputs,
            found._traces,
            check_packages,
            check_model,
            *[check_device] * here,
        ]
        for config, check in product(configs, checks):
            try:
                note = check(config)
            except ConfigurationError as error:
                found.refused += error.problems
            except EnvironmentFailure as error:
                found.lacking.append(str(error))
            else:
                found.warnings += filter(None, [note])
        return found

    def _traces(self, config: TrainConfig) -> str:
        """Describe the supervised stage if that needs neither the hub nor a model's own code;
        return the warning about its rows. Raises ConfigurationError as a run would.
        """
        if not config.sft.is_on or config.model.trust_remote_code:
            return ""
        local = is_offline() or Path(resolve_model(config.model.model)).is_dir()
        if not (local and _asks_nobody(trace_query(config, "train"))):
            return ""
        stage = SupervisedStage.load(config, load_text_model(config.model))
        self.traces = self.traces or list(stage.lines())
        return " ".join(f"{note}." for note in stage.traces.notes)


def check_inputs(config: TrainConfig) -> str:
    """Check, for `explain`, what a run would refuse in its plugins, its rewards and its data files,
    and judge reference answers. It sends no request to the hub; offline it looks into the cache of
    the hub. Return the run's warnings about these files, or "".

    Raises ConfigurationError or EnvironmentFailure, as the run would.
    """
    check_plugins(config)
    if config.lora.init_from:
        from retrain.model.adapter import check_initial

        check_initial(config.model, config.lora)
    if config.resume.from_:
        refuse_resume(config)
    return " ".join(
        filter(None, (_check_source(each.config, each.task) for each in sources_of(config)))
    )


def _check_source(config: TrainConfig, task: str) -> str:
    if config.environment.provider:
        return ""
    config = replaced(config, {"reward.workers": 1})
    with build_scorer(config) as scorer:
        asks = (
            not scorer.judges_groups
            and "judge" not in config.reward.types
            and config.reward.max_failure_rate < 1  # 1 allows a run every failure
        )
    held_out: list[Example] = []
    for own in Plan.of(config).evaluations:
        if own.evaluation.asked_for and _asks_nobody(query_of(own, "heldout")):
            # A source of a mixture may have no held-out rows.
            with suppress(NoHeldOutSplit) if task else nullcontext():
                held_out += load_examples(own, "heldout").examples
    if _asks_nobody(query_of(config, "train")):
        loaded = load_examples(config, "train")
        if asks:
            _judge_references(config, loaded.examples[:_REFERENCES_JUDGED])
        texts = [
            "\n".join(message["content"] for message in messages_of(each, config.data))
            for each in loaded.examples
        ]
        notes = [
            f"Dropped rows: {loaded.dropped_rows()}." * bool(loaded.dropped),
            contamination_note(loaded.examples, held_out),
            *answer_notes(config, texts, loaded.examples),
        ]
        return " ".join(filter(None, notes))
    return ""


_REFERENCES_JUDGED = 3


def _judge_references(config: TrainConfig, examples: Sequence[Example]) -> None:
    """Raise ConfigurationError if the reward can judge none of the reference answers."""
    scores = judge_answers(config, [(boxed_reference(each.reference), each) for each in examples])
    if all(score.reward is None for score in scores):
        raise ConfigurationError(
            f'[reward] type = "{" + ".join(config.reward.types)}" could judge none of'
            f" {counted(len(scores), 'reference answer')} ({scores[0].reason.rstrip('.')});"
            " fix the reward."
        )


def _asks_nobody(query: Query) -> bool:
    """True if files alone give the answer, or if retrain refuses the query: on an offline hub, or
    for training on a set for evaluation.
    """
    source, reader = query.data.source, SOURCES.get(query.data.source)
    on_hub = source in HUB_SOURCES or source.startswith("hub:")
    return bool(
        query.data.path
        or source.endswith(DATA_FILE_SUFFIXES)
        or source in ("jsonl", "parquet", "lab")
        or (source not in SOURCES and query.path.exists())
        or (on_hub and is_offline())
        or (query.split == "train" and isinstance(reader, Benchmark))
    )


def check_model(config: TrainConfig) -> None:
    """Raise as the run would for an unavailable model."""
    if not config.model.trust_remote_code:  # Checking runs no remote code.
        load_model_config(config.model.model, config.model.revision)
