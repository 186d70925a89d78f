"""A site's side of a round, without a network: its data, what it keeps, and its answer.

What a site keeps lies in a folder for each run:

    states.bin, rounds.bin     Local after its last two rounds, on the disk before an answer leaves (states.py)
    down.safetensors           the last broadcast, from which the site personalises without asking anybody

Rounds are idempotent. A request says which of the site's rounds the server counted last; what the site did after it is
forgotten, so an answer that was lost, or came too late, leaves no trace, and the same request gives the same answer.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedbayes import files, trees
from fedbayes.data.layout import Layout
from fedbayes.deploy.experiment import Experiment, Final, SiteData
from fedbayes.engine import keys
from fedbayes.engine import round as steps
from fedbayes.engine.choose import Choice
from fedbayes.engine.local_state import States
from fedbayes.errors import UserError
from fedbayes.evaluation.assess import adapted, scored
from fedbayes.evaluation.score import Score
from fedbayes.primitives.dependence import inseparable
from fedbayes.results.posterior import Posterior, RowSpec


class Site:
    """One site of an experiment.

    Args:
        experiment: What the server has too.
        number: Which of the sites this is, from 0 on; it decides the site's random numbers.
        folder: Where it keeps its state.
        data: Its rows, or its silo's data.
    """

    def __init__(self, experiment: Experiment, number: int, folder: Path | str, data: SiteData) -> None:
        if not 0 <= number < experiment.sites:
            raise UserError(f"this site has number {number}, but there are {experiment.sites}: numbers go from 0 on")
        self.experiment, self.number, self.data = experiment, number, experiment.prepared(data)
        self.folder = Path(folder) / f"site{number}"
        self.form, self.arrays = trees.take_apart(self.data.train)

    def train(self, run: str, round: int, counted: int, down: Any) -> Any:
        """The answer to a round's request; `counted` is the last of this site's rounds that the server counted, or 0."""
        with files.locked(self._folder(run), f"site {self.number}"):
            states = self._states(run, counted)
            given = (self._key(round), down, self._own(states), self.arrays)
            up, new, fine = steps.client(self.experiment.algorithm, self.form, *given)
            if not bool(fine):
                raise UserError(f"round {round}: the numbers of site {self.number} are not finite; nothing is sent or kept")
            states.put(np.array([0]), jax.tree.map(lambda leaf: np.asarray(leaf)[None], new), round)
            states.sync()
            return jax.device_get(up)

    def evidence(self, run: str, round: int, counted: int, down: Any) -> Any:
        """The answer to an evidence round: what this silo's data says of each point; nothing is kept."""
        if why := inseparable(self.experiment.structured.structured, self.data.train):
            raise UserError(f"{why}, so draws cannot be weighed element by element, and nothing is told of the evidence")
        own = self._own(self._states(run, counted, looking=True))
        up, _, fine = steps.client(self.experiment.evidence, self.form, self._key(round), down, own, self.arrays)
        if not bool(fine):
            raise UserError(f"the evidence of site {self.number} is not finite; nothing is sent")
        return jax.device_get(up)

    def choose(self, run: str, round: int, counted: int, down: Any) -> Any:
        """The answer to a choosing round: how candidates score on this site's rows; nothing is kept."""
        fresh = self.experiment.local(self.data.train)
        up, _, fine = steps.client(self.experiment.choosing, self.form, self._key(round), down, fresh, self.arrays)
        if not bool(fine):
            raise UserError(f"the scores of site {self.number} are not finite; nothing is sent")
        return jax.device_get(up)

    def score(self, run: str, round: int, counted: int, final: Final) -> dict[str, Score]:
        """The site's test rows scored in each mode, as sums; the broadcast and the choice are kept for `personal`."""
        down, choice = final.down, self._choice(final)
        self.keep(run, round, counted, final)
        if self.data.test is None:
            return {}
        own, key, algorithm = self._own(self._states(run, counted, looking=True)), self._key(round), self.experiment.algorithm
        found = {}
        for mode in self.experiment.scored:
            local = self.experiment.local(self.data.train) if mode == "global" else own
            local = _adapted(algorithm, key, down, choice, own, self.data.train) if mode == "adapted" else local
            found[mode] = jax.device_get(_scored(algorithm, key, down, local, self.data.test))
        return found

    def keep(self, run: str, round: int, counted: int, final: Final) -> None:
        """Put the last broadcast where `personal` finds it."""
        files.save(self._folder(run) / "down.safetensors", final, {"round": round, "counted": counted})

    def _choice(self, final: Final) -> Choice | None:
        return None if final.choice is None else Choice(self.experiment.choosing.settings.names, final.choice)

    def _last(self, run: str | None) -> tuple[Final, States[Any], int]:
        """The last broadcast, the states and the round of a run, by default of the latest."""
        runs = sorted(self.folder.glob("*/down.safetensors"), key=lambda path: path.stat().st_mtime)
        path = self._folder(run) / "down.safetensors" if run is not None else (runs[-1] if runs else None)
        if path is None or not path.exists():
            raise UserError(f"{self.folder} has no finished run to personalise from; it is there after a run's last round")
        advice = "the last round of the federation's next run writes it anew"
        final, told = files.load(path, self.experiment.received("score"), "the broadcast", advice, finite=True)
        return jax.tree.map(jnp.asarray, final), self._states(path.parent.name, told["counted"], looking=True), told["round"]

    def personal(self, run: str | None = None, *, adapted: bool = False) -> tuple[Any, Any]:
        """The last broadcast and the site's own state, by default of its latest run; `adapted` fits it to its rows."""
        final, states, round = self._last(run)
        local = self._own(states)
        if adapted:
            given = (self._key(round), final.down, self._choice(final), local, self.data.train)
            local = _adapted(self.experiment.algorithm, *given)
        return final.down, local

    def posterior(self, *, adapted: bool = False) -> Posterior:
        """The site's own model of its latest run, to predict with or to save."""
        down, local = self.personal(adapted=adapted)
        choice = self._choice(self._last(None)[0])
        outputs = getattr(self.experiment.network.likelihood, "classes", None)
        classes = None if outputs is None else tuple(map(str, range(outputs)))
        train = self.data.train
        rows = RowSpec(train.x.shape[1:], classes, Layout(), (str(train.x.dtype), str(train.y.dtype)))
        made = {"for": f"site {self.number}", "experiment": self.experiment.fingerprint}
        return Posterior(self.experiment.network, down, local, jax.random.key(self.experiment.seed), rows, made, choice)

    def _key(self, round: int) -> Any:
        return keys.fold(keys.of_round(self.experiment.seed, round), np.uint32(self.number))

    def _folder(self, run: str) -> Path:
        if not run.isalnum():
            raise UserError(f"the run is called {run!r}, but a run's name is letters and digits")
        return files.make_folder(self.folder / run)

    def _states(self, run: str, counted: int, *, looking: bool = False) -> States[Any]:
        """The site's states, at the round that the server counted last; if that one is not there, nothing else will do."""
        first = functools.partial(self.experiment.local, self.data.train)
        # Where it has a state of its own, the first one's shapes will do.
        states = States(trees.zeros(jax.eval_shape(first)) if counted else first(), 1, self._folder(run))
        if counted and not states.has(0, counted):
            problem = (
                f"the server counted round {counted} of site {self.number}, but {self._folder(run)} lacks the state after it"
            )
            raise UserError(f"{problem}; give the site the folder that it had, or start the federation's run anew")
        states.rewind(counted, looking=looking)
        return states

    def _own(self, states: States[Any]) -> Any:
        return jax.tree.map(lambda leaf: jnp.asarray(leaf[0]), states.get(np.array([0])))


_adapted, _scored = (jax.jit(one, static_argnums=0) for one in (adapted, scored))
