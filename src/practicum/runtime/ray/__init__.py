"""The roles as actors of a Ray cluster: what they need, where they go, how they are called and kept alive.

The trainer and the command line may import it; what it shares with the roles of one process is in `runtime`.
"""
