"""Engines as plugins: one that serves a copy of the model by the adapter's files, as a server does,
and what can be wrong with it.
"""

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

from retrain.inference_engine.base import (
    EngineCapabilities,
    InferenceEngine,
    SampleRequest,
    Truncation,
)
from retrain.inference_engine.rows import SampleJob, Variant
from retrain.inference_engine.scheduler import DecodeRun
from retrain.inference_engine.torch_engine import TorchEngine
from retrain.model.devices import EngineOptions
from retrain.noise import Stream
from retrain.types import Completion, FinishReason

Weights = dict[str, Tensor]


class Served(InferenceEngine):
    """Sound."""

    capabilities = EngineCapabilities(
        in_process=False, adapter_reload=True, logprobs="sampled", noise="counter", entropy=True
    )
    syncs: ClassVar[list[int]] = []
    """Steps, over all engines."""
    options = EngineOptions()
    factors: ClassVar[dict[str, float]] = {}
    """A part of the names of weights, and what these are multiplied by."""

    def __init__(self, config: Any, *, model: Any, eos_ids: Sequence[int], device: Any) -> None:
        self.model = deepcopy(model).requires_grad_(False)
        self.engine = TorchEngine(self.model, eos_ids, device, options=self.options)
        self.taken = 0

    def sample(self, requests: Sequence[SampleRequest]) -> Iterator[Completion]:
        self.engine.release()
        for completion in self.engine.sample(requests):
            yield self.altered(completion, requests[completion.request])

    def altered(self, completion: Completion, request: SampleRequest) -> Completion:
        return completion

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
            for parameter, own in zip(
                self.engine._copy.model.parameters(), self.model.parameters(), strict=True
            ):
                parameter.copy_(own)

    def takes(self) -> bool:
        return True

    def changed(self, weights: Weights) -> Weights:
        for part, factor in self.factors.items():
            weights = {name: factor * v if part in name else v for name, v in weights.items()}
        return weights


class IgnoresTheAdapter(Served):
    def takes(self) -> bool:
        return False


class OtherWeights(Served):
    """Its model's head is another one."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        with torch.no_grad():
            self.model.get_output_embeddings().weight.mul_(1.2)


class TwoServers(Served):
    """Two sound ones, which take requests in turn."""

    replicas = 2
    addresses = ("http://one", "http://two")
    second_class: ClassVar[type[Served]] = Served

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.second = self.second_class(*arguments, **options)

    def sample(self, requests: Sequence[SampleRequest]) -> Iterator[Completion]:
        for number, sample in enumerate((super().sample, self.second.sample)):
            for one in sample(requests[number::2]):
                server = self.addresses[number]
                yield replace(one, request=2 * one.request + number, server=server)

    def sync(self, save_adapter: Callable[[Path], None], step: int) -> None:
        super().sync(save_adapter, step)
        self.second.sync(save_adapter, step)


class SecondIgnoresTheAdapter(TwoServers):
    second_class = IgnoresTheAdapter


class SecondHasOtherWeights(TwoServers):
    second_class = OtherWeights


class HalvesTheScale(Served):
    factors: ClassVar = {"lora_B": 0.5}


class Hotter(Served):
    """Its temperature is too high by a tenth."""

    def sample(self, requests: Sequence[SampleRequest]) -> Iterator[Completion]:
        hot = [replace(request, temperature=1.1 * request.temperature) for request in requests]
        return super().sample(hot)


class Noisy(Served):
    """Every second of its log-probs is 0.02 nats too low."""

    nats = 0.02

    def altered(self, completion: Completion, request: SampleRequest) -> Completion:
        noise = np.float32(-self.nats) * (np.arange(len(completion.logprobs)) % 2)
        return replace(completion, logprobs=(completion.logprobs + noise).astype(np.float32))


class RoundsItsHead(Noisy):
    """The size of what a head alone in bf16 does: below the limit for a single token."""

    nats = 8e-4


class RaisesTheScale(Served):
    factors: ClassVar = {"lora_B": 1.35}


class DropsAProjection(Served):
    factors: ClassVar = {"v_proj": 0}


class DropsAProjectionInBf16(DropsAProjection):
    options = EngineOptions(weights=torch.bfloat16)


class DropsAModule(Served):
    """The key projection of the first layer."""

    factors: ClassVar = {".layers.0.self_attn.k_proj.": 0}


class ServedInBf16(Served):
    options = EngineOptions(weights=torch.bfloat16)


class HotterInBf16(Hotter):
    options = EngineOptions(weights=torch.bfloat16)


class DropsTheLastLayer(Served):
    factors: ClassVar = {".layers.3.": 0}


class SwapsQAndK(Served):
    def changed(self, weights: Weights) -> Weights:
        """k has fewer outputs than q: it takes as many of q's, and leaves the others without an
        adapter.
        """
        swapped = dict(weights)
        for name, value in weights.items():
            if "q_proj.lora_B" in name:
                other = name.replace("q_proj", "k_proj")
                swapped[other] = value[: len(weights[other])]
                swapped[name] = torch.cat(
                    [weights[other], torch.zeros(len(value) - len(weights[other]), value.shape[1])]
                )
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


class InProcess(TorchEngine):
    """Sound."""

    def __init__(self, config: Any, *, model: Any, eos_ids: Sequence[int], device: Any) -> None:
        super().__init__(model, eos_ids, device)

    def sample(self, requests: Sequence[SampleRequest]) -> Iterator[Completion]:
        for completion in super().sample(requests):
            yield self.altered(completion, requests[completion.request])

    def altered(self, completion: Completion, request: SampleRequest) -> Completion:
        return completion


class KeepsOldKeysAndValues(InProcess):
    """A prefix cache that outlives the adapter that filled it."""

    def release(self) -> None:
        pass


class RoundsItsLogits(InProcess):
    """Sound: every second of its logits differs by 6e-5 from the learner's, and its log-probs by
    so much divided by the temperature.
    """

    def altered(self, completion: Completion, request: SampleRequest) -> Completion:
        rounding = 6e-5 / request.temperature * (np.arange(len(completion.logprobs)) % 2)
        return replace(completion, logprobs=(completion.logprobs + rounding).astype(np.float32))


class Drifts(InProcess):
    """Its log-probs of training completions are 0.01 nats too high from step 1 on."""

    def altered(self, completion: Completion, request: SampleRequest) -> Completion:
        if request.noise.stream != Stream.SAMPLING or not request.noise.step:
            return completion
        return replace(completion, logprobs=completion.logprobs + 0.01)


class TextOnly(Served):
    capabilities = replace(
        Served.capabilities,
        token_ids_out=False,
        logprobs="none",
        adapter_reload=False,
        entropy=False,
    )


class DeclaresNothing(InferenceEngine):
    def sample(self, requests: Sequence[SampleRequest]) -> Iterator[Completion]:
        yield from ()


class RawLogprobs(Served):
    """Its log-probs are those before the temperature, and it says otherwise."""

    def altered(self, completion: Completion, request: SampleRequest) -> Completion:
        # Not normalized again, as good as raw for a fault.
        own = np.float32(request.temperature) * completion.logprobs
        return replace(completion, logprobs=own.astype(np.float32))


class StripsEOS(InProcess):
    """Returns completions without the token that ended them."""

    def altered(self, completion: Completion, request: SampleRequest) -> Completion:
        return _cut(completion) if completion.finish_reason is FinishReason.STOP else completion


class StripsEOSSilently(StripsEOS):
    """As `StripsEOS`, and says that the completion reached its limit."""

    def altered(self, completion: Completion, request: SampleRequest) -> Completion:
        return replace(super().altered(completion, request), finish_reason=FinishReason.LENGTH)


class NeverEnds(InProcess):
    """Forbids EOS, as min_tokens does, and draws another token in its place."""

    def altered(self, completion: Completion, request: SampleRequest) -> Completion:
        if completion.finish_reason is not FinishReason.STOP:
            return completion
        count = request.max_tokens - len(completion.token_ids) + 1
        ids = np.append(completion.token_ids[:-1], [48] * count).astype(np.int32)
        logprobs = np.append(completion.logprobs[:-1], [-1.0] * count).astype(np.float32)
        whole = replace(completion, token_ids=ids, logprobs=logprobs, entropies=None)
        return replace(whole, finish_reason=FinishReason.LENGTH)


class CertainEOS(InProcess):
    """Reports a log-prob of 0 for EOS."""

    def altered(self, completion: Completion, request: SampleRequest) -> Completion:
        if completion.finish_reason is FinishReason.STOP:
            completion.logprobs[-1] = 0.0
        return completion


class OffByALittle(InProcess):
    """By twice of what rounding in float32 is allowed."""

    def altered(self, completion: Completion, request: SampleRequest) -> Completion:
        return replace(completion, logprobs=completion.logprobs + np.float32(2e-4))


class ShiftsByAToken(InProcess):
    def altered(self, completion: Completion, request: SampleRequest) -> Completion:
        return replace(completion, logprobs=np.roll(completion.logprobs, 1))


class CountsOneMore(InProcess):
    def altered(self, completion: Completion, request: SampleRequest) -> Completion:
        kept = completion.kept
        return completion if kept is None else replace(completion, kept=kept + 1)


class CountsNothing(InProcess):
    def altered(self, completion: Completion, request: SampleRequest) -> Completion:
        return replace(completion, kept=None)


class NoNumbers(InProcess):
    """Its log-probs are NaN, as where a server's weights overflow."""

    def altered(self, completion: Completion, request: SampleRequest) -> Completion:
        completion.logprobs[:] = np.nan
        return completion


class OneSeed(InProcess):
    """Draws all completions of a request with the same noise."""

    def sample(self, requests: Sequence[SampleRequest]) -> Iterator[Completion]:
        alone = [replace(request, count=1, first_sample=0) for request in requests]
        for completion in super().sample(alone):
            request = requests[completion.request]
            for number in range(request.count):
                yield replace(completion, sample=request.first_sample + number)


class PenaltyOfItsOwn(InProcess):
    """Has a repetition penalty of its own, as a server's generation_config.json gives one."""

    penalty = 1.1

    def _run(self, jobs: Sequence[SampleJob]) -> DecodeRun:
        run = super()._run(jobs)
        draw = run.buffers.draw

        def penalized(rows: slice | Tensor, logits: Tensor, variant: Variant) -> Tensor:
            logits = logits.clone()
            for place, slot in enumerate(torch.arange(len(run._slots))[rows].tolist()):
                row = run._slots[slot]
                assert row is not None
                seen = torch.from_numpy(np.unique(row.ids).astype(np.int64))
                own = logits[place, seen]
                logits[place, seen] = torch.where(own > 0, own / self.penalty, own * self.penalty)
            return draw(rows, logits, variant)

        run.buffers.draw = penalized  # type: ignore[method-assign]
        return run


class AnotherTopP(InProcess):
    """Truncates at another top_p than the request's, and reports faithfully what it kept."""

    top_p = 0.8

    def sample(self, requests: Sequence[SampleRequest]) -> Iterator[Completion]:
        cuts = [replace(request.truncation, top_p=self.top_p) for request in requests]
        pairs = zip(requests, cuts, strict=True)
        return super().sample([replace(request, truncation=cut) for request, cut in pairs])


class TopPOfItsOwn(CountsNothing, AnotherTopP):
    """As `AnotherTopP`, but that it says nothing of what it kept."""


class ReportsThePolicy(InProcess):
    """Whatever it draws from, its log-probs are the policy's."""

    def _run(self, jobs: Sequence[SampleJob]) -> DecodeRun:
        run = super()._run(jobs)
        draw = run.buffers.draw

        def reported(rows: slice | Tensor, logits: Tensor, variant: Variant) -> Tensor:
            z = (logits.float() / run.buffers.temperature[rows, None]).log_softmax(-1)
            drawn = draw(rows, logits, variant)
            drawn[:, 1] = z.gather(1, drawn[:, :1].long())[:, 0]
            return drawn

        run.buffers.draw = reported  # type: ignore[method-assign]
        return run


class HidesTopP(ReportsThePolicy, TopPOfItsOwn):
    pass


class HidesPenalty(ReportsThePolicy, PenaltyOfItsOwn):
    pass


class IgnoresTopP(InProcess):
    """Samples from the whole vocabulary, and says that it kept all of it."""

    vocabulary = 259

    def sample(self, requests: Sequence[SampleRequest]) -> Iterator[Completion]:
        whole = [replace(request, truncation=Truncation()) for request in requests]
        return super().sample(whole)

    def altered(self, completion: Completion, request: SampleRequest) -> Completion:
        kept = np.full(len(completion.token_ids), self.vocabulary, np.int32)
        return replace(completion, kept=kept)


def _cut(completion: Completion) -> Completion:
    entropies = None if completion.entropies is None else completion.entropies[:-1]
    kept = None if completion.kept is None else completion.kept[:-1]
    ids, logprobs = completion.token_ids[:-1], completion.logprobs[:-1]
    return replace(completion, token_ids=ids, logprobs=logprobs, entropies=entropies, kept=kept)
