"""Sessions: attempts at prompts, their turns and trajectories, agent loops, tools, demonstrations."""
