"""How rounds run: one round, and what schedules it."""
