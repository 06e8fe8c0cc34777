"""The supervised stage of a run: its traces, its learner's settings, and one step."""

from collections.abc import Iterator
from dataclasses import dataclass
from time import monotonic
from typing import Self

import numpy as np

from retrain.backends.base import Backend
from retrain.backends.rows import learning_rate
from retrain.config import TrainConfig
from retrain.data.traces import TraceSet, load_traces
from retrain.model.text import TextModel
from retrain.records.entries import SftRecord
from retrain.records.terminal import counted, one_line
from retrain.types import StepResult

_SHOWN = 3
"""Traces that `explain` shows."""
_WIDTH = 1000
"""Maximum number of characters of a trace in that text."""
_OPENS, _CLOSES = "[learned: ", "]"


@dataclass(frozen=True)
class SupervisedStage:
    """Supervised fine-tuning before the first step of reinforcement learning.

    At ratio 1 and advantage 1, the policy gradient over the mean of a batch's tokens is the
    gradient of cross-entropy. So the learner of reinforcement takes these steps too.
    """

    config: TrainConfig
    """The run's."""
    traces: TraceSet
    held_out: TraceSet | None
    text: TextModel

    @classmethod
    def load(cls, config: TrainConfig, text: TextModel) -> Self:
        """Load the traces of [sft]. Raises ConfigurationError without a usable trace."""
        traces, held_out = load_traces(config, text), None
        assert traces is not None  # `load_traces` refuses a source without training rows.
        if config.sft.evaluate_every:
            held_out = load_traces(config, text, "heldout")
            if held_out is None:
                traces.notes.append(
                    "The traces are all for training: heldout_logprob in sft.jsonl stays null"
                )
        return cls(config, traces, held_out, text)

    @property
    def steps(self) -> int:
        return self.traces.steps(self.config)

    @property
    def words(self) -> str:
        """The size of the stage."""
        traces = self.traces
        return (
            f"{counted(len(traces), 'trace')}, {traces.tokens:,} tokens with {traces.learned:,}"
            f" to learn, for {counted(self.steps, 'supervised step')} of"
            f" {self.config.sft.batch_size:,}"
        )

    def lines(self) -> Iterator[str]:
        """Describe the stage: its size, its effective settings, and a few traces."""
        training = self.learner_config.training
        yield f"{self.words}, at lr {training.lr:g} and temperature 1"
        yield "only max_grad_norm of [loss] acts in it; top_k, top_p, min_p and teachers do not"
        for trace in self.traces.traces[:_SHOWN]:
            parts = trace.texts(self.text.decode)
            shown = (f"{_OPENS}{part}{_CLOSES}" if learned else part for part, learned in parts)
            yield one_line(f"{trace.example_id}: {''.join(shown)}", _WIDTH)

    @property
    def learner_config(self) -> TrainConfig:
        """The settings of the learner in this stage: temperature 1, one update a step, and only
        max_grad_norm of [loss].
        """
        sft, training, loss = self.config.sft, self.config.training, self.config.loss
        training = training.model_copy(
            update={
                "lr": training.lr if sft.lr is None else sft.lr,
                "lr_schedule": sft.lr_schedule,
                "lr_warmup_steps": sft.lr_warmup_steps,
                "lr_horizon": self.steps,
                "temperature": 1.0,
                "updates_per_batch": 1,
                "minibatches": 1,
            }
        )
        loss = type(loss)(max_grad_norm=loss.max_grad_norm)
        return self.config.model_copy(update={"training": training, "loss": loss})

    def take(self, backend: Backend, step: int) -> tuple[SftRecord, StepResult]:
        """Take one step, in the stage that `Backend.supervise` began."""
        begun, size = monotonic(), self.config.sft.batch_size
        rows = self.traces.batch(step, size, self.config.training.seed)
        logprob = None
        if self.held_out is not None and step % self.config.sft.evaluate_every == 0:
            found = backend.logprobs(self.held_out.rows(), 1.0)
            logprob = float(np.concatenate(found).astype(np.float64).mean())
        result = backend.train(rows, step)
        record = SftRecord(
            step=step,
            loss=result.loss,
            grad_norm=result.grad_norm,
            lr=learning_rate(self.learner_config.training, step),
            tokens=sum(len(row.token_ids) for row in rows),
            learned_tokens=sum(row.num_actions for row in rows),
            step_time_s=monotonic() - begun,
            heldout_logprob=logprob,
        )
        return record, result
