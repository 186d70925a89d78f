"""Algorithms, networks and states as JSON, and back: what a file must say so that another process can predict.

What is read is looked up in tables of this package: nothing in a file is run, and no name in it is imported from elsewhere.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import inspect
import sys
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedbayes.algorithms import REGISTRY, find, module_of
from fedbayes.algorithms.tempered import Tempered
from fedbayes.data.unlabelled import Unlabelled
from fedbayes.errors import UserError
from fedbayes.models import Bernoulli, Categorical, Model, Normal, Poisson, in_units
from fedbayes.models.networks import NETWORKS
from fedbayes.primitives.ivon import Ivon
from fedbayes.primitives.optimisers import ServerStep
from fedbayes.primitives.training import Training

OPTIONS = {cls.__name__: cls for cls in (Training, Ivon, ServerStep, Tempered, Bernoulli, Categorical, Normal, Poisson)}
"""Dataclasses beside the algorithms that a file may name."""
MAKERS = {**NETWORKS, "in_units": in_units}  # functions that make networks
FUNCTIONS = {name: getattr(jax.nn, name) for name in ("relu", "gelu", "silu", "elu", "selu", "celu", "leaky_relu", "softplus")}
FUNCTIONS |= {"sigmoid": jax.nn.sigmoid, "tanh": jnp.tanh, "sin": jnp.sin}
"""Activations that a file may name."""


class Own(Exception):
    """A part that a file cannot describe, because somebody else wrote it; its text goes behind the algorithm's name."""


def encode(value: Any) -> Any:
    """An option of an algorithm as JSON; `Own` where it is somebody's own code.

    >>> encode(Training(lr=0.1, decay_at=(0.5,)))["fields"]["decay_at"]
    {'tuple': [0.5]}
    """
    if isinstance(value, Unlabelled):
        return None  # the server's rows have no part in predictions, and are nobody else's to carry away
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.generic) and value.dtype.kind in "biuf":
        return value.item()
    if isinstance(value, np.ndarray | jax.Array) and value.dtype.kind in "biuf":
        return {"array": np.asarray(value).tolist(), "dtype": str(value.dtype)}
    if isinstance(value, optax.GradientTransformation):
        raise Own(" with a GradientTransformation")
    if isinstance(value, tuple | list):
        return {"tuple" if isinstance(value, tuple) else "list": [encode(entry) for entry in value]}
    if isinstance(value, Model):
        own, recipe = {"own": value.name}, value.recipe
        try:
            arguments = {} if recipe is None else {name: encode(one) for name, one in recipe.arguments.items()}
        except Own:
            return own
        if recipe is None or any("own" in one for one in arguments.values() if isinstance(one, dict)):
            return own
        return {"network": recipe.maker, "arguments": arguments}
    name = _registered(type(value)) or (type(value).__name__ if type(value) in OPTIONS.values() else None)
    if name is not None:
        fields = {field.name: encode(getattr(value, field.name)) for field in dataclasses.fields(value) if field.init}
        return {"class": name, "fields": fields}
    for name, function in FUNCTIONS.items():
        if value is function:
            return {"function": name}
    raise Own


def decode(given: Any, model: Model | None = None) -> Any:
    """What `encode` was given; `model` takes the place of a network of somebody's own.

    >>> decode(encode(Training(lr=0.1, decay_at=(0.5,)))) == Training(lr=0.1, decay_at=(0.5,))
    True
    """
    if not isinstance(given, dict):
        return given
    if "array" in given:
        return np.array(given["array"], np.dtype(given["dtype"]))
    if "tuple" in given or "list" in given:
        entries = [decode(entry, model) for entry in given["tuple" if "tuple" in given else "list"]]
        return tuple(entries) if "tuple" in given else entries
    if "function" in given:
        return _known(FUNCTIONS, given["function"], "activation")
    if "own" in given:
        if model is None:
            advice = "load it in Python with Posterior.load(path, model=…)"
            raise UserError(
                f"it needs the network {given['own']!r}, which is somebody's own code and not in the file; {advice}"
            )
        return model
    if "network" in given:
        maker = _known(MAKERS, given["network"], "network")
        if given["network"] in NETWORKS and not {"shift", "scale"} <= set(given["arguments"]):
            raise UserError("it does not say how features are scaled, without which predictions would be wrong; make it again")
        return _called(maker, given["network"], {name: decode(value, model) for name, value in given["arguments"].items()})
    cls = OPTIONS.get(given["class"]) or find(given["class"], "clients")
    return _called(cls, given["class"], {name: decode(value, model) for name, value in given["fields"].items()})


def needs_model(given: Any) -> bool:
    """Whether a network of somebody's own is a part of what was encoded."""
    if isinstance(given, dict):
        return "own" in given or any(needs_model(value) for value in given.values())
    return isinstance(given, list) and any(needs_model(value) for value in given)


def _called(function: Any, name: str, arguments: dict[str, Any]) -> Any:
    if unknown := sorted(set(arguments) - set(inspect.signature(function).parameters)):
        raise UserError(f"{name} has no option {', '.join(unknown)} in this version of fedbayes; install the one that wrote it")
    return function(**arguments)


def _known(table: Mapping[str, Any], name: str, what: str) -> Any:
    if name not in table:
        raise UserError(f"there is no {what} {name!r} in this version of fedbayes; install the one that wrote it")
    return table[name]


def _registered(cls: type[Any]) -> str | None:
    """The name of an algorithm's class in the registry; loads no module."""
    where = (cls.__module__, cls.__name__)
    names = (name for name, entry in REGISTRY.items() if (f"fedbayes.{module_of(name)}", entry.cls) == where)
    return next(names, None)


def flatten(tree: Any, path: str, arrays: dict[str, np.ndarray]) -> Any:
    """A pytree's form as JSON; its arrays are put into `arrays` under their paths.

    >>> arrays = {}
    >>> flatten({"w": (np.ones(2), None)}, "down", arrays), sorted(arrays)
    ({'dict': {'w': {'tuple': ['down/w/0', None]}}}, ['down/w/0'])
    """
    if tree is None:
        return None
    if isinstance(tree, dict):
        return {"dict": {name: flatten(value, f"{path}/{name}", arrays) for name, value in tree.items()}}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        fields = {name: flatten(value, f"{path}/{name}", arrays) for name, value in zip(tree._fields, tree, strict=True)}
        return {"named": [type(tree).__module__, type(tree).__qualname__], "fields": fields}
    if isinstance(tree, tuple | list):
        kind = "tuple" if isinstance(tree, tuple) else "list"
        return {kind: [flatten(value, f"{path}/{place}", arrays) for place, value in enumerate(tree)]}
    if not hasattr(tree, "dtype") and not isinstance(tree, bool | int | float):
        raise UserError(f"{path} is {type(tree).__name__}; a state is arrays in dicts, tuples and NamedTuples")
    arrays[path] = np.asarray(tree)
    return path


def unflatten(form: Any, arrays: Mapping[str, np.ndarray], home: str = "") -> Any:
    """The pytree of a form and its arrays; NamedTuples are those of fedbayes, or of the module `home`."""
    if form is None:
        return None
    if isinstance(form, str):
        return jnp.asarray(arrays[form])
    if "dict" in form:
        return {name: unflatten(value, arrays, home) for name, value in form["dict"].items()}
    if "named" in form:
        module, name = form["named"]
        return _named_tuple(module, name, home)(**{n: unflatten(value, arrays, home) for n, value in form["fields"].items()})
    entries = [unflatten(entry, arrays, home) for entry in form.get("tuple", form.get("list"))]
    return tuple(entries) if "tuple" in form else entries


MOVED = {"fedbayes.gaussian": "fedbayes.primitives.gaussian", "fedbayes.tempered": "fedbayes.algorithms.tempered"}
"""Where NamedTuples of older files are now."""


def _named_tuple(module: str, name: str, home: str) -> Any:
    found, module = None, MOVED.get(module, module)
    if module.split(".")[0] == "fedbayes":
        with contextlib.suppress(ImportError):
            found = getattr(importlib.import_module(module), name, None)
    elif home:
        found = getattr(sys.modules[home], name, None)
    if not (isinstance(found, type) and issubclass(found, tuple) and hasattr(found, "_fields")):
        raise UserError(f"there is no {module}.{name} in this version of fedbayes; install the one that wrote it")
    return found
