"""Hold one process's share of a run: it opens the run, samples, evaluates, saves and sums up.
`loop.take_step` goes through one step.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import Any

from retrain.backends.declared import is_raw
from retrain.backends.rows import mismatch_fields
from retrain.config import TrainConfig
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
from retrain.records.checkpoint import FINAL
from retrain.records.checkpoint_place import take
from retrain.records.redact import note_secrets
from retrain.records.summary import RunSummary
from retrain.records.terminal import clean
from retrain.run.dialogues import SamplingPlan, Watcher, counting
from retrain.run.interrupts import Interrupts
from retrain.run.notes import preflight_lines, skipped_gate_line
from retrain.run.observer import Past, StepObserver, check_updates
from retrain.run.parts import RunParts, check_again, load_parts, run_parity_gate, training_plan
from retrain.run.pressure import Pressure, decided_by
from retrain.run.rollout import PrefetchedRollout, Rollout
from retrain.run.saver import Saver, Schedule, steps_at
from retrain.run.start import (
    RunStart,
    describe,
    open_together,
    refuse_other_data,
    with_prompt_date,
)
from retrain.run.step_record import Step
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
        parts: RunParts,
        world: World,
        *,
        skip_parity: bool,
    ) -> None:
        backend = parts.backend
        self.config, self.folder, self.state = opened.config, opened.folder, opened.state
        self.plan = Plan.of(self.config)
        self.tracker, self.interrupts, self.parts, self.world = tracker, interrupts, parts, world
        self.schedule = Schedule(self.config)
        self.choice = prompt_choice(self.config, parts.prompts)
        self._stateful: dict[str, Any] = {
            "sampler": self.choice,
            "sepa": parts.sepa,
            "rewards": parts.guard,
        }
        """Field of the state -> the part that keeps it from step to step."""
        self.pressure = None
        if self.config.backpressure.enabled:
            replayed = world.broadcast(decided_by(self.folder, self.state.step))
            self.pressure = Pressure(self.config, backend, replayed)
            self._stateful["backpressure"] = self.pressure.controller
        saved = self.state if opened.checkpoint else None
        self.saver = Saver(self.folder, opened.store, backend, tracker, saved)
        self.observer = StepObserver(self.plan, parts, tracker)
        self.prefetched = PrefetchedRollout(interrupts.check)
        # Several ranks would wait for each other: they stop together, in `_stop_together`.
        if world.size == 1:
            backend.engine.check = interrupts.check
        self._synced: tuple[str, int] | None = None
        """The stage and step whose weights the engine samples from."""
        self._compares = (
            not skip_parity
            and backend.capabilities.scores_rows
            and not backend.engine.capabilities.in_process
        )
        """True if the engine may serve another policy than the learner has, and the learner can
        tell.
        """
        self._gate_repeated = False
        self._began = opened.began
        self._home = Path.cwd()

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
            open_together(config, overwrite, world) as opened,
            Interrupts() as interrupts,
            closing(_tracker(opened, verbosity, world)) as tracker,
        ):
            for line in (*said, *preflight_lines(opened.config), *opened.notes):
                tracker.message(line)
            if world.size > 1:
                tracker.message(
                    f"{world.size} processes share this run, each with its share of the prompts"
                    " and rows."
                )
            with interrupts.at_once() if world.size == 1 else nullcontext():
                dated, home = with_prompt_date(opened.config, opened.folder), Path.cwd()
                loaded = load_parts(dated, opened.state.choices, tracker.message, world)
                os.chdir(home)
            with closing(loaded) as parts:
                if world.is_rank_zero:
                    refuse_other_data(opened, parts)
                session = cls(opened, tracker, interrupts, parts, world, skip_parity=skip_parity)
                try:
                    session._restore(opened)
                    session._pass_gate(opened, skip_parity)
                    if session.state.stage == "rl":
                        session._keep_start()
                    with closing(session.prefetched):
                        yield session
                # The summary names an error of any kind, and the command gets it too.
                except Exception as error:
                    session._sum_up_failure(error)
                    raise

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
            self.parts.credit.load_state_dict(self.state.credit)
            for name, part in self._stateful.items():
                for note in part.load_state_dict(getattr(self.state, name)) or ():
                    self.tracker.message(note)
            # Only the first rank has the files.
            self.observer.past = self.world.broadcast(
                Past.read(self.folder, self.config.evaluation.k)
            )
        if self.state.choices not in (None, backend.choices):
            self.tracker.message(
                "The machine's choices differ from the stored ones: from here on this run is not"
                " byte-exact."
            )
        self.state = replace(self.state, choices=backend.choices, batch_size=self._next_batch_size)
        self.tracker.emit(StartEvent(backend.device_name))

    def _pass_gate(self, opened: RunStart, skip_parity: bool) -> None:
        result = None
        if not skip_parity:
            self.tracker.message(Doing("Parity gate"))
            result = run_parity_gate(self.config, self.parts, self.state.step)
            self._come_back()
        # A resumed run keeps the first figure: its max_logprob_diff is a multiple of it.
        if result and self.state.gate_mismatch is None:
            self.state = replace(self.state, gate_mismatch=result.mean_difference)
        if not self.world.is_rank_zero:
            return
        line = skipped_gate_line(self.config)
        if result:
            line = LogLine(result.line(), result.brief)
        self.tracker.message(line)
        describe(opened, self.parts, result, self.tracker.message)
        self.folder.forget()  # The replaced run stays until the last check has passed.
        take(opened.store.folder, self.folder)
        self.saver.rehearse()

    def _come_back(self) -> None:
        """Return to the folder of the run's relative paths, which the user's code may have left."""
        with suppress(OSError):  # The folder is gone.
            os.chdir(self._home)

    def _keep_start(self) -> None:
        """Hold the weights before the first step of reinforcement, if a reference is "start"."""
        if not self.config.reads_start:
            return
        store, backend = self.saver.store, self.parts.backend
        if self.world.is_rank_zero and not self.state.step:
            store.save_start(self.state, backend.save_adapter)
        self.world.broadcast(None)  # Every rank reads what the first has written.
        backend.keep_start(store.start())

    # -- the supervised stage ----------------------------------------------------------------------

    def take_supervised_step(self) -> None:
        """Take a step of the supervised stage and write it down. After the last one the learner
        turns to reinforcement. Raises RunFailed if the run should not go on.
        """
        stage, backend, before = self.parts.supervised, self.parts.backend, self.state
        assert stage is not None
        self._stop_together()
        self.tracker.message(Doing(f"Supervised step {before.sft_step} of {stage.steps}"))
        if self._synced == before.place:
            backend.engine.sleep()
        with self._under_way():
            record, result = stage.take(backend, before.sft_step)
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
        self.observer.past.add(record)
        check_updates(self.observer.past.supervised, result)

    @contextmanager
    def _under_way(self) -> Iterator[None]:
        """Mark the state as learning until the step has a record."""
        before = self.state
        self.state = replace(before, learning=True)
        try:
            yield
        except NotReached:
            self.state = before  # The batch has not left this process.
            raise

    # -- one step: sample, turn to learning, learn, record -----------------------------------------

    def sample(self) -> Rollout:
        """Return the scored groups of this step: the prefetched ones, or new samples."""
        rollout, step = self.prefetched.take(), self.state.step
        if rollout is None:
            prompts, plan = self._asked(step)
            self._sync()
            watcher = self._watch(f"Step {step}: sampling", len(prompts) * plan.group_size)
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
        same weights as a run without a stop.
        """
        self._stop_together()
        self._come_back()
        step, backend = self.state.step + 1, self.parts.backend
        self.tracker.message(Doing(f"Step {self.state.step}: learning"))
        backend.engine.sleep()
        if (
            not backend.capabilities.samples_ahead
            or self.schedule.saves_at(step, self.state)
            or self.schedule.evaluates_at(step)
        ):
            return
        self._sync()
        prompts, plan = self._asked(step, after=used)
        self.prefetched.start(lambda watcher: self.parts.sampler.draw(prompts, step, plan, watcher))

    def _stop_together(self) -> None:
        """Raise Interrupted in every process, if any process got a signal."""
        self.interrupts.adopt(self.world.gather(self.interrupts.stopped_by))
        self.interrupts.check()

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
        backend, step, log_ratios = self.parts.backend, self.state.step, None
        wanted = is_due(self.config.logging.tokens_every, step)
        with self._moved():
            if wanted and backend.capabilities.scores_rows:
                trained = [row for row in rows if row.trained]
                log_ratios = {
                    row.key: own - row.logprobs
                    for row, own in zip(trained, backend.logprobs(trained), strict=True)
                }
            compared = self._untrained_mismatch(rows, rollout)
            with self._under_way():
                return log_ratios, replace(backend.train(rows, step), **compared)

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

    def record(self, step: Step) -> None:
        """Move the run past a step and write the step down. Raises RunFailed afterwards if the run
        should not go on.
        """
        self._come_back()
        parts, rollout = self.parts, step.rollout
        seconds = self.world.broadcast(step.clock.total)
        decision = self.pressure.observe(step, seconds) if self.pressure else {}
        # After the step's own credit: SEPA acts on what it learns here from the next step on.
        parts.sepa.observe(rollout.correct_rate, step.number)
        parts.sepa.update_auto(step.credit.exec_uncertainty)
        state = self.state.after_step(
            prompts=len(rollout.groups),
            next_batch_size=self._next_batch_size,
            correct=rollout.correct,
            judged=rollout.judged,
            tokens=rollout.tokens,
            seconds=seconds,
        )
        self.choice.observe(step.number, rollout.first_draws)
        self.observer.observe(step, state, decision)
        self.state = state
        self.observer.check(step, state, self.folder.resume_command)
        parts.guard.observe([member.score for group in rollout.drawn for member in group.members])

    @property
    def _next_batch_size(self) -> int:
        """Prompts of the next step: the controller's choice, otherwise the same as before."""
        return self.pressure.controller.batch_size if self.pressure else self.state.batch_size

    def _asked(self, step: int, after: int = 0) -> tuple[list[Prompt], SamplingPlan]:
        """Return the batch of a step, in the shuffle `after` prompts past the cursor, and how to
        sample it. Rank 0 asks the sampler and tells the other ranks.
        """
        count, seed = self.state.batch_size, self.state.seed
        indices = self.world.broadcast(
            self.choice.indices(step, count, seed) if self.world.is_rank_zero else None
        )
        prompts = self.choice.take(step, self.state.cursor + after, count, seed, indices)
        return prompts, training_plan(self.plan.at(step).training)

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

    def _check_again(self) -> None:
        """Check the engine again if a server woke up or came back since the last check."""
        engine = self.parts.backend.engine
        if engine.unchecked and self._compares:
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
        self._come_back()
        self.tracker.emit(result)
        self.observer.past.add(result)
        self.state = self.state.after_evaluation(self.world.broadcast(result.seconds))

    def save_if_due(self) -> None:
        """Save a checkpoint if one is due. Raises RunFailed in every process if the processes do
        not have the same weights.
        """
        if (
            self.schedule.saves_at(self.state.step, self.state)
            and self.world.size > 1
            and len({*self.world.gather(self.parts.backend.digest())}) > 1
        ):
            raise RunFailed(
                "The processes of this run have different weights after step"
                f" {self.state.step}, so retrain saved nothing. Resume from the last"
                " checkpoint, and check the GPUs of the process whose metrics differ."
            )
        if (
            self.schedule.saves(self.state)
            or self.interrupts.take_save_request()
            or self.saver.is_behind
        ):
            self.save_now()

    def save_now(self) -> str:
        """Save a checkpoint between two steps; within a step there is none to save. Return a
        sentence about the saved state.
        """
        current = self.saver.holds(self.state)
        if self.world.is_rank_zero and not (current or self.state.learning):
            self.prefetched.drop()
            stored = replace(
                self.state,
                **{name: part.state_dict() for name, part in self._stateful.items()},
                credit=self.parts.credit.state_dict(self.state.step),
                tracking=self.tracker.state(),
            )
            self.saver.save(stored, may_retry=not self.is_finished)
        return self.saver.what_is_saved(self.state)

    # -- the end -----------------------------------------------------------------------------------

    def finish(self) -> RunSummary:
        """Write the last adapter and the summary, and print the last lines."""
        training, state = self.config.training, self.state
        if unjudged := self.parts.guard.check_end():
            self.tracker.message(unjudged)
        if self.world.is_rank_zero:
            self.saver.store.save_final(state, self.parts.backend.save_adapter)
        (stage, step), planned = state.place, training.max_steps
        if stage == "sft" and self.parts.supervised:
            planned = self.parts.supervised.steps
        if step < planned:
            self.tracker.message(
                f"Stopped at the [training] max_hours limit ({training.max_hours:g} h) after"
                f" {step} of {steps_at((stage, planned))}; continue with"
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
        final, adapter = self.saver.store.folder / FINAL, ""
        if status == "done":
            inside = final.is_relative_to(self.folder.path)
            adapter = str(final.relative_to(self.folder.path) if inside else final)
        past = self.observer.past
        after = past.after
        if after and not (after.step or (after.stage == "rl" and self.parts.supervised)):
            after = None  # The weights had no training yet.
        return RunSummary(
            status=status,
            condition=self.config.condition_label,
            seed=self.state.seed,
            steps=self.state.step,
            seconds=self.state.seconds,
            tokens=self.state.tokens,
            before=past.before,
            after=after,
            last=next(reversed(past.newest), None),
            untrained=self.observer.unlearned(self.state.step),
            adapter=adapter,
            wall_s=monotonic() - self._began,
        )


def _tracker(opened: RunStart, verbosity: Verbosity, world: World) -> Tracker:
    """Return the sinks of a run. Only the first rank has any."""
    if not world.is_rank_zero:
        return Tracker()
    return build_tracker(
        opened.config,
        opened.folder,
        condition=opened.config.condition_label,
        verbosity=verbosity,
        resumed=opened.state.tracking,
        first_step=opened.state.step,
    )
