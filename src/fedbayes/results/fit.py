"""`Fit`: a finished run over clients, from memory or from its folder."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from fedbayes.data.clients import Clients
from fedbayes.data.rows import place_of
from fedbayes.engine import keys
from fedbayes.engine.clients import Simulation
from fedbayes.engine.local_state import States
from fedbayes.errors import UserError
from fedbayes.evaluation.assess import NO_GLOBAL, Evaluation
from fedbayes.models.predictive import Uncertainty
from fedbayes.results.posterior import Posterior, RowSpec


@dataclasses.dataclass
class Members:
    """Who the clients of a run were, and what each of them keeps."""

    data: str
    """The name of the data set."""
    names: list[str]
    unseen: np.ndarray
    counts: np.ndarray
    """Training rows of each."""
    states: States[Any]

    def index(self, client: str) -> int:
        """A client's place."""
        return place_of(client, self.names, self.data)

    def own(self, place: int) -> Any:
        """A client's own state."""
        return jax.tree.map(lambda leaf: jnp.asarray(leaf[0]), self.states.get(np.array([place])))


@dataclasses.dataclass
class Fit:
    """A finished run over clients: the shared model, what clients keep, its history and how well it predicts."""

    shared: Posterior
    """The model that everybody receives."""
    members: Members
    evaluation: Evaluation
    result: dict[str, Any]
    history: list[dict[str, Any]]
    trained: Simulation | None = None

    @classmethod
    def of(cls, simulation: Simulation, evaluation: Evaluation, result: dict[str, Any], history: list[dict[str, Any]]) -> Fit:
        """The fit of a simulation as it stands now."""
        data: Clients = simulation.data
        run = {name: result[name] for name in ("algorithm", "data", "model", "fedbayes")}
        made = {"for": "everybody", "rows": None, "rounds": simulation.round, "seed": simulation.seed, **run}
        fresh = jax.tree.map(jnp.asarray, simulation.fresh)
        key = keys.of_round(simulation.seed, simulation.round)
        shared = Posterior(simulation.algorithm, simulation.down(), fresh, key, RowSpec.of(data), made, simulation.choice)
        members = Members(data.name, [str(name) for name in data.names], data.unseen, data.train_counts, simulation.local)
        return cls(shared, members, evaluation, result, history, simulation)

    def __repr__(self) -> str:
        return f"Fit({self.result['algorithm']}, {self.result['rounds']} rounds on {self.result['data']['name']})"

    def __str__(self) -> str:
        return f"{self!r}\n{self.evaluation.table()}"

    def _repr_html_(self) -> str:
        return self.evaluation.html(repr(self))

    @property
    def simulation(self) -> Simulation:
        """The simulation that trained it; a fit that was opened from a folder has none, as it has nobody's rows."""
        if self.trained is None:
            raise UserError("this fit was opened from its folder, without anybody's rows; train it, or give rows to adapt")
        return self.trained

    def draws(self, x: Any, client: str | None = None, *, adapted: bool = False) -> Float[Array, "s n k"]:
        """Posterior draws of the likelihood's parameters for rows `x`.

        Without a client, of the shared model; with one, of its personal model, or, `adapted`, after `adapt` on its training
        rows. A client that never trained has nothing of its own until it adapts.
        """
        return self.posterior_of(client, adapted=adapted).draws(x)

    def predict(self, x: Any, client: str | None = None, *, adapted: bool = False) -> Float[Array, "n c"]:
        """The prediction for rows `x`: probabilities of the labels, or mean and standard deviation of a number."""
        return self.posterior_of(client, adapted=adapted).predict(x)

    def uncertainty(self, x: Any, client: str | None = None, *, adapted: bool = False) -> Uncertainty:
        """How sure the prediction for each row is: total, aleatoric and epistemic, in nats for labels."""
        return self.posterior_of(client, adapted=adapted).uncertainty(x)

    def posterior_of(self, client: str | None = None, *, adapted: bool = False) -> Posterior:
        """The model that predicts for a client, to use or to `save`: its personal one, or, `adapted`, after `adapt`.

        Without a client, the shared model.
        """
        if client is None:
            if adapted:
                raise UserError("adapted needs a client: it is the client's own training rows that the model is fitted to")
            if not self.shared.algorithm.has_global:
                raise UserError(
                    f"{self.shared.algorithm.title} with these settings {NO_GLOBAL}; adapt it to rows, or name a client"
                )
            return self.shared
        place = self.members.index(client)
        key, count = keys.fold(self.shared.key, np.uint32(place)), int(self.members.counts[place])
        found = self.shared.of(self.members.own(place), key, f"client {client}", count)
        if not adapted:
            return found
        rows = jax.tree.map(lambda leaf: jnp.asarray(leaf[0]), self.simulation.data.train([place], max(1, count)))
        return dataclasses.replace(found.adapted(rows, f"client {client}"), made=found.made)

    def adapt(self, x: Any, y: Any = None) -> Posterior:
        """A personal model for somebody's rows, who need not be among the clients.

        Labels may be missing where the method does not look at them, as FedVI.

        >>> import fedbayes as fb
        >>> clients = fb.data.load("digits", hold_out=4)
        >>> fit = fb.simulate(fb.FedVI(fb.network("mlp", clients)), clients, rounds=1, cohort=5)
        >>> x, _ = clients.rows("3")
        >>> fit.adapt(x).predict(x[:2]).shape
        (2, 10)
        """
        return self.newcomer.adapt(x, y)

    @property
    def newcomer(self) -> Posterior:
        """The shared model with the random key of somebody who is none of the clients."""
        return dataclasses.replace(self.shared, key=keys.fold(self.shared.key, np.uint32(len(self.members.names))))

    def replace(self, **settings: Any) -> Fit:
        """This fit with other prediction settings of its algorithm, such as `draws` or `tune`; its evaluation stays.

        >>> import fedbayes as fb
        >>> clients = fb.data.load("digits")
        >>> fit = fb.simulate(fb.BPFed(fb.network("mlp", clients)), clients, rounds=1, cohort=5)
        >>> fit.replace(draws=3).draws(clients.rows("3")[0][:2]).shape
        (3, 2, 10)
        """
        shared, trained = self.shared.replace(**settings), copy.copy(self.trained)
        if trained is not None:
            trained.algorithm = shared.algorithm
        return dataclasses.replace(self, shared=shared, trained=trained)
