"""Sessions: attempts at prompts, turns and trajectories, agent loops, tools, and SFT examples."""
