"""What the report asks of a layer: how many numbers it stands for, in how many bits, and what they take elsewhere."""


class LayerSizes:
    """Sizes of a layer whose tokens lie in `table`. Layers that store anything besides say so here."""

    @property
    def values_per_token(self) -> int:
        """Key and value elements that the model computes for one token of one sequence in this layer."""
        return sum(plane.num_heads * plane.dim for plane in self.table.arena.specs)

    @property
    def marginal_bits(self) -> float:
        """Bits that one element of an old token takes, all overhead included."""
        return 8 * self.table.arena.block_bytes / (self.context.block_size * self.values_per_token)

    @property
    def num_values(self) -> int:
        """Elements held now, of all rows, in whatever form."""
        return 0 if self.table is None else self.batch_size * self.values_per_token * self.stored_length

    @property
    def dynamic_bytes(self) -> int:
        """What transformers' own layer would hold for the tokens that this one has seen."""
        if self.table is None:
            return 0
        arena = self.table.arena
        return self.batch_size * self.num_dynamic_tokens * (arena.block_bytes // arena.block_size)

    @property
    def num_dynamic_tokens(self) -> int:
        """Of how many tokens it would hold keys and values."""
        return self.seen
