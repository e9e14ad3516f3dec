"""Define, load, check and explain recipes. Imports no torch."""
