"""How much the model's predictions change when keys of one head are a little off: one forward and one backward pass.

A change `d` of an attention output changes the next-token distributions by a KL divergence of about `(g . d)**2 / 2`,
where `g` is the gradient of the log-likelihood of tokens drawn from the model itself: the Fisher information.
Paper: Amari 1998, Natural gradient works efficiently in learning (section 2).
"""

import contextlib
import inspect
import warnings
from collections.abc import Callable

import torch
from torch import nn
from transformers import PreTrainedModel

from .. import compat
from ..cache import KVCache
from ..codecs.statistics import LayerStatistics
from ..layers.attending_layer import AttendingLayer
from ..layers.layer import LayerContext
from ..rotary import Rotary

# Root mean square of the noise of a coefficient, and with usual scaling of a score: that of about 3 to 4 bits.
_NOISE = 0.1
_NUM_DRAWS = 2


class ProbedLayer(AttendingLayer):
    """Attends as the model does over the new tokens alone, and can do so again with other keys.

    After a backward pass through `probe`, its gradient is that of the attention output `[B, T, Hq, D]`.
    """

    name = "calibration"

    def __init__(self, context: LayerContext):
        super().__init__(context)
        self.probe: torch.Tensor | None = None

    def _prepare(self, key_states: torch.Tensor, value_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.is_initialized = True
        return key_states, value_states  # with their gradients, and not stored

    def _attend_and_store(self, base: Callable, module: nn.Module, query, states, mask, args: tuple, kwargs: dict):
        output, *rest = base(module, query, *states, mask, *args, **kwargs)
        self.probe = torch.zeros_like(output, requires_grad=True)
        self.states, fixed = [state.detach() for state in states], query.detach()
        self.output = output.detach()
        self.attend_with = lambda states: base(module, fixed, *states, mask, *args, **kwargs)[0].detach()
        return (output + self.probe, *rest)

    def fill(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        raise NotImplementedError("calibration needs the queries: run the model.")

    def crop(self, tokens_to_remove: int) -> None:
        raise NotImplementedError("calibration keeps no tokens.")

    def importance(
        self, gradient: torch.Tensor, statistics: LayerStatistics, rotary: Rotary, old: slice, begin: int
    ) -> torch.Tensor:
        """Fisher information of the error of one coefficient of a head, `[H]`.

        Args:
            gradient: of the attention output.
            statistics: of this layer's keys, for the coefficients.
            rotary: puts the rotary embedding on the noise.
            old: slots whose keys are disturbed.
            begin: first slot whose query counts.
        """
        generator = torch.Generator().manual_seed(self.context.layer_idx)
        # A coefficient that is not coded at all errs by what it varies, so none errs by more.
        spread = statistics.variance.clamp(max=_NOISE**2).sqrt()
        synthesis = torch.linalg.inv(statistics.basis.double()).float()
        slots = torch.arange(old.start, old.stop, device=gradient.device)[None]
        total = torch.zeros(len(spread), dtype=torch.float64)
        for _ in range(_NUM_DRAWS):
            drawn = torch.randn(len(spread), slots.shape[1], spread.shape[1], generator=generator)
            noise = (drawn * spread[:, None]) @ synthesis
            keys = self.states[0].clone()
            keys[:, :, old] += rotary.turn(noise[None].to(keys.device), slots).to(keys.dtype)
            effect = self.effect([keys, self.states[1]], gradient, begin)  # [T, Hq]
            total += effect.unflatten(1, (len(spread), -1)).sum(-1).square().sum(0).double().cpu()
        return (total / _NUM_DRAWS / spread.square().sum(-1)).float()

    def effect(self, states: list[torch.Tensor], gradient: torch.Tensor, begin: int) -> torch.Tensor:
        """How much other keys and values move each query head's output along the gradient, `[T, Hq]`."""
        change = (self.attend_with(states) - self.output)[0, begin:].float()
        return (change * gradient[0, begin:].float()).sum(-1)


def backward(model: PreTrainedModel, ids: torch.Tensor, cache: KVCache, layers: list[ProbedLayer], begin: int) -> list:
    """The gradient of each layer's attention output, for the log-likelihood of drawn tokens from slot `begin`."""
    generator = torch.Generator().manual_seed(0)
    # Logits of a whole text would take gigabytes.
    can_keep = "logits_to_keep" in inspect.signature(model.forward).parameters
    keep = {"logits_to_keep": ids.shape[1] - begin} if can_keep else {}
    with torch.enable_grad(), _gradients_may_be_cut():
        output = model(input_ids=ids, use_cache=True, **{compat.CACHE_ARG: cache}, **keep)
        logits = output.logits[0, begin - ids.shape[1] :]
        drawn = torch.multinomial(logits.detach().float().softmax(-1).cpu(), 1, generator=generator)
        loss = nn.functional.cross_entropy(logits.float(), drawn[:, 0].to(logits.device), reduction="sum")
        return list(torch.autograd.grad(loss, [layer.probe for layer in layers]))


@contextlib.contextmanager
def _gradients_may_be_cut():
    """Local layers, which are not probed, warn that they store without gradients: they return them as they came."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="hf_kvcache stores keys and values without gradients")
        yield
