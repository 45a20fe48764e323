"""Kernels as plain PyTorch: compiling them takes seconds and is tested on its own."""

import pytest

from hf_kvcache.kernels import compiled, packed


@pytest.fixture
def plain_kernels(monkeypatch):
    monkeypatch.setattr(compiled.torch, "compile", lambda function, **_: function)
    packed._key_kernel.cache_clear()
    packed._value_kernel.cache_clear()
    yield
    packed._key_kernel.cache_clear()
    packed._value_kernel.cache_clear()
