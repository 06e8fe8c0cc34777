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
            for parameter, own in zip(
                self.engine._copy.model.parameters(), self.model.parameters(), strict=True
            ):
                parameter.copy_(own)

    def takes(self) -> bool:
        return True

    def changed(self, weights: Weights) -> Weights:
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
    def changed(self, weights: Weights) -> Weights:
        return {name: 0.5 * value if "lora_B" in name else value for name, value in weights.items()}


class Hotter(Served):
    """Its temperature is too high by a tenth."""

    def sample(self, requests: Sequence[SampleRequest]) -> Iterator[Completion]:
        return super().sample(
            [replace(request, temperature=1.1 * request.temperature) for request in requests]
        )


class Noisy(Served):
    """Every second of its log-probs is 0.02 nats too low."""

    nats = 0.02

    def sample(self, requests: Sequence[SampleRequest]) -> Iterator[Completion]:
        for completion in super().sample(requests):
            noise = np.float32(-self.nats) * (np.arange(len(completion.logprobs)) % 2)
            yield replace(completion, logprobs=(completion.logprobs + noise).astype(np.float32))


class RoundsItsHead(Noisy):
    """The size of what a head alone in bf16 does: below the limit for a single token."""

    nats = 8e-4


class RaisesTheScale(Served):
    def changed(self, weights: Weights) -> Weights:
        return {
            name: 1.35 * value if "lora_B" in name else value for name, value in weights.items()
        }


class DropsAProjection(Served):
    def changed(self, weights: Weights) -> Weights:
        return {name: 0 * value if "v_proj" in name else value for name, value in weights.items()}


class DropsAProjectionInBf16(DropsAProjection):
    options = EngineOptions(weights=torch.bfloat16)


class DropsAModule(Served):
    """The key projection of the first layer."""

    def changed(self, weights: Weights) -> Weights:
        return {
            name: 0 * value if ".layers.0.self_attn.k_proj." in name else value
            for name, value in weights.items()
        }


class ServedInBf16(Served):
    options = EngineOptions(weights=torch.bfloat16)


class HotterInBf16(Hotter):
    options = EngineOptions(weights=torch.bfloat16)


class DropsTheLastLayer(Served):
    def changed(self, weights: Weights) -> Weights:
        return {
            name: 0 * value if ".layers.3." in name else value for name, value in weights.items()
        }


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


class KeepsOldKeysAndValues(InProcess):
    """A prefix cache that outlives the adapter that filled it."""

    def release(self) -> None:
        pass


class RoundsItsLogits(InProcess):
    """Sound: every second of its logits differs by 6e-5 from the learner's, and its log-probs by
    so much divided by the temperature.
    """

    def sample(self, requests: Sequence[SampleRequest]) -> Iterator[Completion]:
        for completion in super().sample(requests):
            rounding = (
                6e-5
                / requests[completion.request].temperature
                * (np.arange(len(completion.logprobs)) % 2)
            )
            yield replace(completion, logprobs=(completion.logprobs + rounding).astype(np.float32))


class Drifts(InProcess):
    """Its log-probs of training completions are 0.01 nats too high from step 1 on."""

    def sample(self, requests: Sequence[SampleRequest]) -> Iterator[Completion]:
        shift = (
            0.01
            if requests
            and requests[0].noise.stream == Stream.SAMPLING
            and requests[0].noise.step > 0
            else 0.0
        )
        for completion in super().sample(requests):
            yield replace(completion, logprobs=completion.logprobs + shift) if shift else completion


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

    def sample(self, requests: Sequence[SampleRequest]) -> Iterator[Completion]:
        for completion in super().sample(requests):
            request = requests[completion.request]
            own = (
                np.float32(request.temperature) * completion.logprobs
            )  # not normalized again, as good as raw for a fault
            yield replace(completion, logprobs=own.astype(np.float32))


class StripsEOS(InProcess):
    """Returns completions without the token that ended them."""

    def sample(self, requests: Sequence[SampleRequest]) -> Iterator[Completion]:
        for completion in super().sample(requests):
            yield _cut(completion) if completion.finish_reason is FinishReason.STOP else completion


class StripsEOSSilently(StripsEOS):
    """As `StripsEOS`, and says that the completion reached its limit."""

    def sample(self, requests: Sequence[SampleRequest]) -> Iterator[Completion]:
        for completion in super().sample(requests):
            yield replace(completion, finish_reason=FinishReason.LENGTH)


class NeverEnds(InProcess):
    """Forbids EOS, as min_tokens does, and draws another token in its place."""

    def sample(self, requests: Sequence[SampleRequest]) -> Iterator[Completion]:
        for completion in super().sample(requests):
            if completion.finish_reason is not FinishReason.STOP:
                yield completion
                continue
            space = requests[completion.request].max_tokens - len(completion.token_ids)
            ids = np.append(completion.token_ids[:-1], np.full(space + 1, 48, np.int32)).astype(
                np.int32
            )
            logprobs = np.append(
                completion.logprobs[:-1], np.full(space + 1, -1, np.float32)
            ).astype(np.float32)
            yield replace(
                completion,
                token_ids=ids,
                logprobs=logprobs,
                entropies=None,
                finish_reason=FinishReason.LENGTH,
            )


class CertainEOS(InProcess):
    """Reports a log-prob of 0 for EOS."""

    def sample(self, requests: Sequence[SampleRequest]) -> Iterator[Completion]:
        for completion in super().sample(requests):
            if completion.finish_reason is FinishReason.STOP:
                completion.logprobs[-1] = 0.0
            yield completion


class NoNumbers(InProcess):
    """Its log-probs are NaN, as where a server's weights overflow."""

    def sample(self, requests: Sequence[SampleRequest]) -> Iterator[Completion]:
        for completion in super().sample(requests):
            completion.logprobs[:] = np.nan
            yield completion


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
        changed = [
            replace(request, truncation=replace(request.truncation, top_p=self.top_p))
            for request in requests
        ]
        return super().sample(changed)


class TopPOfItsOwn(AnotherTopP):
    """As `AnotherTopP`, but that it says nothing of what it kept."""

    def sample(self, requests: Sequence[SampleRequest]) -> Iterator[Completion]:
        return (replace(completion, kept=None) for completion in super().sample(requests))


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
        for completion in TorchEngine.sample(
            self, [replace(request, truncation=Truncation()) for request in requests]
        ):
            yield replace(
                completion, kept=np.full(len(completion.token_ids), self.vocabulary, np.int32)
            )


def _cut(completion: Completion) -> Completion:
    entropies = None if completion.entropies is None else completion.entropies[:-1]
    kept = None if completion.kept is None else completion.kept[:-1]
    ids, logprobs = completion.token_ids[:-1], completion.logprobs[:-1]
    return replace(completion, token_ids=ids, logprobs=logprobs, entropies=entropies, kept=kept)
