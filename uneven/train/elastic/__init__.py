"""Ranks that come and go: those who are left after a loss, or whom another one joins, settle in a new generation."""
