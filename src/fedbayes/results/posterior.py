"""`Posterior`: one person's model, which predicts on its own, and its file to take away.

The file is safetensors: what every client receives (`Down`) and what this one keeps (`Local`), with JSON beside them that says
which algorithm and network they belong to, how rows are read, and what the file was made from. It needs neither the run nor its
data. It carries its own prediction for two rows of zeros and ones: whoever loads it must get the same numbers, or is told so.
"""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy
from jaxtyping import Array, Float, PRNGKeyArray

from fedbayes import __version__, files, wire
from fedbayes.algorithm import AnyNetwork, Data
from fedbayes.data.clients import Clients
from fedbayes.data.layout import Layout
from fedbayes.engine import keys
from fedbayes.engine.choose import Choice
from fedbayes.errors import UserError, nearest
from fedbayes.evaluation import assess
from fedbayes.models import Model
from fedbayes.models.predictive import Uncertainty, is_numeric, predictive, quantile, uncertainty
from fedbayes.primitives.training import unlabelled
from fedbayes.results import serialise
from fedbayes.sheets import listing

if TYPE_CHECKING:
    import pandas as pd

KIND = "fedbayes posterior"
GIVE = "give a file that fedbayes personalise or Posterior.save wrote"
SCHEMA = 1  # of the file; it grows when a field changes its meaning
BLOCK = 1024  # rows that `table` predicts at once; images as few as in an evaluation
INTERVAL = (0.05, 0.95)
CLOSE = 1e-3
"""How far the prediction that a file carries may be from the one that is found, as a share: processors round differently."""


class RowSpec(NamedTuple):
    """What a row is."""

    shape: tuple[int, ...]
    classes: tuple[str, ...] | None
    """A name for each class; None for a numeric target."""
    layout: Layout
    """How tables become rows."""
    dtypes: tuple[str, str] = ("float32", "int32")
    """Of x and y, as training had them."""

    @classmethod
    def of(cls, data: Clients) -> RowSpec:
        """Those of a data set."""
        return cls(data.shape, data.classes, data.layout, (str(data.x.dtype), str(data.y.dtype)))

    def data(self, x: Any, y: Any) -> Data:
        """Rows as `adapt` takes them."""
        return Data(jnp.asarray(x), jnp.asarray(np.asarray(y).astype(self.dtypes[1])), jnp.ones(len(x), bool))

    @property
    def example(self) -> Data:
        """Two rows of zeros."""
        return self.data(np.zeros((2, *self.shape), self.dtypes[0]), np.zeros(2))

    def check(self, x: Any) -> np.ndarray:
        """Rows as an array; a data frame's columns are found by name."""
        if hasattr(x, "columns") and self.layout.columns:
            return self.layout.encode(x, "x")
        return checked_rows(x, self.shape)


@dataclasses.dataclass(repr=False, eq=False)
class Posterior:
    """A model with all that it needs to predict: for one client, for somebody's own rows, or the shared one.

    `Fit.posterior_of` and `Fit.adapt` make one; `save` and `load` keep it in a file.

    >>> import tempfile
    >>> import fedbayes as fb
    >>> clients = fb.data.load("digits", hold_out=4)
    >>> fit = fb.simulate(fb.FedPer(fb.network("mlp", clients, hidden=(8,))), clients, rounds=1, cohort=5)
    >>> x, y = clients.rows("3")
    >>> mine = fit.adapt(x, y)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     mine.save(f"{folder}/me.safetensors")
    ...     again = Posterior.load(f"{folder}/me.safetensors")
    >>> again
    Posterior(FedPer with mlp, for 92 rows; rows of (64,) to 10 classes; 1 rounds on digits)
    >>> bool((again.predict(x[:5]) == mine.predict(x[:5])).all())
    True
    """

    algorithm: AnyNetwork
    down: Any
    """What every client receives, in the algorithm's own form."""
    local: Any
    """What this one keeps, in the algorithm's own form."""
    key: PRNGKeyArray
    rows: RowSpec
    made: dict[str, Any] = dataclasses.field(default_factory=dict)
    """What it was made from: for whom, and of which run."""
    choice: Choice | None = None
    """Settings of `adapt` that the federation chose."""

    def __repr__(self) -> str:
        classes = self.rows.classes
        target = "a number" if classes is None else ", ".join(classes) if len(classes) <= 5 else f"{len(classes)} classes"
        aim = f"{self.rows.layout.target}: {target}" if self.rows.layout.target and self.rows.layout.columns else target
        inputs = ", ".join(column.name for column in self.rows.layout.columns[:6]) or f"rows of {self.rows.shape}"
        inputs += ", …" if len(self.rows.layout.columns) > 6 else ""
        where = f"; {self.made['rounds']} rounds on {self.made['data']['name']}" if "data" in self.made else ""
        name = f"{self.algorithm.title} with {self.algorithm.model.name}"
        return f"Posterior({name}, for {self.made.get('for', 'somebody')}; {inputs} to {aim}{where})"

    def _repr_html_(self) -> str:
        return listing(repr(self), [], [[name, str(value)] for name, value in self.facts().items() if value is not None])

    def facts(self) -> dict[str, Any]:
        """What it is, for whom, and what it was made from."""
        reads = ", ".join(column.name for column in self.rows.layout.columns) or f"rows of shape {self.rows.shape}"
        predicts = "a number" if self.rows.classes is None else ", ".join(self.rows.classes)
        found = {"algorithm": self.algorithm.title, "network": self.algorithm.model.name, "for": self.made.get("for")}
        found |= {"training rows": self.made.get("rows"), "reads": reads, "predicts": predicts}
        found["data"] = self.made.get("data", {}).get("name")
        return found | {name: self.made.get(name) for name in ("rounds", "seed", "fedbayes")}

    @property
    def numeric(self) -> bool:
        """Whether it predicts numbers rather than labels."""
        return is_numeric(self.algorithm.likelihood)

    def draws(self, x: Any) -> Float[Array, "s n k"]:
        """Posterior draws of the likelihood's parameters for rows `x`, an array or a data frame."""
        return self._draws(jnp.asarray(self.rows.check(x)))

    def _draws(self, x: Array) -> Float[Array, "s n k"]:
        return self.algorithm.predict(keys.fold(self.key, np.uint32(keys.PREDICT)), self.down, self.local, x)

    def predict(self, x: Any) -> Float[Array, "n c"]:
        """The prediction for rows `x`: probabilities of the labels, or mean and standard deviation of a number."""
        return predictive(self.algorithm.likelihood, self.draws(x))

    def uncertainty(self, x: Any) -> Uncertainty:
        """How sure the prediction for each row is: total, aleatoric and epistemic, in nats for labels."""
        return uncertainty(self.algorithm.likelihood, self.draws(x))

    @property
    def reads_labels(self) -> bool:
        """Whether `adapt` needs labels."""
        return not self.algorithm.labels_optional and wire.adapt_reads_labels(self.algorithm, self.rows.example)

    def adapt(self, x: Any, y: Any = None) -> Posterior:
        """This model fitted to somebody's rows. Labels may be missing where the method does not look at them, as FedVI."""
        x = self.rows.check(x)
        if y is None and self.reads_labels:
            advice = "give y, or train a method that needs none, such as fedvi"
            raise UserError(f"{self.algorithm.title} adapts to rows with labels, but there are none; {advice}")
        labels = np.zeros(len(x)) if y is None else checked_labels(y, self.rows.classes, len(x))
        rows = self.rows.data(x, labels)
        return self.adapted(rows if y is not None else rows._replace(y=unlabelled(rows.y)), f"{len(x)} rows")

    def adapted(self, rows: Data, who: str) -> Posterior:
        """This model after `adapt` on checked rows."""
        local = assess.adapted(self.algorithm, self.key, self.down, self.choice, self.local, rows)
        return self.of(local, self.key, who, len(rows.y))

    def of(self, local: Any, key: PRNGKeyArray, who: str, rows: int | None) -> Posterior:
        """The same shared part with another local state."""
        return dataclasses.replace(self, local=local, key=key, made={**self.made, "for": who, "rows": rows})

    def replace(self, **settings: Any) -> Posterior:
        """This model with other settings of its algorithm, such as `draws`, that leave the form of its states."""
        if unknown := sorted(set(settings) - {field.name for field in dataclasses.fields(self.algorithm)}):
            raise UserError(f"{self.algorithm.title} has no setting {unknown[0]!r}; see its fields")
        algorithm = dataclasses.replace(self.algorithm, **settings)
        try:
            jax.eval_shape(algorithm.predict, self.key, self.down, self.local, self.rows.example.x)
        except Exception as problem:
            why = str(problem).splitlines()[0]
            raise UserError(f"{', '.join(settings)} cannot be changed after training ({why}); train again") from None
        choice = None if self.choice is None else self.choice.without(settings)
        return dataclasses.replace(self, algorithm=algorithm, choice=choice)

    @property
    def columns(self) -> list[str]:
        """The names of what `table` gives."""
        if self.numeric:
            return ["mean", "standard_deviation", "5%", "95%", "aleatoric_variance", "epistemic_variance"]
        added = ["entropy", "mutual_information"]
        return [f"p({name})" if name in added else name for name in self.rows.classes or ("0", "1")] + added

    def table(self, x: Any) -> pd.DataFrame:
        """The whole prediction for rows `x`, with `columns`; compiled, and in blocks of rows: memory is that of one block.

        For labels their probabilities, the entropy and the mutual information, in nats. For a number its mean and standard
        deviation, the 5 % and 95 % quantiles of the mixture over draws, and the aleatoric and epistemic parts of the variance.
        """
        import pandas as pd

        index = x.index if isinstance(x, pd.DataFrame) else None
        x = self.rows.check(x)
        found, block = [], BLOCK if len(self.rows.shape) == 1 else assess.BLOCK
        for start in range(0, len(x), block):
            # Always the same number of rows: one program, and a row's numbers do not depend on how many come after it.
            part = x[start : start + block]
            padded = np.pad(part, [(0, block - len(part))] + [(0, 0)] * (x.ndim - 1), mode="edge")
            found.append(np.asarray(_table(self.algorithm, self.key, self.down, self.local, padded))[: len(part)])
        return pd.DataFrame(np.concatenate(found), index, self.columns)

    def save(self, path: Path | str) -> None:
        """Write the file, whole or not at all."""
        path = Path(path)
        arrays: dict[str, np.ndarray] = {}
        forms = {name: serialise.flatten(getattr(self, name), name, arrays) for name in ("down", "local")}
        arrays["check"] = self._check()
        try:
            algorithm = serialise.encode(self.algorithm)
        except serialise.Own as part:
            algorithm = {"algorithm": f"{self.algorithm.title}{part}"}
        rows = {**self.rows._asdict(), "layout": self.rows.layout.to_json()}
        key = {"implementation": str(jax.random.key_impl(self.key)), "data": jax.random.key_data(self.key).tolist()}
        about = {"kind": KIND, "schema": SCHEMA, "fedbayes": __version__, "jax": jax.__version__, "algorithm": algorithm}
        about |= {} if self.choice is None else {"choice": self.choice.to_json()}
        content = files.pack(arrays, {**about, **forms, "rows": rows, "key": key, "made": self.made})
        # Read before it is written: a file that cannot be read again would be a loss that is found too late.
        model = self.algorithm.model if serialise.needs_model(algorithm) else None
        _read(content, str(path), model, self.algorithm if "algorithm" in algorithm else None)
        files.write(path, content)

    @classmethod
    def load(cls, path: Path | str, *, model: Model | None = None, algorithm: AnyNetwork | None = None) -> Posterior:
        """What `save` wrote.

        Args:
            path: The file.
            model: The network, where it is your own: code is never stored.
            algorithm: The algorithm with its network, where that is your own.
        """
        try:
            content = Path(path).read_bytes()
        except OSError as problem:
            raise UserError(f"{path} cannot be read ({problem.strerror}); {GIVE}") from None
        return _read(content, str(path), model, algorithm)

    def _check(self) -> np.ndarray:
        """The mean over draws for a row of zeros and one of ones."""
        x = np.stack([np.zeros(self.rows.shape, np.float32), np.ones(self.rows.shape, np.float32)])
        return np.asarray(jnp.mean(self._draws(jnp.asarray(x)), axis=0))


@functools.partial(jax.jit, static_argnums=0)
def _table(algorithm: AnyNetwork, key: PRNGKeyArray, down: Any, local: Any, x: Array) -> Float[Array, "n c"]:
    likelihood = algorithm.likelihood
    draws = algorithm.predict(keys.fold(key, np.uint32(keys.PREDICT)), down, local, x)
    said, sure = predictive(likelihood, draws), uncertainty(likelihood, draws)
    more = [sure.total, sure.epistemic]
    if is_numeric(likelihood):
        more = [*(quantile(likelihood, draws, level) for level in INTERVAL), sure.aleatoric, sure.epistemic]
    return jnp.concatenate([said, jnp.stack(more, axis=-1)], axis=-1)


def checked_rows(x: Any, shape: tuple[int, ...]) -> np.ndarray:
    """Rows of features; refused unless they are finite numbers, in one row or more of this shape.

    >>> checked_rows(np.zeros(3), (3,))
    Traceback (most recent call last):
    fedbayes.errors.UserError: x is one row of shape (3,); expected several, so give x[None]
    """
    try:
        x = np.asarray(x)
    except ValueError:
        raise UserError(f"x is {type(x).__name__} whose rows differ in length; expected rows of shape {shape}") from None
    if x.shape == shape and shape != (1,):
        raise UserError(f"x is one row of shape {shape}; expected several, so give x[None]")
    if x.shape[1:] != shape or x.dtype.kind not in "biuf":
        raise UserError(f"x is {x.dtype} of shape {x.shape}; expected finite numbers, in rows of shape {shape}")
    if not len(x):
        raise UserError(f"x has no rows; expected at least one of shape {shape}")
    return Layout().complete(x, "x")


def checked_labels(y: Any, classes: tuple[str, ...] | None, count: int) -> np.ndarray:
    """What is to be predicted for `count` rows: labels by place or by name, as places; or finite numbers.

    >>> checked_labels(["ill", "well"], ("well", "ill"), 2).tolist(), checked_labels([1, 0], ("well", "ill"), 2).tolist()
    ([1, 0], [1, 0])
    """
    y, kind = np.asarray(y), "a finite number" if classes is None else "a label"
    if y.shape != (count,):
        raise UserError(f"y has shape {y.shape}; expected {kind} for each of the {count} rows of x")
    if classes is not None and y.dtype.kind not in "biuf":
        places = {name: place for place, name in enumerate(classes)}
        if strange := [row for row, name in enumerate(y) if str(name) not in places]:
            word = str(y[strange[0]])
            raise UserError(f"y has {word!r} in row {strange[0]}, which is none of the classes; {nearest(word, classes)}")
        return np.array([places[str(name)] for name in y])
    bad = np.ones(count, bool) if y.dtype.kind not in "biuf" else ~np.isfinite(y)
    if classes is not None:
        bad, kind = ~np.isin(y, np.arange(len(classes))), f"a label from 0 to {len(classes) - 1}, or the name of a class"
    if bad.any():
        row = int(bad.argmax())
        raise UserError(f"y has {y[row].item()!r} in row {row}; expected {kind}")
    return y


def _read(content: bytes, where: str, model: Model | None, algorithm: AnyNetwork | None) -> Posterior:
    try:
        arrays, about = safetensors.numpy.load(content), wire.metadata(content)
    except (safetensors.SafetensorError, ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"{where} is no safetensors file, or it is cut off or damaged; copy it again") from None
    if not isinstance(about, dict) or about.get("kind") != KIND:
        raise UserError(f"{where} is not a personal model; {GIVE}")
    if about.get("schema") != SCHEMA:
        newer = not isinstance(about.get("schema"), int) or about["schema"] > SCHEMA
        advice = "update fedbayes" if newer else "make it again with fedbayes personalise"
        there = f"schema {about.get('schema')} (of fedbayes {about.get('fedbayes')})"
        raise UserError(f"{where} has {there}, but this version reads schema {SCHEMA}; {advice}")
    if about.pop("sha256", None) != files.digest(about, arrays):
        raise UserError(f"{where} does not match its checksum: some of its bytes were changed; copy it again or make it again")
    try:
        found = _built(about, arrays, model, algorithm)
    except UserError as problem:
        raise UserError(f"{where}: {problem}") from None
    except (KeyError, TypeError, ValueError, AttributeError) as problem:
        raise UserError(f"{where} lacks a part or holds a wrong one ({problem!r}); make it again") from None
    made_with = f"fedbayes {about['fedbayes']} with jax {about['jax']}"
    reason = f"this version predicts other numbers than {made_with}, which wrote it; use that one"
    if model is not None or algorithm is not None:
        reason = f"the {'model' if algorithm is None else 'algorithm'} that was given is not the one that it was made with"
    try:
        now, then = found._check(), arrays["check"]
    except Exception as problem:  # whatever somebody's own network does with parameters that are not its own
        raise UserError(f"{where}: {reason} ({str(problem).splitlines()[0] if str(problem) else problem!r})") from None
    if now.shape != then.shape or not np.allclose(now, then, rtol=CLOSE, atol=CLOSE, equal_nan=True):
        raise UserError(f"{where}: {reason}")
    return found


def _built(about: dict[str, Any], arrays: Any, model: Model | None, algorithm: AnyNetwork | None) -> Posterior:
    given = about["algorithm"]
    if "algorithm" in given and algorithm is None:
        advice = "load it in Python with Posterior.load(path, algorithm=…)"
        raise UserError(f"its algorithm {given['algorithm']} is somebody's own code and not in the file; {advice}")
    if algorithm is None and model is not None and not serialise.needs_model(given):
        raise UserError("its network is in the file; leave model out")
    built = serialise.decode(given, model) if algorithm is None else algorithm
    rows, classes = about["rows"], None if about["rows"]["classes"] is None else tuple(about["rows"]["classes"])
    dtypes = tuple(rows.get("dtypes", RowSpec._field_defaults["dtypes"]))
    spec = RowSpec(tuple(rows["shape"]), classes, Layout.from_json(rows["layout"]), dtypes)
    down, local = (serialise.unflatten(about[name], arrays, type(built).__module__) for name in ("down", "local"))
    key = jax.random.wrap_key_data(jnp.array(about["key"]["data"], jnp.uint32), impl=about["key"]["implementation"])
    return Posterior(built, down, local, key, spec, about["made"], Choice.from_json(built, about.get("choice")))
