"""What a recipe will need on a cluster, by arithmetic alone: memory, traffic and seconds of a step.

`practicum plan` prints it. Imports neither torch nor Ray. May be imported by trainer and the layers above.
"""
