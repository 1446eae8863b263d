"""The `otel-dflash` command."""
