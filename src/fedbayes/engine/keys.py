"""Random keys: `fold_in(fold_in(seed, round), client)`, so that the simulator and a deployment draw the same numbers.

Rounds are counted from 1; round 0 is the start. What is not a client has a number at the far end of the range.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jaxtyping import PRNGKeyArray

BROADCAST, SERVER, LOCAL, ADAPT, PREDICT, CHOOSE = (0xFFFFFFFF - offset for offset in range(6))


def of_round(seed: int, round: int) -> PRNGKeyArray:
    """The key that everything in a round is folded from."""
    return _of_round(np.uint32(seed), np.uint32(round)) if seed < 2**31 else jax.random.fold_in(jax.random.key(seed), round)


@jax.jit  # one call to the device in place of several: a small model's round takes as long as a few
def _of_round(seed: Any, round: Any) -> PRNGKeyArray:
    return jax.random.fold_in(jax.random.key(seed), round)


def of_start(seed: int) -> tuple[PRNGKeyArray, PRNGKeyArray]:
    """The keys of `init_server` and `init_local`.

    Every client starts from the same `init_local`, as if the server had drawn it once: what makes clients differ is their data.
    """
    start = of_round(seed, 0)
    return jax.random.fold_in(start, SERVER), jax.random.fold_in(start, LOCAL)


def fold(key: PRNGKeyArray, number: Any) -> PRNGKeyArray:
    """`jax.random.fold_in`, for a client's index or one of the roles above."""
    return jax.random.fold_in(key, number)
