"""Six Cities over two silos: each method beside NUTS on pooled data (the SFVI paper's section S3.1).

    python benchmarks/six_cities.py

writes the table of docs/results/six-cities.md and docs/images/six-cities.png. The judge is NUTS on the pooled data with every
child's effect integrated out by quadrature, which mixes well; NUTS on the model as it is written stands beside it for its time.
 SFVI, SFVI-Avg and PVI run over 300 and 237 children, for three seeds.
"""

import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
from numpyro.infer import MCMC, NUTS

import fedbayes as fb
from fedbayes.models.structured import numbers
from fedbayes.results.pictures import marginals

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "examples"))
import six_cities as model  # noqa: E402

SEEDS = (0, 1, 2)
RICH = fb.Family(moving_scale=True, bound=20)
METHODS = {
    "SFVI, the paper's family": (fb.SFVI(model.population, model.silo, lr=0.05, decay=0.01), 10_000),
    "SFVI, K = 20, moving scale": (fb.SFVI(model.population, model.silo, family=RICH, lr=0.05, decay=0.01), 10_000),
    "PVI, K = 20, moving scale": (fb.PVI(model.population, model.silo, family=RICH, steps=1000), 15),
    "SFVI-Avg, the paper's family": (fb.SFVIAvg(model.population, model.silo, steps=1000, lr=0.02, decay=0.05), 20),
    "SFVI-Avg, K = 20, moving scale": (
        fb.SFVIAvg(model.population, model.silo, family=RICH, steps=1000, lr=0.02, decay=0.05),
        20,
    ),
}


def pooled(data):
    model.silo(model.population(), data)


def integrated(data):
    """The same posterior of beta and omega: a child's likelihood is an integral over its effect (60 points)."""
    beta, omega = model.population()
    points, weights = np.polynomial.hermite_e.hermegauss(60)
    patterns, counts = data
    smoke, ages, wheeze = patterns[:, :1], np.arange(-2.0, 2.0), patterns[:, 1:]
    fixed = beta[0] + beta[1] * smoke + beta[2] * ages + beta[3] * smoke * ages
    logits = fixed[..., None] + jnp.exp(-omega) * points
    each = jnp.sum(jnp.where(wheeze[..., None] == 1, -jnp.logaddexp(0.0, -logits), -jnp.logaddexp(0.0, logits)), axis=1)
    marginal = jax.nn.logsumexp(each + np.log(weights / weights.sum()), axis=1)
    numpyro.factor("likelihood", jnp.sum(counts * marginal))


def nuts(program, data, draws, seed=0):
    began = time.perf_counter()
    sampler = MCMC(
        NUTS(program), num_warmup=1000, num_samples=draws, num_chains=2, chain_method="sequential", progress_bar=False
    )
    sampler.run(jax.random.key(seed), data)
    draws = {name: value for name, value in sampler.get_samples().items() if name in ("beta", "omega")}
    return dict(numbers(jax.block_until_ready(draws))), time.perf_counter() - began


def together(silos):
    return {key: jnp.concatenate([jnp.asarray(part[key]) for part in silos.values()]) for key in ("wheeze", "smoke")}


def main():
    silos = model.silos()
    numpyro.set_host_device_count(1)
    whole = together(silos)
    patterns = np.unique(np.column_stack([whole["smoke"], whole["wheeze"]]), axis=0, return_counts=True)
    judge, judge_seconds = nuts(integrated, patterns, 10_000)
    written, nuts_seconds = nuts(pooled, whole, 3000)
    mean = np.array([judge[name].mean() for name in judge])
    sd = np.array([judge[name].std() for name in judge])
    lines = []
    for name, draws, seconds in (
        ("effects integrated out, 2 × 10,000 draws", judge, judge_seconds),
        ("as written, 2 × 3,000 draws", written, nuts_seconds),
    ):
        found = np.array([(draws[key].mean(), draws[key].std()) for key in judge])
        cells = " | ".join(f"{m:.3f} ± {s:.3f}" for m, s in found)
        off, ratio = np.abs(found[:, 0] - mean) / sd, found[:, 1] / sd
        lines.append(
            f"| NUTS, pooled, {name} | {cells} | {off.max():.2f} | {ratio.min():.2f}–{ratio.max():.2f} | {seconds:.0f} |"
        )
        print(lines[-1], flush=True)
    drawn = {"NUTS on pooled data": judge}
    for method, (algorithm, rounds) in METHODS.items():
        cells, offsets, ratios, seconds, last = [], [], [], [], None
        for seed in SEEDS:
            began = time.perf_counter()
            fit = fb.simulate(algorithm, silos, rounds, seed=seed)
            seconds.append(time.perf_counter() - began)
            last = dict(numbers(fit.draws(20_000, seed=seed)))
            found = np.array([(last[name].mean(), last[name].std()) for name in judge])
            cells.append(found)
            offsets.append((found[:, 0] - mean) / sd)
            ratios.append(found[:, 1] / sd)
            print(
                method,
                seed,
                np.round(offsets[-1], 3),
                np.round(ratios[-1], 3),
                f"{seconds[-1]:.1f} s",
                fit.result["khat"],
                fit.result["ess"],
                flush=True,
            )
            if seed == SEEDS[0]:
                drawn[method] = last
        average = np.mean(cells, axis=0)
        worst, spread = np.abs(offsets).max(), np.std(offsets, axis=0).max()
        texts = " | ".join(f"{m:.3f} ± {s:.3f}" for m, s in average)
        lines.append(
            f"| {method}, {rounds:,} rounds | {texts} | {worst:.2f} ({spread:.2f}) | "
            f"{np.min(ratios):.2f}–{np.max(ratios):.2f} | {np.mean(seconds):.0f} |"
        )
    names = list(judge)
    head = f"| | {' | '.join(names)} | mean off, in sd (spread over seeds) | sd ratio | seconds |"
    table = "\n".join([head, "|---" * (len(names) + 4) + "|", *lines])
    kept = (
        "NUTS on pooled data",
        "SFVI, the paper's family",
        "SFVI, K = 20, moving scale",
        "PVI, K = 20, moving scale",
        "SFVI-Avg, the paper's family",
    )
    (ROOT / "docs" / "images").mkdir(exist_ok=True)
    marginals({name: drawn[name] for name in kept}).savefig(ROOT / "docs" / "images" / "six-cities.png", dpi=110)
    page = ROOT / "docs" / "results" / "six-cities.md"
    text = page.read_text() if page.exists() else "# Six Cities\n\n<!-- table -->\n<!-- end -->\n"
    start, end = text.index("<!-- table -->"), text.index("<!-- end -->")
    page.write_text(f"{text[:start]}<!-- table -->\n{table}\n{text[end:]}")
    print(table)


if __name__ == "__main__":
    main()
