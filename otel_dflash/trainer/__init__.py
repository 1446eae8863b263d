"""Runs in the training process: standard library only."""
