"""One module for each command; `main(arguments)` is called by `fedbayes.cli`."""
