"""The `ray` store: packed columns in Ray's object store, and an index actor that knows where they are.

`store` is where to begin. `held`, `index` and `client` (keys, tags, readiness, waiting) know nothing of
how bytes are packed, so other stores that need an index use them too.
"""
