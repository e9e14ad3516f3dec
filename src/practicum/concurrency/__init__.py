"""The process's one event loop, and small tools for asynchronous work.

May be imported by dataplane, algorithms, processes and the layers above.
"""
