"""The one analysis of a recording, which every view shows: who waits, for whom, and what limits the
throughput."""
