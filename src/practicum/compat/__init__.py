"""Compat: the only code that uses private interfaces of other libraries, one module per library.

Each module names the versions it was tested with and fails on import if the library has changed.
"""
