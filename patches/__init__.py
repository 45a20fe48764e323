"""Changes to a model's computation, one technique a file; storage techniques live in `hf_kvcache` itself.

Ships as `hf_kvcache.patches`. This version has no patch yet: techniques 1, 2, 4 and 5 run as the model was trained,
and their caches are held by `hf_kvcache`.
"""

if __name__ != "hf_kvcache.patches":
    raise ImportError("import `hf_kvcache.patches`, not `patches`: this folder ships inside hf_kvcache (see setup.cfg)")
