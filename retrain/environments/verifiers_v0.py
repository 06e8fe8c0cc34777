"""The older interface of verifiers (0.1.11 to 0.3): the library's own rollout loop, with the run's
sampler behind its client class.
"""

import time
from collections.abc import Mapping
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import verifiers as vf
from verifiers.clients import Client
from verifiers.types import Response, ResponseMessage, ResponseTokens, ToolCall, Usage

from retrain.environments.base import Environment, Episode, Result, Split
from retrain.environments.bridge import (
    BridgedEpisode,
    OutOfTokens,
    RolloutBridge,
    tool_calls,
)
from retrain.errors import ConfigurationError, first_line
from retrain.plugins import describe
from retrain.types import ChatMessage, Example
from retrain.web import EventLoop

if TYPE_CHECKING:
    from retrain.config.schema import Environment as Settings


def load(settings: "Settings") -> Environment:
    """Build the environment. Raises ConfigurationError where it cannot be built, in one sentence
    with its own reason.
    """
    try:
        environment = vf.load_environment(settings.id, **settings.args)
    except Exception as error:  # building it runs code that is not ours
        reason = describe(error.__cause__ or error)
        raise ConfigurationError(
            f'[environment] id = "{settings.id}" could not be loaded with args'
            f" {dict(settings.args)}: {reason}; if it downloads data, it needs the network, else"
            " check its args."
        ) from error
    if (
        settings.max_turns > 0
        and hasattr(environment, "max_turns")
        and not isinstance(environment, vf.SingleTurnEnv)
    ):
        environment.max_turns = settings.max_turns
    return VerifiersV0(environment)


class VerifiersV0(Environment):
    """A verifiers environment; its rubric gives the reward."""

    def __init__(self, environment: Any) -> None:
        self._environment = environment
        self._loop = EventLoop("environment")
        self._rows: dict[str, Any] = {}

    def examples(self, split: Split) -> list[Example]:
        """Return the problems of the data set, or of the evaluation data set; either may be
        missing.
        """
        build = (
            self._environment.build_dataset
            if split == "train"
            else self._environment.build_eval_dataset
        )
        rows = build()
        if rows is None:
            return []
        self._rows[split] = rows
        return [_example(row, split, index) for index, row in enumerate(rows)]

    def episode(self) -> Episode:
        return BridgedEpisode(self._loop, self._rollout)

    def close(self) -> None:
        self._loop.close()

    async def _rollout(self, bridge: RolloutBridge, example: Example, seed: int) -> Result:
        assert example.info is not None
        # The episodes of a group share the row, and a rollout may change what it is given.
        row = deepcopy(dict(self._rows[example.info["split"]][example.info["row"]]))
        state = await self._environment.rollout(row, _SamplerClient(bridge), "policy", {})
        error = state.get("error")
        if error:
            raise RuntimeError(first_line(error.__cause__ or error))
        await self._environment.rubric.score_rollout(state)
        rewards = [step.get("reward") for step in state["trajectory"]]
        metrics = {
            name: float(value)
            for name, value in (state.get("metrics") or {}).items()
            if isinstance(value, int | float)
        }
        return Result(float(state["reward"]), metrics, [] if None in rewards else rewards)


def _example(row: Mapping[str, Any], split: Split, index: int) -> Example:
    messages = [plain_message(message) for message in row["prompt"]]
    task = str(row.get("task") or "default")
    return Example(
        messages,
        str(row.get("answer") or ""),
        task,
        {"split": split, "row": index},
        f"{split}-{row.get('example_id', index)}",
    )


def plain_message(message: Any) -> ChatMessage:
    """Return a message as role and text. A call of a tool is part of the model's own text
    already.
    """
    if isinstance(message, Mapping):
        given = dict(message)
    else:
        given = message.model_dump()
    content = given.get("content") or ""
    if not isinstance(content, str):
        content = "".join(str(part.get("text", "")) for part in content)
    return ChatMessage(role=str(given["role"]), content=content)


class _SamplerClient(Client):  # type: ignore[misc]  # the library is not typed
    """Hands every request of one rollout to the run's sampler. Tokens stay with the sampler, which
    knows them exactly.
    """

    def __init__(self, bridge: RolloutBridge) -> None:
        super().__init__(object())
        self._bridge = bridge
        self._calls = 0

    def setup_client(self, config: Any) -> None:
        return None

    async def to_native_tool(self, tool: Any) -> dict[str, Any]:
        function = {
            "name": tool.name,
            "description": tool.description,
            "parameters": tool.parameters,
        }
        return {"type": "function", "function": function}

    async def to_native_prompt(self, messages: Any) -> tuple[Any, dict[str, Any]]:
        return messages, {}

    async def get_native_response(
        self, prompt: Any, model: str, sampling_args: Any, tools: Any = None, **_: Any
    ) -> str:
        try:
            return await self._bridge.ask(
                [plain_message(message) for message in prompt], tools or []
            )
        except OutOfTokens as error:
            raise vf.OverlongPromptError(str(error)) from error

    async def raise_from_native_response(self, response: str) -> None: ...

    async def from_native_response(self, response: str) -> Response:
        self._calls += 1
        calls = [
            ToolCall(id=f"call-{self._calls}-{number}", name=call.name, arguments=call.arguments)
            for number, call in enumerate(tool_calls(response))
        ]
        nothing = ResponseTokens(
            prompt_ids=[],
            prompt_mask=[],
            completion_ids=[],
            completion_mask=[],
            completion_logprobs=[],
        )
        message = ResponseMessage(
            role="assistant",
            content=response,
            tool_calls=calls or None,
            finish_reason="tool_calls" if calls else "stop",
            is_truncated=False,
            tokens=nothing,
        )
        usage = Usage(prompt_tokens=0, reasoning_tokens=0, completion_tokens=0, total_tokens=0)
        return Response(
            id=f"reply-{self._calls}",
            created=int(time.time()),
            model="policy",
            usage=usage,
            message=message,
        )

    async def close(self) -> None: ...
