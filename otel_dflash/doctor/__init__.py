"""The doctor: does telemetry leave this machine and arrive, and if not, what is wrong and what mends it."""
