"""The `ray` store: packed columns in Ray's object store, and an index actor that knows where they are.

Begin with `ray_store`. The index (`row_locations`, `index_actor`) knows nothing of how bytes
are packed, so the `transferqueue` store uses it too.
"""
