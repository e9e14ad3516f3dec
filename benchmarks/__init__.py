"""How fast practicum is beside its peers, and how its step grows. Run by `make bench`; see README.md.

Nothing in src/ or tests/ needs what is here; the peers live in an environment of their own.
"""
