"""A stand-in for the Tinker SDK and its service: a bigram model that samples, scores and learns for
real, in this process.

It has the calls that retrain makes and no others. The loss is importance sampling, as the service
defines it: a sum over all tokens, or with `reduction = "mean"` SkyRL's mean over positions and
rows. `tests/servers` has the real SDK and a real server.
"""

import sys
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import numpy as np

VOCABULARY = 259


class TinkerError(Exception): ...


class APIStatusError(TinkerError):
    def __init__(self, status: int, detail: str = "no") -> None:
        super().__init__(f"Error code: {status} - {{'detail': '{detail}'}}")
        self.status_code, self.body = status, {"detail": detail}


class APIConnectionError(TinkerError): ...


@dataclass(frozen=True)
class TensorData:
    values: Any

    @classmethod
    def from_numpy(cls, array: Any) -> "TensorData":
        return cls(array)

    def to_numpy(self) -> Any:
        return self.values


@dataclass(frozen=True)
class ModelInput:
    ids: list[int]

    @classmethod
    def from_ints(cls, ids: list[int]) -> "ModelInput":
        return cls(ids)


@dataclass(frozen=True)
class Datum:
    model_input: ModelInput
    loss_fn_inputs: dict[str, TensorData]

    def __getitem__(self, name: str) -> Any:
        return self.loss_fn_inputs[name].values


@dataclass(frozen=True)
class AdamParams:
    learning_rate: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    grad_clip_norm: float


@dataclass(frozen=True)
class SamplingParams:
    max_tokens: int
    temperature: float
    seed: int
    stop: list[int]


@dataclass(frozen=True)
class Output:
    loss_fn_outputs: list[dict[str, TensorData]] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    path: str = ""


@dataclass(frozen=True)
class Sequence:
    tokens: list[int]
    logprobs: list[float] | None
    stop_reason: str


@dataclass(frozen=True)
class Sampled:
    sequences: list[Sequence]


class Answer:
    """The SDK's future. The work is done when it is asked for; `double.events` says when somebody
    waited.
    """

    def __init__(self, name: str, work: Callable[[], Any]) -> None:
        double.events.append(f"ask {name}")
        self._name, self._future = name, Future[Any]()
        if problem := double.problems.get(name):
            self._future.set_exception(problem)
        else:
            self._future.set_result(work())

    def result(self, timeout: float | None = None) -> Any:
        assert timeout is not None, "every wait has a limit"
        double.events.append(f"wait {self._name}")
        return self._future.result(timeout)

    def future(self) -> "Future[Any]":
        return self._future


@dataclass
class Weights:
    logits: Any
    gradient: Any
    steps: int = 0


class TrainingClient:
    def __init__(self, weights: Weights) -> None:
        double.clients += 1
        self.weights, self.run = weights, f"run-{double.clients}"

    def _scored(self, datum: Datum) -> tuple[Any, Any]:
        """Probabilities [N, V] and the targets' log-probs [N]."""
        logits = self.weights.logits[datum.model_input.ids]
        logits = logits - logits.max(-1, keepdims=True)
        probabilities = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
        assert len(datum.model_input.ids) == len(datum["target_tokens"])
        targets = datum["target_tokens"][:, None]
        return probabilities, np.log(np.take_along_axis(probabilities, targets, 1)[:, 0])

    def _outputs(self, data: list[Datum]) -> Output:
        double.sent.append(data)
        logprobs = [self._scored(datum)[1].astype(np.float32) for datum in data]
        if double.broken:
            logprobs = [np.full_like(one, np.nan) for one in logprobs]
        return Output([{"logprobs": TensorData(one)} for one in logprobs])

    def forward(self, data: list[Datum], loss_fn: str) -> Answer:
        assert loss_fn == "cross_entropy"
        return Answer("forward", lambda: self._outputs(data))

    def forward_backward(self, data: list[Datum], loss_fn: str, loss_fn_config: Any) -> Answer:
        double.losses.append((loss_fn, loss_fn_config))
        if loss_fn == "cross_entropy":
            weights = [datum["weights"] for datum in data]
            if double.reduction == "mean":
                weights = [one / (len(one) * len(data)) for one in weights]
            return Answer("forward_backward", lambda: self._cross_entropy(data, weights))
        return Answer("forward_backward", lambda: self._backward(data))

    def forward_backward_custom(self, data: list[Datum], loss_fn: Callable[..., Any]) -> Answer:
        """As the SDK 0.38: it waits for a forward pass, and sends the gradient with respect to the
        log-probs as cross-entropy weights.
        """
        import torch

        # The SDK refuses other inputs.
        assert all(set(datum.loss_fn_inputs) <= {"target_tokens", "weights"} for datum in data)
        scored = self.forward(data, "cross_entropy").result(timeout=1).loss_fn_outputs
        logprobs = [torch.tensor(one["logprobs"].to_numpy()).requires_grad_() for one in scored]
        loss, metrics = loss_fn(data, logprobs)
        assert all(isinstance(value, float) for value in metrics.values())
        loss.backward()
        double.losses.append(("custom", None))
        weights = [-one.grad.numpy() for one in logprobs]
        return Answer("forward_backward", lambda: self._cross_entropy(data, weights))

    def _cross_entropy(self, data: list[Datum], weights: list[Any]) -> Output:
        """The gradient of the sum of -log p * weight over all positions."""
        for datum, weight in zip(data, weights, strict=True):
            by_logit = self._scored(datum)[0] * weight[:, None]
            np.subtract.at(by_logit, (np.arange(len(weight)), datum["target_tokens"]), weight)
            np.add.at(self.weights.gradient, datum.model_input.ids, by_logit)
        return self._outputs(data)

    def _backward(self, data: list[Datum]) -> Output:
        for datum in data:
            probabilities, logprobs = self._scored(datum)
            weights = np.exp(logprobs - datum["logprobs"]) * datum["advantages"]
            if double.reduction == "mean":
                weights = weights / (len(weights) * len(data))
            by_logit = probabilities * weights[:, None]
            np.subtract.at(by_logit, (np.arange(len(weights)), datum["target_tokens"]), weights)
            np.add.at(self.weights.gradient, datum.model_input.ids, by_logit)
        return self._outputs(data)

    def optim_step(self, adam: AdamParams) -> Answer:
        return Answer("optim_step", lambda: self._step(adam))

    def _step(self, adam: AdamParams) -> Output:
        double.adam.append(adam)
        norm = float(np.linalg.norm(self.weights.gradient))
        self.weights.logits = self.weights.logits - 100 * adam.learning_rate * self.weights.gradient
        self.weights.gradient = np.zeros_like(self.weights.gradient)
        self.weights.steps += 1
        return Output(metrics={"double/grad_norm": norm})

    def load_state_with_optimizer(self, path: str) -> Answer:
        self.weights = double.restored(path)
        return Answer("load_state", lambda: None)

    def load_state(self, path: str) -> Answer:
        self.weights = double.restored(path, steps=0)
        return Answer("load_state", lambda: None)

    def save_state(self, name: str) -> Answer:
        return Answer("save_state", lambda: self._kept("weights", name))

    def save_weights_for_sampler(self, name: str) -> Answer:
        return Answer("save_weights_for_sampler", lambda: self._kept("sampler_weights", name))

    def _kept(self, kind: str, name: str) -> Output:
        path, own = f"tinker://{self.run}/{kind}/{name}", self.weights
        assert path not in double.kept, "a name is used once"
        double.kept[path] = Weights(own.logits.copy(), own.gradient.copy(), own.steps)
        return Output(path=path)

    def save_weights_and_get_sampling_client(self) -> Answer:
        return Answer("sampler", lambda: SamplingClient(self.weights.logits.copy()))


class SamplingClient:
    def __init__(self, logits: Any) -> None:
        self.logits = logits

    def sample(
        self, prompt: ModelInput, num_samples: int, sampling_params: SamplingParams
    ) -> Answer:
        def all_of_them() -> Sampled:
            return Sampled([self._one(prompt, sampling_params, one) for one in range(num_samples)])

        return Answer("sample", all_of_them)

    def _one(self, prompt: ModelInput, params: SamplingParams, number: int) -> Sequence:
        noise = np.random.default_rng((params.seed, number))
        tokens: list[int] = []
        logprobs: list[float] = []
        while len(tokens) < params.max_tokens and not (tokens and tokens[-1] in params.stop):
            logits = self.logits[(tokens or prompt.ids)[-1]]
            policy = np.exp(logits - logits.max())
            policy /= policy.sum()
            tokens.append(int(noise.choice(VOCABULARY, p=policy)))
            logprobs.append(float(np.log(policy[tokens[-1]])))
        reason = "stop" if tokens[-1] in params.stop else "length"
        if double.drops_eos and reason == "stop":
            tokens, logprobs = tokens[:-1] or [0], logprobs[:-1] or [0.0]
        return Sequence(tokens, None if double.drops_logprobs else logprobs, reason)


class ServiceClient:
    def __init__(self, base_url: str | None, api_key: str) -> None:
        double.keys.append(api_key)
        if problem := double.problems.get("session"):
            raise problem
        self.holder = object()

    def create_lora_training_client(
        self, base_model: str, rank: int, seed: int, train_unembed: bool
    ) -> Answer:
        asked = {"base_model": base_model, "rank": rank, "seed": seed}
        double.created.append({**asked, "train_unembed": train_unembed})
        logits = np.random.default_rng(seed).normal(0, 0.5, (VOCABULARY, VOCABULARY))
        return Answer("create", lambda: TrainingClient(Weights(logits, np.zeros_like(logits))))

    def create_training_client_from_state_with_optimizer(self, path: str) -> Answer:
        return self._restore(path)

    def create_training_client_from_state(self, path: str) -> Answer:
        return self._restore(path, steps=0)

    def _restore(self, path: str, steps: int | None = None) -> Answer:
        if double.loads_into_adapters:
            double.problems["restore"] = APIStatusError(422)
            return Answer("restore", lambda: None)
        return Answer("create", lambda: TrainingClient(double.restored(path, steps)))

    def close(self, status: str) -> Answer:
        return Answer("close", lambda: None)


@dataclass
class Double:
    """What the service saw, and what is wrong with it."""

    reduction: str = "sum"
    clients: int = 0
    events: list[str] = field(default_factory=list)
    sent: list[list[Datum]] = field(default_factory=list)
    losses: list[tuple[str, Any]] = field(default_factory=list)
    adam: list[AdamParams] = field(default_factory=list)
    created: list[dict[str, Any]] = field(default_factory=list)
    kept: dict[str, Weights] = field(default_factory=dict)
    keys: list[str] = field(default_factory=list)
    problems: dict[str, Exception] = field(default_factory=dict)
    broken: bool = False
    loads_into_adapters: bool = False
    """As SkyRL 0.4.0: a state is loaded into an adapter that exists."""
    drops_eos: bool = False
    drops_logprobs: bool = False

    def restored(self, path: str, steps: int | None = None) -> Weights:
        """The weights of a state, with the optimizer's count of steps unless another is given."""
        kept = self.kept[path]
        count = kept.steps if steps is None else steps
        return Weights(kept.logits.copy(), kept.gradient.copy(), count)


double = Double()


def install() -> Double:
    """Put the stand-in in the place of the SDK, with a service that nothing has happened to."""
    global double  # noqa: PLW0603 - one service at a time, as the module that it stands in for
    double = Double()
    types = ModuleType("tinker.types")
    module: Any = ModuleType("tinker")
    for one in (TensorData, ModelInput, Datum, AdamParams, SamplingParams):
        setattr(types, one.__name__, one)
    for other in (TinkerError, APIStatusError, APIConnectionError, ServiceClient):
        setattr(module, other.__name__, other)
    module.types = types
    sys.modules |= {"tinker": module, "tinker.types": types}
    return double
