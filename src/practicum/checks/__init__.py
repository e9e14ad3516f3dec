"""Invariants that are checked during a run. They are on by default and cheap."""
