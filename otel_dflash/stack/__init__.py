"""The engines that store and show telemetry: how each is built, started and checked."""
