"""The PyTorch engine: samples from the very model that is being trained.

The base weights serve both, and are never changed. All completions of a call decode together under a budget of rows and KV tokens.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import deepcopy
from pathlib import Path

import numpy as np
import torch
from torch import nn

from retrain.distributed import ALONE, World
from retrain.errors import ConfigurationError
from retrain.inference_engine.base import PYTORCH, InferenceEngine, SampleRequest
from retrain.inference_engine.decoder import Decoder
from retrain.inference_engine.kv_cache import PrefixStore
from retrain.inference_engine.scheduler import DecodeRun, Waiting, pieces
from retrain.model.budget import STORE_SHARE, DecodeLimits
from retrain.model.devices import resolve
from retrain.model.fused import FusedDecoder
from retrain.model.pool import Pool
from retrain.model.projection import AdapterLayer
from retrain.types import Completion

_MOST_PIECES = {"cpu": 16}
"""More completions than that many times the decoding rows make the pieces longer, and a row that is free is taken again. A GPU has the
rows of all completions in one."""


class TorchEngine(InferenceEngine):
    """`inference_engine/base.py`'s contract on a transformers model in this process.

    The same requests give the same bytes in every process with the same threads and limits. Between two completions the
    model is as the caller left it (training flags, attention, gradient mode, adapter).
    """

    capabilities = PYTORCH

    def __init__(
        self,
        model: nn.Module,
        eos_ids: Sequence[int],
        device: torch.device | str,
        *,
        decode_rows: int = 128,
        decode_tokens: int = 1 << 20,
        attention_kernel: str = "default",
        dtype: str = "auto",
        kv_cache_dtype: str = "auto",
        prefix_caching: bool = True,
        fused: FusedDecoder | None = None,
        shards: World = ALONE,
        follow: Callable[[], None] | None = None,
        pool: Pool | None = None,
    ) -> None:
        """`model` is a causal language model of transformers on `device`, bare or wrapped by peft; it stays the caller's.

        `pool` computes the pieces of a call. `fused` is the caller's own, to be shared, and `shards` the processes that hold the model in
        parts: all of them call `sample`, with requests or none, and read it to its end. `follow` copies the learner's adapter into `model`,
        where that is a copy for sampling. attention_kernel, dtype, kv_cache_dtype and prefix_caching are keys of `[inference]`; a value
        that cannot be served is refused (`options.resolve`).
        """
        options = resolve(
            attention_kernel=attention_kernel,
            dtype=dtype,
            kv_cache_dtype=kv_cache_dtype,
            prefix_caching=prefix_caching,
            device_type=torch.device(device).type,
            model_dtype=_dtype_of(model),
        )
        self._model = model
        self._copy = CastCopy(model, options.weights) if options.weights is not None else None
        if self._copy is None:
            self._decoder = Decoder(model, options.flash, fused, shards)
        else:
            self._decoder = Decoder(self._copy.model, options.flash, merge=fused is not None and fused.merge)
        self._eos_ids = np.asarray(sorted(set(eos_ids)), dtype=np.int64)
        self._limits = DecodeLimits(decode_rows, decode_tokens)
        self._prefixes = PrefixStore(decode_tokens // STORE_SHARE) if prefix_caching else None
        self._pool = pool or Pool()
        self._may_be_shared = pool is not None and self._decoder.device.type == "cpu"
        """Also where there is one worker: a run has the same bytes with more of them."""
        self._decode = self._pool.shared(self._decode_piece)
        self._kv_storage = options.kv_storage
        self._weights_version = weights_version(model)
        self._follow = follow

    def sample(self, requests: Sequence[SampleRequest]) -> Iterator[Completion]:
        """Completions under different adapters share the batch where the model's family can; else slot follows slot."""
        waiting = [one for index, request in enumerate(requests) for one in self._waiting(index, request)]
        for _, completion in self._decode(pieces(waiting, self._limits.rows, _MOST_PIECES.get(self._decoder.device.type, 1))):
            yield completion
        self._decoder.run_dummy_passes()

    def _decode_piece(self, waiting: Sequence[Waiting]) -> Iterator[Completion]:
        if self._may_be_shared:
            self.release()  # prompts of an earlier call may be with another worker, and computed anew their bits may differ
        self._follow_weights()
        slots = sorted({one.request.adapter_slot for one in waiting}, reverse=True)
        for together in [slots] if self._decoder.mixes and slots else [[slot] for slot in slots]:
            of_slots = [one for one in waiting if one.request.adapter_slot in together]
            run = DecodeRun(self._decoder, of_slots, self._limits, self._eos_ids, self._prefixes, self._kv_storage)
            while run.unfinished:
                with self._decoder.sampling(run.slots):  # not held over a yield: the consumer may train or score meanwhile
                    finished = run.advance()
                yield from finished

    def load_adapter(self, slot: int, layers: Iterable[AdapterLayer]) -> None:
        """Serve one more LoRA adapter to the requests that name `slot` > 0, in the same batch as the others.

        `layers` are those of a `LoraAdapter` (retrain.squeeze.adapter), of any ranks; one that had this slot is replaced.
        """
        if slot < 1:
            raise ConfigurationError(f"Slot {slot} is taken: 0 is the adapter that is trained, -1 the base model; use 1 or more.")
        self._pool.close()  # workers have the adapters of the time when they were forked
        self._decoder.load_adapter(slot, layers)
        self.release()

    def sync(self, save_adapter: Callable[[Path], None], step: int) -> None:
        """The weights are shared, or copied here; what was computed from the old ones is dropped at the next call."""
        if self._follow is not None:
            self._follow()

    def release(self) -> None:
        """Give back the memory that is held between calls."""
        if self._prefixes is not None:
            self._prefixes.clear()

    def close(self) -> None:
        self.release()

    def _waiting(self, index: int, request: SampleRequest) -> list[Waiting]:
        prompt_tokens = len(request.prompt_ids)
        limit = min(request.max_tokens, self._decoder.context - prompt_tokens)
        if request.adapter_slot not in self._decoder.slots:
            known = ", ".join(map(str, sorted(self._decoder.slots)))
            raise ConfigurationError(
                f"The pytorch engine has no adapter in slot {request.adapter_slot}; it has {known} (-1 is the base model)."
            )
        if prompt_tokens < 1 or limit < 1 or request.temperature < 0:
            raise ConfigurationError(
                f"A request for {request.max_tokens} tokens after a prompt of {prompt_tokens} at temperature {request.temperature} cannot "
                f"be sampled: the model's context is {self._decoder.context} tokens, a prompt has at least one, max_tokens is at least 1."
            )
        if prompt_tokens + limit > self._decoder.uniform_positions:
            raise ConfigurationError(
                f"[training] max_tokens = {request.max_tokens} after a prompt of {prompt_tokens} tokens passes "
                f"{self._decoder.uniform_positions} tokens, where this model's longrope changes the angles of earlier positions; "
                "choose max_tokens so that prompt and completion stay below."
            )
        return [Waiting(index, request, request.first_sample + each, limit) for each in range(request.count)]

    def _follow_weights(self) -> None:
        """A prompt's keys and values are only good for the weights that made them, and a copy has to follow its source."""
        version = weights_version(self._model)
        if version != self._weights_version:
            self.release()
            if self._copy is not None:
                self._copy.follow()
            self._weights_version = version


def _dtype_of(model: nn.Module) -> torch.dtype:
    """The dtype of the frozen weights; an adapter may be kept in a wider one."""
    dtypes = [parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()]
    return max(set(dtypes), key=lambda dtype: sum(p.numel() for p in model.parameters() if p.dtype == dtype))


WeightsVersion = tuple[tuple[int, int], ...]


def weights_version(model: nn.Module) -> WeightsVersion:
    """Changes whenever a trained weight is written in place or replaced."""
    return tuple((parameter.data_ptr(), parameter._version) for parameter in model.parameters() if parameter.requires_grad)


class CastCopy:
    """`inference.dtype` other than the model's: the whole model once more in that dtype.

    A copy and not autocast, which would convert every frozen weight again for every token. The learner keeps the exact
    weights; sampler and learner then differ by the dtype's rounding, which the parity gate bounds.
    """

    def __init__(self, source: nn.Module, dtype: torch.dtype) -> None:
        self._source = source
        self.model = deepcopy(source).requires_grad_(False)
        for parameter in self.model.parameters():  # buffers stay: rotary frequencies are float32 in every dtype
            parameter.data, parameter.grad = parameter.data.to(dtype), None

    def follow(self) -> None:
        """Copy the trained weights."""
        with torch.no_grad():
            for target, source in zip(self.model.parameters(), self._source.parameters(), strict=True):
                if source.requires_grad:
                    target.copy_(source)
