"""ProdLDA, a topic model of documents in silos. Run: fedbayes fit examples/prodlda.py.

    T_jv ~ Normal(0, 3)                                                                        shared: topic j, word v
    W_k ~ Normal(0, 3 I),   counts_k ~ Multinomial(length_k, softmax(b + T' softmax(W_k)))      of each document

and θ is b, the log-frequency of each word. The model is that of the SFVI paper, section 4.2, which prints T_j ~ Dirichlet(β)
and softmax(T W_k); entries of a simplex over 2000 words are near 0, so that this is nearly uniform whatever W_k is, and T are
log-weights here and W_k enters by a softmax, as in Srivastava and Sutton (2017), who named the model.
A word's T says how far the topic raises it above its background, and its words of largest T are what the topic is about.

The documents are the posts of 20 Newsgroups where FEDBAYES_DATA names a folder with 20newsgroups/20news_bow2000.npz, and else
drawn from four known topics over 40 words. They are dealt at random to three silos of equal size.
"""

import functools
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist

import fedbayes

_POSTS = Path(os.environ.get("FEDBAYES_DATA", "")) / "20newsgroups" / "20news_bow2000.npz"
_TOPICS = 21 if _POSTS.is_file() else 4
_LONGEST = 3500 if _POSTS.is_file() else 40  # words in a document, at most
_HIDDEN = 100  # units of the encoder
_BATCH = 200  # documents in a step
_SPREAD = 3.0  # of W: a document is about few topics
_NARROWEST = -4.0  # log-scale of q(W)
_SCALE = 3.0  # of T: wide, as one topic may have a word ten times as often as another


def population():
    words = len(vocabulary())
    background = numpyro.param("background", jnp.zeros(words))
    return background + numpyro.sample("T", dist.Normal(0.0, _SCALE).expand([_TOPICS, words]).to_event(2))


def silo(population, data):
    with _documents(data) as rows:
        W = numpyro.sample("W", dist.Normal(0.0, _SPREAD).expand([_TOPICS]).to_event(1))
        counts = data["counts"][rows].astype(jnp.int32)
        likelihood = dist.Multinomial(counts.sum(axis=1), logits=jax.nn.softmax(W) @ population, total_count_max=_LONGEST)
        numpyro.sample("counts", likelihood, obs=counts)


def encoder(data):
    """q(W_k) by a network with one hidden layer: means and log-scales, (documents, topics) each.

    Left to itself, q(W) of most topics soon becomes its prior, and these topics are alike and stay so. Hence means are
    standardised over the documents of the step, which keeps every topic in use, and no scale is larger than the prior's.
    """
    with _documents(data) as rows:
        x = jnp.log1p(data["counts"][rows].astype(jnp.float32))
    x = x / jnp.maximum(jnp.linalg.norm(x, axis=1, keepdims=True), 1e-6)
    first = numpyro.param("encoder.first", _normal(0, (x.shape[1], _HIDDEN), 0.13))
    second = numpyro.param("encoder.second", _normal(1, (_HIDDEN, 2 * _TOPICS), 0.1))
    hidden = jax.nn.relu(x @ first + numpyro.param("encoder.bias", jnp.zeros(_HIDDEN)))
    mean, width = jnp.split(hidden @ second, 2, axis=1)
    width = width + numpyro.param("encoder.width", jnp.zeros(_TOPICS))
    mean = _SPREAD * (mean - mean.mean(axis=0)) / jnp.sqrt(mean.var(axis=0) + 1e-6)  # a root of 0 has no gradient
    # In single precision a scale of e⁻¹⁷ is lost beside a mean of 30, and a few odd documents would get there.
    return {"documents": (mean, jnp.maximum(jnp.log(_SPREAD) - jax.nn.softplus(width), _NARROWEST))}


def silos():
    counts, _ = _corpus()
    size = len(counts) // 3
    order = np.random.default_rng(0).permutation(len(counts))
    return {f"silo {number}": {"counts": counts[order[number * size : (number + 1) * size]]} for number in range(3)}


def vocabulary():
    return _corpus()[1]


def coherence(topics, counts, top=10):
    """UMass coherence of each topic (Mimno et al. 2011): Σ_{i>j} log (D(w_i, w_j) + 1) / D(w_j) over its `top` words.

    D counts the documents that have a word, or both. Nearer to zero is better, but words that are common everywhere score well
    also where they say nothing: compare topics that have few words in common.
    """
    present = (np.asarray(counts) > 0).astype(np.float32)
    scores = []
    for topic in np.asarray(topics):
        chosen = present[:, np.argsort(-topic)[:top]]
        together = chosen.T @ chosen
        ratios = np.log((together + 1) / np.maximum(np.diag(together), 1))  # row i, column j
        scores.append(np.tril(ratios, -1).sum())
    return np.array(scores)


def top_words(topics, vocabulary, count=10):
    """The words of highest weight in each topic, best first."""
    return [[str(vocabulary[word]) for word in np.argsort(-topic)[:count]] for topic in np.asarray(topics)]


def _documents(data):
    count = data["counts"].shape[0]
    return numpyro.plate("documents", count, subsample_size=min(_BATCH, count))


def _normal(number, shape, scale):
    # From a fixed key: silos that start from different networks would find the topics in different orders.
    return scale * jax.random.normal(jax.random.key(number), shape)


@functools.cache
def _corpus():
    """Counts of the documents that are not empty, in bytes to keep them small, and the words."""
    if not _POSTS.is_file():
        return _synthetic()
    with np.load(_POSTS) as arrays:
        counts = np.zeros(arrays["shape"], np.uint8)
        rows = np.repeat(np.arange(len(counts)), np.diff(arrays["indptr"]))
        counts[rows, arrays["indices"]] = arrays["data"]
        words = arrays["vocab"].astype(str)
    return counts[counts.any(axis=1)], words


def _synthetic(documents=600, words_each=10, topics=4, length=40):
    """Each topic has words of its own, named after it, which make nine tenths of a document about it."""
    draw = np.random.default_rng(0)
    about = draw.integers(topics, size=documents)
    own = np.repeat(np.eye(topics), words_each, axis=1) / words_each
    counts = np.stack([draw.multinomial(length, 0.9 * own[topic] + 0.1 / own.shape[1]) for topic in about])
    return counts.astype(np.uint8), np.array([f"{name}{place}" for name in "abcd" for place in range(words_each)])


algorithm = fedbayes.SFVIAvg(population, silo, family=fedbayes.Family.mean_field(encoder=encoder), steps=50, decay=1.0)
rounds = 90
