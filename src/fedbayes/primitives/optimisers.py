"""Optax's optimisers: by name or as they are, for clients' steps and for the server's.

"adamw"                         with Optax's own defaults
"adamw:b1=0.95,nesterov=true"   with options of its own
optax.chain(...)                any GradientTransformation, in Python; its step size is its own
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
from collections.abc import Callable
from types import FunctionType
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Int

from fedbayes import trees
from fedbayes.algorithm import Params
from fedbayes.errors import UserError, nearest

Optimiser: TypeAlias = str | optax.GradientTransformation
UNFIT = ("lbfgs", "noisy_sgd", "optimistic_adam", "sm3")
"""Not by name: the first needs the loss itself, the second a key, the third is deprecated and the fourth takes no scalars."""


class Named(NamedTuple):
    """A function of Optax, its arguments after the learning rate with their defaults, and those that the name sets."""

    make: Callable[..., optax.GradientTransformation]
    defaults: dict[str, Any]
    options: dict[str, Any]


@functools.cache
def known() -> dict[str, inspect.Signature]:
    """The functions of Optax that make an optimiser of a learning rate alone.

    >>> {"adam", "adamw", "lion", "rmsprop", "sgd", "yogi"} <= set(known())
    True
    """
    functions = {
        name: value for name, value in sorted(vars(optax).items()) if isinstance(value, FunctionType | functools.partial)
    }
    signatures = {name: inspect.signature(value) for name, value in functions.items()}
    leads = {name: next(iter(signature.parameters), "") for name, signature in signatures.items()}
    fit = [name for name in leads if leads[name] == "learning_rate" and not name.startswith(("_", "scale_by_"))]
    return {name: signatures[name] for name in fit if name not in UNFIT}


@functools.cache
def read(text: str) -> Named:
    """An optimiser's name and options.

    >>> read("sgd:nesterov=true").options
    {'nesterov': True}
    """
    name, _, rest = text.partition(":")
    if name not in known():
        raise UserError(f"there is no optimiser {name!r} in Optax; {nearest(name, known())}")
    defaults = {key: value.default for key, value in list(known()[name].parameters.items())[1:]}
    options: dict[str, Any] = {}
    for option in filter(None, rest.split(",")):
        key, _, value = option.partition("=")
        if key not in defaults:
            raise UserError(f"the optimiser {name} has no option {key!r}; {nearest(key, defaults)}")
        try:
            options[key] = json.loads(value)
            jax.eval_shape(vars(optax)[name](0.1, **options).init, jnp.zeros(2))
        except Exception:
            raise UserError(
                f"the optimiser is {text!r}, but {value!r} is no value of {key}; write numbers and true or false, "
                "such as adamw:b1=0.95,nesterov=true"
            ) from None
    return Named(vars(optax)[name], defaults, options)


def arguments(optimiser: Optimiser, **given: Any) -> dict[str, Any]:
    """The arguments of a named optimiser: those its name sets, those of `given` that it has and that are not None, defaults.

    >>> arguments("adamw:b1=0.95", weight_decay=0.01, momentum=0.9)["weight_decay"]
    0.01
    """
    if not isinstance(optimiser, str):
        return {}
    _, defaults, options = read(optimiser)
    return {**defaults, **{key: value for key, value in given.items() if key in defaults and value is not None}, **options}


def build(optimiser: Optimiser, lr: Any, **given: Any) -> optax.GradientTransformation:
    """Optax's optimiser with a step size, which may be traced, and these arguments where it has them."""
    return read(optimiser).make(lr, **arguments(optimiser, **given)) if isinstance(optimiser, str) else optimiser


def check(optimiser: Any) -> None:
    """Refuse what is neither the name of an optimiser nor a GradientTransformation."""
    if isinstance(optimiser, str):
        read(optimiser)
    elif not isinstance(optimiser, optax.GradientTransformation):
        raise UserError(
            f"the optimiser is {optimiser!r}, but it is a name, such as adamw, or a GradientTransformation, as optax.adam gives"
        )


def move(optimiser: optax.GradientTransformation, values: Any, gradient: Any, state: Any) -> tuple[Any, Any]:
    """A step of one of Optax's optimisers; returns the values and the optimiser's state."""
    with trees.other_peoples_code():
        updates, state = optimiser.update(gradient, state, values)
    return optax.apply_updates(values, updates), state


@dataclasses.dataclass(frozen=True)
class ServerStep:
    """The server's step towards the clients' mean (Reddi et al. 2021, Algorithm 2): w ← opt(w, gradient = w − mean).

    By default w becomes the mean. A momentum is FedAvgM; "adam", "yogi" and "adagrad" are FedAdam, FedYogi and FedAdagrad, with
    Optax's bias correction where it has one.

    >>> ServerStep("yogi:b2=0.99").rate
    0.01
    """

    optimiser: Optimiser = "sgd"
    """Any of Optax's by name, such as adam, yogi or adam:b2=0.99,eps=0.001; in Python also a GradientTransformation."""
    lr: float | None = None
    """Step size; by default 1 for sgd, which with momentum 0 is the mean itself, and 0.01 for others."""
    momentum: float = 0.0
    """Momentum of sgd, and of others that have one."""

    def __post_init__(self) -> None:
        check(self.optimiser)
        if not self.rate > 0 or not 0 <= self.momentum < 1:
            given = f"the server's lr is {self.lr} and its momentum {self.momentum}"
            raise UserError(f"{given}, but the step is above 0 and momentum from 0 to below 1")

    @property
    def rate(self) -> float:
        """The step size."""
        return self.lr if self.lr is not None else 1.0 if self.optimiser == "sgd" else 0.01

    def init(self, w: Params) -> Any:
        """The optimiser's state before round 1; of sgd, its momentum."""
        return trees.zeros(w) if self.optimiser == "sgd" else self._built.init(w)

    def against(self, w: Params, state: Any, gradient: Params) -> tuple[Params, Any]:
        """A step against `gradient`, the mean of w − w_i; returns w and the optimiser's state."""
        if self.optimiser != "sgd":
            return move(self._built, w, gradient, state)
        momentum = jax.tree.map(lambda old, new: self.momentum * old + new, state, gradient)
        return jax.tree.map(lambda w, step: w - self.rate * step, w, momentum), momentum

    def start(self, w: Params) -> tuple[Params, Int[Array, ""], Any]:
        """w, no rounds behind it, and the optimiser's state: None where the server takes the mean."""
        plain = self.optimiser == "sgd" and self.rate == 1 and not self.momentum
        return w, jnp.int32(0), None if plain else self.init(w)

    def next(self, w: Params, round: Int[Array, ""], state: Any, mean: Params) -> tuple[Params, Int[Array, ""], Any]:
        """w, its rounds and the optimiser's state after one round more, whose mean this is."""
        if state is not None:
            mean, state = self.against(w, state, jax.tree.map(jnp.subtract, w, mean))
        return mean, round + 1, state

    @property
    def _built(self) -> optax.GradientTransformation:
        return build(self.optimiser, self.rate, momentum=self.momentum or None)
