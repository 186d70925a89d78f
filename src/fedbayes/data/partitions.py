"""Partitions: which client each row goes to, as pure functions of the labels and a seed.

Each returns one client for each row, 0..clients-1, or -1 for a row that no client gets. `parse` reads the short form that
the command line takes, such as `shards:5`; `follow` gives the rows of an official test set to the clients in the same way.
"""

from __future__ import annotations

import dataclasses
import difflib

import numpy as np

from fedbayes.errors import UserError


def iid(labels: np.ndarray, clients: int, seed: int = 0) -> np.ndarray:
    """Rows at random, the same number to each client (within one).

    >>> np.bincount(iid(np.zeros(7), clients=3)).tolist()
    [3, 2, 2]
    """
    _enough(labels, clients, 1)
    return np.random.default_rng(seed).permutation(np.arange(len(labels)) % clients)


def shards(labels: np.ndarray, clients: int, per_client: int = 2, seed: int = 0) -> np.ndarray:
    """Rows sorted by label and cut into clients * per_client shards, of which each client gets `per_client`.

    McMahan et al. 2017, "Communication-efficient learning of deep networks from decentralized data", section 3. FedHB (Kim and
    Hospedales 2023) takes 100 clients with 2, 5 or 10 shards.

    >>> client = shards(np.repeat([0, 1, 2, 3], 6), clients=4, per_client=1)
    >>> np.bincount(client).tolist()
    [6, 6, 6, 6]
    """
    _enough(labels, clients, per_client, f"{clients} clients with {per_client} shards each")
    rng, client = np.random.default_rng(seed), np.empty(len(labels), np.int64)
    order = rng.permutation(len(labels))
    order = order[np.argsort(labels[order], kind="stable")]
    owner = rng.permutation(np.repeat(np.arange(clients), per_client))
    client[order] = np.repeat(owner, [len(part) for part in np.array_split(order, len(owner))])
    return client


def dirichlet(labels: np.ndarray, clients: int, alpha: float = 0.5, minimum: int = 4, seed: int = 0) -> np.ndarray:
    """The rows of each label divided over the clients by proportions from Dirichlet(alpha).

    Yurochkin et al. 2019, "Bayesian nonparametric federated learning of neural networks", section 4; small alpha makes clients
    differ in labels and in size. Rows then move from the largest client until each has at least `minimum`.

    >>> client = dirichlet(np.arange(600) % 3, clients=10, alpha=0.1, minimum=5)
    >>> bool(np.bincount(client, minlength=10).min() >= 5)
    True
    """
    if not alpha > 0:
        raise UserError(f"dirichlet:{alpha} is not a concentration; expected a number above 0, such as 0.3")
    minimum = min(minimum, max(1, len(labels) // max(1, clients)))
    _enough(labels, clients, minimum)
    rng = np.random.default_rng(seed)
    client = np.empty(len(labels), np.int64)
    for label in np.unique(labels):
        rows = rng.permutation(np.flatnonzero(labels == label))
        cuts = np.rint(np.cumsum(rng.dirichlet(np.full(clients, alpha))[:-1]) * len(rows)).astype(np.int64)
        for owner, part in enumerate(np.split(rows, cuts)):
            client[part] = owner
    counts = np.bincount(client, minlength=clients)
    for small in np.flatnonzero(counts < minimum):
        while counts[small] < minimum:
            largest = counts.argmax()
            client[rng.choice(np.flatnonzero(client == largest))] = small
            counts[small] += 1
            counts[largest] -= 1
    return client


def labels_per_client(labels: np.ndarray, clients: int, k: int = 2, seed: int = 0) -> np.ndarray:
    """Each client holds k labels, each label as many clients as any other (within one), which share its rows equally.

    The split of FedRep (Collins et al. 2021) and of BPFed's 10 clients with 5 of 10 labels.

    >>> labels = np.arange(1000) % 10
    >>> client = labels_per_client(labels, clients=10, k=5)
    >>> [len(np.unique(labels[client == i])) for i in range(3)]
    [5, 5, 5]
    """
    values = np.unique(labels)
    if not 1 <= k <= len(values) or clients * k < len(values):
        expected = f"expected between {-(-len(values) // max(1, clients))} and {len(values)} labels per client"
        raise UserError(f"labels:{k} cannot share {len(values)} labels over {clients} clients; {expected}")
    rng = np.random.default_rng(seed)
    holders: list[list[int]] = [[] for _ in values]
    for owner in range(clients):
        fewest_first = np.lexsort((rng.random(len(values)), np.array([len(owners) for owners in holders])))
        for position in fewest_first[:k]:
            holders[position].append(owner)
    client = np.empty(len(labels), np.int64)
    for value, owners in zip(values, holders, strict=True):
        rows = rng.permutation(np.flatnonzero(labels == value))
        client[rows] = rng.permutation(owners)[np.arange(len(rows)) % len(owners)]
    empty = np.setdiff1d(np.arange(clients), client)
    if len(empty):
        raise UserError(f"labels:{k} leaves {len(empty)} of {clients} clients without rows; take fewer clients or more rows")
    return client


def majority(labels: np.ndarray, clients: int, q: float = 0.9, seed: int = 0) -> np.ndarray:
    """Clients of equal size; a share q of a client's rows has one label, the others are spread over the other labels.

    SFVI (Hassan et al. 2024) takes 10 or 50 clients and q = 0.9 on MNIST. Labels have main clients in proportion to their rows.
    Clients are as large as the scarcest label allows; what remains is left out.

    >>> labels = np.arange(1000) % 10
    >>> client = majority(labels, clients=10, q=0.9)
    >>> sorted(np.bincount(labels[client == 0], minlength=10).tolist())[-1]
    90
    """
    if not 0 < q <= 1:
        raise UserError(f"majority:{q} is not a share; expected a number above 0 and at most 1, such as 0.9")
    _enough(labels, clients, 1)
    rng = np.random.default_rng(seed)
    values, inverse, counts = np.unique(labels, return_inverse=True, return_counts=True)
    mains = apportion(counts / counts.sum() * clients, rng)  # how many clients have this main label
    size = len(labels) // clients
    while size and not _fits(counts, mains, size, round(q * size)):
        size -= 1
    own = round(q * size)
    if not own:
        raise UserError(f"majority:{q} leaves {clients} clients without rows of their label; take fewer clients")
    main = rng.permutation(np.repeat(np.arange(len(values)), mains))
    pools = [rng.permutation(np.flatnonzero(inverse == value)).tolist() for value in range(len(values))]
    client = np.full(len(labels), -1)
    for owner in range(clients):
        client[[pools[main[owner]].pop() for _ in range(own)]] = owner
    left = np.array([len(pool) for pool in pools])
    for _ in range(size - own):
        for owner in rng.permutation(clients):
            # From the fullest other label: the minority stays even, and no client is left with only its own label to take.
            weight = np.where((np.arange(len(values)) == main[owner]) & (left < left.sum()), -1, left + rng.random(len(values)))
            source = int(weight.argmax())
            client[pools[source].pop()] = owner
            left[source] -= 1
    return client


def pachinko(
    labels: np.ndarray, coarse: np.ndarray, clients: int, alpha: float = 0.1, beta: float = 10.0, seed: int = 0
) -> np.ndarray:
    """Pachinko allocation over coarse and fine labels; `coarse` gives the coarse label of each fine one.

    Reddi et al. 2020, "Adaptive federated optimization", appendix F (CIFAR-100, alpha 0.1, beta 10): a client draws
    Dirichlet(alpha) over the coarse labels and, under each, Dirichlet(beta) over its fine labels, then rows without
    replacement; a label without rows left is removed and the rest renormalised.

    >>> fine = np.arange(400) % 8
    >>> client = pachinko(fine, np.arange(8) // 2, clients=4)
    >>> np.bincount(client).tolist()
    [100, 100, 100, 100]
    """
    _enough(labels, clients, 1)
    rng = np.random.default_rng(seed)
    pools = [rng.permutation(np.flatnonzero(labels == fine)).tolist() for fine in range(len(coarse))]
    left = np.array([len(pool) for pool in pools])
    groups = np.unique(coarse, return_inverse=True)[1]
    client = np.full(len(labels), -1)
    for owner in range(clients):
        root = rng.dirichlet(np.full(groups.max() + 1, alpha))
        leaves = np.empty(len(coarse))
        for group in range(len(root)):
            leaves[groups == group] = rng.dirichlet(np.full(np.count_nonzero(groups == group), beta))
        need = len(labels) // clients
        while need:
            for fine in rng.choice(len(coarse), need, p=_path(root, leaves, groups, left > 0)):
                client[pools[fine].pop()] = owner
                left[fine] -= 1
                need -= 1
                if not left[fine]:
                    break  # from here on the probabilities are others
    return client


def by_column(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """One client for each value of a column, and the values as names.

    >>> client, names = by_column(np.array(["north", "south", "north"]))
    >>> client.tolist(), names.tolist()
    ([0, 1, 0], ['north', 'south'])
    """
    names, client = np.unique(values, return_inverse=True)
    return client, names.astype(str)


def follow(labels: np.ndarray, client: np.ndarray, test_labels: np.ndarray, clients: int, seed: int = 0) -> np.ndarray:
    """Clients for the rows of an official test set: of each label, in proportion to the clients' training rows of that label.

    So a client is tested on the distribution of labels that it trains on, as with FedHB's test shards.

    >>> train, test = np.array([0, 0, 0, 0, 1, 1]), np.array([0, 0, 1, 1])
    >>> follow(train, np.array([0, 0, 0, 0, 1, 1]), test, clients=2).tolist()
    [0, 0, 1, 1]
    """
    rng = np.random.default_rng([seed, 2])
    result = np.full(len(test_labels), -1)
    for label in np.unique(test_labels):
        rows = rng.permutation(np.flatnonzero(test_labels == label))
        here = np.bincount(client[(labels == label) & (client >= 0)], minlength=clients)
        if here.sum():
            result[rows] = np.repeat(np.arange(clients), apportion(here / here.sum() * len(rows), rng))
    return result


def apportion(shares: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Whole numbers with the same sum as `shares`: rounded down, the rest to the largest remainders, ties at random."""
    whole = np.floor(shares + 1e-9).astype(np.int64)
    rest = round(float(shares.sum())) - int(whole.sum())
    largest = np.lexsort((rng.random(len(shares)), -np.round(shares - whole, 9)))
    whole[largest[:rest]] += 1
    return whole


def _fits(counts: np.ndarray, mains: np.ndarray, size: int, own: int) -> bool:
    """Whether there are enough rows of each main label, and then enough of the other labels for its clients."""
    left, others = counts - mains * own, mains * (size - own)
    return bool((left >= 0).all() and (others <= left.sum() - left).all() and others.sum() <= left.sum())


def _enough(labels: np.ndarray, clients: int, each: int, what: str = "") -> None:
    if clients < 1 or each < 1:
        raise UserError(f"cannot divide rows over {clients} clients with {each} part(s) each; expected at least one of both")
    if clients * each > len(labels):
        what = what or (f"{clients} clients" if each == 1 else f"{clients} clients with at least {each} rows each")
        raise UserError(f"{what} need {clients * each} rows but there are {len(labels)}; take fewer clients")


def _path(root: np.ndarray, leaves: np.ndarray, groups: np.ndarray, alive: np.ndarray) -> np.ndarray:
    """Probability of each fine label: of its coarse label among those with rows left, times its own among its siblings."""
    inner = np.where(alive, leaves, 0.0)
    sums = np.bincount(groups, inner)
    outer = np.where(sums > 0, root, 0.0)
    if not outer.sum() > 0:  # what was likely has run out
        outer = (sums > 0).astype(float)
    return np.asarray((outer / outer.sum())[groups] * inner / np.where(sums > 0, sums, 1.0)[groups])


FORMS = {
    "iid": "iid",
    "shards": "shards:5 (5 per client)",
    "dirichlet": "dirichlet:0.3 (alpha)",
    "labels": "labels:2 (labels per client)",
    "majority": "majority:0.9 (share of the main label)",
    "pachinko": "pachinko (coarse and fine labels)",
}


@dataclasses.dataclass(frozen=True)
class Partition:
    """A partition by name with its one number, as `parse` reads it."""

    kind: str
    """A key of `FORMS`."""
    value: float | None = None
    """Shards or labels per client, alpha, or the share of the main label; None for the function's default."""

    def __call__(self, labels: np.ndarray, clients: int, seed: int = 0, coarse: np.ndarray | None = None) -> np.ndarray:
        """A client for each row."""
        if self.kind != "iid" and labels.dtype.kind == "f":
            raise UserError(f"partition {self} needs classes but the target is numeric; use iid or a client column")
        if self.kind == "pachinko":
            if coarse is None:
                raise UserError("partition pachinko needs coarse and fine labels, which only cifar100 has; try dirichlet:0.1")
            return pachinko(labels, coarse, clients, self.value or 0.1, seed=seed)
        if self.kind in ("shards", "labels"):
            return (shards if self.kind == "shards" else labels_per_client)(labels, clients, int(self.value or 2), seed)
        if self.kind == "majority":
            return majority(labels, clients, self.value or 0.9, seed)
        return iid(labels, clients, seed) if self.kind == "iid" else dirichlet(labels, clients, self.value or 0.5, seed=seed)

    def __str__(self) -> str:
        return self.kind if self.value is None else f"{self.kind}:{self.value:g}"


def parse(spec: str) -> Partition:
    """The partition that a short form such as `shards:5` names.

    >>> parse("shards:5")
    Partition(kind='shards', value=5.0)
    >>> parse("shard:5")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    fedbayes.errors.UserError: unknown partition 'shard:5', did you mean shards? choose one of iid, shards:5 (5 per client), ...
    """
    kind, _, number = spec.strip().partition(":")
    if kind not in FORMS:
        near = difflib.get_close_matches(kind, FORMS, n=1)
        hint = f", did you mean {near[0]}?" if near else ";"
        raise UserError(f"unknown partition {spec!r}{hint} choose one of {', '.join(FORMS.values())}")
    if not number:
        return Partition(kind)
    try:
        value = float(number)
    except ValueError:
        value = np.nan
    whole = kind in ("shards", "labels")
    if kind == "iid" or not 0 < value < np.inf or (whole and value != int(value)):
        raise UserError(f"partition {spec!r} has a number that does not fit; write {FORMS[kind]}")
    return Partition(kind, value)
