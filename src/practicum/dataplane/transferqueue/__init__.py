"""The `transferqueue` store: an adapter for clusters that run TransferQueue.

Begin with `transferqueue_store`. Only `tq_client` moves bytes to and from TransferQueue, and only
`tq_servers` starts and ends its processes. Nothing outside this package knows of TransferQueue.
"""
