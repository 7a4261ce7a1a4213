"""MemPO: reinforcement learning for agents that write their own memory from turn to turn (arXiv 2603.00680)."""

__version__ = "0.1.0"
