"""Child processes (models and engines behind a pipe, servers, commands with limits), and this process's
memory.
"""
