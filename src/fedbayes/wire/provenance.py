"""Which inputs each output of a program depends on, and which it copies: a walk over the jaxpr.

`depends` errs on the side of too much, `copies` follows an input through every primitive that only moves numbers about
(reshape, slice, gather, concatenate, select …), so a leaf that is sent under another shape is still found.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend import core

from fedbayes import trees

MOVES = frozenset(
    {
        *("reshape", "transpose", "squeeze", "expand_dims", "broadcast_in_dim", "concatenate", "pad", "rev", "split", "sort"),
        *("slice", "dynamic_slice", "dynamic_update_slice", "gather", "scatter", "select_n", "stop_gradient", "device_put"),
        *("scatter-add", "neg", "max", "min", "clamp", "top_k", "cummax", "cummin", "real", "imag", "complex", "copysign"),
        *("pure_callback", "io_callback", "python_callback"),
        *("copy", "copy_p", "convert_element_type", "bitcast_convert_type", "reduce_precision", "optimization_barrier"),
    }
)
"""Primitives whose outputs hold their inputs' numbers as they are."""
LAYOUT = frozenset({"convert_element_type", "broadcast_in_dim", "reshape", "squeeze", "expand_dims", "slice", "dynamic_slice"})
"""Those of them that keep a mask a mask."""


class Flow(NamedTuple):
    """Where the numbers of one variable come from, by the names of the inputs; and whether they are all 0 or 1."""

    depends: tuple[str, ...] = ()
    copies: tuple[str, ...] = ()
    mask: bool = False


def trace(function: Callable[..., Any], inputs: dict[str, Any]) -> list[Flow]:
    """The flow of each leaf of `function(*inputs.values())`, in the order of its leaves.

    >>> x = jax.ShapeDtypeStruct((3,), "float32")
    >>> trace(lambda a, b: (a.sum() * b, a[::-1]), {"a": x, "b": x})
    [Flow(depends=('a', 'b'), copies=(), mask=False), Flow(depends=('a',), copies=('a',), mask=False)]
    """
    closed = jax.make_jaxpr(function)(*inputs.values())
    # One by one: a dict as a pytree would sort its keys, and the arguments are in the order given.
    names = [f"{name}/{path}".rstrip("/") for name, tree in inputs.items() for path in trees.named(tree)]
    return _walk(closed.jaxpr, [Flow((name,), (name,)) for name in names])


def _join(*flows: Flow) -> Flow:
    depends = {name for flow in flows for name in flow.depends}
    copies = {name for flow in flows for name in flow.copies}
    return Flow(tuple(sorted(depends)), tuple(sorted(copies)))


def _walk(jaxpr: Any, arguments: Sequence[Flow]) -> list[Flow]:
    flows: dict[Any, Flow] = dict(zip(jaxpr.invars, arguments, strict=True))

    def read(variable: Any) -> Flow:
        return Flow() if isinstance(variable, core.Literal) else flows.get(variable, Flow())

    for equation in jaxpr.eqns:
        sources = [read(variable) for variable in equation.invars]
        for variable, flow in zip(equation.outvars, _apply(equation, sources), strict=True):
            mask = variable.aval.dtype == bool or (equation.primitive.name in LAYOUT and sources[0].mask)
            flows[variable] = flow._replace(mask=mask)
    return [read(variable) for variable in jaxpr.outvars]


def _apply(equation: Any, sources: list[Flow]) -> list[Flow]:
    name, params = equation.primitive.name, equation.params
    if name == "scan":
        constants, carries = params["num_consts"], params["num_carry"]
        head, carry, rest = sources[:constants], sources[constants : constants + carries], sources[constants + carries :]
        return _fixpoint(params["jaxpr"].jaxpr, head, carry, rest)
    if name == "while":
        test, body = params["cond_nconsts"], params["body_nconsts"]
        head, carry = sources[test : test + body], sources[test + body :]
        while True:
            after = _fixpoint(params["body_jaxpr"].jaxpr, head, carry, [])
            # How often the body runs depends on the test, so every result does.
            stop = _walk(params["cond_jaxpr"].jaxpr, [*sources[:test], *after])[0].depends
            grown = [_join(flow, Flow(depends=stop)) for flow in after]
            if grown == carry:
                return grown
            carry = grown
    if name == "cond":
        branches = [_walk(branch.jaxpr, sources[1:]) for branch in params["branches"]]
        return [_join(*flows, Flow(depends=sources[0].depends)) for flows in zip(*branches, strict=True)]
    inner = params.get("jaxpr", params.get("call_jaxpr", params.get("fun_jaxpr")))
    if inner is not None:
        jaxpr = getattr(inner, "jaxpr", inner)
        if len(jaxpr.invars) == len(sources) and len(jaxpr.outvars) == len(equation.outvars):
            return _walk(jaxpr, sources)
    everything = _join(*sources)
    moves = name in MOVES or _moves(equation, sources)
    return [Flow(everything.depends, everything.copies if moves else ()) for _ in equation.outvars]


def _moves(equation: Any, sources: list[Flow]) -> bool:
    """Whether arithmetic leaves a number as it is, or as good as it is: times a mask or a constant, a sum of one."""
    if equation.primitive.name in ("mul", "add", "add_any", "sub", "div"):
        constant = [isinstance(variable, core.Literal) for variable in equation.invars]
        return any(constant) or any(source.mask for source in sources)
    if equation.primitive.name in ("reduce_sum", "reduce_max", "reduce_min"):
        return equation.invars[0].aval.size == equation.outvars[0].aval.size
    return False


def _fixpoint(jaxpr: Any, head: list[Flow], carry: list[Flow], rest: list[Flow]) -> list[Flow]:
    while True:
        outputs = _walk(jaxpr, [*head, *carry, *rest])
        grown = [_join(before, after) for before, after in zip(carry, outputs[: len(carry)], strict=True)]
        if grown == carry:
            return [*grown, *outputs[len(carry) :]]
        carry = grown


def digest(*programs: Any) -> str:
    """A digest of jaxprs with their constants.

    Their text will not do: it names a part that occurs twice once, if it was traced once, which depends on what the process
    did before.

    >>> program = jax.make_jaxpr(lambda x: 2 * x)
    >>> digest(program(1.0)) == digest(program(3.0)), digest(program(1.0)) == digest(jax.make_jaxpr(lambda x: 3 * x)(1.0))
    (True, False)
    """
    found = hashlib.sha256()
    for part in _told(programs):
        found.update(part + b"\0")
    return found.hexdigest()[:16]


def _told(value: Any) -> Iterator[bytes]:
    """A program in words, each part where it is used, variables by number."""
    if isinstance(value, core.ClosedJaxpr):
        yield from _told(value.jaxpr)
        for constant in value.consts:
            yield np.asarray(constant).tobytes()
    elif isinstance(value, core.Jaxpr):
        numbers: dict[int, int] = {}

        def name(variable: Any) -> bytes:
            if isinstance(variable, core.Literal):
                return str(variable.aval).encode() + np.asarray(variable.val).tobytes()
            return f"{numbers.setdefault(id(variable), len(numbers))} {variable.aval}".encode()

        yield from map(name, (*value.constvars, *value.invars))
        for eqn in value.eqns:
            yield eqn.primitive.name.encode()
            yield from map(name, (*eqn.invars, *eqn.outvars))
            yield from _told(eqn.params)
        yield from map(name, value.outvars)
    elif isinstance(value, Mapping):
        for key in sorted(value):
            yield str(key).encode()
            yield from _told(value[key])
    elif isinstance(value, tuple | list):
        for one in value:
            yield from _told(one)
    elif callable(value):
        yield getattr(value, "__qualname__", type(value).__name__).encode()
    else:
        yield re.sub(r"0x[0-9a-f]+", "", str(value)).encode()
