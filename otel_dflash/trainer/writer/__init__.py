"""The hot path: one worker's records into its ring."""
