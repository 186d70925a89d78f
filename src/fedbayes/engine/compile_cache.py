"""Compiled programs kept from one process to the next. Nothing here imports JAX, so that the command line starts at once."""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import sys
from pathlib import Path


def keep_compiled(least: float = 0.3) -> None:
    """Keep programs that took `least` seconds to compile for the next run, in the user's cache folder, or where JAX was told.

    The folder's name has the processor's abilities in it: a program that was compiled for one may not run on another.
    """
    with contextlib.suppress(OSError):
        cpu = next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags")), "")
        machine = hashlib.sha256((platform.machine() + cpu).encode()).hexdigest()[:12]
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fedbayes" / f"compiled-{machine}"
        cache.mkdir(parents=True, exist_ok=True)
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(cache))
        os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", str(least))
        if "jax" in sys.modules:  # which has read its environment already
            config = sys.modules["jax"].config
            if config.jax_compilation_cache_dir is None:
                config.update("jax_compilation_cache_dir", os.environ["JAX_COMPILATION_CACHE_DIR"])
                config.update("jax_persistent_cache_min_compile_time_secs", least)
