"""Traces for the supervised stage: prompts with the completions to learn, as rows of a learner.

The prompt has the same form as in reinforcement learning. The module encodes a completion by
itself, with the token at its end that ends a turn of the chat template. The model could therefore
have sampled every learned token there.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise
from typing import TYPE_CHECKING

import numpy as np

from retrain.data.chat import ChatRenderer, encode_texts, messages_of, render_text, rendering
from retrain.data.prompts import epoch_order
from retrain.data.readers import Split
from retrain.data.sources import NoHeldOutSplit, Query, ReadResult, Reason, read_source
from retrain.errors import ConfigurationError
from retrain.model.text import TextModel, end_of_turn
from retrain.noise import Stream
from retrain.types import Example, Int32Array, Row

if TYPE_CHECKING:
    from retrain.config.schema import TrainConfig


@dataclass(frozen=True)
class Trace:
    """One sequence to learn from."""

    example_id: str
    token_ids: Int32Array
    """[P + T] prompts and completions."""
    spans: tuple[tuple[int, int], ...]
    """Half-open ranges of the learned tokens, one for each completion, its end included."""

    @property
    def learned(self) -> int:
        """The number of learned tokens."""
        return sum(stop - start for start, stop in self.spans)

    def texts(self, decode: Callable[[Int32Array], str]) -> Iterator[tuple[str, bool]]:
        """Yield the trace as text in parts, each with True if training learns it."""
        end = 0
        for start, stop in self.spans:
            yield decode(self.token_ids[end:start]), False
            yield decode(self.token_ids[start:stop]), True
            end = stop

    def row(self, number: int) -> Row:
        """Return the trace as row `number` of a step: every learned token has advantage 1."""
        learned = self.learned
        return Row(
            token_ids=self.token_ids,
            spans=self.spans,
            logprobs=np.zeros(learned, np.float32),
            advantages=np.ones(learned, np.float32),
            group=number,
        )


@dataclass(frozen=True)
class TraceSet:
    """The traces of a run, in the source's order."""

    traces: tuple[Trace, ...]
    examples: Sequence[Example]
    """Every row of the source, also a row that did not fit."""
    notes: list[str] = field(default_factory=list)
    """Sentences for the start of the run."""

    def __len__(self) -> int:
        return len(self.traces)

    @property
    def tokens(self) -> int:
        """Tokens of all traces, prompts included."""
        return sum(len(trace.token_ids) for trace in self.traces)

    @property
    def learned(self) -> int:
        """Learned tokens of all traces."""
        return sum(trace.learned for trace in self.traces)

    @property
    def longest(self) -> int:
        """Tokens of the longest trace."""
        return max(len(trace.token_ids) for trace in self.traces)

    def steps(self, config: "TrainConfig") -> int:
        """Return the steps of the stage; a last batch that is not full takes traces of the next
        pass.
        """
        sft = config.sft
        return sft.steps or math.ceil(sft.epochs * len(self) / sft.batch_size)

    def batch(self, step: int, count: int, seed: int) -> list[Row]:
        """Return the rows of a step. The seed alone shuffles each pass over the traces."""
        size = len(self)
        first = step * count
        return [
            self.traces[epoch_order(seed, i // size, size, Stream.TRACE_ORDER)[i % size]].row(
                i - first
            )
            for i in range(first, first + count)
        ]

    def rows(self) -> list[Row]:
        """Return every trace as a row."""
        return [trace.row(number) for number, trace in enumerate(self.traces)]


def load_traces(config: "TrainConfig", text: TextModel, split: Split = "train") -> TraceSet | None:
    """Load the traces of [sft]; None for the held-out traces of a source without them.

    Raises ConfigurationError if no trace is usable, EnvironmentFailure if it needs the hub and the
    hub does not answer.
    """
    query = trace_query(config, split)
    try:
        read = read_source(query)
    except NoHeldOutSplit:
        return None
    traces = tuple(_encoded(config, text, read))
    if not traces:
        details = "; ".join(filter(None, [read.dropped_rows(), *read.notes])) or "it is empty"
        raise ConfigurationError(f"{query.key} has no usable trace: {details}.")
    if read.dropped:
        read.notes.append(f"Dropped traces: {read.dropped_rows()}")
    return TraceSet(traces, read.examples, read.notes)


def trace_query(config: "TrainConfig", split: Split) -> Query:
    """Return the request for the examples of `load_traces`."""
    source, data = config.sft.source, config.data
    if source not in ("", data.source):
        data = data.model_copy(update={"source": source, "path": "", "params": {}})
    return Query(config, data, split, named_for_evaluation=False, traces=True)


def _encoded(config: "TrainConfig", text: TextModel, read: ReadResult) -> Iterator[Trace]:
    """Yield the traces that fit, and count the others in `read`."""
    limit = min(config.sft.max_tokens or text.context, text.context)
    writer = _Writer(config, text)
    for example in read.examples:
        found = writer.trace(example)
        if isinstance(found, Reason):
            read.drop(found, example.example_id)
        elif len(found.token_ids) > limit:
            read.drop(Reason.TOO_LONG, example.example_id)
        else:
            yield found


class _Writer:
    """Writes examples as token ids."""

    def __init__(self, config: "TrainConfig", text: TextModel) -> None:
        self._data = rendering(config)
        if config.data.mix:  # The prompts of a mixture have the template of their own source.
            self._data = self._data.model_copy(update={"source": config.sft.source})
        self._tokenizer = text.tokenizer
        self._eos_ids = frozenset(text.eos_ids)
        ends = (end_of_turn(text.tokenizer), text.tokenizer.eos_token_id, *text.eos_ids)
        self._end = next(int(end) for end in ends if end is not None)
        arguments = config.data.chat_template_args
        self._renderer = ChatRenderer(text.tokenizer, text.eos_ids, arguments)

    def trace(self, example: Example) -> Trace | Reason:
        """Return the example's trace, or why it cannot be one."""
        if example.reference:
            prompt = encode_texts(
                self._tokenizer, [render_text(self._tokenizer, example, self._data)]
            )[0]
            return _joined(example.example_id, [(prompt, self._completion(example.reference))])
        return self._conversation(example)

    def _completion(self, text: str) -> Int32Array:
        """Return [T] the tokens of a completion and of its end."""
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        if not ids or ids[-1] not in self._eos_ids:
            ids = [*ids, self._end]
        return np.array(ids, np.int32)

    def _conversation(self, example: Example) -> Trace | Reason:
        """Learn each of the assistant's turns, after what the template writes before it."""
        messages = messages_of(example, self._data)
        tools = (example.info or {}).get("tools") or ()
        replies = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if any(messages[index].get("tool_calls") for index in replies):
            return Reason.TOOL_CALLS
        if not all(messages[index]["content"].strip() for index in replies):
            return Reason.NO_COMPLETION
        if (
            not replies
            or not replies[0]
            or any(later - earlier == 1 for earlier, later in pairwise(replies))
        ):
            return Reason.MALFORMED
        before = self._renderer.opening(messages[: replies[0]], tools)
        turns = []
        for index, following in zip(replies, [*replies[1:], None], strict=True):
            reply = self._completion(messages[index]["content"])
            turns.append((before.token_ids, reply))
            if following is not None:
                before = self._renderer.continued(
                    before.text,
                    messages[: index + 1],
                    messages[index + 1 : following],
                    int(reply[-1]),
                    tools,
                )
                if before.restarts:
                    return Reason.REWRITTEN
        return _joined(example.example_id, turns)


def _joined(example_id: str, turns: Sequence[tuple[Int32Array, Int32Array]]) -> Trace:
    """Put contexts and completions one behind the other."""
    spans, end = [], 0
    for context, completion in turns:
        start = end + len(context)
        end = start + len(completion)
        spans.append((start, end))
    return Trace(example_id, np.concatenate(list(chain.from_iterable(turns))), tuple(spans))
