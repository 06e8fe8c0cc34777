"""Requests that come up while others decode: what they draw, when they join, and what of their
prompts is computed again.
"""

import threading
from typing import Any, cast

import numpy as np
import pytest

from retrain.environments.base import Observation
from retrain.inference_engine.base import InferenceEngine, NoiseKey, SampleRequest
from retrain.inference_engine.torch_engine import TorchEngine
from retrain.model.devices import EngineOptions
from retrain.run.dialogues import Dialogue, Dialogues, SamplingPlan, Stage, Watcher
from retrain.types import Completion, Example, FinishReason, Prompt, Score
from tests.decoding import assert_agrees, assert_same, paged, prompts, tiny, with_adapter

EOS = tuple(range(2, 30))


class Talk:
    """A feed of dialogues of three replies, each followed by two tokens that nobody sampled; two
    dialogues may wait for their next turn.
    """

    def __init__(
        self, count: int = 3, many: int = 3, max_tokens: int = 25, later: int = 10
    ) -> None:
        self.later = later
        self.waiting = [
            SampleRequest(p, count, max_tokens, 0.8, NoiseKey(1, 0, 0, i), extendable=True)
            for i, p in enumerate(prompts(many))
        ]
        self.asked: list[SampleRequest] = []
        self.turn: dict[tuple[int, int], int] = {}
        self.found: dict[tuple[int, int], Completion] = {}
        self.joined = 0

    def more(self, idle: bool) -> list[SampleRequest]:
        """All that wait where nothing decodes, else those beyond two."""
        due = self.waiting[: len(self.waiting) if idle else max(0, len(self.waiting) - 2)]
        self.waiting = self.waiting[len(due) :]
        due = (
            sorted(due, key=lambda request: (request.noise.prompt, request.first_sample))
            if idle
            else due
        )
        self.joined += 0 if idle else len(due)
        self.asked += due
        return due

    def receive(self, one: Completion) -> None:
        before = self.asked[one.request]
        key = before.noise.prompt, one.sample
        self.turn[key] = turn = self.turn.get(key, 0) + 1
        self.found[key[0] * 100 + one.sample, turn] = one
        if turn < 3:
            prompt = np.concatenate([before.prompt_ids, one.token_ids, [50 + turn, 60]]).astype(
                np.int32
            )
            position, extends = before.first_position + len(one.token_ids), len(prompt) - 2
            noise = {"noise": before.noise, "first_sample": one.sample, "first_position": position}
            self.waiting.append(
                SampleRequest(prompt, 1, self.later, 0.8, extends=extends, extendable=True, **noise)
            )


def talk(engine: InferenceEngine, **settings: Any) -> Talk:
    feed = Talk(**settings)
    for completion in engine.sample_feed(feed):
        feed.receive(completion)
    return feed


@pytest.fixture(scope="module")
def model() -> Any:
    return with_adapter(tiny())


@pytest.mark.parametrize("memory", [1 << 20, 150])
@pytest.mark.parametrize("options", [{}, {"prefix_caching": False}], ids=["kept", "computed anew"])
def test_turns_that_join_a_running_batch_draw_what_rounds_draw(
    model: Any, memory: int, options: dict[str, bool]
) -> None:
    rounds = talk(TorchEngine(model, EOS, "cpu"))
    engine = paged(
        model, EOS, EngineOptions(paged=True, page_tokens=8, **options), decode_tokens=memory
    )
    joined = talk(engine)
    assert rounds.joined == 0 < joined.joined
    assert len(joined.found) == 27
    assert_same(joined.found, rounds.found, atol=1e-4)
    engine.release()
    assert engine._paged is not None and engine._paged.pool.free == engine._paged.pool.pages, (
        "every page came back"
    )


def test_the_same_dialogues_give_the_same_bytes_twice(model: Any) -> None:
    one, other = (talk(paged(model, EOS, decode_tokens=150)) for _ in range(2))
    assert [request.noise for request in one.asked] == [request.noise for request in other.asked]
    assert_same(one.found, other.found, atol=0)


def test_a_reply_that_follows_the_same_tokens_again_loses_no_pages(model: Any) -> None:
    """An environment may rewrite the conversation to what it was before."""
    engine = paged(model, EOS)
    for position in range(3):
        asked = [
            SampleRequest(
                p, 2, 1, 0.8, NoiseKey(1, 0, 0, i), first_position=position, extendable=True
            )
            for i, p in enumerate(prompts(3))
        ]
        assert len(list(engine.sample(asked))) == 6
    engine.release()
    assert engine._paged is not None and engine._paged.pool.free == engine._paged.pool.pages


@pytest.mark.parametrize("family", ["qwen3", "mistral"])
def test_a_later_turn_computes_what_is_new_alone(family: str) -> None:
    """Past a sliding window too; the reply's last token was never fed, so it is computed with what
    follows.
    """
    sliding = {"sliding_window": 16} if family == "mistral" else {}
    model = tiny(family, **sliding)
    engine = paged(model, EOS)
    compute, lengths = engine._decoder.run_prompts, []
    engine._decoder.run_prompts = lambda prompts, *rest: (
        lengths.extend(map(len, prompts)),
        compute(prompts, *rest),
    )[1]  # type: ignore[method-assign]
    feed = talk(engine)
    assert sorted(lengths) == sorted([3] * 18 + [len(prompt) for prompt in prompts(3)])
    assert max(len(request.prompt_ids) for request in feed.asked) > 16
    assert_agrees(
        model,
        feed.asked,
        {(one.request, one.sample): one for one in feed.found.values()},
        atol=1e-4,
    )


def test_a_turn_too_long_for_the_batch_begins_the_next_one(model: Any) -> None:
    """The tables of the first batch are as wide as its own rows need."""
    engine = paged(model, EOS)
    feed = Talk(count=2, many=1, max_tokens=2, later=25)
    made = []
    run = engine._paged_run
    engine._paged_run = lambda jobs: (made.append(len(jobs)), run(jobs))[1]  # type: ignore[method-assign]
    for completion in engine.sample_feed(feed):
        feed.receive(completion)
    assert len(made) > 1 and len(feed.found) == 6


def test_another_adapter_does_not_join() -> None:
    model = with_adapter(tiny())
    engine = paged(model, EOS)
    stream = engine._paged_run(
        engine._jobs([SampleRequest(prompts(1)[0], 1, 9, 1.0, NoiseKey(1, 0, 0, 0))])
    )
    for request, joins in (
        (SampleRequest(prompts(1)[0], 1, 9, 1.0, NoiseKey(1, 0, 0, 1)), True),
        (SampleRequest(prompts(1)[0], 1, 9, 1.0, NoiseKey(1, 0, 0, 1), adapter_slot=-1), False),
        (SampleRequest(prompts(1)[0], 1, 9, 0.0, NoiseKey(1, 0, 0, 1)), False),
        (SampleRequest(prompts(1)[0], 1, 4000, 1.0, NoiseKey(1, 0, 0, 1)), False),
    ):
        assert stream.join(engine._jobs([request])[0]) is joins
    stream.close()


# -- when the next turn of a dialogue is asked for -------------------------------------------------


class Answering:
    """The other side of a dialogue: a nod after every reply, and a verdict after the second;
    `ready` is the test's to say.
    """

    def __init__(self) -> None:
        self.ready, self.waited_for, self.replies = True, 0, 0

    def reply(self, text: str, *, last: bool) -> None:
        self.replies += 1

    def end(self) -> None: ...

    def answer(self, check: Any) -> Observation | Score:
        self.waited_for += 1
        return Score.of(1.0, 0.5) if self.replies == 2 else Observation([])


def opened(repeatable: bool, count: int = 12) -> tuple[Dialogues, dict[tuple[int, int], Answering]]:
    prompt = Prompt(Example("?", ""), "?", np.arange(3, 8, dtype=np.int32))
    stage: Any = Stage(cast(Any, None), cast(Any, None), str, 1000)
    dialogues = [Dialogue(prompt, 0, sample, stage) for sample in range(count)]
    sides = {dialogue.key: Answering() for dialogue in dialogues}
    plan, watcher = (
        SamplingPlan(count, 50, 1.0, seed=0, stream=0),
        Watcher(lambda: None, lambda _: None),
    )
    feed = Dialogues(sides, dialogues, 0, plan, text=str, repeatable=repeatable, watcher=watcher)
    for dialogue in dialogues:
        dialogue.add_observation = lambda *_: None  # type: ignore[method-assign]
    return feed, sides


def replied(number: int, sample: int) -> Completion:
    return Completion(
        number, sample, np.array([9], np.int32), np.zeros(1, np.float32), None, FinishReason.STOP
    )


def test_where_noise_is_counted_the_order_of_requests_depends_on_no_clock() -> None:
    feed, sides = opened(repeatable=True)
    (first,) = feed.more(idle=True)
    assert first.count == 12, "one request for the group"
    for sample in range(12):
        sides[0, sample].ready = sample % 2 == 0  # of no consequence
        feed.receive(replied(0, sample))
        asked = [request.first_sample for request in feed.more(idle=False)]
        assert asked == ([sample - 8] if sample >= 8 else []), (
            "eight dialogues may wait for their environment"
        )
    assert [request.first_sample for request in feed.more(idle=True)] == list(range(4, 12))


def test_other_engines_are_asked_as_soon_as_an_environment_has_answered() -> None:
    feed, sides = opened(repeatable=False, count=4)
    feed.more(idle=True)
    for sample in range(4):
        sides[0, sample].ready = sample == 2
        feed.receive(replied(0, sample))
    assert [request.first_sample for request in feed.more(idle=False)] == [2]
    assert feed.more(idle=False) == []
    assert [sides[0, sample].waited_for for sample in range(4)] == [1, 1, 2, 1], (
        "nobody waited for the slow ones"
    )
    threading.Timer(0.05, lambda: setattr(sides[0, 1], "ready", True)).start()
    assert [request.first_sample for request in feed.more(idle=True)] == [1], (
        "idle, it waits for the first of them"
    )
    feed.receive(replied(1, 2))
    assert feed.more(idle=False) == [] and set(feed.scored) == {(0, 2)}
