"""The parts of a run, loaded in the order in which the screen reports them, and the parity gate that they must pass."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from retrain.advantages.pipeline import CreditPipeline
from retrain.advantages.sepa import SEPAController
from retrain.backends.base import Backend
from retrain.backends.declared import backend_class, capability_notes, engine_class, incapable
from retrain.config import TrainConfig
from retrain.config.judging import judging_note, with_judging_reward
from retrain.data import PromptSet, contamination_note, encode_prompts, load_examples
from retrain.distributed import ALONE, World
from retrain.errors import ConfigurationError, EnvironmentFailure
from retrain.inference_engine.base import Truncation
from retrain.model.text import TextModel, load_text_model
from retrain.noise import Stream
from retrain.plugins import user_code
from retrain.records.run_folder import RunFolder
from retrain.rewards import FailureGuard, Scorer, build_scorer
from retrain.run.evaluation import Evaluator
from retrain.run.gate import GateInputs, GateResult, adapter_check, parity_gate
from retrain.run.rollout import Sampler, SamplingPlan
from retrain.types import MachineChoices, Prompt

Say = Callable[[str], None]

_EVALUATION_ORDER_SEED = 0
"""Sources are sorted by subject, so held-out problems are shuffled; the seed is the same for every run."""


@dataclass(frozen=True)
class Parts:
    """Everything that a step calls."""

    text: TextModel
    prompts: PromptSet
    backend: Backend
    scorer: Scorer
    judge: Scorer
    """Scores held-out answers; the scorer itself unless that has a random part."""
    guard: FailureGuard
    sampler: Sampler
    credit: CreditPipeline
    sepa: SEPAController
    evaluator: Evaluator | None

    def close(self) -> None:
        self.scorer.close()
        self.judge.close()
        self.backend.close()


def load_parts(config: TrainConfig, choices: MachineChoices | None, say: Say, world: World = ALONE, *, learns: bool = True) -> Parts:
    """Tokenizer, data, rewards, credit, model; cheap parts first, so that a mistake shows before a model is loaded.

    `learns` is False where nothing will be trained, so the memory of training is not predicted.
    """
    if problems := incapable(config):
        raise ConfigurationError(problems)
    for note in capability_notes(config):
        say(note)
    if config.backend.backend == "local" and config.inference.engine != "pytorch":
        with user_code(f'connecting [inference] engine = "{config.inference.engine}"', EnvironmentFailure):
            engine_class(config).preflight(config)
    text = load_text(config, say)
    credit = CreditPipeline(config, text.vocabulary.pieces)
    for note in credit.notes:
        say(note)
    prompts = load_prompts(config, text, say)
    held_out = load_held_out(config, text, prompts, say) if config.evaluation.asked_for else None
    with ExitStack() as undo:
        verdicts = RunFolder(Path(config.logging.log_dir)).verdicts if learns else None
        scorer = build_scorer(config, verdicts)  # its workers start while the model loads
        undo.callback(scorer.close)
        judge = load_judge(config, scorer, verdicts, say) if held_out else scorer
        undo.callback(judge.close)
        for note in dict.fromkeys(asking.probe() for asking in dict.fromkeys((scorer, judge))):
            if note:
                say(note)
        if learns:
            say_memory(config, choices, [*prompts.prompts, *(held_out or ())], say, world)
        backend = build_backend(config, text.eos_ids, choices, say, world)
        undo.callback(backend.close)
        backend.engine.say = say
        undo.pop_all()
    sampler = Sampler(backend.engine, scorer, text.vocabulary.text, world=world)
    examiner = Sampler(backend.engine, judge, text.vocabulary.text, world=world)
    evaluator = Evaluator(examiner, held_out, evaluation_plan(config), config.evaluation.k) if held_out else None
    guard = FailureGuard(config.reward.max_failure_rate)
    return Parts(text, prompts, backend, scorer, judge, guard, sampler, credit, SEPAController(config.sepa), evaluator)


def build_backend(config: TrainConfig, eos_ids: Sequence[int], choices: MachineChoices | None, say: Say, world: World = ALONE) -> Backend:
    """`choices` are the stored ones of a resumed run; None at its first start."""
    if config.backend.backend == "local":
        return _local_backend(config, eos_ids, choices, say, world)
    if world.size > 1:
        raise ConfigurationError(
            f'[backend] backend = {config.backend.backend!r} under torchrun: only backend = "local" learns in several processes.'
        )
    if config.backend.backend == "tinker":
        from retrain.backends.tinker.backend import TinkerBackend

        return TinkerBackend(config, eos_ids=eos_ids, say=say)
    make = backend_class(config)
    with user_code(f'building [backend] backend = "{config.backend.backend}"', ConfigurationError):
        return make(config, choices, eos_ids=eos_ids)  # type: ignore[call-arg]


def _local_backend(config: TrainConfig, eos_ids: Sequence[int], choices: MachineChoices | None, say: Say, world: World) -> Backend:
    from retrain.backends.local.backend import LocalBackend
    from retrain.model.devices import choose_device, half_precision_note

    device, note, sampler = choose_device(config, world)
    for line in filter(None, (note, half_precision_note(config, device))):
        say(line)
    say(f"Loading train model: {config.model.model} on {device}...")
    backend = LocalBackend(config, choices, eos_ids=eos_ids, world=world)
    for line in backend.notes:
        say(line)
    say(backend.trainable_parameters_line())
    say(f"LocalTrainHelper ready (engine={config.inference.engine}, split_mode={sampler is not None}).")
    return backend


def load_text(config: TrainConfig, say: Say) -> TextModel:
    say(f"Loading tokenizer for {config.model.model} ...")
    text = load_text_model(config.model)
    say("Loading vocabulary table...")
    say(f"Vocabulary table: {len(text.vocabulary)} entries")
    return text


def say_memory(config: TrainConfig, choices: MachineChoices | None, prompts: Sequence[Prompt], say: Say, world: World = ALONE) -> None:
    """Predict the run's memory before the weights are loaded. Raises EnvironmentFailure where not even one completion would fit."""
    if config.backend.backend != "local":
        return
    from retrain.model.memory import NotPredictable, predict_memory  # torch, which other backends do without
    from retrain.model.sharding import shards_of

    longest = max(len(prompt.token_ids) for prompt in prompts)
    try:
        say(predict_memory(config, prompt_tokens=longest, choices=choices, shards=shards_of(config, world)).line())
    except NotPredictable as error:
        say(str(error))


def load_prompts(config: TrainConfig, text: TextModel, say: Say) -> PromptSet:
    say("Loading dataset...")
    loaded = load_examples(config, "train")
    say(f"Loaded {len(loaded)} examples")
    prompts = encode_prompts(config.training, text, loaded)
    say(f"Pre-encoded {len(prompts)} prompts")
    for note in prompts.notes:
        say(note)
    return prompts


def load_held_out(config: TrainConfig, text: TextModel, training: PromptSet, say: Say) -> list[Prompt]:
    """`[evaluation] max_examples` of the held-out problems, the same ones in the same order for every run of a data set."""
    loaded = load_examples(config, "heldout")
    prompts = encode_prompts(config.training, text, loaded)
    shared = contamination_note((prompt.example for prompt in training.prompts), loaded.examples)
    count = min(config.evaluation.max_examples or len(prompts), len(prompts))
    say(f"Held-out evaluation on {count} of {len(prompts)} problems")
    for note in filter(None, (*prompts.notes, shared)):
        say(note)
    return prompts.batch(0, count, _EVALUATION_ORDER_SEED)


def load_judge(config: TrainConfig, scorer: Scorer, verdicts: Path | None, say: Say) -> Scorer:
    """The scorer of held-out answers: the run's own, unless that has a random part."""
    judging = with_judging_reward(config)
    if judging is config:
        return scorer
    say(judging_note(judging))
    return build_scorer(judging, verdicts)


def training_plan(config: TrainConfig) -> SamplingPlan:
    training = config.training
    return SamplingPlan(
        group_size=training.group_size,
        max_tokens=training.max_tokens,
        temperature=training.temperature,
        seed=training.seed,
        stream=Stream.SAMPLING,
        redraws=training.dynamic_sampling,
        truncation=truncation(config),
    )


def truncation(config: TrainConfig) -> Truncation:
    """The truncation of training and of evaluation."""
    return Truncation(config.training.top_k, config.training.top_p, config.training.min_p)


def evaluation_plan(config: TrainConfig) -> SamplingPlan:
    evaluation, training = config.evaluation, config.training
    return SamplingPlan(
        group_size=evaluation.samples,
        max_tokens=training.max_tokens,
        temperature=training.temperature if evaluation.temperature is None else evaluation.temperature,
        seed=training.seed,
        stream=Stream.EVALUATION,
        truncation=truncation(config),
    )


def is_rounded(config: TrainConfig, backend: Backend) -> bool:
    """True where sampler or learner computes, or caches keys and values, in 16 bits or fewer."""
    return backend.half_precision or config.inference.dtype != "auto" or config.inference.kv_cache_dtype != "auto"


def run_parity_gate(config: TrainConfig, parts: Parts, step: int, *, trained: bool = False) -> GateResult:
    """Check the first prompts of the data order, so that a resumed run is checked on the same ones.

    `step` counts the training steps behind the weights. `trained`: the engine already serves these weights and is checked with them first.
    """
    inputs = _gate_inputs(config, parts, step, trained)
    return parity_gate(inputs, _gate_prompts(config, parts))


def check_again(config: TrainConfig, parts: Parts, step: int) -> None:
    """Check the engine's current adapter alone, after a server woke up or came back."""
    adapter_check(_gate_inputs(config, parts, step, True), _gate_prompts(config, parts))


def _gate_prompts(config: TrainConfig, parts: Parts) -> list[Prompt]:
    return parts.prompts.batch(0, min(config.training.batch_size, len(parts.prompts)), config.training.seed)


def _gate_inputs(config: TrainConfig, parts: Parts, step: int, trained: bool) -> GateInputs:
    return GateInputs(
        backend=parts.backend,
        scorer=parts.scorer,
        decode=lambda ids: str(parts.text.tokenizer.decode(ids.tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False)),
        eos_ids=parts.text.eos_ids,
        temperature=config.training.temperature,
        truncation=truncation(config),
        max_tokens=config.training.max_tokens,
        longest_row=config.training.max_tokens + max(len(prompt.token_ids) for prompt in parts.prompts.prompts),
        seed=config.training.seed,
        half_precision=is_rounded(config, parts.backend),
        step=step,
        trained=trained,
    )
