"""Records to totals, and totals to metrics."""
