"""Child processes: a model or engine asked through a pipe, a guarded server, a command with limits;
the memory of this one.
"""
