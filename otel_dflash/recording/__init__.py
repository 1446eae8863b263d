"""The recording: the log of frames on disk, and the meaning of its bytes."""
