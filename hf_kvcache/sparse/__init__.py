"""Query-aware sparse reads (technique 7): layers that read a part of what they store."""
