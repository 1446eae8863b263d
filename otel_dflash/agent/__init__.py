"""The agent process: rings to recording, recording to spans and metrics."""
