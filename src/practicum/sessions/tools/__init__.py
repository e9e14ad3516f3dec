"""Tools that a model may call in a session: a calculator, sandboxed Python, a user's own functions.
`toolbox` makes them from the recipe and runs calls, `calls` reads calls out of what a model wrote. Imports
`practicum.tasks` and below; agent loops, runtime and above may import it.
"""
