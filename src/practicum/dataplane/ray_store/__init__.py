"""The `ray` store: packed columns in Ray's object store, and an index actor that knows where they are.

Begin with `ray_store`. The index (`store_index`) knows nothing of how bytes are packed: the `transferqueue`
store uses it too.
"""
