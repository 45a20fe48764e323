"""Products with packed tensors: compiled where a compiler is there, plain PyTorch a slice at a time elsewhere."""
