"""Completed steps -> neutral spans: which spans belong together, in which trace, and which are sent."""
