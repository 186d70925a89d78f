"""Files: a damaged bit of any file that the package writes is without effect or one sentence; so are two processes in one
folder, a full disk and a read-only folder."""

import ast
import collections
import contextlib
import errno
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from conftest import ROOT, Stop, stop_after
from deployed import deployment, parts_of
from hierarchy import partition, population
from hierarchy import silo as one_silo
from table import TABLE

import fedbayes as fb
from fedbayes import files
from fedbayes.deploy.coordinator import Coordinator, Counted
from fedbayes.deploy.site import Site
from fedbayes.engine.clients import Simulation
from fedbayes.engine.local_state import States
from fedbayes.engine.silo_data import plan
from fedbayes.engine.silos import SiloSimulation, SiloStates
from fedbayes.errors import UserError
from fedbayes.report import records, structured
from fedbayes.results.folder import Run
from fedbayes.study.crew import Done
from fedbayes.study.run import read_run

FLIPS, CUTS = 40, 20
ROUNDS = {"rounds": 4, "cohort": 3, "checkpoint_every": 2}


@pytest.fixture(params=[40, pytest.param(200, marks=pytest.mark.slow)], autouse=True)
def flips(request, monkeypatch):
    """Bits that are flipped in a file: a few each time, and all over it in `make test-all`."""
    monkeypatch.setattr(sys.modules[__name__], "FLIPS", request.param)


# The common test: damage a file, read the folder, and compare with what was read before


def damaged(content, cuts):
    """A file with one bit flipped, in places all over it, and cut off."""
    generator = np.random.default_rng(len(content))
    for place in np.linspace(0, len(content) - 1, FLIPS).astype(int):
        flipped = bytearray(content)
        flipped[place] ^= 1 << int(generator.integers(8))
        yield f"byte {place}", bytes(flipped)
    for length in np.linspace(0, len(content) - 1, cuts).astype(int):
        yield f"cut to {length}", content[:length]


def frozen(tree):
    """Everything in a pytree, to the bit."""
    leaves, structure = jax.tree.flatten(tree)
    return str(structure), [(str(np.asarray(leaf).dtype), np.asarray(leaf).tobytes()) for leaf in leaves]


def is_a_sentence(text):
    assert text
    assert "\n" not in text
    return True


def survives(folder, read, names, harmless=(), cuts=CUTS):
    """Damage each of the files; `read` gives what must always be the same, what may be lacking with a word about it, and the
    words."""
    clean = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    times = {path: path.stat().st_mtime_ns for path in clean}
    must, may, said = read()
    must, may = frozen(must), frozen(may)
    refused = collections.Counter()
    for name in names:
        for where, content in damaged(clean[folder / name], cuts):
            (folder / name).write_bytes(content)
            try:
                found, also, words = read()
            except UserError as problem:
                refused[name] += is_a_sentence(str(problem))
            else:
                assert frozen(found) == must, (name, where)
                if words == said:
                    assert frozen(also) == may, (name, where)
                else:
                    refused[name] += all(map(is_a_sentence, words))
            for path in clean:
                if path == folder / name or not path.exists() or path.stat().st_mtime_ns != times[path]:
                    path.write_bytes(clean[path])
                    times[path] = path.stat().st_mtime_ns
        assert refused[name] > (0 if name in harmless else FLIPS // 2), (name, refused)


@contextlib.contextmanager
def warnings_of_runs():
    heard, handler = [], logging.Handler(logging.WARNING)
    handler.emit = lambda record: heard.append(record.getMessage())
    logger = logging.getLogger("fedbayes")
    logger.addHandler(handler)
    try:
        yield heard
    finally:
        logger.removeHandler(handler)


@pytest.fixture
def quick(monkeypatch):
    """Thousands of files are written, and none needs to survive a power cut."""
    monkeypatch.setattr(os, "fsync", lambda file: None)


def resumed(folder, simulation, store, config):
    """Go on from a folder, as every command does that reads a run: state, clients' states and history."""
    start = simulation.state, simulation.round
    simulation.local = store(folder / "local")
    with warnings_of_runs() as heard:
        run = Run(folder, config, resume=True)
        try:
            history = run.restore(simulation)
            if run.finished:
                result = run.outcome(simulation) if "modes" in config else files.read_json(folder / "result.json")
            else:
                result = None
        finally:
            run.close()
            state, round = simulation.state, simulation.round
            simulation.state, simulation.round = start
    result = [result[0], result[1].scores] if isinstance(result, tuple) else result
    return [state, round, result], history, heard


def config_of(folder):
    return {name: value for name, value in files.read_json(folder / "config.json").items() if name != "schema"}


def reported(folder):
    """What the page says, and its notes."""
    record = records.load(folder)
    seen = {name: value for name, value in vars(record).items() if name not in ("notes", "folder", "timing")}
    return [], [seen, record.timing], list(record.notes)


def drawn(folder):
    """What the page takes from posterior.nc."""
    inference, problem = structured._inference_data(records.load(folder))
    return [], None if inference is None else structured.draws_of(inference), [problem] if problem else []


# Run folders of clients


def fit(model, clients, folder, **options):
    return fb.simulate(TABLE["fedper"](model), clients, folder=folder, **{**ROUNDS, **options})


@pytest.fixture(scope="module")
def finished(model, clients, tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished") / "run"
    fit(model, clients, folder, evaluate_every=2)
    files.write_json(folder / "command.json", {"run": ["fedper"]})
    return folder


@pytest.fixture(scope="module")
def unfinished(model, clients, tmp_path_factory):
    folder = tmp_path_factory.mktemp("unfinished") / "run"
    with pytest.raises(Stop):
        fit(model, clients, folder, callbacks=(stop_after(3),))
    return folder


@pytest.fixture(scope="module")
def simulation(model, clients):
    return Simulation(TABLE["fedper"](model).planned(4, **clients.facts), clients, cohort=3)


RESUMED = ["config.json", "metrics.jsonl", "checkpoint.safetensors", "local/states.bin", "local/rounds.bin"]


@pytest.mark.parametrize("state", ["finished", "unfinished"])
def test_a_damaged_run_goes_on_as_it_was_or_not_at_all(state, request, quick, simulation, clients):
    folder = request.getfixturevalue(state)
    config = config_of(folder)

    def read():
        (state, round, result), history, heard = resumed(
            folder, simulation, lambda path: States(simulation.fresh, len(clients), path), config
        )
        own = simulation.local.get(np.arange(len(clients)))
        return [state, round, result, own], history, heard

    more = ["result.json", "scores.safetensors"] if state == "finished" else []
    # Half of the states' file are those of the round before, of clients that were absent, or that no checkpoint has.
    survives(folder, read, RESUMED + more, harmless=("local/states.bin", "local/rounds.bin"))


def test_a_page_leaves_out_what_is_damaged(finished, quick):
    names = ["metrics.jsonl", "scores.safetensors", "result.json", "about.json", "command.json", "config.json"]
    survives(finished, lambda: reported(finished), names)
    survives(finished, lambda: reported(finished), ["timing.jsonl"], cuts=0)  # of times, lines at the end may be lost


def test_a_damaged_run_is_not_opened(finished, quick, clients):
    everyone = np.arange(len(clients))

    def read():
        with warnings_of_runs() as heard:
            fit = fb.open(finished)
        members = vars(fit.members)
        kept = [members["states"].get(everyone), members["unseen"], np.asarray(members["counts"]), members["names"]]
        return [fit.shared.down, fit.shared.local, kept, fit.evaluation.scores, fit.result], fit.history, heard

    survives(finished, read, ["shared.safetensors", "members.json", "result.json"])


def test_a_study_reads_whole_runs_alone(finished, quick, clients):
    end = Done([bool(one) for one in clients.unseen])

    def read():
        result, evaluation = read_run(finished, end)
        return [result, evaluation.scores], [], []

    survives(finished, read, ["result.json", "scores.safetensors"])


# Run folders of silos


@pytest.fixture(scope="module")
def silos(tmp_path_factory):
    folder, data = tmp_path_factory.mktemp("silos") / "run", partition(4, 4, 4)
    algorithm = fb.SFVIAvg(population, one_silo, steps=5)
    fb.simulate(algorithm, data, 6, folder=folder)
    return folder, SiloSimulation(plan(algorithm, data, 6), data)


def test_a_damaged_run_over_silos(silos, quick):
    folder, simulation = silos
    config, fresh = config_of(folder), simulation.states

    def read():
        simulation.states = fresh
        must, may, heard = resumed(folder, simulation, lambda path: SiloStates(simulation, path), config)
        return [*must, simulation.states], may, heard

    survives(folder, read, [*RESUMED[:3], "result.json", "local/0/states.bin", "local/0/rounds.bin"])
    survives(folder, lambda: reported(folder), ["result.json", "metrics.jsonl", "about.json"])
    survives(folder, lambda: drawn(folder), ["posterior.nc"])

    def opened():
        fit = fb.open(folder, algorithm=simulation.algorithm)
        return [fit.shared, list(fit.names)], [], []

    survives(folder, opened, ["shared.safetensors"])


# Deployments


@pytest.fixture(scope="module")
def deployed(model, clients, tmp_path_factory):
    folder = tmp_path_factory.mktemp("deployed")
    coordinator, post = deployment(TABLE["fedper"](model), parts_of(clients), folder, rounds=3)
    coordinator.finish(post)
    return coordinator, post


def test_a_damaged_server_folder(deployed, quick):
    coordinator, _ = deployed
    folder, config = coordinator.folder, deployed[0].kept.config

    def read():
        coordinator.local = Counted(coordinator.experiment.sites)
        with warnings_of_runs() as heard:
            run = Run(folder, config, resume=True)
            try:
                history = run.restore(coordinator)
            finally:
                run.close()
        kept = coordinator.local.commit(coordinator.round)
        return [coordinator.state, coordinator.round, kept, files.read_json(folder / "result.json")], history, heard

    survives(folder, read, ["config.json", "metrics.jsonl", "checkpoint.safetensors", "result.json"])


def test_a_cut_history_does_not_stop_a_server_from_starting(deployed, caplog):
    coordinator, _ = deployed
    path = coordinator.folder / "metrics.jsonl"
    before = path.read_bytes()
    for length in (0, 10, len(before) // 2, len(before) - 1):
        path.write_bytes(before[:length])
        again = Coordinator(coordinator.experiment, coordinator.folder)
        assert again.round == 3
        assert "is damaged" in caplog.text or again.history == coordinator.history
        caplog.clear()
    path.write_bytes(before)


def test_a_damaged_site_folder(deployed, quick):
    coordinator, post = deployed
    site: Site = post.places[1]
    folder = site.folder / coordinator.run
    survives(
        folder,
        lambda: (site.personal(), [], []),
        ["down.safetensors", "states.bin", "rounds.bin"],
        harmless=("states.bin", "rounds.bin"),
    )


# Saved clients, take-away models, comparisons


def test_damaged_clients(clients, tmp_path, quick):
    clients.standardised().save(tmp_path / "kept")

    def read():
        found = vars(fb.Clients.load(tmp_path / "kept"))
        arrays = {name: value for name, value in found.items() if isinstance(value, np.ndarray)}
        return [arrays, str({name: value for name, value in found.items() if name not in arrays})], [], []

    names = [path.name for path in (tmp_path / "kept").iterdir()]
    assert len(names) == 9
    survives(tmp_path / "kept", read, names)


def test_a_damaged_personal_model(finished, model, clients, tmp_path, quick):
    path = tmp_path / "me.safetensors"
    fit(model, clients, finished, evaluate_every=2, resume=True).posterior_of("0").save(path)

    def read():
        mine = fb.Posterior.load(path)
        return [mine.down, mine.local, mine._check()], [repr(mine)], []

    survives(tmp_path, read, ["me.safetensors"])


def test_a_damaged_comparison(tmp_path, quick):
    path = tmp_path / "out.json"
    files.write_json(path, {"results": {"fedavg": [{"metrics": {"global": 0.125, "gap": -3e-05}}]}, "failures": {}})
    survives(tmp_path, lambda: (files.read_json(path), [], []), ["out.json"])


# Older files, and lines that a kill cut off


def test_files_of_schema_1_are_read(tmp_path):
    (tmp_path / "old.json").write_text('{"schema": 1, "rounds": 3}')
    assert files.read_json(tmp_path / "old.json", rounds=int) == {"schema": 1, "rounds": 3}
    (tmp_path / "old.json").write_text('{"schema": 2, "rounds": 3}')
    with pytest.raises(UserError, match="does not match its checksum"):
        files.read_json(tmp_path / "old.json")
    files.write_json(tmp_path / "new.json", {"schema": 3})
    with pytest.raises(UserError, match="has schema 3, but this version reads up to 2; update fedbayes"):
        files.read_json(tmp_path / "new.json")
    files.write_json(tmp_path / "new.json", {"rounds": "three"})
    with pytest.raises(UserError, match="lacks rounds"):
        files.read_json(tmp_path / "new.json", rounds=int)
    (tmp_path / "old.jsonl").write_text('{"round": 1}\n{"round": 2}\n{"rou')
    assert files.read_lines(tmp_path / "old.jsonl") == ([{"round": 1}, {"round": 2}], 0)


def test_a_line_after_one_that_was_cut_off(tmp_path):
    path = tmp_path / "a.jsonl"
    for number in range(3):
        files.append_line(path, {"round": number, "loss": 0.1 * number})
    assert all(set(json.loads(line)) == {"round", "loss", "checksum"} for line in path.read_text().splitlines())
    path.write_bytes(path.read_bytes()[:-9])
    assert files.read_lines(path) == ([{"round": 0, "loss": 0.0}, {"round": 1, "loss": 0.1}], 0)
    files.append_line(path, {"round": 2})
    assert [entry["round"] for entry in files.read_lines(path)[0]] == [0, 1, 2]
    path.write_bytes(path.read_bytes().replace(b"0.1", b"0.2"))
    assert files.read_lines(path) == ([{"round": 0, "loss": 0.0}, {"round": 2}], 1)


# Two processes, full disks, read-only folders


HELD = """
import sys
import fedbayes as fb
clients = fb.data.synthetic(clients=6, rows=10, features=4, classes=2)
def wait(simulation, done):
    if done.round == 3:
        print("there", flush=True)
        sys.stdin.read()
algorithm = fb.FedPer(fb.network("mlp", clients, hidden=(4,)))
fb.simulate(algorithm, clients, 5, folder=sys.argv[1], callbacks=(wait,), checkpoint_every=1)
"""


def test_a_second_process_is_refused_until_the_first_is_dead(tmp_path):
    command = [sys.executable, "-c", HELD, str(tmp_path / "run")]
    first = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    clients = fb.data.synthetic(clients=6, rows=10, features=4, classes=2)
    algorithm = fb.FedPer(fb.network("mlp", clients, hidden=(4,)))
    try:
        assert first.stdout.readline() == "there\n"
        before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
        for how in ({"resume": True}, {"force": True}, {}):
            with pytest.raises(UserError, match=r"another process is working in .*run; wait for it, or choose another folder"):
                fb.simulate(algorithm, clients, 5, folder=tmp_path / "run", **how)
        assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == before
    finally:
        first.send_signal(signal.SIGKILL)
        first.communicate()
    assert fb.simulate(algorithm, clients, 5, folder=tmp_path / "run", resume=True).simulation.round == 5


def test_a_finished_run_is_read_by_many(finished, model, clients):
    with files.locked(finished):
        assert fit(model, clients, finished, evaluate_every=2, resume=True).simulation.round == 4


def test_a_run_that_is_refused_holds_nothing(unfinished, model, clients):
    """Not even while somebody keeps the error, as a notebook does."""
    with pytest.raises(UserError, match="holds an unfinished run") as kept:
        fit(model, clients, unfinished)
    with files.locked(unfinished):
        assert kept.value


def test_silos_hold_their_folder_too(tmp_path):
    data, algorithm = partition(4, 4, 4), fb.SFVIAvg(population, one_silo, steps=5)

    def second(simulation, done):
        with pytest.raises(UserError, match="another process is working in"):
            fb.simulate(algorithm, data, 2, folder=tmp_path / "run", resume=True)
        raise Stop

    with pytest.raises(Stop):
        fb.simulate(algorithm, data, 2, folder=tmp_path / "run", callbacks=(second,))
    with files.locked(tmp_path / "run"):
        pass  # the run that failed let it go


@contextlib.contextmanager
def read_only(folder):
    """A folder that cannot be written to, also not by root, who then is nobody for a while."""
    root, mode = os.geteuid() == 0, folder.stat().st_mode
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)
    for parent in folder.parents:
        if root and not parent.stat().st_mode & 1:
            parent.chmod(parent.stat().st_mode | 0o111)
    if root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)
        for path in (folder, *folder.rglob("*")):
            path.chmod(mode if path.is_dir() else 0o644)


def writers(model, clients, coordinator, post, folder):
    """Each thing that writes to a folder."""
    down = coordinator.experiment.algorithm.broadcast(jax.random.key(0), coordinator.state)
    site = Site(coordinator.experiment, 1, folder, post.places[1].data)
    return {
        "run": lambda: fit(model, clients, folder / "new"),
        "resume": lambda: fit(model, clients, folder / "run", resume=True),
        "site": lambda: site.keep("abc", 3, 3, down),
        "state": lambda: site.train("abc", 1, 0, down),
        "clients": lambda: clients.save(folder / "kept"),
        "json": lambda: files.write_json(folder / "a.json", {}),
        "server": lambda: Coordinator(coordinator.experiment, folder / "server"),
    }


WRITERS = ("run", "resume", "site", "state", "clients", "json", "server")


@pytest.mark.parametrize("what", WRITERS)
def test_a_read_only_folder_is_one_sentence(what, model, clients, deployed, unfinished, tmp_path):
    folder = tmp_path / "folder"
    shutil.copytree(unfinished, folder / "run")
    found = writers(model, clients, *deployed, folder)
    with read_only(folder), pytest.raises(UserError, match=r"cannot write to .*: Permission denied") as problem:
        found[what]()
    assert is_a_sentence(str(problem.value))


@pytest.mark.parametrize("call", ["fsync", "pwrite"])
@pytest.mark.parametrize("what", WRITERS)
def test_a_full_disk_is_one_sentence(what, call, model, clients, deployed, unfinished, tmp_path, monkeypatch):
    folder = tmp_path / "folder"
    shutil.copytree(unfinished, folder / "run")
    found = writers(model, clients, *deployed, folder)

    def full(*given):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, call, full)
    if call == "pwrite" and what not in ("run", "resume", "state"):
        pytest.skip("writes no records in place")
    with pytest.raises(
        UserError, match=r"cannot write to .*: No space left on device; what was written before is intact"
    ) as problem:
        found[what]()
    assert is_a_sentence(str(problem.value))
    monkeypatch.undo()
    assert not list(folder.rglob("*.part"))
    if what == "resume":
        assert fit(model, clients, folder / "run", resume=True).simulation.round == 4


# The commands


@pytest.mark.slow
def test_commands_say_one_sentence(tmp_path):
    def fedbayes(*words):
        return subprocess.Popen(
            [sys.executable, "-m", "fedbayes.cli", *map(str, words)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def ended(process):
        _, err = process.communicate(timeout=300)
        return process.returncode, err

    words = ["run", "fedper", "--cohort", "5", "--hold-out", "2", "--rounds", "2000", "--out", tmp_path / "run"]
    first = fedbayes(*words)
    while not (tmp_path / "run" / "checkpoint.safetensors").exists():
        assert first.poll() is None
        time.sleep(0.1)
    code, err = ended(fedbayes(*words, "--resume"))
    assert code == 2
    assert "another process is working in" in err
    first.send_signal(signal.SIGINT)
    assert ended(first)[0] == 130
    for name, word in (
        ("checkpoint.safetensors", "damaged"),
        ("config.json", "damaged|another"),
        ("local/states.bin", "damaged"),
    ):
        path = tmp_path / "run" / name
        before = path.read_bytes()
        path.write_bytes(bytes(byte ^ 16 for byte in before))
        code, err = ended(fedbayes(*words, "--resume"))
        assert (code, len(err.strip().splitlines())) == (2, 1), err
        assert any(each in err for each in word.split("|"))
        path.write_bytes(before)


# One place that writes


WRITES = {"write_text", "write_bytes", "savez", "savez_compressed", "tofile", "mkdtemp", "NamedTemporaryFile", "fsync"}


def test_no_other_module_writes_files():
    """Apart from files without a name, which go with the process, and logs of Flower's processes."""
    allowed = {
        "open(self.logs / f'{name}.log', 'ab')",
        "open(part, 'xb')",
        "os.fsync(self._states.fileno())",
        "os.fsync(self._tags.fileno())",
    }
    found = []
    for path in sorted((ROOT / "src").rglob("*.py")):
        if path.name == "files.py" and path.parent.name == "fedbayes":
            continue
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if not isinstance(node, ast.Call):
                continue
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            modes = [one.value for one in node.args[-1:] if isinstance(one, ast.Constant) and isinstance(one.value, str)]
            writes = name == "open" and any(set(mode) & set("wax+") and set(mode) <= set("rwaxbt+") for mode in modes)
            on_os = ast.unparse(node.func) in (
                "os.replace",
                "os.rename",
                "os.pwrite",
                "os.write",
                "np.save",
                "shutil.copy",
                "fcntl.flock",
            )
            if (writes or name in WRITES or on_os) and ast.unparse(node) not in allowed:
                found.append(f"{path.name}: {ast.unparse(node)}")
    assert found == []
