"""The version, read by the build and by `otel-dflash --version`."""

__version__ = "0.1.0"
