"""KV quantization (technique 8): layers whose old tokens are encoded."""
