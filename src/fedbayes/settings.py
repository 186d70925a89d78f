"""Settings of algorithms: their limits, facts that a run says, and candidates that a federation chooses from."""

from __future__ import annotations

import copy
import dataclasses
import numbers
import operator
import warnings
from collections.abc import Mapping
from typing import Any, TypeVar

from fedbayes.errors import UserError

D = TypeVar("D")

FACTS = ("rounds", "clients", "rows", "silos", "form")
"""Facts known before a run: its rounds, how many clients or silos may train, all their rows, and the form of a silo's
data."""


def fact(name: str, needed_by: str | None = None) -> Any:
    """A field that is None until the run that the algorithm is planned for says it (see `Algorithm.planned`).

    With `needed_by` it stays None where that other field is empty: a run without a schedule can be extended.

    >>> @dataclasses.dataclass(frozen=True)
    ... class Schedule:
    ...     rounds: int | None = fact("rounds")
    >>> plan(Schedule(), {"rounds": 10}), plan(Schedule(5), {"rounds": 10})
    (Schedule(rounds=10), Schedule(rounds=5))
    """
    if name not in FACTS:
        raise TypeError(f"there is no fact {name!r} of a run; there are {', '.join(FACTS)}")
    return dataclasses.field(
        default=None, metadata={"fact": name, "needed_by": needed_by, "limits": {} if name == "form" else {"least": 1}}
    )


class Lengths(tuple[float, ...]):
    """Candidates for how many steps `adapt` takes. Those that take equally many are tried together, as they end together."""


class OfPopulation(tuple[float, ...]):
    """Candidates for a property of the population, such as a prior's width: one value for all numbers of rows, and one that may
    lie between two positive candidates."""


def setting(default: Any, *others: str, which: str = "", choose: Any = (), **limits: float) -> Any:
    """A field with other choices beside its default, or limits for a number; `which` says what the number does.

    A setting of `adapt` that a federation may choose has candidates in `choose`: numbers, the first of which is kept where none
    is ahead of it, and moves a client little; or, for settings inside a dataclass, a dict of such. See engine/choose.py.

    >>> @dataclasses.dataclass(frozen=True)
    ... class Pull:
    ...     lam: float = setting(1.0, least=0, which="weighs a squared distance")
    >>> check_settings(Pull(-1.0))
    Traceback (most recent call last):
    fedbayes.errors.UserError: lam is -1.0, but it weighs a squared distance and must be at least 0
    """
    metadata = {"choices": (default, *others), "limits": limits, "which": which, "choose": choose}
    return dataclasses.field(default=default, metadata=metadata)


LIMITS = {"least": ("at least", operator.ge), "above": ("above", operator.gt), "most": ("at most", operator.le)}
LIMITS |= {"below": ("below", operator.lt)}


def check_settings(config: Any) -> None:
    """Refuse a value that its `setting` does not allow; an optional setting may be None."""
    for field in dataclasses.fields(config):
        value, limits = getattr(config, field.name), field.metadata.get("limits", {})
        choices, which = field.metadata.get("choices", ()), field.metadata.get("which")
        if len(choices) > 1 and value not in choices:
            raise UserError(f"{field.name} is {value!r}, but it is {', '.join(choices[:-1])} or {choices[-1]}")
        if value is not None and not all(LIMITS[name][1](value, limit) for name, limit in limits.items()):
            allowed = " and ".join(f"{LIMITS[name][0]} {limit}" for name, limit in limits.items())
            raise UserError(f"{field.name} is {value}, but it {f'{which} and must be' if which else 'is'} {allowed}")


WHOLE = (int, "int", "int | None")  # how a field that counts something is annotated


def plan(config: D, facts: dict[str, Any]) -> D:
    """A dataclass of settings with its `fact` fields set, those of the settings inside it too; what cannot be is refused."""
    changes: dict[str, Any] = {}
    for field in dataclasses.fields(config):  # type: ignore[arg-type]
        value = getattr(config, field.name)
        if field.type in WHOLE and value is not None and not isinstance(value, numbers.Integral):
            raise UserError(f"{field.name} is {value!r}, but it is a whole number")
        if isinstance(value, numbers.Real) and value != value:
            raise UserError(f"{field.name} is nan, but it is a number; look where it was computed")
        needed_by = field.metadata.get("needed_by")
        if value is None and field.metadata.get("fact") in facts and (needed_by is None or getattr(config, needed_by)):
            changes[field.name] = facts[field.metadata["fact"]]
        elif dataclasses.is_dataclass(value) and not isinstance(value, type) and (planned := plan(value, facts)) is not value:
            changes[field.name] = planned
    if not changes:
        return config
    with warnings.catch_warnings(action="ignore"):  # what they have to say was said when they were first made
        return dataclasses.replace(config, **changes)  # type: ignore[type-var]


def settled(config: D, settings: Mapping[str, Any]) -> D:
    """A copy with other values of some settings, by dotted name; values may be traced, so none is checked.

    >>> from fedbayes.primitives.training import Training
    >>> settled(Training(), {"lr": 0.5}).lr
    0.5
    """
    changed = copy.copy(config)
    for name, value in settings.items():
        first, _, rest = name.partition(".")
        object.__setattr__(changed, first, settled(getattr(changed, first), {rest: value}) if rest else value)
    return changed
