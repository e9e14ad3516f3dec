"""Teachers: which one corrects which prompt, where it lives, and how it scores a student's tokens.

A `place` scores rows: processes of a teacher's own, or a server behind a URL. May be imported by runtime,
checks, observe, trainer and cli.
"""
