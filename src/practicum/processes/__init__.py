"""Processes of our own: a model or an engine apart from this process, asked through a pipe."""
