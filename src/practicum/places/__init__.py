"""Where a frozen model lives: in this process, in its own process, behind a URL, or in vLLM.

Teachers and reward models share it. May be imported by rewards, teachers and the layers above.
"""
