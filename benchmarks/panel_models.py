"""The models of the panel: hierarchical models as a statistician would write them, over silos, and pooled for NUTS.

    FEDBAYES_DATA=<folder> python benchmarks/panel_models.py     # check that both forms of each model have the same density

Each model is written as in a textbook, with latents in their natural (mostly centred) form and groups indexed by row, with
nothing done for the sake of fedbayes. `pooled` is the same joint density as one NumPyro model over all rows, in which a site of
a silo is a site of the same name, the silos' values one after the other. NUTS samples `standardised` sites as location plus
scale times a standard normal, which changes its geometry and not the posterior. Simulated data has a fixed seed.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable

import jax
from panel_model import Data, Model, check
from panel_real import eight_schools, heart_disease, nurses, six_cities, trauma
from panel_simulated import (
    blood_pressure,
    correlated_slopes,
    crossed_counts,
    horseshoe,
    many_silos,
    nested_gaussian,
    radon,
    small_silos,
    survival,
)

from fedbayes.errors import UserError

__all__ = ["MODELS", "Data", "Model", "load"]

MODELS: dict[str, Callable[[], Model]] = {
    make.__name__: make
    for make in (
        six_cities,
        eight_schools,
        heart_disease,
        nurses,
        trauma,
        correlated_slopes,
        crossed_counts,
        small_silos,
        blood_pressure,
        nested_gaussian,
        survival,
        horseshoe,
        radon,
        many_silos,
    )
}


@functools.cache
def load(name: str) -> Model:
    """A model of the panel by its name."""
    if name not in MODELS:
        raise UserError(f"there is no model {name!r} in the panel; it has {', '.join(MODELS)}")
    return MODELS[name]()


def main() -> int:
    """Check every model."""
    jax.config.update("jax_enable_x64", True)
    failed = 0
    for name in sys.argv[1:] or MODELS:
        model = load(name)
        error, rows = check(model), [model.structured.rows(data) for data in model.silos.values()]
        failed += not error < 1e-6
        print(f"{name:20} {len(rows):2} silos of {min(rows)} to {max(rows)} rows, {model.structured.size():2} global ", end="")
        print(f"latents; difference of log densities, relative: {error:.1e}{'' if error < 1e-6 else '   <-- not the same'}")
    return failed


if __name__ == "__main__":
    raise SystemExit(main())
