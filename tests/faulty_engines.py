"""Engines as plugins: one that serves a copy of the model by the adapter's files, as a server does, and what can be wrong with it."""

from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from retrain.inference_engine.base import EngineCapabilities, InferenceEngine, SampleRequest
from retrain.inference_engine.torch_engine import TorchEngine
from retrain.model.devices import EngineOptions
from retrain.noise import Stream
from retrain.types import Completion

Weights = dict[str, Tensor]


class Served(InferenceEngine):
    """Sound."""

    capabilities = EngineCapabilities(in_process=False, adapter_reload=True, logprobs="sampled", noise="counter", entropy=True)
    syncs: ClassVar[list[int]] = []
    """Steps, over all engines."""
    options = EngineOptions()

    def __init__(self, config: Any, *, model: Any, eos_ids: Sequence[int], device: Any) -> None:
        self.model = deepcopy(model).requires_grad_(False)
        self.engine = TorchEngine(self.model, eos_ids, device, options=self.options)
        self.taken = 0

    def sample(self, requests: Sequence[SampleRequest]) -> Iterator[Completion]:
        self.engine.release()
        return self.engine.sample(requests)

    def sync(self, save_adapter: Callable[[Path], None], step: int) -> None:
        self.syncs.append(step)
        with TemporaryDirectory() as folder:
            save_adapter(Path(folder))
            weights = self.changed(load_file(Path(folder) / "adapter_model.safetensors"))
        if not self.takes():
            return
        self.taken += 1
        self.load(weights)

    @torch.no_grad()
    def load(self, weights: Weights) -> None:
        for name, parameter in self.model.named_parameters():
            if ".lora_" in name:
                parameter.copy_(weights[name.replace(".default.", ".")])
        if self.engine._copy is not None:
            for parameter, own in zip(self.engine._copy.model.parameters(), self.model.parameters(), strict=True):
                parameter.copy_(own)

    def takes(self) -> bool:
        return True

    def changed(self, weights: Weights) -> Weights:
        return weights


class IgnoresTheAdapter(Served):
    def takes(self) -> bool:
        return False


class HalvesTheScale(Served):
    def changed(self, weights: Weights) -> Weights:
        return {name: 0.5 * value if "lora_B" in name else value for name, value in weights.items()}


class Hotter(Served):
    """Its temperature is too high by a tenth."""

    def sample(self, requests: Sequence[SampleRequest]) -> Iterator[Completion]:
        return super().sample([replace(request, temperature=1.1 * request.temperature) for request in requests])


class RaisesTheScale(Served):
    def changed(self, weights: Weights) -> Weights:
        return {name: 1.35 * value if "lora_B" in name else value for name, value in weights.items()}


class DropsAProjection(Served):
    def changed(self, weights: Weights) -> Weights:
        return {name: 0 * value if "v_proj" in name else value for name, value in weights.items()}


class DropsAProjectionInBf16(DropsAProjection):
    options = EngineOptions(weights=torch.bfloat16)


class ServedInBf16(Served):
    options = EngineOptions(weights=torch.bfloat16)


class HotterInBf16(Hotter):
    options = EngineOptions(weights=torch.bfloat16)


class DropsTheLastLayer(Served):
    def changed(self, weights: Weights) -> Weights:
        return {name: 0 * value if ".layers.3." in name else value for name, value in weights.items()}


class SwapsQAndK(Served):
    def changed(self, weights: Weights) -> Weights:
        """k has fewer outputs than q: it takes as many of q's, and leaves the others without an adapter."""
        swapped = dict(weights)
        for name, value in weights.items():
            if "q_proj.lora_B" in name:
                other = name.replace("q_proj", "k_proj")
                swapped[other] = value[: len(weights[other])]
                swapped[name] = torch.cat([weights[other], torch.zeros(len(value) - len(weights[other]), value.shape[1])])
            elif "q_proj.lora_A" in name:
                other = name.replace("q_proj", "k_proj")
                swapped[name], swapped[other] = weights[other], value
        return swapped


class KeepsTheFirstAdapter(Served):
    """Reloads nothing under a name that it knows."""

    def takes(self) -> bool:
        return self.taken == 0


class KeepsTheTrialAdapter(Served):
    def takes(self) -> bool:
        return self.taken < 2


class StopsReloading(Served):
    """After the three adapters of the gate at the start."""

    def takes(self) -> bool:
        return self.taken < 3


class KeepsOldKeysAndValues(TorchEngine):
    """A prefix cache that outlives the adapter that filled it."""

    def __init__(self, config: Any, *, model: Any, eos_ids: Sequence[int], device: Any) -> None:
        super().__init__(model, eos_ids, device)

    def release(self) -> None:
        pass


class RoundsItsLogits(TorchEngine):
    """Sound: its logits differ by 6e-5 from the learner's, and its log-probs by so much divided by the temperature."""

    def __init__(self, config: Any, *, model: Any, eos_ids: Sequence[int], device: Any) -> None:
        super().__init__(model, eos_ids, device)

    def sample(self, requests: Sequence[SampleRequest]) -> Iterator[Completion]:
        for completion in super().sample(requests):
            rounding = 6e-5 / requests[completion.request].temperature * (-1.0) ** np.arange(len(completion.logprobs))
            yield replace(completion, logprobs=(completion.logprobs + rounding).astype(np.float32))


class Drifts(TorchEngine):
    """Its log-probs of training completions are 0.01 nats too high from step 1 on."""

    def __init__(self, config: Any, *, model: Any, eos_ids: Sequence[int], device: Any) -> None:
        super().__init__(model, eos_ids, device)

    def sample(self, requests: Sequence[SampleRequest]) -> Iterator[Completion]:
        shift = 0.01 if requests and requests[0].noise.stream == Stream.SAMPLING and requests[0].noise.step > 0 else 0.0
        for completion in super().sample(requests):
            yield replace(completion, logprobs=completion.logprobs + shift) if shift else completion


class TextOnly(Served):
    capabilities = replace(Served.capabilities, token_ids_out=False, logprobs="none", adapter_reload=False, entropy=False)


class DeclaresNothing(InferenceEngine):
    def sample(self, requests: Sequence[SampleRequest]) -> Iterator[Completion]:
        yield from ()
