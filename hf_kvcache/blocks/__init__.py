"""Fixed-size blocks of token slots: who owns them, which sequence they belong to, and how they are read in long runs.

`BlockPool` hands memory to layers (one a device), `Arena` is the storage of one layer, `BlockTable` maps the tokens of
each sequence of a batch to blocks of an arena, and `runs` turns a table into a few strided views.
Paper: Kwon et al. 2023, PagedAttention, https://arxiv.org/abs/2309.06180.
"""

from .arena import Arena
from .pool import BlockPool
from .stored import load_table, table_state
from .table import BlockTable

__all__ = ["Arena", "BlockPool", "BlockTable", "load_table", "table_state"]
