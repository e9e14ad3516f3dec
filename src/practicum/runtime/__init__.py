"""Where the roles of a run live, and how work reaches them: dispatch, deadlines, the event loop.

May be imported by checks, observe, trainer and cli.
"""
