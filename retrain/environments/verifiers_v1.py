"""verifiers 0.4 and later: tasksets, agents and harnesses, with the run's sampler as the model of
the only agent.

The library talks to a model through a client that it makes from an address. Each episode has its
own address. This module replaces the function that makes clients with a function that knows these
addresses, because the library has no public hook.
"""

import sys
from collections.abc import Mapping
from contextlib import AsyncExitStack
from importlib.util import find_spec
from itertools import chain, count
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import httpx
import verifiers.v1 as vf
from verifiers.v1.clients.train import serialize_completion
from verifiers.v1.configs.agent import agent_config_fields
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.interception import server
from verifiers.v1.utils import loaders

from retrain.environments.base import Environment, Episode, Result, Split
from retrain.environments.bridge import (
    BridgedEpisode,
    OutOfTokens,
    RolloutBridge,
    tool_calls,
)
from retrain.errors import ConfigurationError, EnvironmentFailure
from retrain.plugins import describe
from retrain.types import ChatMessage, Example
from retrain.web import EventLoop

if TYPE_CHECKING:
    from retrain.config.schema import Environment as Settings

_START_SECONDS = 60
_MAX_SILENT = 64
"""Empty replies to a rollout that goes on asking after its tokens ran out; an error then ends it.
"""
_ADDRESS = "http://retrain.invalid/episode/"
_HARNESS = "retrain_one_call"
"""The id of our harness, and its module."""


def load(settings: "Settings", name: str) -> Environment:
    """Build the environment of the module `name`. `args` are the fields of its configuration;
    `args.evaluation` are the fields of its taskset for held-out problems.

    Raises ConfigurationError if it does not build, has seats besides the trained seat, or serves
    tools to our harness. Raises EnvironmentFailure for the interface before 0.4.
    """
    given = dict(settings.args)
    evaluation = given.pop("evaluation", None)
    try:
        environment = _built(settings, given, name)
        held_out = None
        if evaluation is not None:
            values = {"id": name, **given.get("taskset", {}), **evaluation}
            held_out = loaders.load_taskset(
                loaders.taskset_config_type(name).model_validate(values)
            )
    except Exception as error:  # building it runs code that is not ours
        if is_older(name):
            raise EnvironmentFailure(
                f'[environment] id = "{settings.id}" has the interface before verifiers 0.4'
                " (load_environment), which retrain 0.10 no longer supports; use the"
                " environment's newer version."
            ) from error
        raise ConfigurationError(
            f'[environment] id = "{settings.id}" does not load with args {dict(settings.args)}:'
            f" {describe(error)}."
        ) from error
    seats = list(agent_config_fields(environment.config))
    if len(seats) != 1:
        raise ConfigurationError(
            f'[environment] id = "{settings.id}" has {len(seats)} seats'
            f" ({', '.join(seats) or 'none'}), and a run trains the model of one; choose an"
            " environment with one seat."
        )
    (seat,) = seats
    if getattr(environment.config, seat).harness.id == _HARNESS:
        taskset = environment.taskset
        first = next(iter(taskset), None)  # of the class of all tasks
        if type(taskset).toolsets(taskset.config) or (
            first is not None and first.toolsets(first.config)
        ):
            raise ConfigurationError(
                f'[environment] id = "{settings.id}" serves tools over MCP, which retrain\'s own'
                f" harness does not call. Name one that does, such as args = {{ {seat} = {{"
                ' harness = { id = "null" } } }, whose programs need uv.'
            )
    return VerifiersV1(environment, held_out)


def is_older(name: str) -> bool:
    """Return True if the source of the module `name` has the function of the interface before
    0.4, and nothing of the newer one.
    """
    found = find_spec(name)
    if found is None or not found.origin or not found.origin.endswith(".py"):
        return False
    source = Path(found.origin).read_text(encoding="utf-8", errors="replace")
    return "def load_environment(" in source and "verifiers.v1" not in source


def _built(settings: "Settings", given: Mapping[str, Any], name: str) -> Any:
    """Build the environment. Its agents run in a subprocess instead of a cloud machine. An
    environment without a harness gets a harness in this process.
    """
    config_type = loaders.env_config_type(name)
    seats = [
        seat
        for seat, field in config_type.model_fields.items()
        if isinstance(field.default, vf.AgentConfig)
    ]
    values = {**given, "taskset": {"id": name, **given.get("taskset", {})}}
    brings_harness = loaders.default_harness_id(name) == "bash"
    if brings_harness:  # the library finds a harness as a module that exports one
        module = ModuleType(_HARNESS)
        module.__all__ = ["OneCall"]  # type: ignore[attr-defined]  # a module made here
        module.OneCall = OneCall  # type: ignore[attr-defined]  # a module made here
        sys.modules.setdefault(_HARNESS, module)
    for seat in seats:
        own = dict(values.get(seat, {}))
        own.setdefault("runtime", {"type": "subprocess"})
        if brings_harness:
            own.setdefault("harness", {"id": _HARNESS})
        if settings.max_turns > 0:
            own["max_turns"] = settings.max_turns
        values[seat] = own
    return loaders.load_environment(config_type.model_validate(values))


class VerifiersV1(Environment):
    """A taskset with its environment, which gives the reward."""

    def __init__(self, environment: Any, held_out: Any) -> None:
        self._environment, self._held_out = environment, held_out
        self._tasks: dict[str, list[Any]] = {}
        self._numbers = count()
        self._loop = EventLoop("environment")
        self._serving = AsyncExitStack()
        self._loop.start(self._serving.enter_async_context(environment.serving())).result(
            _START_SECONDS
        )

    def examples(self, split: Split) -> list[Example]:
        taskset = self._environment.taskset if split == "train" else self._held_out
        self._tasks[split] = [] if taskset is None else list(taskset)
        return [_example(task.data, split, index) for index, task in enumerate(self._tasks[split])]

    def episode(self) -> Episode:
        return BridgedEpisode(self._loop, self._rollout)

    def close(self) -> None:
        self._loop.start(self._serving.aclose()).result(_START_SECONDS)
        self._loop.close()

    async def _rollout(self, bridge: RolloutBridge, example: Example, seed: int) -> Result:
        assert example.info is not None
        task = self._tasks[example.info["split"]][example.info["row"]]
        address = f"{_ADDRESS}{next(self._numbers)}"
        _bridges[address] = bridge
        try:
            client = vf.EvalClientConfig(base_url=address, api_key_var="NONE")
            context = vf.ModelContext(model="policy", client=client, sampling=vf.Sampling())
            (slot,) = self._environment.slots(task, 1)
            played = await self._environment.run_slot(slot, context, None, None)
        finally:
            del _bridges[address]
        return _result(played)


def _result(played: Any) -> Result:
    """Return the result. Raises RuntimeError with the first error of an episode that failed."""
    errors = list(chain.from_iterable(trace.errors for trace in played.traces))
    if errors:
        raise RuntimeError(str(errors[0])[:300])
    if len(played.traces) != 1:
        raise RuntimeError(f"the episode has {len(played.traces)} traces instead of one")
    trace = played.traces[0]
    parts = {
        name: float(reward.value) for name, reward in trace.rewards.items() if reward is not None
    }
    metrics = {name: float(value) for name, value in trace.metrics.items() if value is not None}
    return Result(float(trace.reward), {**parts, **metrics, "turns": float(trace.num_turns)})


def _example(data: Any, split: Split, index: int) -> Example:
    prompt = data.prompt if data.prompt is not None else data.name or "begin"
    if isinstance(prompt, str):
        messages = [ChatMessage(role="user", content=prompt)]
    else:
        messages = [_plain(message) for message in prompt]
    if data.system_prompt:
        messages.insert(0, ChatMessage(role="system", content=data.system_prompt))
    return Example(
        messages,
        str(getattr(data, "answer", "")),
        info={"split": split, "row": index},
        example_id=f"{split}-{data.id or index}",
    )


def _plain(message: Any) -> ChatMessage:
    content = message.content or ""
    if not isinstance(content, str):
        content = "".join(getattr(part, "text", "") or "" for part in content)
    return ChatMessage(role=message.role, content=content)


# -- the model of an episode -----------------------------------------------------------------------

_bridges: dict[str, RolloutBridge] = {}
"""Address -> the bridge of the episode that has it."""


class _SamplerClient(vf.Client):  # type: ignore[misc]  # the library is not typed
    def __init__(self, bridge: RolloutBridge) -> None:
        self._bridge = bridge
        self._calls = 0
        self._silent = 0

    async def get_response(
        self,
        dialect: Any,
        body: Any,
        sampling: Any,
        session_id: Any = None,
        turn: Any = None,
        headers: Any = None,
    ) -> Any:
        if turn is None:
            request = dialect.parse_request(body)
            asked = request.messages
        else:
            request, asked = turn, turn.prompt
        tools = [
            {
                "type": "function",
                "function": tool.model_dump(include={"name", "description", "parameters"}),
            }
            for tool in request.tools
        ]
        try:
            reply = await self._bridge.ask([_plain(message) for message in asked], tools)
            reason = "stop"
        except OutOfTokens:
            reply, reason = "", "length"
            self._silent += 1
            if self._silent > _MAX_SILENT:
                raise
        self._calls += 1
        calls = [
            vf.ToolCall(id=f"call-{self._calls}-{number}", name=call.name, arguments=call.arguments)
            for number, call in enumerate(tool_calls(reply))
        ]
        response = vf.Response(
            id=f"reply-{self._calls}",
            created=0,
            model=body["model"],
            message=vf.AssistantMessage(content=reply, tool_calls=calls or None),
            finish_reason="tool_calls" if calls else reason,
            usage=vf.Usage(prompt_tokens=0, completion_tokens=0),
        )
        response.raw = serialize_completion(response, body["model"])
        return response

    async def close(self) -> None: ...


_resolve_client = server.resolve_client


def _client_of(config: Any) -> Any:
    bridge = _bridges.get(str(getattr(config, "base_url", "")))
    if bridge is None:
        return _resolve_client(config)
    return _SamplerClient(bridge)


server.resolve_client = _client_of


# -- a harness in this process ---------------------------------------------------------------------


class OneCallConfig(vf.HarnessConfig):  # type: ignore[misc]  # the base class has no types
    """It has nothing to set."""


class OneCall(vf.Harness[OneCallConfig]):  # type: ignore[misc]  # the base class has no types
    """Sends the conversation to the model once; an environment of several turns resumes it. The
    library's own start `uv` for that.
    """

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: Any,
        data: Any,
        tool_interception_url: Any = None,
    ) -> Any:
        system, prompt = self.resolve_prompt(data)
        messages = [{"role": "system", "content": system}] if system else []
        messages += (
            [{"role": "user", "content": prompt}]
            if isinstance(prompt, str)
            else [message_to_wire(item) for item in prompt or ()]
        )
        # The endpoint is plain http on this machine. A client that could verify https reads all
        # certificate authorities, 0.09 s a call.
        async with httpx.AsyncClient(timeout=None, verify=False, trust_env=False) as http:
            answer = await http.post(
                endpoint.rstrip("/") + "/chat/completions",
                headers={"Authorization": f"Bearer {secret}"},
                json={"model": ctx.model, "messages": messages},
            )
        failed = answer.status_code != httpx.codes.OK
        return vf.ProgramResult(
            exit_code=int(failed), stdout=answer.text, stderr=answer.text if failed else ""
        )
