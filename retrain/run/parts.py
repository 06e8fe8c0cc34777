"""The parts of a run, loaded in the order in which the screen reports them, and the parity gate
that they must pass.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np

from retrain.advantages.pipeline import CreditPipeline
from retrain.advantages.planning import Encoder
from retrain.advantages.sepa import SEPAController
from retrain.backends.base import BACKENDS, Backend, backend_kind
from retrain.backends.declared import backend_class, capability_notes, engine_class, incapable
from retrain.config import TrainConfig, replaced
from retrain.config.judging import judging_note
from retrain.config.keys import keys_by_path
from retrain.config.names import is_data_location, is_dotted
from retrain.config.plan import Plan, sources_of
from retrain.config.schema import Backend as BackendSettings
from retrain.config.schema import Inference, Model, Training
from retrain.config.unused import reason_unused
from retrain.data import (
    NoHeldOutSplit,
    PromptSet,
    contamination_note,
    encode_prompts,
    load_examples,
)
from retrain.data.chat import ChatRenderer
from retrain.data.prompts import (
    MixedPrompts,
    as_task,
    examples_key,
    fingerprint,
    of_task,
    query_of,
)
from retrain.data.readers import Split
from retrain.data.samplers import SAMPLERS, build_sampler
from retrain.data.sources import Query, load_source
from retrain.data.traces import trace_query
from retrain.distributed import ALONE, World
from retrain.environments.episodes import EpisodeHost
from retrain.environments.loading import (
    check_package,
    environment_name,
    load_environment,
    load_problems,
)
from retrain.errors import ConfigurationError, EnvironmentFailure
from retrain.inference_engine.base import Truncation
from retrain.model.budget import longest_row
from retrain.model.text import (
    TextModel,
    load_text_model,
    model_files,
)
from retrain.noise import Stream
from retrain.plugins import load_plugin, user_code
from retrain.records.run_folder import RunFolder
from retrain.records.terminal import counted
from retrain.rewards import FailureGuard, Scorer, boxed_reference, build_scorer
from retrain.run.dialogues import SamplingPlan, Stage
from retrain.run.evaluation import Evaluator
from retrain.run.gate import (
    GateResult,
    adapter_check,
    parity_gate,
    play_references,
    score_references,
)
from retrain.run.gate_samples import GateInputs
from retrain.run.notes import answer_notes
from retrain.run.rollout import Judge, Sampler
from retrain.run.sharing import shared
from retrain.run.supervised import SupervisedStage
from retrain.run.teacher import Teacher, check_answers, check_teacher
from retrain.tracking.build import check_packages as check_tracker_packages
from retrain.types import Doing, Example, Int32Array, LogLine, MachineChoices, Prompt

Say = Callable[[str], None]


Judges = Mapping[str, Judge]
"""Task of a source -> what judges its answers; "" stands for any other task."""
HeldOut = Sequence[tuple[Sequence[Prompt], SamplingPlan]]
"""The held-out prompts of each source of `[evaluation]`, and the plan for sampling answers."""
_EVALUATION_ORDER_SEED = 0
"""Seed that shuffles held-out problems, which sources sort by subject; it is the same for every
run."""


@dataclass(frozen=True)
class RunParts:
    """The parts of a run that its steps use."""

    text: TextModel
    prompts: PromptSet
    """The training prompts of all sources."""
    sources: Sequence["SourceParts"]
    """The source of the problems; several with `[[data.mix]]`."""
    backend: Backend
    guard: FailureGuard
    sampler: Sampler
    credit: CreditPipeline
    teacher: Teacher | None
    """Scores sampled tokens for stages of credit; None without [algorithm] teacher."""
    sepa: SEPAController
    evaluator: Evaluator | None
    supervised: SupervisedStage | None
    _opened: ExitStack
    """Closes the parts."""

    @property
    def fingerprints(self) -> dict[str, str]:
        """The hashes of the run's training data, under the names of environment.json."""
        found = {"data_sha256": self.prompts.fingerprint}
        if self.supervised:
            found["traces_sha256"] = fingerprint(self.supervised.traces.examples)
        return found

    @property
    def heldout_sha256(self) -> dict[str, str] | None:
        """Task -> sha256 of its held-out examples; None without an evaluation."""
        return self.evaluator.heldout_sha256 if self.evaluator else None

    @property
    def has_turns(self) -> bool:
        """True if an environment judges some of the problems."""
        return any(source.stage for source in self.sources)

    def close(self) -> None:
        self._opened.close()


@dataclass(frozen=True)
class SourceParts:
    """A source of problems, and what judges the answers to them."""

    task: str
    """Its name in `[[data.mix]]`; "" if it is the only source."""
    config: TrainConfig
    """The configuration of a run on this source alone."""
    stage: Stage | None
    """The environment, which judges its own problems; None if they come from [data]."""
    scorer: Scorer | None = None
    """Scores training completions; None if an environment judges."""

    @property
    def judge(self) -> Judge:
        judge = self.stage or self.scorer
        assert judge is not None  # Every source has a scorer or a stage.
        return judge


@dataclass(frozen=True)
class Scorers:
    """The scorers of a run, one for each distinct reward."""

    verdicts: Path | None
    """The file of the judge's verdicts; None if nothing keeps them."""
    opened: ExitStack
    """Closes the scorers."""
    made: dict[str, Scorer] = field(default_factory=dict)

    def of(self, config: TrainConfig) -> Scorer | None:
        """Return the scorer of `[reward]`, started at its first call; None if an environment
        judges.
        """
        if config.environment.provider:
            return None
        key = config.reward.model_dump_json()
        if key not in self.made:
            self.made[key] = self.opened.enter_context(build_scorer(config, self.verdicts))
        return self.made[key]


def load_parts(
    config: TrainConfig,
    choices: MachineChoices | None,
    log: Say,
    world: World = ALONE,
    *,
    learns: bool = True,
) -> RunParts:
    """Load tokenizer, data, rewards, credit and model. Cheap parts come first, so that a mistake
    shows before a model loads.

    `learns` is False if the run will train no weights, so this does not predict the memory of
    training.
    """
    if problems := incapable(config):
        raise ConfigurationError(problems)
    check_plugins(config)
    if config.is_set("backend.devices"):
        check_device(config)
    for note in capability_notes(config):
        log(note)
    _connect_engine(config, log, learns)
    verdicts = RunFolder(config.folder).verdicts if learns else None
    with ExitStack() as opened:
        scorers = Scorers(verdicts, opened)
        for source in sources_of(config):
            scorers.of(source.config)  # Its workers start while the model loads.
        return _load_rest(config, choices, log, world, scorers, learns=learns)


def _load_rest(
    config: TrainConfig,
    choices: MachineChoices | None,
    log: Say,
    world: World,
    scorers: Scorers,
    *,
    learns: bool,
) -> RunParts:
    """Load the parts that may come from the hub."""
    opened = scorers.opened
    text = load_text(config.model, log)
    _log_context(config.training, text.context, log)
    credit = _load_credit(config, text, log, world)
    sources = load_sources(config, text, log, opened, scorers)
    prompts = load_mixed_prompts(text, sources, log)
    check_answers(config, prompts.examples)
    supervised = load_supervised(config, text, log) if learns else None
    learned = supervised.traces.examples if supervised else ()
    held_out = load_held_out(config, text, sources, [*prompts.examples, *learned], log)
    judges = load_judges(config, sources, scorers, log) if held_out else {}
    for note in filter(None, dict.fromkeys(one.probe() for one in scorers.made.values())):
        log(note)
    if learns:
        say_memory(config, choices, longest_prompt(prompts, held_out), supervised, log, world)
    backend = build_backend(config, text.eos_ids, choices, log, world)
    opened.callback(backend.close)
    backend.engine.log = log

    def sampler(by_task: Judges) -> Sampler:
        return Sampler(backend.engine, by_task.get(""), text.vocabulary.text, world, by_task)

    rate = config.reward.max_failure_rate
    return RunParts(
        text,
        prompts,
        sources,
        backend,
        FailureGuard(rate),
        sampler({source.task: source.judge for source in sources}),
        credit,
        Teacher(config.algorithm, text, backend) if config.algorithm.teacher else None,
        SEPAController(config.sepa),
        Evaluator(sampler(judges), held_out, config.evaluation.k, rate) if held_out else None,
        supervised,
        opened.pop_all(),
    )


def load_sources(
    config: TrainConfig,
    text: TextModel,
    log: Say,
    opened: ExitStack,
    scorers: Scorers | None = None,
) -> list[SourceParts]:
    """Load the judges of each source's answers: the environments, which `opened` closes, and the
    scorers if `scorers` has them.
    """
    loaded = []
    for source in sources_of(config):
        scorer = scorers.of(source.config) if scorers else None
        stage = load_stage(source.config, text, log)
        if stage:
            opened.callback(stage.host.close)
        loaded.append(SourceParts(source.task, source.config, stage, scorer))
    return loaded


def load_mixed_prompts(text: TextModel, sources: Sequence[SourceParts], log: Say) -> PromptSet:
    """Load the training prompts of all sources."""
    sets = []
    for source in sources:
        own = load_prompts(source.config, text, source.stage, log, source.task)
        if not source.stage:
            for note in answer_notes(source.config, own.texts, own.examples):
                log(note)
        sets.append(own)
    return MixedPrompts.of(sets) if sources[0].task else sets[0]


def _log_context(training: Training, positions: int, log: Say) -> None:
    """Say that max_tokens exceeds the positions of the model."""
    if training.max_tokens >= positions:
        log(
            f"[training] max_tokens = {training.max_tokens:,}, and the model has {positions:,}"
            " positions for prompt and completion (with longrope, of its original length). A"
            " completion ends where they are full."
        )


def _load_credit(config: TrainConfig, text: TextModel, log: Say, world: World) -> CreditPipeline:
    credit = CreditPipeline(
        config, text.vocabulary.pieces, lambda name: load_encoder(config.backend, name, world)
    )
    for note in credit.notes:
        log(note)
    return credit


def check_plugins(config: TrainConfig) -> None:
    """Load every plugin that the run needs, except for its rewards, before any request to the hub.

    Raises ConfigurationError, with one sentence for each plugin that does not load or fails on a
    small example.
    """
    problems: list[str] = []
    # The other detector's encoder is a model of the hub.
    regex = replaced(config, {"planning.detector": "regex"})
    for load in (
        lambda: CreditPipeline(regex, lambda ids: [""] * len(ids)),
        lambda: _load_sources(config),
        lambda: check_teacher(config),
    ):
        try:
            load()
        except ConfigurationError as error:
            problems += error.problems
    if problems:
        raise ConfigurationError(problems)


def _load_sources(config: TrainConfig) -> None:
    """Load the plugins of [data] and [environment], without calling them. An existing file is never
    a plugin path, whatever its name ends in.
    """
    for own in sources_of(config):
        provider = own.config.environment.provider
        if not provider:
            _load_source(query_of(own.config, "train"))
        elif is_dotted(provider):
            load_plugin("environment", provider, config)
    if config.sft.is_on:
        _load_source(trace_query(config, "train"))
    for evaluation in Plan.of(config).evaluations if config.evaluation.asked_for else ():
        _load_source(query_of(evaluation, "heldout"))
    known = load_plugin("sampler", config.data.sampler, config, SAMPLERS)
    # A plugin may read its examples, so the run tries it after loading its own examples.
    if known is not None and config.data.sampler in SAMPLERS:
        build_sampler(config, [Example("?", "")])


def _load_source(query: Query) -> None:
    source = query.data.source
    if is_dotted(source) and not is_data_location(source) and not Path(source).exists():
        load_source(query)


def check_device(config: TrainConfig) -> None:
    """Raise as the run would for a missing device, and for an unsupported use of it by the engine
    of this process.
    """
    if backend_kind(config.backend.backend).in_process:
        from retrain.model.devices import choose_device, usable_dtype

        usable_dtype(config, choose_device(config.backend).device)


def check_packages(config: TrainConfig) -> None:
    """Raise as the run would for a missing package of its backend, its environment, its trackers or
    its planning detector.
    """
    _check_backend(config)
    for source in sources_of(config):
        check_package(source.config.environment.provider)
    if config.planning.detector == "semantic" and not reason_unused(
        config, keys_by_path()["planning.detector"]
    ):
        from retrain.model.sentences import check_encoder_package

        check_encoder_package()
    check_tracker_packages(config.logging)


def _check_backend(config: TrainConfig) -> None:
    """Raise EnvironmentFailure if the backend needs something that this machine lacks."""
    if reason := backend_kind(config.backend.backend).unavailable_reason():
        raise EnvironmentFailure(reason)


def _connect_engine(config: TrainConfig, log: Say, learns: bool) -> None:
    """Check, before a model loads, that an engine outside this process answers and can do what the
    run needs.
    """
    if not backend_kind(config.backend.backend).in_process:
        return
    where = f'connecting [inference] engine = "{config.inference.engine}"'
    with user_code(where, EnvironmentFailure):
        text_alone = engine_class(config).preflight(config)
    if text_alone:
        if learns:
            raise ConfigurationError(text_alone)
        log(text_alone)


def build_backend(
    config: TrainConfig,
    eos_ids: Sequence[int],
    choices: MachineChoices | None,
    log: Say,
    world: World = ALONE,
) -> Backend:
    """Build the backend with the stored `choices` of a resumed run, or None at its first start."""
    name = config.backend.backend
    kind = backend_kind(name)
    if world.size > 1 and not kind.in_process:
        raise ConfigurationError(
            f'[backend] backend = {name!r} under torchrun: only backend = "local" learns in several'
            " processes."
        )
    _check_backend(config)
    if name in BACKENDS:
        return kind.open(config, choices, eos_ids=eos_ids, log=log, world=world)
    make = backend_class(config)
    with user_code(f'building [backend] backend = "{name}"', ConfigurationError):
        return make(config, choices, eos_ids=eos_ids)  # type: ignore[call-arg]  # a plugin's own constructor


def load_encoder(backend: BackendSettings, name: str, world: World) -> Encoder:
    """Load the sentence encoder of the semantic planning detector, on the learner's device if that
    is in this process.
    """
    from retrain.model.sentences import load_sentence_encoder

    if not backend_kind(backend.backend).in_process:
        return load_sentence_encoder(name)
    from retrain.model.devices import choose_device

    return load_sentence_encoder(name, str(choose_device(backend, world).device))


def _text_key(model: Model) -> tuple[Hashable, ...]:
    return "text", model.model, model.revision, *model_files(model.model)


def load_text(model: Model, log: Say) -> TextModel:
    log(LogLine(f"Loading tokenizer for {model.model} ..."))
    key = _text_key(model) if not model.trust_remote_code else None
    text = shared(key, lambda: load_text_model(model))
    log(LogLine("Loading vocabulary table..."))
    log(LogLine(f"Vocabulary table: {len(text.vocabulary)} entries"))
    return text


def say_memory(
    config: TrainConfig,
    choices: MachineChoices | None,
    prompt_tokens: int,
    supervised: SupervisedStage | None,
    log: Say,
    world: World,
) -> None:
    """Predict the run's memory, with prompts of up to `prompt_tokens`, before the weights load.
    Raises EnvironmentFailure if not even one completion would fit.
    """
    if not backend_kind(config.backend.backend).in_process:
        return
    # They import torch, which other backends do without.
    from retrain.model.load import shards_of
    from retrain.model.memory import PredictionError, predict_memory

    if supervised:  # The longest row must cover the rows of traces too.
        completion = config.training.max_tokens
        prompt_tokens = max(prompt_tokens, supervised.traces.longest - completion)
    try:
        memory = predict_memory(
            config,
            prompt_tokens=prompt_tokens,
            choices=choices,
            shards=shards_of(config.backend, world),
        )
        log(LogLine(memory.line(), f"needs {memory.peak_words}"))
    except PredictionError as error:
        log(str(error))


def load_stage(config: TrainConfig, text: TextModel, log: Say) -> Stage | None:
    """Load the environment of `[environment]`, ready for its episodes; None if there is none."""
    settings = config.environment
    if not settings.provider:
        return None
    log(LogLine(f"Loading environment {environment_name(config.environment)} ..."))
    environment = load_environment(config)
    host = EpisodeHost(
        environment,
        max_turns=max(settings.max_turns, 0) or environment.max_turns,
        timeout_s=settings.timeout_s,
        correct_threshold=config.reward.correct_threshold,
    )
    renderer = ChatRenderer(text.tokenizer, text.eos_ids, config.data.chat_template_args)
    return Stage(host, renderer, text.decode, text.context)


def load_prompts(
    config: TrainConfig, text: TextModel, stage: Stage | None, log: Say, task: str = ""
) -> PromptSet:
    """Load the training prompts of a source; `task` is its name in a mixture."""
    of = f" of {task}" if task else ""
    log(LogLine("Loading dataset..."))
    count, prompts = _read_prompts(config, text, stage, "train", log, task)
    log(LogLine(f"Loaded {count} examples{of}"))
    log(LogLine(f"Pre-encoded {len(prompts)} prompts", counted(len(prompts), "prompt") + of))
    for note in prompts.notes:
        log(note)
    return prompts


def load_supervised(config: TrainConfig, text: TextModel, log: Say) -> SupervisedStage | None:
    """Load the traces of [sft]; None without a supervised stage."""
    if not config.sft.is_on:
        return None
    log(LogLine("Loading traces..."))
    stage = SupervisedStage.load(config, text)
    log(LogLine(f"Loaded {stage.words}", counted(len(stage.traces), "trace")))
    for note in stage.traces.notes:
        log(note)
    return stage


def _read_prompts(
    config: TrainConfig,
    text: TextModel,
    stage: Stage | None,
    split: Split,
    log: Say,
    task: str = "",
) -> tuple[int, PromptSet]:
    """Return the number of examples, and the prompts of the examples that fit the context. With a
    `task`, the name of a source of a mixture, the examples belong to it.
    """
    if stage is None:
        asked = query_of(config, split).key
    else:
        asked = f"[environment] {environment_name(config.environment)}"

    def read() -> tuple[int, PromptSet]:
        log(Doing(f"Reading and encoding {asked}"))
        if stage is None:
            loaded = load_examples(config, split)
        else:
            loaded = load_problems(
                stage.host.environment, config, "train" if split == "train" else "evaluation"
            )
        if task:
            loaded.examples = [as_task(example, task) for example in loaded.examples]
        return len(loaded.examples), encode_prompts(config.training, text, loaded)

    key = None
    if stage is None and not config.model.trust_remote_code:
        key = examples_key(config, split)
    if key is not None:
        key = (*_text_key(config.model), config.training.max_tokens, task, key)
    return shared(key, read)


def longest_prompt(training: PromptSet, held_out: HeldOut) -> int:
    """Return the number of tokens of the longest prompt that the run may sample from."""
    asked = chain.from_iterable(prompts for prompts, _ in held_out)
    return max(training.longest, *(len(prompt.token_ids) for prompt in asked), 0)


def load_held_out(
    config: TrainConfig,
    text: TextModel,
    sources: Sequence[SourceParts],
    trained: Sequence[Example],
    log: Say,
) -> HeldOut:
    """Load `[evaluation] max_examples` of the held-out problems of each source; none if the run
    evaluates nothing. Every run of a data set has the same ones in the same order. Sources of a
    mixture may have none, but not all.
    """
    if not config.evaluation.asked_for:
        return ()
    asked = _held_out_sources(config, sources)
    chosen: list[tuple[Sequence[Prompt], SamplingPlan]] = []
    for own in asked:
        settings, name = own.config.evaluation, f" of {own.task}" if own.task else ""
        try:
            _, prompts = _read_prompts(own.config, text, own.stage, "heldout", log, own.task)
        except NoHeldOutSplit:
            if not own.task or (own is asked[-1] and not chosen):
                raise
            log(
                f"The source {own.task} has no held-out rows, so retrain trains on it and does not"
                " evaluate it."
            )
            continue
        seen = contamination_note(trained, prompts.examples)
        count = min(settings.max_examples or len(prompts), len(prompts))
        drawn = prompts.batch(0, count, _EVALUATION_ORDER_SEED)
        if len(asked) > 1 and not own.task:
            (source,) = settings.sources
            drawn, name = of_task(drawn, source), f" of {source}"
        line = f"Held-out evaluation on {count} of {len(prompts)} problems{name}"
        log(LogLine(line, f"{count:,} held-out{name}"))
        for note in filter(None, (*prompts.notes, seen)):
            log(note)
        plan = training_plan(settings.over(config.training))
        plan = replace(plan, group_size=settings.samples, stream=Stream.EVALUATION, redraws=0)
        chosen.append((drawn, plan))
    return chosen


def _held_out_sources(config: TrainConfig, sources: Sequence[SourceParts]) -> Sequence[SourceParts]:
    """Return the sources of held-out problems: the training sources, or the sources of
    [evaluation].
    """
    of_training = not config.evaluation.source if config.data.mix else sources[0].stage
    if of_training:
        return sources
    return [SourceParts("", own, None) for own in Plan.of(config).evaluations]


def load_judges(
    config: TrainConfig, sources: Sequence[SourceParts], scorers: Scorers, log: Say
) -> Judges:
    """Return the judges of held-out answers. They are the judges of training, unless those have a
    random part.
    """
    if config.data.mix and config.evaluation.source:
        sources = [SourceParts("", config, None)]
    judges = {}
    for own in sources:
        judging = Plan.of(own.config).judging
        if judging is not own.config and not own.stage:
            log(judging_note(own.config, judging))
        judges[own.task] = replace(own, scorer=scorers.of(judging)).judge
    return judges


def training_plan(training: Training) -> SamplingPlan:
    return SamplingPlan(
        group_size=training.group_size,
        max_tokens=training.max_tokens,
        temperature=training.temperature,
        seed=training.seed,
        stream=Stream.SAMPLING,
        redraws=training.max_resamples,
        truncation=truncation(training),
    )


def truncation(training: Training) -> Truncation:
    return Truncation(training.top_k, training.top_p, training.min_p)


def is_rounded(inference: Inference, backend: Backend) -> bool:
    """Return True if sampler or learner computes, or caches keys and values, in 16 bits or
    fewer.
    """
    return backend.half_precision or backend.engine.rounds or inference.reduced_precision


def run_parity_gate(
    config: TrainConfig,
    parts: RunParts,
    step: int,
    *,
    trained: bool = False,
) -> GateResult:
    """Check the first prompts of the data order, so that a resumed run checks the same prompts.

    `step` counts the training steps behind the weights. `trained`: the engine already serves these
    weights, and the gate checks it with them first.
    """
    inputs = gate_inputs(config, parts, step, trained)
    return parity_gate(inputs, _gate_prompts(config.training, parts))


def check_again(config: TrainConfig, parts: RunParts, step: int) -> None:
    """Check the engine's current adapter alone, after a server woke up or came back."""
    adapter_check(gate_inputs(config, parts, step, True), _gate_prompts(config.training, parts))


def _gate_prompts(training: Training, parts: RunParts) -> list[Prompt]:
    count = min(max(training.batch_size, len(parts.sources)), len(parts.prompts))
    return parts.prompts.batch(0, count, training.seed)


def gate_inputs(config: TrainConfig, parts: RunParts, step: int, trained: bool) -> GateInputs:
    training = config.training
    return GateInputs(
        backend=parts.backend,
        check_references=partial(_check_references, parts),
        eos_ids=parts.text.eos_ids,
        answers=partial(_answers, parts),
        temperature=training.temperature,
        truncation=truncation(training),
        longest_row=max(
            longest_row(
                training, source.config.environment, parts.text.context, parts.prompts.longest
            )
            for source in parts.sources
        ),
        seed=training.seed,
        half_precision=is_rounded(config.inference, parts.backend),
        eight_bits=config.inference.eight_bits,
        dtype_set=config.inference.dtype != "auto",
        step=step,
        trained=trained,
    )


def _check_references(parts: RunParts, prompts: Sequence[Prompt]) -> str:
    """Score the right answers to these prompts with the judge of their source."""
    found = []
    for source in parts.sources:
        own = [each for each in prompts if source.task in ("", each.example.task)]
        if isinstance(source.judge, Stage):
            words = play_references(source.judge.host, own)
        else:
            words = score_references(source.judge, source.config.reward.think_end_token, own)
        found.append(f"{source.task} {words}".strip())
    return ", ".join(found)


def _answers(parts: RunParts, prompt: Prompt) -> list[Int32Array]:
    """Return ways to end an answer to `prompt`, as token ids."""
    reference = prompt.example.reference
    if not reference:
        return []
    boxed = boxed_reference(reference)
    texts = (boxed, f"{boxed}.", f"The answer is {reference}.", reference)
    return [
        np.array(parts.text.tokenizer.encode(text, add_special_tokens=False), np.int32)
        for text in texts
    ]
