"""The engines people look at telemetry with: how each is built, started, and known to be healthy."""
