"""All code that reads OTEL_* variables, uses the OpenTelemetry SDK, or parses an OTLP receiver's answers."""
