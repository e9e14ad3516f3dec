"""The process's one event loop, and small tools for asynchronous work."""
