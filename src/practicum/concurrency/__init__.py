"""The process's one event loop, and small tools for asynchronous work.

Imports only `errors`; everything may import it.
"""
