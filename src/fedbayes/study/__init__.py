"""Comparisons: methods × data × seeds."""
