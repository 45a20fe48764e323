"""What every layer of a cache is, and the exact ones."""
