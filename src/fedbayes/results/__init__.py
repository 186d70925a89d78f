"""What a run leaves: fits, posteriors, run folders."""
