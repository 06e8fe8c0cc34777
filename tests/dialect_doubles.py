"""Servers in this process that answer as SGLang, MLX-LM and MAX do, with the lab model behind them.

SGLang's is written from its documented API and the source of 0.5.23, MAX's adapters from the source
of 26.7.0; what MLX-LM 0.32 and MAX's base model answer was observed. `make test-servers` runs the
mlx engine against the real one.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from vllm_double import HASTY, Answer, VLLMDouble, eos_ids, error, lab, texts

from retrain.inference_engine.base import BASE_MODEL, SampleRequest
from retrain.inference_engine.max import MAXEngine
from retrain.inference_engine.mlx import MLXEngine
from retrain.inference_engine.sglang import SGLangEngine
from retrain.model.text import LAB_MODEL, load_tokenizer
from retrain.types import Completion, FinishReason


class HastySGLang(SGLangEngine):
    patience = HASTY


class HastyMLX(MLXEngine):
    patience = HASTY


class HastyMAX(MAXEngine):
    patience = HASTY


class SGLangDouble(VLLMDouble):
    """`hides_adapters`: it loads one and does not list it."""

    hides_adapters = False

    def get(self, path: str) -> Answer:
        if path == "/v1/models":
            return 200, {
                "data": [{"id": "default", "root": "default", "max_model_len": self.context}]
            }
        return super().get(path) if path == "/health" else (404, {"detail": "Not Found"})

    def post(self, path: str, body: Any) -> Answer:
        self.asked.append((path, body))
        if path == "/load_lora_adapter":
            return self.load(body)
        if path == "/unload_lora_adapter":
            known = self.adapters.pop(body["lora_name"], None)
            return (200 if known else 400), {"success": bool(known), "loaded_adapters": {}}
        if path == "/flush_cache":
            return 200, "Cache flushed.\n"
        return self.generate(body) if path == "/generate" else (404, {"detail": "Not Found"})

    def load(self, body: Any) -> Answer:
        name = body["lora_name"]
        if name in self.adapters:
            message = f"LoRA adapter {name} is already loaded."
            return 400, {"success": False, "error_message": message, "error": {"message": message}}
        self.adapters[name] = Path(body["lora_path"])
        return 200, {
            "success": True,
            "error_message": None,
            "loaded_adapters": {} if self.hides_adapters else dict.fromkeys(self.adapters, ""),
        }

    def generate(self, body: Any) -> Answer:
        names = body.get("lora_path") or [None] * len(body["input_ids"])
        if any(name is not None and name not in self.adapters for name in names):
            return error(400, "Got LoRA adapter that has never been loaded")
        found = []
        with self.lock:
            for prompt, settings, name in zip(
                body["input_ids"], body["sampling_params"], names, strict=True
            ):
                assert not settings["ignore_eos"], "the real server would not stop at any token"
                self.calls = settings["sampling_seed"]
                (one,) = self.sample(
                    name or "base",
                    prompt,
                    settings | {"n": 1, "max_tokens": settings["max_new_tokens"]},
                )
                found.append(self.one(one, len(prompt), settings["max_new_tokens"]))
        return 200, found

    def one(self, one: Completion, prompt: int, limit: int) -> Any:
        """As in `check_finished` of the real server, the limit counts before a stop."""
        ids = one.token_ids.tolist()
        stopped = one.finish_reason is FinishReason.STOP and len(ids) < limit
        pairs = [
            [float(logprob), token, None] for logprob, token in zip(one.logprobs, ids, strict=True)
        ]
        reason = (
            {"type": "stop", "matched": ids[-1]}
            if stopped
            else {"type": "length", "length": len(ids)}
        )
        about = {
            "finish_reason": reason,
            "prompt_tokens": prompt,
            "output_token_logprobs": pairs,
            "weight_version": "default",
        }
        return {"text": "", "output_ids": ids[:-1] if stopped else ids, "meta_info": about}


class RawDouble(VLLMDouble):
    """Log-probs of temperature 1 whatever the temperature."""

    def __init__(self, port: int = 0) -> None:
        super().__init__(port)
        self.raw = True

    def with_raw_logprobs(self, one: Completion, request: SampleRequest) -> Completion:
        with lab()._weights.disabled() if request.adapter_slot == BASE_MODEL else nullcontext():
            return super().with_raw_logprobs(one, request)


class LlamaCppDouble(RawDouble):
    """llama.cpp's /v1/completions, as its server writes it (tools/server/server-task.cpp, August
    2026): ids beside the log-probs, no adapters, and sampling settings of its own.
    """

    def get(self, path: str) -> Answer:
        if path == "/v1/models":
            return 200, {"object": "list", "data": [{"id": "lab.gguf", "owned_by": "llamacpp"}]}
        return super().get(path) if path == "/health" else (404, {"error": "File Not Found"})

    def post(self, path: str, body: Any) -> Answer:
        if "lora" in path:
            return 404, {"error": {"code": 404, "message": "File Not Found"}}
        return super().post(path, body | {"model": "base"})

    def complete(self, body: Any, prompt: Any, settings: Any) -> Answer:
        assert "ignore_eos" not in settings or "return_token_ids" in settings, "a probe alone"
        neutral = (settings.get("top_k", 40), settings.get("min_p", 0.05))
        assert settings["max_tokens"] == 1 or neutral == (-1, 0.0), "its defaults cut"
        status, answer = super().complete(body, prompt, {**settings, "logprobs": 0})
        for choice in answer["choices"]:
            values = choice["logprobs"]["token_logprobs"]
            content = [
                {"id": token, "token": "", "bytes": [], "logprob": value, "top_logprobs": []}
                for token, value in zip(choice["token_ids"], values, strict=True)
            ]
            for own in ("token_ids", "prompt_token_ids", "sampling_mask"):
                choice.pop(own, None)
            text = texts().decode([one["id"] for one in content if one["id"] not in eos_ids()])
            asked = "logprobs" in settings
            choice |= {"text": text, "logprobs": {"content": content} if asked else None}
        return status, answer | {"usage": {"prompt_tokens": len(prompt)}}


class MAXDouble(RawDouble):
    """Raw log-probs, one sample whatever `n` says, names of adapters without folders. `on_a_cpu`:
    without adapters.
    """

    on_a_cpu = False

    def get(self, path: str) -> Answer:
        if path == "/v1/models":
            return 200, {
                "data": [
                    {"id": name, "max_model_len": self.context} for name in ("base", *self.adapters)
                ]
            }
        return super().get(path) if path == "/health" else (404, {"detail": "Not Found"})

    def post(self, path: str, body: Any) -> Answer:
        if path == "/v1/load_lora_adapter":
            if self.on_a_cpu:
                return 501, {"detail": "LoRA functionality is not enabled on this server."}
            if body["lora_name"] in self.adapters:
                return 409, {"detail": "exists"}
        return super().post(path, body)

    def complete(self, body: Any, prompt: Any, settings: Any) -> Answer:
        if not 1 <= settings["logprobs"] <= 7:
            return error(400, "`logprobs` must be in [0, 7]")
        assert not settings["ignore_eos"], "the real server would not stop at stop_token_ids either"
        return super().complete(
            body, prompt, {**settings, "n": 1, "logprobs": 0, "own_seed": settings["seed"]}
        )


class MLXDouble(RawDouble):
    """Text in, ids out, raw log-probs, adapters in MLX's format: one that it has loaded from a
    folder is never read again.
    """

    def __init__(self, port: int = 0) -> None:
        super().__init__(port)
        self.extra_tokens = 0
        self.tokenizer = load_tokenizer("lab")
        self.read: dict[str, TemporaryDirectory[str]] = {}

    def get(self, path: str) -> Answer:
        return (200, {"status": "ok"}) if path == "/health" else error(404, "CacheNotFound")

    def post(self, path: str, body: Any) -> Answer:
        self.asked.append((path, body))
        for fault in list(self.faults):
            if (answer := fault(path, body)) is not None:
                return answer
        if (
            path != "/v1/completions"
            or body["model"] != str(LAB_MODEL)
            or not isinstance(body["prompt"], str)
        ):
            return 404, {"error": "text input must be of type `str`"}
        prompt, folder = self.tokenizer.encode(body["prompt"]), body.get("adapters")
        with self.lock:
            self.calls += 1
            if folder:
                self.adapters[folder] = self.in_peft(folder)
            (one,) = self.sample(folder or "base", prompt, {**body, "n": 1, "logprobs": 0})
        return 200, self.one(one, len(prompt))

    def one(self, one: Completion, prompt: int) -> Any:
        content = [
            {"id": token, "logprob": float(logprob)}
            for token, logprob in zip(one.token_ids.tolist(), one.logprobs, strict=True)
        ]
        reason = "stop" if one.finish_reason is FinishReason.STOP else "length"
        choice = {"index": 0, "finish_reason": reason, "text": "", "logprobs": {"content": content}}
        return {
            "choices": [choice],
            "usage": {
                "prompt_tokens": prompt + self.extra_tokens,
                "completion_tokens": len(content),
            },
        }

    def in_peft(self, folder: str) -> Path:
        """What W x + scale (x A) B means to the lab model."""
        if folder in self.read:
            return Path(self.read[folder].name)
        settings = json.loads((Path(folder) / "adapter_config.json").read_text())
        assert settings["fine_tune_type"] == "lora" and settings["num_layers"] == 4
        own = {name: value for name, value in lab()._weights.parameters.items() if "lora_A" in name}
        scale = settings["lora_parameters"]["scale"] / lab_scale()
        weights: dict[str, torch.Tensor] = {}
        for name, value in load_file(Path(folder) / "adapters.safetensors").items():
            module, _, factor = name.rpartition(".lora_")
            assert (
                module.partition(".layers.")[2].partition(".")[2]
                in settings["lora_parameters"]["keys"]
            )
            weights[f"base_model.model.{module}.lora_{factor.upper()}.weight"] = (
                value.T * (scale if factor == "b" else 1)
            ).contiguous()
        assert len(weights) == 2 * len(own)
        self.read[folder] = TemporaryDirectory()
        save_file(weights, Path(self.read[folder].name) / "adapter_model.safetensors")
        return Path(self.read[folder].name)


def lab_scale() -> float:
    """alpha / rank of the model behind the doubles."""
    config = lab().config
    return (config.lora.alpha or 2 * config.model.lora_rank) / config.model.lora_rank


@contextmanager
def double(kind: type[VLLMDouble]) -> Iterator[Any]:
    lab()  # takes seconds at its first use, which no request should wait for
    one = kind()
    try:
        yield one
    finally:
        one.kill()
