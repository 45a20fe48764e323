"""Side-by-side measurements in one process: every figure is a ratio against transformers' own caches."""
