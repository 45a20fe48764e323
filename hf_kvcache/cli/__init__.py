"""The `hf-kvcache` command: techniques, models, generate and bench.

Stores nothing itself. Importing it costs no torch: each command imports what it needs when it runs.
"""

from hf_kvcache.cli.app import app, main

__all__ = ["app", "main"]
