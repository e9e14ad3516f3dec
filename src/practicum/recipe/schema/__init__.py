"""Sections of the recipe as typed models: every key with its type, default and description."""
