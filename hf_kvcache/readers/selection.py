"""What a decode step reads, as units of tokens, and the columns of an attention mask that belong to them."""

from typing import NamedTuple

import torch

from ..masks import visible


class Selection(NamedTuple):
    """Units `[B, H, K]` of `unit` tokens that a step reads, and which of them count (None: all).

    `length` tokens are gathered: the last unit may not be full. `rest` is the log mass of what stands for all others,
    `[B, H, G]`, or None.
    """

    units: torch.Tensor
    is_read: torch.Tensor | None
    unit: int
    length: int
    rest: torch.Tensor | None = None

    def seen(self, mask: torch.Tensor | None) -> torch.Tensor | None:
        """Whether the query of each row sees the tokens gathered, `[B, H, length]`, or None if all are seen."""
        own = None if mask is None else visible(self.columns(mask))
        if self.is_read is None:
            return own
        is_read = self.is_read.repeat_interleave(self.unit, dim=2)[:, :, : self.length]
        return is_read if own is None else is_read & own

    def columns(self, mask: torch.Tensor) -> torch.Tensor:
        """The columns of a mask `[B or 1, 1, 1, T]` that belong to the tokens gathered, `[B, H, length]`."""
        offsets = torch.arange(self.unit, device=mask.device)
        tokens = (self.units.unsqueeze(3) * self.unit + offsets).flatten(2)[:, :, : self.length]
        return mask[:, :, 0].expand(*tokens.shape[:2], -1).gather(2, tokens)
