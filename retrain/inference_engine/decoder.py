"""The learner's model as the engine uses it: two kinds of forward pass, and a context that leaves
no trace on the model.

The decoder calls only the base model's forward, never `generate`, so a generation_config has no
effect.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from retrain.distributed import ALONE, World
from retrain.inference_engine.base import BASE_MODEL
from retrain.inference_engine.kv_cache import DecodePass, KVArena, PromptPass, PromptState
from retrain.inference_engine.sampling import upload
from retrain.model import attention, varlen
from retrain.model.budget import context_length
from retrain.model.fused import FusedDecoder
from retrain.types import Int32Array


class Decoder:
    """A causal language model of transformers, bare or wrapped by peft. It shares its weights with
    the learner.
    """

    def __init__(
        self,
        model: nn.Module,
        flash: bool,
        fused: FusedDecoder | None = None,
        shards: World = ALONE,
        *,
        merge: bool = False,
    ) -> None:
        """`flash` computes prompts by torch's flash kernel. `fused` is the fused forward of
        `model`; None builds it with `merge`, if the family has one.

        `shards` are the ranks that hold the model in parts, so that every pass is collective.
        """
        self._model = model
        self._modules = list(model.modules())
        base: Any = model
        self._base: Any = base.get_base_model() if hasattr(model, "peft_config") else base
        self._text_config: Any = self._base.config.get_text_config()
        attention.refuse_undecodable(self._base)
        self.shards = shards
        self.fused = fused or FusedDecoder.of(self._base, merge=merge)
        over_pages = varlen.flash_paged if flash and varlen.reads_pages() else varlen.plain_paged
        self.kernel = attention.FusedAttention(over_pages, varlen.flash if flash else None)

    @property
    def device(self) -> torch.device:
        return next(self._model.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights, and so of keys and values."""
        dtype: torch.dtype = self._base.get_input_embeddings().weight.dtype
        return dtype

    @property
    def context(self) -> int:
        """Tokens that a sequence may have, prompt and completion together."""
        return context_length(self._text_config)

    @contextmanager
    def sampling(self, slot: int) -> Iterator[None]:
        """Switch to evaluation mode, without gradient, with our attention and the adapter of this
        slot. Restore everything on leaving.

        The fused forward has neither modes nor the model's attention.

        It uses no_grad and not inference_mode. Some rotary embeddings store buffers on the module
        during a forward, and an inference tensor there would break the learner's backward.
        """
        training = []
        if self.fused is None:
            training = [module for module in self._modules if module.training]
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            # Events, graphs and kernels of a model's own code go to the current device.
            if self.device.type == "cuda":
                stack.enter_context(torch.cuda.device(self.device))
            if self.fused is None:
                stack.enter_context(attention.plugged_in(self._base))
            if slot == BASE_MODEL and hasattr(self._model, "disable_adapter"):
                stack.enter_context(self._model.disable_adapter())  # type: ignore[operator]  # peft adds the method
            try:
                for module in training:
                    module.training = False
                if self.fused is not None:
                    self.fused.refresh(sampling=True)
                yield
            finally:
                for module in training:
                    module.training = True

    def prefill(self, prompts: Sequence[Int32Array]) -> list[PromptState]:
        """Run the prompts packed into one row; the head sees only their last tokens."""
        batch = PromptPass([len(prompt) for prompt in prompts], self.kernel)
        return batch.states(prompts, self.run_prompts(prompts, batch))

    def run_prompts(self, prompts: Sequence[Int32Array], batch: PromptPass) -> Tensor:
        """Return the logits [prompts, V] of the token after each prompt; `batch` stores their keys
        and values.

        If `batch` already holds a sequence's first tokens, `prompts` has only the rest.
        """
        self.shards.any_rank(True)
        positions = np.concatenate(
            [held + np.arange(len(new)) for held, new in zip(batch.held, prompts, strict=True)]
        )
        last = upload(np.cumsum(batch.lengths) - 1, self.device)
        ids = upload(np.concatenate(prompts).astype(np.int64)[None], self.device)
        return self._forward(ids, torch.from_numpy(positions[None]), batch, last)[0]

    def decode(
        self,
        arena: KVArena,
        tokens: Tensor,
        lengths: npt.NDArray[np.int64],
    ) -> Tensor:
        """Feed `tokens` [R] to rows with `lengths` [R] cached tokens; logits [R, V] of the next
        ones.
        """
        self.shards.any_rank(True)
        batch = DecodePass(arena, lengths, self.kernel)
        return self._forward(tokens[:, None], batch.positions[:, None], batch, 1)[:, 0]

    def run_dummy_passes(self) -> None:
        """Run dummy forwards until every rank finishes, since FSDP gathers are collective. Ends
        what `prefill` and `decode` begin.
        """
        if self.shards.size == 1:
            return
        with self.sampling(0):
            while self.shards.any_rank(False):
                token = PromptPass([1], self.kernel)
                zero = torch.zeros(1, 1, dtype=torch.int64)
                self._forward(zero, zero, token, 1)

    def _forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        batch: PromptPass | DecodePass,
        logits_to_keep: Tensor | int,
    ) -> Tensor:
        ids, positions = token_ids.to(self.device), positions.to(self.device)
        if self.fused is not None:
            hidden = self.fused.hidden_states(ids, positions, batch, cache=batch)
            last: Any = logits_to_keep
            if isinstance(logits_to_keep, int):
                last = slice(-logits_to_keep, None)
            return self.fused.logits(hidden[:, last])
        outputs = self._base(
            input_ids=ids,
            position_ids=positions,
            past_key_values=batch,
            use_cache=True,
            logits_to_keep=logits_to_keep,
            attention_batch=batch,
        )
        logits: Tensor = outputs.logits
        return logits
