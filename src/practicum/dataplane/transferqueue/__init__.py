"""The `transferqueue` store: packed columns in TransferQueue, whose cost is per row and field.

`store` is where to begin; `link` is the only place that calls TransferQueue for bytes, `servers` the
only one that starts and ends its processes. Nothing of TransferQueue is seen outside this package.
"""
