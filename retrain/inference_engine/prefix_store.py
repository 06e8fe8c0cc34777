"""Prompts whose keys and values are kept between calls, while the weights have not changed."""

from collections import OrderedDict

from retrain.inference_engine.base import NoiseKey, SampleRequest
from retrain.inference_engine.kv_cache import PromptState

PromptKey = tuple[NoiseKey, int, bytes]


class PrefixStore:
    """The newest prompts up to a number of tokens.

    The noise coordinates are part of the key: a redraw of a training group finds its prompt, and nothing else (an evaluation,
    the parity gate) can hand its own copy to a training step. So a resumed run, which skips those, computes the same bits.
    """

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._tokens = 0
        self._states: OrderedDict[PromptKey, PromptState] = OrderedDict()

    def get(self, key: PromptKey) -> PromptState | None:
        return self._states.get(key)

    def put(self, key: PromptKey, state: PromptState) -> None:
        if len(state.token_ids) > self._max_tokens or key in self._states:
            return
        self._states[key] = state
        self._tokens += len(state.token_ids)
        while self._tokens > self._max_tokens:
            _, dropped = self._states.popitem(last=False)
            self._tokens -= len(dropped.token_ids)

    def clear(self) -> None:
        self._states.clear()
        self._tokens = 0


def prompt_key(request: SampleRequest) -> PromptKey:
    return request.noise, request.adapter_slot, request.prompt_ids.tobytes()
