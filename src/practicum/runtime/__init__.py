"""Runtimes: run the roles in this process, or as actors of Ray."""
