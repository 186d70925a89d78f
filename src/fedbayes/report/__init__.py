"""Pictures and pages of data and runs."""
