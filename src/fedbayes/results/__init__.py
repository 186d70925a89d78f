"""What a run leaves: fits, posteriors, run folders."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(__name__, ["trackers"])
