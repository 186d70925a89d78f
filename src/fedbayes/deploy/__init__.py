"""Engines other than this process."""
