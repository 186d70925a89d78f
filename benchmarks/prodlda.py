"""ProdLDA on 20 Newsgroups over three silos: SFVI-Avg beside a fit of each silo alone (the SFVI paper's section 4.2).

    FEDBAYES_DATA=… python benchmarks/prodlda.py

writes the table and the topics of docs/results/prodlda.md.
"""

import dataclasses
import sys
import time
from pathlib import Path

import numpy as np

import fedbayes as fb

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "examples"))
import prodlda as model  # noqa: E402

SEEDS = (0, 1, 2)


def fitted(silos, seed):
    """The weights of words in topics above their background, the background, and the seconds of a fit."""
    began = time.perf_counter()
    algorithm = dataclasses.replace(model.algorithm, rounds=model.rounds)
    fit = fb.simulate(algorithm, silos, model.rounds, seed=seed)
    topics, background = np.asarray(fit.shared.eta.mean).reshape(model._TOPICS, -1), np.asarray(fit.shared.theta["background"])
    return topics, background, time.perf_counter() - began


def main():
    silos, words = model.silos(), model.vocabulary()
    counts = np.concatenate([part["counts"] for part in silos.values()])
    setups = {"SFVI-Avg over three silos": silos}
    setups |= {f"{name} alone": {name: part} for name, part in silos.items()}
    lines, shown = [], []
    for setup, parts in setups.items():
        probable, lifted, distinct, seconds = [], [], [], []
        for seed in SEEDS:
            topics, background, took = fitted(parts, seed)
            scores = model.coherence(topics, counts)
            probable.append(np.median(model.coherence(background + topics, counts)))
            lifted.append(np.median(scores))
            top = model.top_words(topics, words)
            distinct.append(len({word for topic in top for word in topic}) / sum(map(len, top)))
            seconds.append(took)
            print(setup, seed, f"probable {probable[-1]:.1f} lifted {lifted[-1]:.1f} {took:.0f} s", flush=True)
            if setup.startswith("SFVI") and seed == 0:
                shown = [f"| {scores[place]:.0f} | {' '.join(top[place])} |" for place in np.argsort(-scores)]
        cells = [f"{np.mean(found):.1f} ± {np.std(found, ddof=1):.1f} ({_each(found)})" for found in (probable, lifted)]
        lines.append(f"| {setup} | {' | '.join(cells)} | {100 * np.mean(distinct):.0f} % | {np.mean(seconds):.0f} |")
    head = [
        "fit",
        "most probable words",
        "words raised most above the background",
        "distinct words among the latter",
        "seconds",
    ]
    table = [f"| {' | '.join(head)} |", "|---" * len(head) + "|", *lines, "", "All 21 topics of seed 0:", ""]
    table += ["| coherence | the ten words that the topic raises most |", "|---|---|", *shown]
    page = ROOT / "docs" / "results" / "prodlda.md"
    text = page.read_text()
    start, end = text.index("<!-- table -->"), text.index("<!-- end -->")
    page.write_text(f"{text[:start]}<!-- table -->\n{chr(10).join(table)}\n{text[end:]}")
    print("\n".join(table))


def _each(values):
    return ", ".join(f"{value:.1f}" for value in values)


if __name__ == "__main__":
    main()
