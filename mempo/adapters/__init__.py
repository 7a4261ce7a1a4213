"""The memory reward inside the trainers of others. Nothing else of ``mempo`` imports this. See docs/adapters.md."""
