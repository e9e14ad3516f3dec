"""Sessions: attempts at prompts, their turns and trajectories, agent loops, tools, demonstrations.

May be imported by rewards, teachers and the layers above.
"""
