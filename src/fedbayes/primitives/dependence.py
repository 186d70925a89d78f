"""Which terms of a structured model depend on which latents, found from its program."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from fedbayes.models.structured import Structured
from fedbayes.wire import provenance


def inseparable(structured: Structured, data: Any) -> str:
    """Why draws cannot be weighed plate by plate, if so: a site that reads the latents of a plate it does not lie in."""
    plates, real = structured.plates(data), jnp.zeros(0).dtype
    shapes = {name: jax.ShapeDtypeStruct((plates[name].size, d), real) for name, (_, d) in structured.blocks(data).items()}
    z_G, theta = jax.ShapeDtypeStruct((structured.size(),), real), structured.theta(data)

    def terms(z_G: Any, z_L: Any) -> Any:
        return structured.log_silo(theta, z_G, z_L, data)

    found = jax.eval_shape(terms, z_G, shapes)
    for name, flow in zip(sorted(found), provenance.trace(terms, {"z_G": z_G, "z": shapes}), strict=True):
        others = {place.partition("/")[2] for place in flow.depends if place.startswith("z/")} - {name, ""}
        if others:
            where = f"plate {name!r}" if name else "no plate"
            return f"a site in {where} depends on latents of plate {sorted(others)[0]!r}"
    # Within a plate only numbers tell: terms of even elements must not change with the latents of odd ones.
    z = jax.tree.map(lambda leaf: 0.1 * jax.random.normal(jax.random.key(1), leaf.shape), shapes)
    even = {name: (jnp.arange(leaf.size) % 2 == 0).astype(real) for name, leaf in found.items()}
    (at_z,) = jax.jit(lambda z: jax.vjp(lambda z: terms(jnp.zeros(z_G.shape), z), z)[1](even))(z)
    for name in [name for name in shapes if name and jnp.any(jnp.nan_to_num(at_z[name][1::2]) != 0)]:
        return f"an element of plate {name!r} depends on another one's latents"
    return ""
