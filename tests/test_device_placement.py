"""No forward or backward pass mixes tensors of the host with those of the device, or reads one
back: what only a GPU would show.

torch's fake tensors have shapes and a device, and no values: an operation on two devices raises,
and so does a read by the host. Their device is "meta", which every build of torch knows; branches
for CUDA alone are not taken.
"""

from contextlib import ExitStack
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

from retrain.backends.local.learner import Learner, _Weights
from retrain.backends.local.micro_batches import LearnerRow
from retrain.errors import EnvironmentFailure
from retrain.inference_engine.decoder import Decoder
from retrain.inference_engine.kv_cache import KVArena
from retrain.inference_engine.sampling import draw
from retrain.model.adapter import Adapter
from retrain.model.fused import FusedDecoder
from retrain.run.parts import load_parts
from retrain.types import MachineChoices
from tests.fake_device import DEVICE, on_device
from tests.learner_models import config_for, make_rows
from tests.marks import first_of
from tests.runs import small

PASSES = product((False, True), (False, True), (0.0, 0.1))
EACH_ONCE = ((False, False, 0.0), (True, True, 0.1))


@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
@pytest.mark.parametrize("kv_storage", [None, torch.int8])
def test_a_decode_step_stays_on_its_device(family: str, kv_storage: torch.dtype | None) -> None:
    config = config_for(family)
    with ExitStack() as stack:
        base, adapter = on_device(config, torch.bfloat16, stack)
        decode_once(
            adapter,
            FusedDecoder(base.model, merge=False) if family == "qwen3" else None,
            kv_storage,
        )


def decode_once(
    adapter: Adapter, fused: FusedDecoder | None, kv_storage: torch.dtype | None
) -> None:
    decoder = Decoder(adapter.peft_model, False, fused)
    with decoder.sampling(0):
        short, long = decoder.prefill([np.arange(4, dtype=np.int32), np.arange(9, dtype=np.int32)])
        arena = KVArena(3, 16, short, kv_storage)
        arena.write_prompt([0, 1], short)
        arena.write_prompt([2], long)
        logits = decoder.decode(arena, torch.tensor([5, 6, 7]), np.array([4, 4, 9]))
        arena.move([2], [0], 9)
        arena.reserve(20, 40, 3, 10)
        temperatures, uniforms = torch.ones(3, device=DEVICE), torch.zeros(3, device=DEVICE)
        drawn = draw(logits, temperatures, uniforms.double(), greedy=True)
    assert {tensor.device for tensor in (logits, drawn, *short.keys, *short.values)} == {DEVICE}


@pytest.mark.parametrize(
    ("own_forward", "checkpointing", "dropout"),
    first_of([*EACH_ONCE, *sorted({*PASSES} - {*EACH_ONCE})], quick=len(EACH_ONCE)),
)
def test_a_learning_pass_stays_on_its_device(
    own_forward: bool, checkpointing: bool, dropout: float
) -> None:
    loss = {
        "mode": "gspo",
        "kl_coef": 0.1,
        "entropy_coef": 0.1,
        "correction": "tis",
        "old_logprobs": "recomputed",
    }
    config = config_for(lora={"dropout": dropout}, loss=loss)
    with ExitStack() as stack:
        own_forward |= dropout > 0
        # The model's own forward in bf16 is under autocast, which "meta" has not.
        base, adapter = on_device(config, torch.float32 if own_forward else torch.bfloat16, stack)
        choices = MachineChoices(1, 8, 1024, 64, checkpointing)
        fused = None if own_forward else FusedDecoder(base.model, merge=False)
        learner = Learner(base, adapter, config, choices, fused)
        rows = [
            LearnerRow(number, row, row.logprobs, row.logprobs, row.logprobs)
            for number, row in enumerate(make_rows())
        ]
        for piece in learner._pieces(rows, share=not dropout):
            (learned,) = learner._learn(
                replace(piece, step=0, weights=[_Weights(1.0, 1.0)] * len(piece.rows))
            )
            assert {learned.loss.device, learned.infinite.device, learned.clip.device} == {DEVICE}
        assert {gradient.device for gradient in learner.optimizer.gradients()} == {DEVICE}


def test_a_device_that_is_named_and_absent_is_refused_before_the_data_is_read(
    tmp_path: Path,
) -> None:
    config = small(
        tmp_path, backend={"devices": "gpu:99"}, data={"source": str(tmp_path / "none.jsonl")}
    )
    with pytest.raises(EnvironmentFailure, match="no such device"):
        load_parts(config, None, lambda line: None)
