"""Your own arrays: rows, targets and whose each row is, to predictions for a client. Run: python examples/own_data.py."""

import numpy as np

import fedbayes as fb


def measurements(sites: int = 12, rows: int = 60) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Made-up measurements: a quantity that depends on three features, with a level of its own at each site."""
    generator = np.random.default_rng(0)
    site = np.repeat([f"site-{number:02}" for number in range(sites)], rows)
    x = generator.normal(size=(sites * rows, 3)).astype(np.float32)
    level = np.repeat(generator.normal(scale=2.0, size=sites), rows)
    y = x @ np.array([1.0, -2.0, 0.5]) + level + generator.normal(scale=0.3, size=sites * rows)
    return x, y.astype(np.float32), site


def main(rounds: int = 60) -> fb.Fit:
    x, y, site = measurements()

    # Floats are a numeric target, whole numbers 0…k−1 are classes. A quarter of each client's rows is kept for testing, and two
    # sites never train. Hold out first: standardising must not look at unseen clients.
    clients = fb.Clients.build(x, y, client=site, features=("age", "dose", "weight"), name="sites").hold_out(2).standardised()
    print(clients)

    # For a numeric target the likelihood is normal, with a scale that is learnt. What stays at a site is the last layer.
    model = fb.network("mlp", clients, hidden=(16,))
    algorithm = fb.FedPer(
        model,
        train=fb.Training(epochs=2, batch=20, lr=0.02, momentum=0.9),
        tune=fb.Training(epochs=20, batch=20, lr=0.02, momentum=0.9),
    )
    fit = fb.simulate(algorithm, clients, rounds=rounds)
    print(fit)

    # For a number, a prediction is a mean and a standard deviation.
    for truth, (mean, deviation) in zip(y[:3], fit.predict(x[:3], client="site-00"), strict=True):
        print(f"site-00: {truth:.2f}, predicted {mean:.2f} ± {deviation:.2f}")
    return fit


if __name__ == "__main__":
    main()
