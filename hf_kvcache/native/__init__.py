"""Layers of models that choose, compress or window their past by themselves."""
