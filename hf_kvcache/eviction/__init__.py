"""Token eviction (technique 9): when tokens go, and layers that keep other ones for each head."""
