"""Memory-aware policy optimization: reinforcement learning for agents that carry their own memory from turn to turn."""

__version__ = "0.1.0"
