"""Reads recordings for people."""
