"""The `ray` store, and the index that the `transferqueue` store uses too: begin with `ray_store`."""
