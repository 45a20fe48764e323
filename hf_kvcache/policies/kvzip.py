"""KVzip: keep what the model needs to repeat the prompt.

When a prompt is in, the model reads it a second time, after the first; score: the most attention that any query of the
second reading gives to the token. All heads of all layers share one budget. What can repeat the text can answer any
question about it: nearly nothing is lost at a quarter of the tokens. Costs less than one more prefill, which happens in
`generate()` or by `cache.compress(ids)`. Not between the chunks of a prompt: it is first needed whole.
Paper: Kim et al. 2025, https://arxiv.org/abs/2505.23416.
Differs from the paper: a query of the second reading attends to sinks, to the text that it repeats and a little around
it, to the tokens read again right before, and to a sample of the others (`looks="near"`). The paper's attends to the
whole prompt (`looks="all"`), which costs two prefills or more, and keeps more when nine tenths are evicted. There is no
instruction to repeat; the beginning of the prompt (system prompt) is scored like the rest.
"""

import torch

from .base import Held, Observer, Policy
from .reconstruction import Reconstruction


class KVzip(Policy):
    """What the second reading looks at stays; scores come from `new_reading`.

    Args:
        chunk_length: tokens of the second reading that run at a time.
        looks: what each of them attends to, `"near"` or `"all"`.
    """

    needs_reconstruction = True
    is_incremental = False

    def __init__(self, *, chunk_length: int, looks: str):
        self.chunk_length = chunk_length
        self.looks = looks

    def new_reading(self, held: Held, *, is_last: bool) -> Reconstruction:
        """What the second reading shows in one layer."""
        return Reconstruction(held, looks_at_all=self.looks == "all", is_last=is_last)

    def scores(self, held: Held, observer: Observer | None) -> torch.Tensor:
        raise RuntimeError("kvzip has read nothing again yet: call cache.compress(ids) with the ids of the prompt.")
