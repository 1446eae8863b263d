"""The doctor: does telemetry leave this machine and arrive, and if not, what is wrong and how to fix it."""
