"""Where the roles of a run live, and how work reaches them: in this process, or as actors of Ray."""
