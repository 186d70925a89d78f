"""Building blocks that algorithms import."""
