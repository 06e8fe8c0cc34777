"""The learning pass: rows in, optimizer steps out, with one normalization per optimizer batch,
whatever its micro-batches.

The policy is softmax(logits / temperature) over the tokens that the sampler kept. Dropout acts in
the training pass, and in the pass that recomputes old log-probs for it.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import astuple, dataclass, replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from retrain.backends.local.loss import clip_counts, kl_term, policy_loss
from retrain.backends.local.micro_batches import (
    LearnerRow,
    MicroBatch,
    pack,
    pad,
    share_rows,
    split_rows,
)
from retrain.backends.local.optimizer import AdapterOptimizer
from retrain.backends.losses import ActionTokens
from retrain.backends.own_loss import Terms, aggregation_of, own_function
from retrain.backends.proof import metric_names
from retrain.backends.rows import (
    Update,
    check_rows,
    first_nonfinite,
    for_each_row,
    minibatch_split,
    num_completions,
    row_weights,
    step_result,
)
from retrain.distributed import ALONE, World
from retrain.errors import ConfigurationError, RunFailed
from retrain.inference_engine.base import Truncation
from retrain.model.attention import FusedAttention, missing, plugged_in
from retrain.model.devices import attention_of
from retrain.model.functions import recomputed
from retrain.model.fused import FusedDecoder
from retrain.model.head import TokenScores, count_kept, score_tokens
from retrain.model.load import BaseModel, layers
from retrain.model.pool import Pool, in_order
from retrain.model.precision import computed_in
from retrain.model.weights import TrainedWeights
from retrain.types import Float32Array, MachineChoices, Row, StepResult

if TYPE_CHECKING:
    from retrain.config import TrainConfig
    from retrain.config.schema import Inference, Loss


class _Weights(NamedTuple):
    """Weights of each token of one row in the loss: of its policy term, and of its KL and entropy
    terms.
    """

    policy: float
    regularizer: float


_SUPERVISED_STEPS = 1 << 31
"""Added to the steps of the supervised stage, so that its dropout has noise of its own."""


@dataclass(frozen=True)
class _Settings:
    """The settings that may move from step to step; a piece carries them, since a worker process
    does not see what changes in this one.
    """

    loss: "Loss"
    temperature: float
    entropy: bool
    """True if the loss reads entropies."""
    supervised: bool
    """True if the loss is cross-entropy."""


@dataclass(frozen=True)
class _Piece:
    """The rows of one micro-batch, and what to do with them."""

    rows: Sequence[LearnerRow]
    share: bool
    """True if one computation of a prompt serves all its rows."""
    dummy: bool
    """True for a dummy micro-batch, which serves the collectives of the other processes. Its loss
    is 0, and the learner drops its scores.
    """
    settings: _Settings
    step: int | None = None
    """The step whose dropout masks act; None for no dropout."""
    weights: Sequence[_Weights] = ()
    """One for each row."""
    measured: bool = False
    """True if the caller wants the log-probs too."""
    entropy: bool = False
    """True if the caller wants the entropies too."""
    reference: bool = False
    """True if scores come from the frozen base, with the adapter off, over the whole vocabulary."""
    dtype: torch.dtype | None = None
    """Dtype of the base that computes the scores; None for its own dtype."""
    truncation: Truncation | None = None
    """With a truncation, scores are the numbers of tokens that it keeps; with None, log-probs."""


@dataclass(frozen=True)
class _Contribution:
    """The part of an update that one piece adds."""

    loss: Tensor
    infinite: Tensor
    """Number of log-probs that are not finite."""
    clip: Tensor
    """[2] `clip_counts`."""
    metrics: Tensor
    """[metrics, 2] (sum, number) of each metric of a custom loss."""
    entropy: Tensor
    """[2] (sum, number) of the entropies, if the piece asks for them."""
    logprobs: dict[int, Float32Array]
    """Log-probs by row number, if the piece asks for them."""
    gradients: list[Float32Array]
    """Gradients of the parameters, in order; empty if the process added them in place."""

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """Return the tensors that the learner sums over the pieces of an update."""
        return self.loss, self.infinite, self.clip, self.entropy, self.metrics


class Learner:
    def __init__(
        self,
        base: BaseModel,
        weights: TrainedWeights,
        config: "TrainConfig",
        choices: MachineChoices,
        fused: FusedDecoder | None = None,
        world: World = ALONE,
        pool: Pool | None = None,
    ) -> None:
        """`fused` replaces the model's own forward wherever no dropout acts.

        In a parallel `world` every process receives all rows, computes its share, and ends with the
        whole result.
        """
        self.base, self.weights, self.choices = base, weights, choices
        self._fused = fused if weights.frozen_layers else None
        self.world = world
        self.max_tokens = config.training.max_tokens
        self.seed = config.training.seed
        # Load the loss before `begin`, which asks what it reads.
        self._own_loss = own_function("loss", config)
        self._own_correction = own_function("correction", config)
        self._aggregation = aggregation_of(config)
        self._metrics: tuple[str, ...] = ()
        if self._own_loss:
            self._metrics = metric_names(self._own_loss, base.device)
        self.begin(config)
        self._kernel_of = partial(attention_of, config.inference.attention_kernel, base.device.type)
        self._kernel: FusedAttention = self._kernel_of(base.dtype)
        self._packs = not missing(base.model)
        self._checkpointed = _checkpointed_layers(base, choices)
        self._pool = pool or Pool()
        self._learn_pieces = self._pool.shared(self._learn)
        self._score_pieces = self._pool.shared(self._score)

    def begin(self, config: "TrainConfig", *, supervised: bool = False) -> None:
        """Begin a stage with these settings and a new optimizer; a `supervised` stage minimizes the
        mean cross-entropy of the action tokens.
        """
        self.supervised = supervised
        self.optimizer = AdapterOptimizer(
            self.weights.parameters,
            config.optimizer,
            config.training,
            config.loss.max_grad_norm,
            self.weights.undecayed,
        )
        self.use(config)
        self._passes = config.training.updates_per_batch
        self._minibatches = config.training.minibatches
        self._recompute = not supervised and recomputes_old_logprobs(
            config.loss, rounded=rounds(config.inference, self.base.dtype)
        )

    def use(self, config: "TrainConfig") -> None:
        """Use the values of [loss] and [training] that a schedule may move."""
        loss = config.loss
        own = [function for function in (self._own_loss, self._own_correction) if function]
        if self.supervised:
            own = []
        self._reference = loss.kl_coef != 0 or any(
            function.declares("needs_reference") for function in own
        )
        entropy = loss.entropy_coef != 0 or any(
            function.declares("needs_entropy") for function in own
        )
        self._settings = _Settings(loss, config.training.temperature, entropy, self.supervised)
        self.optimizer.training, self.optimizer.max_grad_norm = config.training, loss.max_grad_norm

    @property
    def temperature(self) -> float:
        return self._settings.temperature

    def train(
        self,
        rows: Sequence[Row],
        step: int,
        *,
        sampler_is_raw: bool = False,
        entropy: bool = False,
    ) -> StepResult:
        """Take one step.

        `sampler_is_raw` says that the recorded log-probs are at temperature 1 whatever the training
        temperature. The learner's own log-probs then replace them, and the result reports the
        ratios of sampler and learner at temperature 1. With `entropy`, the result reports the
        policy's mean entropy.
        """
        check_rows(rows)
        batch = _learner_rows(rows, [row.trained for row in rows])
        raw: dict[int, Float32Array] | None = None
        if sampler_is_raw:
            at_one = self.score(batch, temperature=1.0)
            raw = {row.number: own - row.sampler for row, own in zip(batch, at_one, strict=True)}
            batch = _with(batch, self.score(batch), "sampler", "old")
        batch = self._with_passes_before(batch, step)
        updates: list[Update] = []
        measured: dict[int, Float32Array] = {}
        completions = num_completions(rows) / self._minibatches
        for turn in range(self._passes if batch else 0):
            log_ratios = measured if turn == 0 and not self._recompute and raw is None else None
            parts = minibatch_split(batch, self._minibatches, self.seed, step, turn)
            for part in parts:
                asked = entropy and not updates
                updates.append(self._update(part, step, completions, log_ratios, entropy=asked))
        if raw is not None:
            measured = raw
        elif self._recompute:
            measured = {row.number: row.old - row.sampler for row in batch}
        else:
            measured = self._of_all_processes(measured)
        before, kl = self._before_updates(measured, batch, step), self._divergence(batch)
        return step_result(updates, list(measured.values()), before, self.max_tokens, kl)

    def _before_updates(
        self, measured: dict[int, Float32Array], batch: list[LearnerRow], step: int
    ) -> list[Float32Array]:
        """Return the measurements of the rows of the first minibatch, before any update."""
        first_pass = minibatch_split(batch, self._minibatches, self.seed, step, turn=0)
        first = {row.number for part in first_pass[:1] for row in part}
        return [ratios for number, ratios in measured.items() if number in first]

    def _with_passes_before(self, batch: list[LearnerRow], step: int) -> list[LearnerRow]:
        """Add what the loss reads of passes before the first update: the old log-probs of the
        learner and the log-probs of the reference.
        """
        if self._recompute:
            # Use the masks and micro-batches of the first pass, so that the first ratio is exactly
            # 1.
            first_pass = minibatch_split(batch, self._minibatches, self.seed, step, turn=0)
            parts = [_with(part, self.score(part, masks_of=step), "old") for part in first_pass]
            batch = sorted(chain.from_iterable(parts), key=lambda row: row.number)
        if self._reference:
            batch = _with(batch, self._reference_logprobs(batch), "reference")
        return batch

    def _divergence(self, batch: Sequence[LearnerRow]) -> float | None:
        """Return the mean KL divergence from the reference; None if the loss reads none."""
        pairs = [(row.old, row.reference) for row in batch if row.reference is not None]
        if not pairs:
            return None
        sides = zip(*pairs, strict=True)
        old, reference = (torch.from_numpy(np.concatenate(side)) for side in sides)
        loss = self._settings.loss
        return float(
            kl_term(old, reference, loss.kl_estimator, loss.log_ratio_clamp).double().mean()
        )

    def _of_all_processes(self, found: dict[int, Float32Array]) -> dict[int, Float32Array]:
        """Join what every process has found of its own rows, by row number."""
        joined: dict[int, Float32Array] = {}
        for part in self.world.gather(found):
            joined |= part
        return joined

    def logprobs(
        self, rows: Sequence[Row], temperature: float | None = None, **asked: Any
    ) -> list[Float32Array]:
        """Return [T] log-probs of each row, without gradient or dropout, at `temperature` or else
        the training temperature; `asked` as in `score`. A row without actions has no values.
        """
        check_rows(rows)
        filled = _learner_rows(rows, [row.num_actions for row in rows])
        return for_each_row(rows, self.score(filled, temperature, **asked))

    def _reference_logprobs(self, batch: list[LearnerRow]) -> list[Float32Array]:
        """Return [T] log-probs of each row by [loss] kl_reference, over the whole vocabulary."""
        if self._settings.loss.kl_reference == "base":
            return self.score(batch, reference=True)
        with self.weights.started():
            whole = [replace(row, row=replace(row.row, kept=None)) for row in batch]
            return self.score(whole)

    def kept(self, rows: Sequence[Row], truncation: Truncation) -> list[Float32Array]:
        """Return [T] the numbers of tokens that `truncation` keeps, of each row."""
        return self.logprobs(rows, truncation=truncation)

    def score(
        self,
        rows: Sequence[LearnerRow],
        temperature: float | None = None,
        *,
        masks_of: int | None = None,
        **asked: Any,
    ) -> list[Float32Array]:
        """Return [T] log-probs of each row, under the dropout masks of the step `masks_of` if
        given. The fields `asked` of a piece can ask for other values.

        The learner does not truncate the base. The base's own most probable tokens are another set,
        and the divergence of a truncated policy from the whole base is finite. For a fixed kept set
        it exceeds the divergence over that set by a constant, -ln of the base's mass of the set.
        """
        settings = replace(self._settings, temperature=temperature or self.temperature)
        asked |= {"settings": settings, "step": masks_of}
        pieces = self._pieces(rows, share=masks_of is None or not self.weights.drops)
        found: dict[int, Float32Array] = {}
        for _, values in self._score_pieces(replace(piece, **asked) for piece in pieces):
            found |= values
        found = self._of_all_processes(found)
        return [found[row.number] for row in rows]

    # -- one update --------------------------------------------------------------------------------

    def _update(
        self,
        rows: Sequence[LearnerRow],
        step: int,
        completions: float,
        log_ratios: dict[int, Float32Array] | None,
        *,
        entropy: bool,
    ) -> Update:
        """Compute the gradient of one optimizer batch and, if everything is finite, take one step.
        `completions` is the batch's share of all completions drawn, trained or not; `log_ratios`
        collects this process's log-ratios by row number.
        """
        name = first_nonfinite(
            {
                "advantages": [row.row.advantages for row in rows],
                "sampler log-probs": [row.sampler for row in rows],
                "old log-probs": [row.old for row in rows],
                "reference log-probs": [row.reference for row in rows if row.reference is not None],
            }
        )
        if name:
            return Update(nonfinite=name)
        self.optimizer.zero_gradients()
        weights = self._weights(rows, completions)
        sums = self._gradient(
            (
                replace(
                    piece,
                    step=step,
                    weights=[weights[row.number] for row in piece.rows],
                    measured=log_ratios is not None,
                    entropy=entropy,
                )
                for piece in self._pieces(rows, share=not self.weights.drops)
            ),
            rows,
            log_ratios,
        )
        loss, infinite, clip, entropies, metrics = sums
        norm = self.optimizer.gradient_norm()
        clipped, clippable = clip.tolist()
        nonfinite = self._nonfinite_result(infinite, loss, norm)
        if not nonfinite:
            self.optimizer.step(step, norm)
            self.weights.written()
        counted = dict(zip(self._metrics, map(tuple, metrics.tolist()), strict=True))
        summed = tuple(entropies.tolist())
        return Update(loss.item(), norm.item(), clipped, clippable, counted, summed, nonfinite)

    def _gradient(
        self,
        pieces: Iterator[_Piece],
        rows: Sequence[LearnerRow],
        log_ratios: dict[int, Float32Array] | None,
    ) -> list[Tensor]:
        """Add up the gradient of an optimizer batch, and return the sums of `_Contribution.parts`
        over all processes.
        """
        sampler_of = {row.number: row.sampler for row in rows}
        zeros = partial(torch.zeros, device=self.base.device)
        sums = [zeros(()), zeros(()), zeros(2), zeros(2), zeros(len(self._metrics), 2)]
        # Take the order of the pieces, whichever worker finishes first, because sums depend on the
        # order.
        for learned in in_order(self._learn_pieces(pieces)):
            self.optimizer.add(learned.gradients)
            for total, part in zip(sums, learned.parts, strict=True):
                total.add_(part)
            if log_ratios is not None:
                log_ratios |= {
                    number: new - sampler_of[number] for number, new in learned.logprobs.items()
                }
        self.world.sum([*self.optimizer.gradients(), *sums])
        return sums

    def _nonfinite_result(self, infinite: Tensor, loss: Tensor, norm: Tensor) -> str:
        """Name what forbids an optimizer step; "" if nothing."""
        if infinite:
            return "log-probs"
        if not torch.isfinite(loss):
            return "loss"
        if not torch.isfinite(norm):
            name = self.optimizer.nonfinite_gradient()
            return f"gradient of {name}" if name else "gradient norm"
        return ""

    def _weights(self, rows: Sequence[LearnerRow], completions: float) -> dict[int, _Weights]:
        """Return row number -> weights, for all rows of the optimizer batch, whichever process
        computes them.

        The policy term averages over the rows that have one and the tokens that count in it. KL and
        entropy average over all rows, so that switching them on changes nothing in the policy term.
        """
        aggregation = "token_mean" if self.supervised else self._aggregation
        own, common = [row.row for row in rows], (aggregation, self.max_tokens, completions)
        policy = row_weights(own, [row.num_counted for row in own], *common)
        regularizer = row_weights(own, [row.num_actions for row in own], *common)
        return {
            row.number: _Weights(*weights)
            for row, *weights in zip(rows, policy, regularizer, strict=True)
        }

    def _pieces(self, rows: Sequence[LearnerRow], *, share: bool) -> Iterator[_Piece]:
        """Return the micro-batches of this process's share of `rows`, the rows of all processes.
        `share` computes a prompt once for its rows; not under dropout, whose masks differ from row
        to row. With a sharded base every process makes equally many, the last ones dummies.
        """
        parts = split_rows(
            share_rows(rows, self.world),
            self.choices.micro_batch_tokens,
            share=share and self._packs,
        )
        for part in self.base.shards.in_lockstep(parts):
            own = part or [min(rows, key=lambda row: row.tokens)]
            yield _Piece(own, share, not part, self._settings)

    def _learn(self, piece: _Piece) -> Iterator[_Contribution]:
        """Add the piece's gradient to the parameters' own; a worker returns it instead."""
        micro, settings = self._micro_batch(piece), piece.settings
        if self._pool.in_worker:
            self._settings = settings
            self.optimizer.zero_gradients()
        assert piece.step is not None
        with self._training(micro, piece.step):
            scores = score_tokens(
                self.base.head,
                micro.states(self._hidden_states(micro)),
                micro.targets,
                self.temperature,
                kept=micro.kept(),
                entropy=settings.entropy or piece.entropy,
                entropy_gradient=settings.entropy,
            )
            entropies = scores.entropies
            if not settings.entropy:
                scores = scores._replace(entropies=None)
            weights = [_Weights(0.0, 0.0)] * len(piece.rows) if piece.dummy else piece.weights
            tokens = _action_tokens(micro, scores, weights)
            loss, own = self._loss(tokens, settings)
            loss.backward()  # type: ignore[no-untyped-call]  # torch does not annotate it
        new = scores.logprobs.detach()
        yield _Contribution(
            loss.detach(),
            torch.isfinite(new).logical_not().sum(),
            self._clip_counts(tokens, own),
            self._measured(None if piece.dummy else own),
            self._entropy(entropies if piece.entropy and not piece.dummy else None),
            _by_row(micro, new) if piece.measured and not piece.dummy else {},
            (
                [gradient.numpy() for gradient in self.optimizer.gradients()]
                if self._pool.in_worker
                else []
            ),
        )

    def _loss(self, tokens: ActionTokens, settings: _Settings) -> tuple[Tensor, Terms | None]:
        """Return the loss of a micro-batch, and the answer of a custom loss."""
        if settings.supervised:
            return -(tokens.new * tokens.weights).sum(), None
        own = correction = None
        if self._own_loss:
            own = replace(self._own_loss, params=settings.loss.params)(tokens)
        if self._own_correction:
            correction = self._own_correction(tokens)
        values = own.values if own else None
        return policy_loss(tokens, settings.loss, values, correction), own

    def _clip_counts(self, tokens: ActionTokens, own: Terms | None) -> Tensor:
        """Return [2] `clip_counts`; zeros for a custom loss that gives no mask."""
        clipped = None
        if own is not None:
            clipped = own.clipped
            if clipped is None:
                return torch.zeros(2, device=self.base.device)
        return clip_counts(tokens, self._settings.loss, clipped)

    def _entropy(self, entropies: Tensor | None) -> Tensor:
        """Return [2] (sum, number) of the entropies."""
        if entropies is None:
            return torch.zeros(2, device=self.base.device)
        return torch.stack([entropies.detach().sum(), entropies.new_tensor(len(entropies))])

    def _measured(self, own: Terms | None) -> Tensor:
        """Return [metrics, 2] (sum, number) of each metric; zeros for a dummy."""
        if own is None or not self._metrics:
            return torch.zeros(len(self._metrics), 2, device=self.base.device)
        if tuple(own.metrics) != self._metrics:
            raise RunFailed(
                f'[loss] mode = "{self._settings.loss.mode}" gave the metrics'
                f" {', '.join(own.metrics) or 'none'}, and {', '.join(self._metrics)} before; give"
                " the same ones every time."
            )
        return torch.stack(
            [
                torch.stack([value.float().sum(), value.new_tensor(value.numel()).float()])
                for value in own.metrics.values()
            ]
        )

    def _score(self, piece: _Piece) -> Iterator[dict[int, Float32Array]]:
        """Return the requested scores of the piece's rows, by row number."""
        micro, head, temperature = (
            self._micro_batch(piece),
            self.base.head,
            piece.settings.temperature,
        )
        with torch.no_grad(), self._attention(), ExitStack() as stack:
            if piece.reference:
                stack.enter_context(self.weights.disabled())
            if piece.step is not None:
                stack.enter_context(self._dropout(micro, piece.step))
            if piece.dtype is None:
                hidden = self._hidden_states(micro)
            else:
                other = computed_in(self.base, piece.dtype, self.weights.beside)
                base = stack.enter_context(other)
                hidden = base.hidden_states(micro.token_ids, micro.positions, micro.attention)
                head = base.head
            states = micro.states(hidden)
            if piece.truncation is not None:
                values = count_kept(head, states, temperature, *astuple(piece.truncation))
            else:
                kept = None if piece.reference else micro.kept()
                scores = score_tokens(head, states, micro.targets, temperature, kept=kept)
                values = scores.logprobs
        yield {} if piece.dummy else _by_row(micro, values)

    def _micro_batch(self, piece: _Piece) -> MicroBatch:
        if not self._packs:
            return pad(piece.rows, self.base.device)
        kernel = self._kernel_of(piece.dtype) if piece.dtype else self._kernel
        return pack(
            piece.rows, self.base.device, kernel, self.choices.micro_batch_tokens, share=piece.share
        )

    def _hidden_states(self, micro: MicroBatch) -> Tensor:
        """Return [1, N, H], or [rows, longest, H] for padded rows."""
        if (
            self._fused is not None
            and micro.attention is not None
            and micro.positions is not None
            and not self.weights.is_dropping
        ):
            self._fused.refresh()
            return self._fused.hidden_states(
                micro.token_ids,
                micro.positions,
                micro.attention,
                checkpointed=self.choices.gradient_checkpointing,
            )
        with self.weights.computing(self.base):
            hidden = self.base.hidden_states(micro.token_ids, micro.positions, micro.attention)
        # On CUDA autocast leaves a last LayerNorm in float32, which the head's product refuses.
        return hidden.to(self.base.dtype)

    def _attention(self) -> AbstractContextManager[None]:
        """Plug our attention in, around a backward pass too: gradient checkpointing runs layers
        again in it.
        """
        if self._packs:
            return plugged_in(self.base.model)
        return nullcontext()

    @contextmanager
    def _training(self, micro: MicroBatch, step: int) -> Iterator[None]:
        """Switch the adapter's dropout and gradient checkpointing on inside, for the forward pass
        and its backward.

        A checkpointed layer keeps its input and runs again in the backward pass. The gradient
        checkpointing of transformers would want layers in training mode, where some families drop
        out (OPT, StarCoder 2).
        """
        for layer in self._checkpointed:
            layer.forward = partial(recomputed, layer.forward)
        try:
            with self._attention(), self._dropout(micro, step):
                yield
        finally:
            for layer in self._checkpointed:
                del layer.forward

    def _dropout(self, micro: MicroBatch, step: int) -> AbstractContextManager[None]:
        """Apply the masks of `step` inside, if there is dropout."""
        if self._settings.supervised:
            step += _SUPERVISED_STEPS
        numbers, lengths = [row.number for row in micro.rows], None
        if micro.attention:
            lengths = [row.tokens for row in micro.rows]
        return self.weights.dropping(step, numbers, self.base.device, lengths)


def recomputes_old_logprobs(loss: "Loss", *, rounded: bool) -> bool:
    """Return True if old log-probs come from the learner, as `[loss] old_logprobs` says. If it is
    unset, this holds for mode = "gspo" with `rounded` log-probs. Its narrow clip would otherwise
    take rounding for a change of the policy.
    """
    if loss.is_set("old_logprobs") or loss.mode != "gspo":
        return loss.old_logprobs == "recomputed"
    return rounded


def old_logprobs_note(loss: "Loss", *, rounded: bool) -> str:
    """Return a sentence on gspo in half precision; "" for every other run."""
    if loss.mode != "gspo" or not rounded:
        return ""
    clip = "({:g}, {:g})".format(*loss.clips)
    rounding = f"in half precision rounding alone can move a sequence's ratio past its clip {clip}"
    if recomputes_old_logprobs(loss, rounded=True):
        chosen = "" if loss.is_set("old_logprobs") else "as old_logprobs is unset, "
        return (
            f'[loss] mode = "gspo": {rounding}, so {chosen}the learner recomputes old log-probs'
            " before the first update of each step."
        )
    return (
        f'[loss] old_logprobs = "sampler" with mode = "gspo": {rounding}, so it takes gradient'
        ' away on policy (clip_fraction). Leave old_logprobs unset, or give "recomputed".'
    )


def rounds(inference: "Inference", dtype: torch.dtype) -> bool:
    """Return True if learner or sampler computes in less than float32, so that their log-probs of
    one token differ by more than float32's rounding.

    `dtype` is the dtype of the base.
    """
    return dtype != torch.float32 or inference.reduced_precision


def _checkpointed_layers(base: BaseModel, choices: MachineChoices) -> list[nn.Module]:
    """Return the layers that each backward pass computes again."""
    if not choices.gradient_checkpointing:
        return []
    found = layers(base.model)
    if not found:
        raise ConfigurationError(
            f"[training] gradient_checkpointing finds no layers in {type(base.model).__name__};"
            " set it false, and lower [training] micro_batch_tokens if memory is short."
        )
    return found


def _learner_rows(rows: Sequence[Row], wanted: Sequence[bool | int]) -> list[LearnerRow]:
    """Return the wanted rows, with their place among all."""
    return [
        LearnerRow(number, row, row.logprobs, row.logprobs)
        for number, (row, counts) in enumerate(zip(rows, wanted, strict=True))
        if counts
    ]


def _with(
    rows: Sequence[LearnerRow], values: Sequence[Float32Array], *names: str
) -> list[LearnerRow]:
    """Return the rows with their `values` in the fields `names`."""
    fields: list[dict[str, Any]] = [dict.fromkeys(names, own) for own in values]
    return [replace(row, **own) for row, own in zip(rows, fields, strict=True)]


def _action_tokens(
    micro: MicroBatch, scores: TokenScores, weights: Sequence[_Weights]
) -> ActionTokens:
    rows = micro.rows

    def repeated(of_rows: Sequence[float]) -> Tensor:
        return micro.flat(
            [
                np.full(length, value, np.float32)
                for length, value in zip(micro.lengths, of_rows, strict=True)
            ]
        )

    references = [row.reference for row in rows if row.reference is not None]
    return ActionTokens(
        new=scores.logprobs,
        old=micro.flat([row.old for row in rows]),
        sampler=micro.flat([row.sampler for row in rows]),
        advantages=micro.flat([row.row.advantages for row in rows]),
        weights=repeated([weight.policy for weight in weights]),
        lengths=micro.lengths,
        reference=micro.flat(references) if references else None,
        entropy=scores.entropies,
        regularizer_weights=repeated([weight.regularizer for weight in weights]),
    )


def _by_row(micro: MicroBatch, values: Tensor) -> dict[int, Float32Array]:
    """Copy [N] values from the device, by row number."""
    if values.dtype != torch.float64:
        values = values.float()
    parts = np.split(values.cpu().numpy(), np.cumsum(micro.lengths)[:-1])
    return {row.number: part for row, part in zip(micro.rows, parts, strict=True)}
