"""The HTTP endpoint through which agents that exist already call the model: requests become turns."""
