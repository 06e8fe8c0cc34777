"""Modular's MAX: `max serve` over HTTP, started here as a child where no URL is given. Token ids,
raw log-probs, a sample per request.

Observed with MAX 26.7.0 on a CPU, which serves the base model only; adapters need a GPU and are
written from its source.
"""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from shutil import which
from typing import TYPE_CHECKING, Any

import httpx

from retrain.errors import ConfigurationError, EnvironmentFailure
from retrain.inference_engine.base import Description, EngineCapabilities, SampleRequest
from retrain.inference_engine.commands import (
    ServerCommand,
    ServerNeeds,
    address_flags,
    concurrent_sequences,
    model_flags,
    refuse_four_bits,
    setting_flags,
)
from retrain.inference_engine.http import Json, Refusal, Server
from retrain.inference_engine.served import ServedAdapter, ServedEngine
from retrain.inference_engine.vllm import VLLMDialect

if TYPE_CHECKING:
    from retrain.config import TrainConfig

_START_S = 1800.0
"""The first start compiles the model: 4 minutes for 135M parameters on two cores, seconds
afterwards."""
_STOP_S = 15.0
_LOG = "max-server.log"


class MAXDialect(VLLMDialect):
    title = "The max server"
    chosen_logprob = 1  # 0 is off

    async def look(self, server: Server) -> None:
        base, *_ = (await server.get("/v1/models"))["data"]
        server.facts |= {
            "base": base["id"],
            "context": base.get("max_model_len"),
            "sleeps": False,
        }

    def call(
        self, request: SampleRequest, adapter: ServedAdapter | None, server: Server
    ) -> tuple[str, Json]:
        path, body = super().call(request, adapter, server)
        del body["n"]  # without effect
        # ignore_eos switches stop_token_ids off too; without it the server's own end-of-sequence
        # tokens count as well.
        return path, body | {
            "ignore_eos": False,
            "seed": request.noise.seed_of(request.first_sample, request.first_position),
        }

    async def why_it_differs(self, server: Server) -> str:
        return ""

    async def load(self, server: Server, adapter: ServedAdapter) -> None:
        try:
            await server.post("/v1/load_lora_adapter", adapter.fields)
        except Refusal as error:
            if error.status == 501:
                raise ConfigurationError(
                    f"{self.title} {server.url} was started without adapters, which MAX serves on a"
                    " GPU only; start it there with the command that `retrain serve max FILE`"
                    ' prints, or use engine = "pytorch".'
                ) from error
            if error.status != 409:  # a second try of a load whose answer was lost
                raise
        server.facts.setdefault("adapters", {})[adapter.name] = str(adapter.folder)

    async def adapters(self, server: Server) -> Mapping[str, str]:
        """Its list has names without folders."""
        listed = {model["id"] for model in (await server.get("/v1/models"))["data"]}
        return {
            name: folder
            for name, folder in server.facts.get("adapters", {}).items()
            if name in listed
        }


class MAXEngine(ServedEngine):
    capabilities = EngineCapabilities(
        in_process=False, adapter_reload=True, logprobs="raw", n=False, prefix_cache=True
    )
    """Adapters, and with them training, on a GPU only; there without the prefix cache."""
    about = Description(
        "a MAX server, started by retrain unless a URL is given",
        "max 26.7.0 on a CPU, base model only; adapters: contract",
        ("max",),
        install="uv pip install 'max[serve]'",
    )
    default_port = 8000
    needs_address = False
    cpu_note = (
        "MAX applies adapters on a GPU only: on a CPU it serves the base model, which can be"
        " evaluated but not trained."
    )
    dialect_class = MAXDialect

    def __init__(
        self, config: "TrainConfig", *, model: Any, eos_ids: Sequence[int], device: Any
    ) -> None:
        self._child: MAXChild | None = None
        if not config.inference.urls:
            self._child = MAXChild(config, device.type, model)
            config = self._child.wait()
        try:
            super().__init__(config, model=model, eos_ids=eos_ids, device=device)
        # A signal too: the child must not outlive the engine that was not made.
        except BaseException:
            self._end()
            raise

    @classmethod
    def decides(cls, config: "TrainConfig") -> Mapping[str, str]:
        return super().decides(config) if config.inference.urls else {}

    @classmethod
    def preflight(cls, config: "TrainConfig") -> str:
        if config.inference.urls:
            return super().preflight(config)
        reason = cls.unavailable_reason()
        if reason:
            raise EnvironmentFailure(reason)
        return ""

    @classmethod
    def unavailable_reason(cls) -> str:
        if max_program():
            return ""
        return (
            '[inference] engine = "max" without a url starts `max serve`, which is not installed'
            " here; install it with uv pip install 'max[serve]', or set [inference] url to a"
            " server's address."
        )

    @classmethod
    def server_command(
        cls, config: "TrainConfig", needs: ServerNeeds, python: str
    ) -> ServerCommand:
        """`max serve` stands beside its Python. It serves adapters on a GPU only, without its
        prefix cache.
        """
        refuse_four_bits("max", config.model)
        folder = os.path.dirname(python)  # noqa: PTH120 - pathlib would make a bare name of ./max, to be looked up on PATH
        program = os.path.join(folder, "max") if folder else "max"  # noqa: PTH118 - for the same reason
        command = ServerCommand(
            [program, "serve", "--model", needs.model], {"MAX_SERVE_DISABLE_TELEMETRY": "1"}
        )
        command.add(*address_flags(config.inference, cls.default_port))
        served_model = config.inference.served_model
        command.add(*model_flags(config.model, served_model, "--huggingface-model-revision"))
        command.add("--no-enable-echo")
        known: dict[str, dict[str, tuple[str, ...]]] = {
            "dtype": {"bf16": ()},
            "attention_kernel": {},
            "kv_cache_dtype": {},
        }
        command.add(*setting_flags("max", config.inference, known))
        command.add("--devices", "cpu" if needs.device == "cpu" else "gpu:0")
        command.add("--quantization-encoding", needs.dtype, "--max-length", str(needs.context))
        command.add("--max-batch-size", str(concurrent_sequences(config.training)))
        if needs.device != "cpu":
            rank = str(config.model.lora_rank)
            # Two adapters: a new version is loaded before the old one goes.
            command.add("--enable-lora", "--max-lora-rank", rank, "--max-num-loras", "2")
            command.add("--no-enable-prefix-caching", "--prefer-module-v3")
        elif config.inference.prefix_caching:
            command.add("--enable-prefix-caching")
        else:
            command.add("--no-enable-prefix-caching")
        return command

    def close(self) -> None:
        super().close()
        self._end()

    def _end(self) -> None:
        if self._child:
            self._child.close()


class MAXChild:
    """`max serve` as a child in a session of its own, on a free port of the loopback; its output
    goes to the run's folder.
    """

    def __init__(self, config: "TrainConfig", device: str, model: Any) -> None:
        """Start it. `device` is the learner's: cpu or cuda."""
        from retrain.model.budget import context_length, longest_sampled
        from retrain.model.text import resolve_model

        self._port = _held_port()
        url = f"http://127.0.0.1:{self._port.getsockname()[1]}"
        if sys.platform != "linux":  # elsewhere the server could not bind it
            self._port.close()
        self.config = config.model_copy(
            update={"inference": config.inference.model_copy(update={"url": url})}
        )
        dtype = str(model.dtype).removeprefix("torch.")
        if config.inference.dtype == "bf16":
            dtype = "bfloat16"
        longest = longest_sampled(
            config.training, config.evaluation, config.environment, context_length(model.config)
        )
        needs = ServerNeeds(resolve_model(config.model.model), dtype, device, longest, 0)
        command = MAXEngine.server_command(self.config, needs, "python")
        command.arguments[0] = max_program()
        folder = Path(config.logging.log_dir)
        if folder.is_dir():
            self._log = folder / _LOG
        else:
            self._log = Path(os.devnull)
        with self._log.open("ab") as log:
            self._guard = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    "-m",
                    "retrain.inference_engine.guard",
                    str(os.getpid()),
                    *command.arguments,
                ],
                env=os.environ | command.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def wait(self) -> "TrainConfig":
        """Return the configuration with its address, once it is healthy. Raises EnvironmentFailure
        where it ends before.
        """
        (url,), ends = self.config.inference.urls, time.monotonic() + _START_S
        while time.monotonic() < ends:
            if self._guard.poll() is not None:
                self.close()
                raise EnvironmentFailure(
                    f"`max serve` ended with {self._guard.returncode} before it was ready;"
                    f" {self._log} says why."
                )
            with suppress(httpx.TransportError):
                answer = httpx.get(f"{url}/health", timeout=5, trust_env=False)
                if answer.status_code == httpx.codes.OK:
                    return self.config
            time.sleep(0.5)
        self.close()
        raise EnvironmentFailure(
            f"`max serve` was not ready after {_START_S / 60:.0f} minutes; {self._log} says how far"
            " it came."
        )

    def close(self) -> None:
        """End the child; it is safe to call this twice."""
        self._port.close()
        if self._guard.poll() is None:
            self._guard.terminate()
            try:
                self._guard.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                self._guard.kill()


def _held_port() -> socket.socket:
    """A socket on a free port of the loopback, which no other process is given while it is open.

    `max serve` binds with SO_REUSEADDR, as this does, so that Linux lets it listen on the port.
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    return held


def max_program() -> str:
    """Return the command `max`, of this environment or on PATH; "" where there is none."""
    beside = Path(sys.executable).with_name("max")
    if beside.is_file():
        return str(beside)
    return which("max") or ""
