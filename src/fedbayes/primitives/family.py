"""Which Gaussians a variational method searches over a structured model, and where the search starts.

    q(Z) = q(Z_G) Π_j q(Z_Sj | Z_G) Π_b q(Z_jb | Z_Sj, Z_G)

Z_S are the latents that a silo has once, Z_b those of one block: an element of a plate, or of a vector that rows read by index.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from fedbayes.algorithm import check_settings, setting
from fedbayes.errors import UserError
from fedbayes.models.sites import Spread, Values
from fedbayes.models.structured import Structured, encode
from fedbayes.primitives import gaussian
from fedbayes.primitives.dependence import inseparable, moving

LARGEST = 2**27
"""Numbers in one array of variational parameters beyond which a family is refused."""
PART = 0.1
"""Of the prior's standard deviations, those of q(Z_G) at the start."""

Locals = dict[str, gaussian.Local]
Noise = dict[str, Float[Array, "s k blocks d"]]
Indices = dict[str, Int[Array, " size"]]


class Shared(NamedTuple):
    """What all silos share: η_G and θ."""

    eta: gaussian.Global
    theta: Values


@dataclasses.dataclass(frozen=True)
class Family:
    """Which Gaussians are searched, and with how many draws. None stands for yes, but for an encoder, which has none of it.

    >>> Family.mean_field(bound=5)
    Family(full=False, coupled=False, dense=False, moving_scale=False, bound=5, draws=1, start=None, jitter=0.0, encoder=None)
    """

    full: bool = True
    """Whether q(Z_G) has a full covariance; else it is mean-field."""
    coupled: bool | None = None
    """Whether the mean of a block depends on Z_G and on the silo's own latents, by C; yes by default."""
    dense: bool | None = None
    """Whether the latents of one block are correlated given the others, by L; yes by default."""
    moving_scale: bool | None = None
    """Whether the log-scale of a block depends on them too, by D; by default where the curvature of its prior does."""
    bound: int = setting(1, least=1)
    """K, importance-weighted draws for each block, and as many for the silo's own latents, each with K draws of the blocks."""
    draws: int = setting(1, least=1)
    """Monte Carlo samples in a step."""
    start: float | None = setting(None, above=0)
    """Standard deviations at the start, as a part of the prior's; by default 0.1 for what silos share, and 1 for their own
    latents, whose scale would be taken for small if they began narrow."""
    jitter: float = setting(0.0, least=0)
    """Means at the start are drawn with this part of the prior's standard deviation, alike in all silos; hidden units of a
    network need it."""
    encoder: Callable[..., Any] | None = None
    """Amortised inference: a function of the silo's data, and of Z_G where it takes a second argument, that gives mean and
    log-scale for each plate; its params are θ."""

    def __post_init__(self) -> None:
        check_settings(self)
        for option in ("coupled", "dense", "moving_scale"):
            if self.encoder is not None and getattr(self, option):
                raise UserError(
                    f"{option}=True has no effect with an encoder, which gives mean and log-scale alone; leave it out"
                )

    @classmethod
    def mean_field(cls, **options: Any) -> Family:
        """No correlation at all, for models with many latents."""
        return cls(**{"full": False, "coupled": False, "dense": False, "moving_scale": False, **options})

    def init_shared(self, key: PRNGKeyArray, structured: Structured, data: Any) -> Shared:
        """Around the prior's medians, or jittered, with `start` of its standard deviations; and θ as the model has it."""
        n = structured.size()
        if self.full and n * n > LARGEST:
            raise UserError(f"a full covariance of {n} global latents is too large; use Family.mean_field() or full=False")
        theta = structured.theta(data)
        if self.encoder is not None and data is not None:
            theta = {**theta, **encode(self.encoder, {}, data, jnp.zeros(n))[1]}
        return Shared(self._started(key, gaussian.init_global(n, full=self.full), structured.global_spread(), self.part), theta)

    def init_local(self, key: PRNGKeyArray, structured: Structured, data: Any) -> Locals:
        """η_L for the latents that this silo's data asks for, around their prior; nothing where they are amortised."""
        if self.encoder is not None:
            return {}
        n, blocks, found = structured.size(), structured.blocks(data), {}
        spread = structured.local_spread(data) if blocks else {}
        coupled, dense = self.coupled is not False, self.dense is not False
        own = 1.0 if self.start is None else self.start
        moves = moving(structured, data) if self.moving_scale is None else blocks if self.moving_scale else ()
        for place, (name, (count, d)) in enumerate(blocks.items()):
            parents = n + (blocks[""][1] if name and "" in blocks else 0)
            too_many = count * d * parents > LARGEST
            if too_many and (coupled or self.moving_scale):
                raise UserError(f"{count} × {d} local latents cannot depend on {parents} global ones; use coupled=False")
            if dense and count * d * d > LARGEST:
                raise UserError(f"{d} local latents in a block are too many for a covariance; use dense=False")
            options = {"dense": dense, "coupled": coupled, "moving_scale": name in moves and not too_many}
            key = jax.random.fold_in(key, place)
            found[name] = self._started(key, gaussian.init_local(count, d, parents, **options), spread[name], own)
        return found

    @property
    def part(self) -> float:
        """Of the prior's standard deviation, that with which a search of Z_G starts."""
        return PART if self.start is None else self.start

    def _started(self, key: PRNGKeyArray, q: Any, prior: Spread, part: float) -> Any:
        mean = prior.location
        if self.jitter:
            mean = mean + self.jitter * prior.scale * jax.random.normal(key, q.mean.shape)
        return q._replace(mean=mean, log_scale=jnp.log(part * prior.scale))

    def check_draws(self, structured: Structured, data: Any) -> None:
        """Refuse K draws where the elements of a plate do not stand apart."""
        if self.bound > 1 and (why := inseparable(structured, data)):
            raise UserError(f"{why}, so draws cannot be weighed block by block; use bound=1 for this model")

    def outer(self, structured: Structured, data: Any) -> int:
        """Draws of the silo's own latents in a sample: K, but one where rows are subsampled, so that no draw can be weighed."""
        return self.bound if "" in structured.blocks(data) and not structured.everyone(data) else 1

    def noise(self, key: PRNGKeyArray, structured: Structured, data: Any) -> Noise:
        """ε_L for every Monte Carlo sample and importance draw; for blocks, K for each draw of the silo's own latents."""
        found, plates, outer = {}, structured.plates(data), self.outer(structured, data)
        for place, (name, (_, d)) in enumerate(structured.blocks(data).items()):
            shape = (self.draws, outer * self.bound if name else outer, plates[name].size, d)
            # Each derivation of a key takes as long as the rest of a small model's step: so none for the first plate.
            found[name] = jax.random.normal(jax.random.fold_in(key, 2 + place) if place else key, shape)
        return found

    def locals_of(
        self, structured: Structured, theta: Values, eta: Locals, data: Any, indices: Indices, z_G: Float[Array, " n"]
    ) -> Locals:
        """η_L of the plate elements in `indices`: kept, or given by the inference network."""
        if self.encoder is not None:
            given, _ = encode(self.encoder, theta, data, z_G, indices)
            eta = {name: gaussian.Local(mean, log_scale, None, None, None) for name, (mean, log_scale) in given.items()}
            expected = structured.blocks(data)
            if eta.keys() != expected.keys():
                raise UserError(
                    f"encoder gives {', '.join(eta) or 'nothing'}, but the silo has latents in "
                    f"{', '.join(expected) or 'no plate'}; it must return {{plate: (mean, log_scale)}} for each of them"
                )
            for name, (mean, log_scale) in given.items():
                if not mean.shape == log_scale.shape == (len(mean), expected[name][1]):
                    raise UserError(
                        f"encoder gives {name} a mean of shape {mean.shape} and a log-scale of shape {log_scale.shape}, but "
                        f"both must have {expected[name][1]} columns, one for each number of an element"
                    )
        sizes = {name: plate for name, plate in structured.plates(data).items() if name in eta}
        chosen = {}
        for name, q in eta.items():
            whole = q.mean.shape[0] == sizes[name].total and name in indices
            chosen[name] = jax.tree.map(lambda leaf, name=name: leaf[indices[name]], q) if whole else q
        return chosen
