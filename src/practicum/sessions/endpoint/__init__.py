"""The HTTP endpoint for external agents. Requests become turns of a session."""
