"""Attention of one new token on keys and values as they are stored: one C++ kernel, compiled at its first use."""
