"""Child processes: a model or an engine in its own process, asked through a pipe.

May be imported by checks, models and the layers above.
"""
