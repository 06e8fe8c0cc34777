"""Hold one process's share of a run: it opens the run, samples, evaluates, saves and sums up.
`loop.take_step` goes through one step.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext, suppress
from dataclasses import asdict, replace
from time import monotonic
from typing import Any

from retrain.backends.declared import is_raw, loss_notes
from retrain.backends.rows import mismatch_fields
from retrain.config import TrainConfig
from retrain.config.data_sections import DATE_ARGUMENT
from retrain.config.plan import Plan
from retrain.data.mixing import prompt_choice
from retrain.distributed import World, joined
from retrain.errors import (
    EnvironmentFailure,
    Interrupted,
    NotReached,
    RetrainError,
    RunFailed,
)
from retrain.model.text import model_fingerprint
from retrain.records.checkpoint_place import take
from retrain.records.disk import replace_file
from retrain.records.entries import SftRecord, StepRecord
from retrain.records.evaluation import Evaluation, read_evaluations
from retrain.records.redact import note_secrets
from retrain.records.summary import RunSummary
from retrain.records.terminal import clean, counted
from retrain.run.dialogues import SamplingPlan, Watcher, counting
from retrain.run.gate import GateResult
from retrain.run.interrupts import Interrupts
from retrain.run.notes import preflight_lines, skipped_gate_line
from retrain.run.observer import (
    StepObserver,
    check_mismatch,
    check_updates,
    mismatch_limit,
    untrained_mismatch_line,
)
from retrain.run.parts import (
    Parts,
    check_again,
    is_rounded,
    load_parts,
    run_parity_gate,
    training_plan,
)
from retrain.run.pressure import Pressure
from retrain.run.rollout import PrefetchedRollout, Rollout
from retrain.run.saver import Saver, Schedule
from retrain.run.start import (
    RunStart,
    open_run,
    part_of_session,
    refuse_other_data,
    with_prompt_date,
)
from retrain.run.step_record import Step
from retrain.system import read_object
from retrain.tracking import Tracker, build_tracker
from retrain.tracking.base import GroupScore, GroupScores, StartEvent, Verbosity, is_due
from retrain.types import (
    Doing,
    Float32Array,
    Float64Array,
    Group,
    LogLine,
    Prompt,
    Row,
    RowKey,
    StepResult,
)


class Session:
    """A run in progress in this process. Between steps, only `state` and the backend change, and no
    other part holds the state.
    """

    def __init__(
        self,
        opened: RunStart,
        tracker: Tracker,
        interrupts: Interrupts,
        parts: Parts,
        world: World,
        *,
        skip_parity: bool,
    ) -> None:
        self.config = opened.config
        self.plan = Plan.of(self.config)
        self.folder = opened.folder
        self.state = opened.state
        self.tracker = tracker
        self.interrupts = interrupts
        self.parts = parts
        self.world = world
        self.schedule = Schedule(self.config.training, self.config.evaluation, self.config.sft)
        settings = self.config.backpressure
        self.pressure = None
        if settings.enabled:
            self.pressure = Pressure(
                settings, self.config.training, parts.backend, opened.decided_by
            )
        self.choice = prompt_choice(self.config, parts.prompts)
        saved = self.state if opened.checkpoint else None
        self.saver = Saver(self.folder, opened.store, parts.backend, tracker, saved)
        self.observer = StepObserver(self.plan, parts, tracker)
        self.evaluations: list[Evaluation] = []
        self.sft_records: list[SftRecord] = []
        """The steps of the supervised stage, of all sessions."""
        self.prefetched = None
        if parts.backend.capabilities.samples_ahead:
            self.prefetched = PrefetchedRollout(interrupts.check)
        # Several ranks would wait for each other: they stop together, in `turn_to_learning`.
        if world.size == 1:
            parts.backend.engine.check = interrupts.check
        self._adapter = opened.store.folder / "final"
        self._synced: tuple[str, int] | None = None
        """The stage and step whose weights the engine samples from."""
        self._skip_parity = skip_parity
        self._began = opened.began
        self._gate_repeated = skip_parity

    # -- the start ---------------------------------------------------------------------------------

    @classmethod
    @contextmanager
    def open(
        cls,
        config: TrainConfig,
        *,
        overwrite: bool,
        verbosity: Verbosity = Verbosity.NORMAL,
        skip_parity: bool = False,
        said: Sequence[str] = (),
    ) -> Iterator["Session"]:
        """Load, restore and check everything, so that the next thing to do is a step; close it at
        the end of the block. The lines `said` come first.
        """
        note_secrets(config)
        with (
            joined() as world,
            _opened(config, overwrite, world) as opened,
            Interrupts() as interrupts,
        ):
            tracker = Tracker()
            if world.is_rank_zero:
                tracker = build_tracker(
                    opened.config,
                    opened.folder,
                    condition=opened.config.condition_label,
                    verbosity=verbosity,
                    resumed=opened.state.tracking,
                    first_step=opened.state.step,
                )
            try:
                for line in (*said, *preflight_lines(opened.config), *opened.notes):
                    tracker.message(line)
                if world.size > 1:
                    tracker.message(
                        f"{world.size} processes share this run, each with its share of the prompts"
                        " and rows."
                    )
                with interrupts.at_once() if world.size == 1 else nullcontext():
                    dated = with_prompt_date(opened.config, opened.folder)
                    loaded = load_parts(dated, opened.state.choices, tracker.message, world)
                with closing(loaded) as parts:
                    if world.is_rank_zero:
                        refuse_other_data(opened, parts.fingerprints, parts.heldout_sha256)
                    session = cls(
                        opened, tracker, interrupts, parts, world, skip_parity=skip_parity
                    )
                    try:
                        session._restore(opened)
                        session._pass_gate()
                        if session.state.stage == "rl":
                            session._keep_start()
                        with closing(session.prefetched) if session.prefetched else nullcontext():
                            yield session
                    # The summary names an error of any kind, and the command gets it too.
                    except Exception as error:
                        session._sum_up_failure(error)
                        raise
            finally:
                tracker.close()

    def _restore(self, opened: RunStart) -> None:
        """Put the checkpoint's state into the parts, and make the folder ready for its first
        line.
        """
        backend = self.parts.backend
        stage = self.parts.supervised
        if stage and not opened.checkpoint:
            self.state = replace(self.state, stage="sft")
        if stage and self.state.stage == "sft":
            backend.supervise(stage.learner_config)
        if opened.checkpoint:
            backend.load(opened.checkpoint.folder)
            for note in self.parts.sepa.load_state_dict(self.state.sepa):
                self.tracker.message(note)
            self.parts.guard.load_state_dict(self.state.rewards)
            self.choice.load_state_dict(self.state.sampler)
            self.parts.credit.load_state_dict(self.state.credit)
            if self.pressure:
                self.pressure.load_state_dict(self.state.backpressure)
            self._restore_records()
        if self.state.choices not in (None, backend.choices):
            self.tracker.message(
                "The machine's choices differ from the stored ones: from here on this run is not"
                " byte-exact."
            )
        self.state = replace(self.state, choices=backend.choices, batch_size=self._next_batch_size)
        self.tracker.emit(StartEvent(backend.device_name))

    def _restore_records(self) -> None:
        """Take up the records of steps and evaluations from earlier sessions. Only the first rank
        has them.
        """
        folder, ks = self.folder, self.config.evaluation.k
        own = list(StepRecord.read(folder.metrics)), list(SftRecord.read(folder.sft))
        self.observer.records, self.sft_records = self.world.broadcast(own)
        self.evaluations = read_evaluations(folder.sft_evaluation, ks, "sft")
        self.evaluations += read_evaluations(folder.evaluation, ks)

    def _pass_gate(self) -> None:
        result = None
        if not self._skip_parity:
            self.tracker.message(Doing("Parity gate"))
            result = run_parity_gate(self.config, self.parts, self.state.step)
        # A resumed run keeps the first figure: its mismatch_limit is a multiple of it.
        if result and self.state.gate_mismatch is None:
            self.state = replace(self.state, gate_mismatch=result.mean_difference)
        if not self.world.is_rank_zero:
            return
        line = skipped_gate_line(self.config)
        if result:
            line = LogLine(result.line(), result.brief)
        self.tracker.message(line)
        self._describe(result)
        self.folder.forget()  # The replaced run stays until the last check has passed.
        take(self.saver.store.folder, self.folder)
        self.saver.rehearse()

    def _keep_start(self) -> None:
        """Hold the weights before the first step of reinforcement, if a reference is "start"."""
        if not self.config.reads_start:
            return
        store, backend = self.saver.store, self.parts.backend
        if self.world.is_rank_zero and not self.state.step:
            store.save_start(self.state, backend.save_adapter)
        self.world.broadcast(None)  # Every rank reads what the first has written.
        backend.keep_start(store.start())

    def _describe(self, gate: GateResult | None) -> None:
        """Complete environment.json, including the data of this session."""
        model, prompts = self.config.model, self.parts.prompts
        environment = read_object(self.folder.environment) | {
            **self.parts.fingerprints,
            "prompt_date": prompts.data.chat_template_args[DATE_ARGUMENT],
            "engine": asdict(self.parts.backend.engine.capabilities),
            "backend": asdict(self.parts.backend.capabilities),
            "loss": loss_notes(self.config),
        }
        own = part_of_session(environment, goes_on=self.saver.saved is not None)
        own["parity_gate"], own["model_sha256"] = gate and gate.to_json(), model_fingerprint(model)
        own["heldout_sha256"] = self.parts.heldout_sha256
        written = prompts.sha256
        if environment.setdefault("prompts_sha256", written) != written:
            self.tracker.message(
                "The chat template writes other prompts than when the run began. From here on this"
                " run is not byte-exact."
            )
        if environment.get("model_sha256") not in (None, own["model_sha256"]):
            self.tracker.message(
                f'[model] model = "{model.model}" has other files than when the run began. If'
                " its weights changed, restore them, since the adapter fits the first ones."
            )
        replace_file(self.folder.environment, json.dumps(environment, indent=2) + "\n")

    # -- the supervised stage ----------------------------------------------------------------------

    def take_supervised_step(self) -> None:
        """Take a step of the supervised stage and write it down. After the last one the learner
        turns to reinforcement. Raises RunFailed if the run should not go on.
        """
        stage, backend, before = self.parts.supervised, self.parts.backend, self.state
        assert stage is not None
        self.interrupts.adopt(self.world.gather(self.interrupts.stopped_by))
        self.interrupts.check()
        self.tracker.message(Doing(f"Supervised step {before.sft_step} of {stage.steps}"))
        if self._synced == before.place:
            backend.engine.sleep()
        self.state = replace(before, learning=True)
        try:
            record, result = stage.take(backend, before.sft_step)
        except NotReached:
            self.state = before
            raise
        ends = before.sft_step + 1 >= stage.steps
        if ends:
            backend.supervise(None)
            self._keep_start()
        self.state = before.after_sft_step(
            tokens=record.tokens,
            seconds=self.world.broadcast(record.step_time_s),
            ends=ends,
        )
        self.tracker.emit(record)
        self.sft_records.append(record)
        check_updates(self.sft_records, result)

    # -- one step: sample, turn to learning, learn, record -----------------------------------------

    def sample(self) -> Rollout:
        """Return the scored groups of this step: the prefetched ones, or new samples."""
        rollout = self.prefetched.take() if self.prefetched else None
        if rollout is None:
            prompts, plan = self._prompts(self.state.step), self._sampling(self.state.step)
            self._sync()
            step, completions = self.state.step, len(prompts) * plan.group_size
            watcher = self._watch(f"Step {step}: sampling", completions)
            rollout = self.parts.sampler.draw(prompts, step, plan, watcher)
            self._check_again()  # Check before the learner trains on its samples.
        if self.config.schedule.points:
            self.parts.credit.use(self._settings)
        scores = [
            GroupScore(group.correct, len(group.rewards), group.prompt.example.reference)
            for group in rollout.groups
        ]
        self.tracker.emit(GroupScores(scores))
        return rollout

    def turn_to_learning(self, used: int) -> None:
        """Stop for a signal, for the last time in this step, which used `used` prompts. In split
        mode start to sample the next step.

        It never prefetches across a checkpoint or an evaluation, so a resumed run samples with the
        same weights as a run without a stop. Raises Interrupted in every process, if any process
        got a signal.
        """
        self.interrupts.adopt(self.world.gather(self.interrupts.stopped_by))
        self.interrupts.check()
        self.tracker.message(Doing(f"Step {self.state.step}: learning"))
        self.parts.backend.engine.sleep()
        step = self.state.step + 1
        if (
            self.prefetched is None
            or self.schedule.saves_at(step, self.state)
            or self.schedule.evaluates_at(step)
        ):
            return
        self._sync()
        prompts, plan = self._prompts(step, after=used), self._sampling(step)
        self.prefetched.start(lambda watcher: self.parts.sampler.draw(prompts, step, plan, watcher))

    def _sampling(self, step: int) -> SamplingPlan:
        """Return how a step samples."""
        return training_plan(self.plan.at(step).training)

    @property
    def _settings(self) -> TrainConfig:
        """The configuration of this step."""
        return self.plan.at(self.state.step)

    @contextmanager
    def _moved(self) -> Iterator[None]:
        """Give the backend the settings of this step inside the context. The gate and evaluations
        use the settings of the file.
        """
        backend = self.parts.backend
        if not (self.config.schedule.points and backend.capabilities.moves_settings):
            yield
            return
        backend.use(self._settings)
        try:
            yield
        finally:
            backend.use(self.config)

    def taught(self, groups: Sequence[Group]) -> Float64Array:
        """Return [n] log-probs of the groups' action tokens from the run's teacher."""
        assert self.parts.teacher is not None
        with self._moved():
            return self.parts.teacher.logprobs(groups)

    def learn(
        self, rows: list[Row], rollout: Rollout
    ) -> tuple[dict[RowKey, Float32Array] | None, StepResult]:
        """Train on the rows of `rollout`. Return, for each trained row, [T] learner - sampler
        log-prob before the step, and the learner's report.

        The log-ratios are None if the step does not need them, since they cost a forward pass, and
        if the backend cannot score rows.
        """
        backend, before = self.parts.backend, self.state
        log_ratios = None
        wanted = is_due(self.config.logging.tokens_every, before.step)
        with self._moved():
            if wanted and backend.capabilities.scores_rows:
                trained = [row for row in rows if row.trained]
                scored = zip(trained, backend.logprobs(trained), strict=True)
                log_ratios = {row.key: own - row.logprobs for row, own in scored}
            compared = self._untrained_mismatch(rows, rollout)
            # It stays so until `record` has moved past the step.
            self.state = replace(before, learning=True)
            try:
                return log_ratios, replace(backend.train(rows, before.step), **compared)
            except NotReached:
                self.state = before  # The batch has not left this process.
                raise

    def _untrained_mismatch(self, rows: list[Row], rollout: Rollout) -> dict[str, Any]:
        """Return the logprob_diff_* of a few completions of a step without a trained row. Return {}
        in any other step, and if the learner cannot score what the engine samples, with the weights
        that sampled it.
        """
        backend = self.parts.backend
        able = backend.capabilities
        raw = is_raw(backend.engine.capabilities, self._settings.training.temperature)
        compares = able.scores_rows and not able.samples_ahead and not raw
        if any(row.trained for row in rows) or not compares:
            return {}
        few = rollout.few_rows(self.state.seed, self.state.step)
        ratios = [own - row.logprobs for row, own in zip(few, backend.logprobs(few), strict=True)]
        return mismatch_fields(ratios, self.config.training.max_tokens)

    @property
    def _mismatch_limit(self) -> float | None:
        """Nats that sampler and learner may differ by in three steps in a row; None allows any
        difference.
        """
        config, backend = self.config, self.parts.backend
        return mismatch_limit(
            config.inference,
            config.lora,
            self.state.gate_mismatch or 0.0,
            half_precision=is_rounded(config.inference, backend),
            samples_ahead=backend.capabilities.samples_ahead,
        )

    def record(self, step: Step) -> None:
        """Move the run past a step and write the step down. Raises RunFailed afterwards if the run
        should not go on.
        """
        parts, result = self.parts, step.result
        rewards = self.observer.rewards(step)
        seconds = self.world.broadcast(step.clock.total)
        decision = {}
        if self.pressure:
            decision = self.pressure.observe(step, seconds)
        # After the step's own credit: SEPA acts on what it learns here from the next step on.
        parts.sepa.observe(rewards.correct_rate, step.number)
        parts.sepa.update_auto(step.credit.exec_uncertainty)
        state = self.state.after_step(
            prompts=len(step.rollout.groups),
            next_batch_size=self._next_batch_size,
            correct=rewards.correct,
            judged=rewards.judged,
            tokens=step.rollout.tokens,
            seconds=seconds,
        )
        self.choice.observe(step.number, step.rollout.first_draws)
        self.observer.observe(step, rewards, state, decision)
        self.state = state
        records, limit = self.observer.records, self._mismatch_limit
        check_updates(records, result)
        if limit is not None and records[-1].num_datums:
            check_mismatch(records, limit, state.gate_mismatch or 0.0, self.folder.resume_command)
        elif limit is not None and not (result.logprob_diff_mean or 0.0) <= limit:
            self.tracker.message(untrained_mismatch_line(step.number, result, limit))
        parts.guard.observe(
            [member.score for group in step.rollout.drawn for member in group.members]
        )

    @property
    def _next_batch_size(self) -> int:
        """Prompts of the next step: the controller's choice, otherwise the same as before."""
        return self.pressure.batch_size if self.pressure else self.state.batch_size

    def _prompts(self, step: int, after: int = 0) -> list[Prompt]:
        """Return the batch of a step, in the shuffle `after` prompts past the cursor. Rank 0 asks
        the sampler and tells the other ranks.
        """
        count, seed, indices = self.state.batch_size, self.state.seed, None
        if self.world.is_rank_zero:
            indices = self.choice.indices(step, count, seed)
        indices = self.world.broadcast(indices)
        return self.choice.take(step, self.state.cursor + after, count, seed, indices)

    def _sync(self) -> None:
        """Give the engine the learner's current weights, once per step, since a server reads the
        adapter from a disk.

        It checks an engine outside this process again at its first new adapter: so far the gate saw
        only adapters of its own making. It also checks a server that woke up or came back.
        """
        step, engine = self.state.step, self.parts.backend.engine
        if self._synced == self.state.place:
            return
        engine.sync(self.parts.backend.save_adapter, step)
        if self._synced and not self._gate_repeated and self._compares:
            self.tracker.message(
                run_parity_gate(self.config, self.parts, step, trained=True).line()
            )
            self._gate_repeated, engine.unchecked = True, False
        self._check_again()
        self._synced = self.state.place

    @property
    def _compares(self) -> bool:
        """True if the engine may serve another policy than the learner has, and the learner can
        tell.
        """
        backend = self.parts.backend
        return backend.capabilities.scores_rows and not backend.engine.capabilities.in_process

    def _check_again(self) -> None:
        """Check the engine again if a server woke up or came back since the last check."""
        engine = self.parts.backend.engine
        if engine.unchecked and self._compares and not self._skip_parity:
            check_again(self.config, self.parts, self.state.step)
        engine.unchecked = False

    def _watch(self, label: str, completions: int) -> Watcher:
        """Return a watcher that shows progress, and stops between two completions if a signal asks
        for it.

        Several processes would wait for each other, so none of them stops alone.
        """
        check = self.interrupts.check if self.world.size == 1 else lambda: None
        share = -(-completions // self.world.size)
        return Watcher(check, counting(label, share, self.tracker.message))

    # -- between steps -----------------------------------------------------------------------------

    @property
    def is_finished(self) -> bool:
        return self.schedule.is_finished(self.state)

    def evaluate_if_due(self) -> None:
        """Evaluate the current weights on held-out problems, if that is due: once per step count,
        also over a resume.
        """
        evaluator, (stage, step) = self.parts.evaluator, self.state.place
        if (
            evaluator is None
            or not self.schedule.evaluates(self.state)
            or self.state.last_evaluation == step
        ):
            return
        self._sync()
        name = "supervised step" if stage == "sft" else "step"
        watcher = self._watch(f"Evaluation at {name} {step}", evaluator.completions)
        result, _ = evaluator.run(step, watcher, stage)
        self.tracker.emit(result)
        self.evaluations.append(result)
        self.state = self.state.after_evaluation(self.world.broadcast(result.seconds))

    def save_if_due(self) -> None:
        if self.schedule.saves_at(self.state.step, self.state):
            self._compare_ranks()
        if (
            self.schedule.saves(self.state)
            or self.interrupts.take_save_request()
            or self.saver.is_behind
        ):
            self.save_now()

    def _compare_ranks(self) -> None:
        """Raise RunFailed in every process if the processes do not have the same weights."""
        if self.world.size > 1 and len({*self.world.gather(self.parts.backend.digest())}) > 1:
            raise RunFailed(
                "The processes of this run have different weights after step"
                f" {self.state.step}, so retrain saved nothing. Resume from the last"
                " checkpoint, and check the GPUs of the process whose metrics differ."
            )

    def save_now(self) -> str:
        """Save a checkpoint between two steps; within a step there is none to save. Return a
        sentence about the saved state.
        """
        current = self.saver.holds(self.state)
        if self.world.is_rank_zero and not (current or self.state.learning):
            if self.prefetched:
                self.prefetched.drop()
            stored = replace(
                self.state,
                sampler=self.choice.state_dict(),
                credit=self.parts.credit.state_dict(self.state.step),
                sepa=self.parts.sepa.state_dict(),
                rewards=self.parts.guard.state_dict(),
                backpressure=self.pressure.state_dict() if self.pressure else {},
                tracking=self.tracker.state(),
            )
            self.saver.save(stored, may_retry=not self.is_finished)
        return self.saver.what_is_saved(self.state)

    # -- the end -----------------------------------------------------------------------------------

    def finish(self) -> RunSummary:
        """Write the last adapter and the summary, and print the last lines."""
        training, state = self.config.training, self.state
        self.parts.guard.check_end()
        if self.world.is_rank_zero:
            self.saver.store.save_final(state, self.parts.backend.save_adapter)
        (stage, step), planned, name = state.place, training.max_steps, "step"
        if stage == "sft" and self.parts.supervised:
            planned, name = self.parts.supervised.steps, "supervised step"
        if step < planned:
            self.tracker.message(
                f"Stopped at the [training] max_hours limit ({training.max_hours:g} h) after"
                f" {step} of {counted(planned, name)}; continue with"
                f" `{self.folder.resume_command} {training.more_hours(state.seconds)}`."
            )
        summary = self._summary("done")
        self.tracker.emit(summary)
        return summary

    def _sum_up_failure(self, error: Exception) -> None:
        """Write a summary that says why the run ended."""
        if not self.folder.config.is_file():
            return  # The run has not begun.
        reason = str(error)
        if not isinstance(error, RetrainError):
            reason = f"{type(error).__name__}: {error}"
        summary = self._summary("interrupted" if isinstance(error, Interrupted) else "failed")
        # A full disk may be the reason itself, which is on its way to the screen.
        with suppress(OSError, EnvironmentFailure):
            self.tracker.emit(replace(summary, reason=clean(reason)))

    def _summary(self, status: str) -> RunSummary:
        adapter = self._adapter
        if adapter.is_relative_to(self.folder.path):
            adapter = adapter.relative_to(self.folder.path)
        after = self.evaluations[-1] if self.evaluations else None
        if after and not (after.step or (after.stage == "rl" and self.parts.supervised)):
            after = None  # The weights had no training yet.
        return RunSummary(
            status=status,
            condition=self.config.condition_label,
            seed=self.state.seed,
            steps=self.state.step,
            seconds=self.state.seconds,
            tokens=self.state.tokens,
            before=next((item for item in self.evaluations if item.step == 0), None),
            after=after,
            last=self.observer.records[-1] if self.observer.records else None,
            untrained=self.observer.unlearned(self.state.step),
            adapter=str(adapter) if status == "done" else "",
            wall_s=monotonic() - self._began,
        )


@contextmanager
def _opened(config: TrainConfig, overwrite: bool, world: World) -> Iterator[RunStart]:
    """Open the folder on rank 0, which holds its lock, and tell the other ranks what it found."""
    config.backend.splits_base(world.size)
    if not world.is_rank_zero:
        found: RunStart | RetrainError | None = world.broadcast(None)
        if isinstance(found, RetrainError):
            raise SystemExit(found.exit_code)  # Rank 0 prints the sentence.
        assert found is not None
        yield found
        return
    with ExitStack() as stack:
        try:
            opened = stack.enter_context(open_run(config, overwrite=overwrite))
        except RetrainError as error:
            world.broadcast(error)
            raise
        yield world.broadcast(opened)
