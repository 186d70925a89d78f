"""Files: atomic, checksummed and locked."""
