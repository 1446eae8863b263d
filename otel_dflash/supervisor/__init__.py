"""The agent's parent: starts it, waits, and starts it again."""
