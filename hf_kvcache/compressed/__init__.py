"""Compressed attention (technique 6): clusters and fitted tokens that stand for others."""
