"""Tools that a model may call in a session: a calculator, sandboxed Python, custom functions."""
