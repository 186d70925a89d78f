"""Tests run with strict promotion of types and ranks, with shapes checked at run time, and with one compilation cache."""

import gc
import os
from pathlib import Path

ROOT = Path(__file__).parent.parent
# Compiling is most of the time that the tests take; what is compiled here runs for milliseconds.
FLAGS = (
    "--xla_backend_optimization_level=0",
    "--xla_cpu_use_fusion_emitters=false",
    "--xla_cpu_parallel_codegen_split_count=1",
)
os.environ.setdefault("XLA_FLAGS", " ".join(FLAGS))
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".pytest_cache" / "jax"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")

import jax  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402
from jaxtyping import install_import_hook  # noqa: E402

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# Shapes are checked where the numbers are made; elsewhere the checks would only take time.
CHECKED = ["algorithms", "primitives", "engine.reduce", "engine.silos", "evaluation.score"]
CHECKED += [f"models.{name}" for name in ("networks", "convolution", "likelihoods", "predictive", "structured")]
with install_import_hook([f"fedbayes.{name}" for name in CHECKED], "beartype.beartype"):
    from fedbayes.data import Clients
    from fedbayes.models import Categorical, mlp


def pytest_addoption(parser):
    parser.addoption("--method", help="run all tests of one method's row, and write its golden files where they are missing")


SLOW = set((ROOT / "tests" / "slow.txt").read_text().splitlines())
"""Tests that take more than three seconds; `make test-all` runs them. Most, but not all, have a quicker one beside them."""


def pytest_collection_modifyitems(config, items):
    for item in items:
        if item.nodeid in SLOW:
            item.add_marker("slow")
    if name := config.getoption("--method"):
        chosen = [item for item in items if "callspec" in vars(item) and item.callspec.params.get("name") == name]
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = chosen
        if not chosen:
            raise pytest.UsageError(f"there is no test of {name!r}; add its row to tests/table.py")


MEMORY, MORE = 3 * 2**30, 2**30
"""Bytes of a worker beyond which it forgets what it compiled, hundreds of tests would take twice as much; and how many more
it may then take before it does so again, as not all of it comes back."""
allowed = MEMORY


def used():
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGESIZE") if statm.exists() else 0


@pytest.fixture(autouse=True)
def within_memory():
    global allowed
    yield
    if used() > allowed:
        jax.clear_caches()
        gc.collect()
        allowed = max(MEMORY, used() + MORE)


@pytest.fixture(scope="session")
def clients() -> Clients:
    """Six clients of different sizes, two of them unseen, whose rows two classes divide by a line."""
    generator = np.random.default_rng(0)
    counts = [9, 30, 14, 22, 26, 17]
    client = np.repeat(np.arange(6), counts)
    x = generator.normal(size=(len(client), 4)).astype(np.float32)
    y = (x @ np.array([2.0, -1.0, 0.5, 1.0]) > 0).astype(np.int32)
    return Clients.build(x, y, client, test=0.3, name="six").hold_out(2, seed=5)


@pytest.fixture(scope="session")
def model():
    return mlp((4,), Categorical(2), hidden=(8,))


def assert_close(one, other, tolerance, relative=0.0):
    """Every leaf within an absolute tolerance, and a relative one where that is given."""
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(a, b, atol=tolerance, rtol=relative, err_msg=jax.tree_util.keystr(path))


def assert_same(one, other):
    """Every leaf the same, bit for bit."""
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(one), jax.tree.leaves(other), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes(), jax.tree_util.keystr(path)


class Stop(Exception):
    """Instead of a kill."""


def stop_after(round):
    """A callback that ends a run after a round."""

    def callback(simulation, done):
        if done.round == round:
            raise Stop

    return callback


def simulated(algorithm, data, rounds, **options):
    """A simulation after some rounds, with schedules planned for as many."""
    from fedbayes.engine.clients import Simulation

    simulation = Simulation(algorithm.planned(rounds, **data.facts), data, **options)
    for _ in range(rounds):
        simulation.step()
    return simulation
