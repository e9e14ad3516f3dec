"""Roles as actors of a Ray cluster: resources, placement, calls and restarts.

The trainer and the command line may import it. Parts shared with the local runtime are in `runtime`.
"""
