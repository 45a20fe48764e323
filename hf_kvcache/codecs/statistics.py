"""What calibrated codecs know of one layer's keys."""

from typing import NamedTuple

import torch


class LayerStatistics(NamedTuple):
    """The keys of a layer before their rotary embedding, a row a KV head.

    `(key - mean) @ basis` are uncorrelated coefficients, and the squared error of a coefficient is that of the scores
    that queries get: how much one direction matters is in its length.

    Attributes:
        mean: mean key, `[H, D]`.
        basis: `[H, D, D]`, a column a coefficient, the largest variance first.
        variance: of each coefficient, `[H, D]`.
        importance: of the squared error of a coefficient for the model's predictions, from layer to layer and head to
            head, `[H]`.
    """

    mean: torch.Tensor
    basis: torch.Tensor
    variance: torch.Tensor
    importance: torch.Tensor
