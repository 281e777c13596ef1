"""The data-parallel half of a model: the parameters that are equal on every rank."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor, nn

from partial_fc import checkpoint
from partial_fc.checkpoint import Checkpoint
from partial_fc.comm import World, all_gather_json
from partial_fc.evaluate.evaluation import Forward
from partial_fc.models import lora
from partial_fc.models.inputs import InputContract
from partial_fc.models.sample_random import SampleRandom
from partial_fc.optim.backbone import load_named_state, named_state, set_lr
from partial_fc.optim.gradient_sync import Compression, GradientSync
from partial_fc.train.batch_norm import GlobalBatchNorm, RunningStatistics, joined_statistics
from partial_fc.train.ema import Average
from partial_fc.train.precision import LossScaler, Precision, Weights


class _Gradient(torch.autograd.Function):
    """A scalar whose gradient in `output` is given: the same as output.backward(gradient), to the bit, but without
    torch's imports for comparing the two shapes, 0.7 s in each process."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, gradient: Tensor) -> Tensor:
        assert output.shape == gradient.shape
        ctx.gradient = gradient
        return output.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, None]:
        return ctx.gradient, None


class TorchBackbone:
    """A torch module with its precision, weights, optimizer, gradient exchange and input contract. A module without
    parameters to train (--network none) stays frozen.

    module: on its device, equal on all ranks (`broadcast_module`). contract: what model.safetensors says of the
    network; its "network" and sizes must be those of a checkpoint that is loaded. seed: of random layers.
    """

    def __init__(
        self,
        module: nn.Module,
        world: World,
        precision: Precision,
        make_optimizer: Callable[[Weights], torch.optim.Optimizer],
        to_input: InputContract,
        contract: Mapping[str, str],
        seed: int = 0,
        compression: Compression = "none",
    ):
        self.module, self.world, self.precision, self.to_input = module, world, precision, to_input
        self.device = precision.device
        self.mode: str = precision.mode  # for result.json
        self.contract = {**contract, **to_input.facts()}
        # note: for the user, on this precision on this machine.
        self.weights, self.note = precision.prepare(module)
        self.optimizer = make_optimizer(self.weights)
        self.sync = GradientSync(module, world, compression=compression)
        self.weights.bind_gradients(self.sync.gradient_of)
        self.average: Average | None = None
        self._random, self._seed = SampleRandom.of(module), seed
        self._trained: nn.Module = module  # what the forward of training calls: the module, or its compiled form
        self._output_B: Tensor | None = None  # of the last forward, until its backward
        self._statistics = RunningStatistics(nn.Identity())
        self._frozen = not self.sync.gradient_of
        self._finite = torch.tensor(True)  # the gradient of a frozen backbone's output

    @property
    def scaler(self) -> LossScaler | None:
        """Returns the loss scale, in the modes that have one."""
        return self.precision.scaler if self.sync.gradient_of else None

    def compile(self, input_B: Tensor) -> str:
        """Compiles training for batches like this one; returns why it cannot, or "". A collective."""
        devices = [self.device] if self.device.type == "cuda" else []
        self.name_samples(torch.arange(len(input_B)))
        with self._statistics_kept(), torch.random.fork_rng(devices):
            self._trained, why = compile_module(self.module, lambda module: self._forward(input_B, module), self.world)
        return why

    # ---- one update

    def keep_statistics(self) -> None:
        """Makes `undo` also restore the running statistics of before the update."""
        self._statistics = RunningStatistics(self.module)

    def keep_average(self, decay: float) -> None:
        """Keeps a moving average of the weights (ema.py), which is what is evaluated and delivered."""
        self.average = Average(self.weights, decay)

    def zero(self, num_samples: int) -> None:
        """Prepares an update over num_samples samples of all ranks."""
        self._statistics.keep()
        if self._frozen:
            self._finite = torch.tensor(True, device=self.device)
        self.sync.zero(self.precision.loss_scale)

    def name_samples(self, position_B: Tensor | None) -> None:
        """Names the next passes' samples, by position in the data, for random layers; None: unknown."""
        if self._random and position_B is not None:
            SampleRandom.name_samples(self._random, self._seed, position_B.to(self.device, non_blocking=True))

    def forward(self, input_B: Tensor) -> Tensor:
        """Returns the output for a loader's batch, as a leaf in the head's dtype, which separates the two backwards."""
        with torch.set_grad_enabled(not self._frozen):
            self._output_B = self._forward(input_B, self._trained)
        return self._output_B.detach().to(self.precision.parameter_dtype).requires_grad_()

    def backward(self, grad_B: Tensor) -> None:
        """grad_B: of the leaf from `forward`. The head's gradient is never 16-bit: only the backbone is scaled."""
        assert self._output_B is not None, "forward() comes first"
        output_B, self._output_B = self._output_B, None
        if self._frozen:
            self._finite &= grad_B.isfinite().all()
            return
        if self.precision.loss_scale != 1.0:
            grad_B = grad_B * self.precision.loss_scale
        _Gradient.apply(output_B, grad_B.to(output_B.dtype)).backward()

    def hold(self) -> AbstractContextManager:
        """Returns the context for the backward of all micro-batches but the last: no gradient exchange (no_sync)."""
        return self.sync.hold()

    def wait(self) -> None:
        """Returns when the gradient is the sum over the ranks."""
        if self._frozen:
            self._finite = self.world.all_reduce(1 - self._finite.float(), "max", name="backbone/frozen") == 0
            return
        self.sync.wait()

    def gradient_sum(self) -> Tensor:
        """Returns a scalar that is finite if the summed gradient is, but for a sum beyond its dtype."""
        return torch.where(self._finite, 0.0, torch.nan) if self._frozen else self.sync.sum()

    def finite(self) -> Tensor:
        """Returns whether the summed gradient is finite: bool scalar, equal on all ranks if the sums are."""
        return self._finite if self._frozen else self.sync.finite()

    @property
    def may_overflow(self) -> bool:
        return self.sync.may_overflow and not self._frozen

    def square_sum(self) -> Tensor:
        return torch.zeros((), dtype=torch.float64, device=self.device) if self._frozen else self.sync.square_sum()

    def scale(self, factor: float) -> None:
        self.sync.scale(factor)

    def undo(self) -> None:
        """Skips the update: restores running statistics."""
        self._statistics.restore()

    def step(self, lr: float) -> None:
        if self._frozen:
            return
        set_lr(self.optimizer, lr)
        self.optimizer.step()
        self.weights.publish()
        if self.average:
            self.average.update()
        if self.scaler:
            self.scaler.update(overflowed=False)

    def _forward(self, input_B: Tensor, module: nn.Module | None = None) -> Tensor:
        data_B = input_B.to(self.device, non_blocking=True)
        with self.precision.autocast():
            return (self.module if module is None else module)(self.precision.as_input(self.to_input(data_B)))

    # ---- modes

    def train(self) -> None:
        self.module.train(not self._frozen)

    def freeze(self, frozen: bool) -> None:
        """Says whether the next updates leave all of it as it is: they then run it as evaluations do (batch norms by
        their running statistics, no dropout), without gradient."""
        frozen = frozen or not self.sync.gradient_of
        if frozen != self._frozen:
            self._frozen = frozen
            self.train()

    @contextmanager
    def evaluating(self) -> Iterator[Forward]:
        """Yields the forward of the model as delivered: inputs on the host, as loaded -> float output. A collective."""
        self.module.eval()
        average = self.average.in_network() if self.average else nullcontext()
        with average, joined_statistics(self.module, self.world), torch.no_grad():
            yield lambda input_B: self._forward(input_B).to(self.precision.parameter_dtype)
        self.train()

    # ---- state

    def state(self) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
        """Returns (weights and running statistics of all ranks together, as delivered; the optimizer's state; this
        rank's running statistics), by name; the first two equal on all ranks; no copies, except for the statistics.

        With an average, or adapters (models/lora.py), the second also has what else resuming needs, as NAME/raw and
        NAME/ema; an average's own statistics are buffer/NAME/ema. A collective.
        """
        forms = self._forms()
        delivered = lora.merged({**forms["raw"], **forms.get("ema", {})})
        kept = {
            f"{name}/{form}": t for form, found in forms.items() for name, t in found.items()
            if delivered.get(name) is not t
        }  # fmt: skip
        own = {f"buffer/{name}": t for name, t in self.module.named_buffers()}
        average = self.average.tensors if self.average else {}
        own |= {f"{name}/ema": average[key] for name in own if (key := name.removeprefix("buffer/")) in average}
        return delivered, named_state(self.optimizer, self.weights) | kept, own

    def raw_weights(self) -> dict[str, Tensor]:
        """Returns the weights, where `state` delivers their average; {}: no average is kept. A collective."""
        return lora.merged(self._forms()["raw"]) if self.average else {}

    def _forms(self) -> dict[str, dict[str, Tensor]]:
        """Returns the weights in training, and their average, with the statistics of all ranks. A collective."""

        def with_joined(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
            with joined_statistics(self.module, self.world):
                joined = checkpoint.copied(dict(self.module.named_buffers()))
            return {name: joined.get(name, t) for name, t in tensors.items()}

        forms = {"raw": with_joined(self.weights.state_dict())}
        if self.average:
            with self.average.in_network():
                forms["ema"] = with_joined(self.average.tensors)
        return forms

    def replicated(self) -> dict[str, Tensor]:
        """Returns the tensors that must be bit-identical on every rank, by name; weights begin with "weight "."""
        state = {f"weight {name}": p.detach() for name, p in self.weights.named_parameters()}
        average = self.average.tensors if self.average else {}
        state |= {f"average of {name}": t for name, t in average.items() if f"weight {name}" in state}
        return state | {f"optimizer state {name}": t for name, t in named_state(self.optimizer, self.weights).items()}

    def load(self, found: Checkpoint) -> list[str]:
        """Loads a checkpoint; state that it lacks is initialised. Returns notes for the user. A collective."""
        delivered, optimizer, buffers = found.backbone(), dict(found.optimizer()), dict(found.buffers(self.world))
        raw, average, own_average = _taken(optimizer, "/raw"), _taken(optimizer, "/ema"), _taken(buffers, "/ema")
        self.weights.load_state_dict(lora.without_merged({**delivered, **raw}))
        load_named_state(self.optimizer, self.weights, optimizer)
        now = dict(self.module.named_buffers())
        for name, buffer in buffers.items():
            now[name].copy_(buffer)
        notes = self._load_average(found, {**delivered, **average, **own_average})
        if self.scaler:
            self.scaler.load_state(found.manifest.get("loss_scaler") or LossScaler().state())
        return notes

    def _load_average(self, found: Checkpoint, stored: Mapping[str, Tensor]) -> list[str]:
        """stored: the average, by name, if there is one. Returns notes for the user."""
        has_one = bool((found.manifest.get("configuration") or {}).get("ema"))
        if self.average and has_one:
            self.average.load({name: stored[name] for name in self.average.tensors})
        elif self.average:
            self.average.restart()
            return [
                f"{found.folder} has no average of the weights: --ema {self.average.decay:g} starts from its weights"
            ]
        elif has_one:
            return [f"{found.folder} has an average of the weights, which this run, without --ema, leaves out"]
        return []

    # ---- a second look at an update with NaN or Inf (guards/nan_report.py); statistics and gradients stay

    def watch_outputs(self, input_B: Tensor, look: Callable[[str, str, Tensor], None]) -> None:
        """Runs a forward without gradients that reports every module's output, in order: look(name, kind, output)."""

        def hook(module: nn.Module, name: str, output: Any) -> None:
            if isinstance(output, Tensor):
                look(name, type(module).__name__, output)

        handles = [
            module.register_forward_hook(lambda module, _input, output, name=name: hook(module, name, output))
            for name, module in self.module.named_modules()
        ]
        try:
            with torch.no_grad(), self._statistics_kept():
                self._forward(input_B)
        finally:
            for handle in handles:
                handle.remove()

    def gradients(self, input_B: Tensor | None = None, grad_B: Tensor | None = None) -> dict[str, Tensor]:
        """Returns this rank's gradient for a micro-batch, by name in backward's order; without one, the ranks' sums."""
        named = [(name, p) for name, p in reversed(list(self.module.named_parameters())) if p.requires_grad]
        if input_B is None or grad_B is None or not named:
            return {name: self.sync.gradient_of[p] for name, p in named}
        with self._statistics_kept():
            output_B = self._forward(input_B)
            given_B = (grad_B * self.precision.loss_scale).to(output_B.dtype)
            grads = torch.autograd.grad(output_B, [p for _, p in named], given_B, allow_unused=True)
        return {name: g for (name, _), g in zip(named, grads, strict=True) if g is not None}

    @contextmanager
    def _statistics_kept(self) -> Iterator[None]:
        """Restores the running statistics at the end of the block."""
        statistics = RunningStatistics(self.module)
        try:
            yield
        finally:
            statistics.restore()


def _taken(tensors: dict[str, Tensor], suffix: str) -> dict[str, Tensor]:
    """Takes the tensors out whose names end so; returns them by the rest of their names."""
    return {name.removesuffix(suffix): tensors.pop(name) for name in list(tensors) if name.endswith(suffix)}


def compile_module(module: nn.Module, run: Callable[[nn.Module], Tensor], world: World) -> tuple[nn.Module, str]:
    """Returns what training calls instead of the module, and why that is the module itself; "": it is compiled.

    run: calls what it is given with a batch like those of training. Forward and backward are compiled before the first
    step, so that all ranks compile, or none does. A collective.
    """
    if any(isinstance(layer, GlobalBatchNorm) for layer in module.modules()):
        return module, "batch norms of --sync-bn exchange statistics inside the network"
    why = ""
    try:
        # Shapes of a run are constant; a last batch of another size is compiled once more.
        compiled = cast(nn.Module, torch.compile(module, dynamic=False))
        output_B = run(compiled)
        parameters = [p for p in module.parameters() if p.requires_grad]
        torch.autograd.grad(output_B.float().sum(), parameters, allow_unused=True)
    except (RuntimeError, OSError) as error:  # of the compiler, the Python version, memory; its cache, a full disk
        why = " ".join(str(error).split())[:300] or type(error).__name__
    reasons = [reason for reason in all_gather_json(why, world, "start/compile") if reason]
    return (module, reasons[0]) if reasons else (compiled, "")
