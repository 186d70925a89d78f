"""The runs of a study, one after another in this process or side by side in several.

A worker is a process of its own, `python -m fedbayes.study.crew`, that never shared JAX with its parent: tasks come in as lines
of JSON, rounds and outcomes go out as lines of JSON, scores stay in the run's folder. It ends at once when its parent is gone.
The process pools of concurrent.futures and loky do neither: one worker that is killed fails every task, and workers outlive a
parent that is killed. A pool of threads does the scheduling, with one worker for each thread.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import IO, Any, NamedTuple

import msgspec

from fedbayes import files
from fedbayes.data import Clients
from fedbayes.errors import UserError
from fedbayes.results.loop import stop_after_round
from fedbayes.results.simulate import simulate
from fedbayes.results.trackers import tracker
from fedbayes.study.options import DataOptions, RunOptions, arguments, build, default, override
from fedbayes.study.study import Job


class Done(NamedTuple):
    """The end of a run: who was unseen, or the sentence that says why it failed."""

    unseen: list[bool] | None = None
    failure: str | None = None


class Task(NamedTuple):
    """A job, where its folder lies, and how it is kept."""

    job: Job
    folder: str
    force: bool = False
    track: tuple[str, ...] = ()


Progress = Callable[[Job, int], None]


def perform(task: Task, progress: Callable[[int], None]) -> Done:
    """Do one run, or read it where it is finished; `progress` gets its round."""
    try:
        done = _perform(task, progress)
    except UserError as problem:
        done = Done(failure=str(problem))
    progress(task.job.run.rounds)  # also where it was finished before, or failed: it takes no more time
    return done


def _perform(task: Task, progress: Callable[[int], None]) -> Done:
    job, folder = task.job, Path(task.folder) / task.job.place
    data = clients(job.data, job.validation, 0 if job.validation is None else job.seed)
    algorithm = override(default(job.algorithm, job.model), job.settings)
    network = algorithm.model.name
    built = dataclasses.replace(algorithm, model=build(algorithm.model, data, job.run.likelihood))
    config: dict[str, Any] = {"network": network, **({} if job.validation is None else {"validation": job.validation})}
    keeps: dict[str, Any] = {"folder": folder, "resume": not task.force, "force": task.force, "config": config}
    keeps["callbacks"] = (lambda simulation, _: progress(simulation.round), *(tracker(one, job.place) for one in task.track))
    fit = simulate(built, data, job.run.rounds, seed=job.seed, **job.run.keywords, **keeps)
    if job.validation is None:
        files.write_json(folder / "command.json", {"run": as_run(job, algorithm)})
    return Done(fit.evaluation.unseen.tolist())


def as_run(job: Job, algorithm: Any) -> list[str]:
    """What `fedbayes run` takes to do the same; commands that read a run's folder build it again from this."""
    held = job.data.hold_out  # one name that is a number would be read as a count; a name may be given twice
    data = dataclasses.replace(job.data, hold_out=2 * held) if isinstance(held, tuple) and len(held) == 1 else job.data
    given = [*arguments(data, DataOptions()), *arguments(job.run, RunOptions()), "--seed", str(job.seed)]
    return [job.algorithm, *given, *arguments(algorithm, default(job.algorithm))]


@functools.lru_cache(maxsize=1)
def clients(options: Any, validation: float | None, seed: int) -> Clients:
    """The rows of a job; the last that were loaded are kept, since the runs on the same rows follow one another."""
    data: Clients = options.load()
    return data if validation is None else data.validation(validation, seed)


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def usual_processes(tasks: Sequence[Task]) -> int:
    """As many as there are cores and runs that are not finished; one where JAX has another device than the processor."""
    elsewhere = importlib.util.find_spec("jax_plugins") is not None and os.environ.get("JAX_PLATFORMS") != "cpu"
    left = sum(task.force or not (Path(task.folder) / task.job.place / "result.json").exists() for task in tasks)
    return 1 if elsewhere else max(1, min(cores(), left))


def perform_all(tasks: Sequence[Task], processes: int, progress: Progress) -> list[Done]:
    """Do all runs; one that fails does not stop the others. Ctrl-C ends the rounds that run and leaves all to be resumed."""
    if processes == 1 or len(tasks) < 2:
        return [perform(task, functools.partial(progress, task.job)) for task in tasks]
    return Crew(tasks, min(processes, len(tasks)), progress).run()


class Crew:
    """Workers that take task after task."""

    def __init__(self, tasks: Sequence[Task], size: int, progress: Progress) -> None:
        self.tasks, self.size, self.progress = tasks, size, progress
        self.workers: set[Worker] = set()
        self.idle: queue.SimpleQueue[Worker] = queue.SimpleQueue()
        self.lock, self.stopped = threading.Lock(), False

    def run(self) -> list[Done]:
        """Until all are done."""
        # An interrupt raised here could be lost in what JAX does while Python collects garbage.
        with stop_after_round() as stopped, ThreadPoolExecutor(self.size) as threads:
            try:
                ends = [threads.submit(self._perform, task) for task in self.tasks]
                while wait(ends, 0.05).not_done and not stopped():
                    pass
                if not all(end.done() for end in ends):
                    self._stop(signal.SIGINT)
                    wait(ends, 60)
                    raise KeyboardInterrupt
            except BaseException:  # also a second Ctrl-C
                self._stop(signal.SIGKILL)
                raise
            finally:
                threads.shutdown()
                for worker in self.workers:
                    worker.close()
        return [end.result() or Done(failure="it was not started") for end in ends]

    def _stop(self, number: int) -> None:
        with self.lock:
            self.stopped = True
            for worker in self.workers:
                worker.process.send_signal(number)

    def _perform(self, task: Task) -> Done | None:
        """Give a task to a worker that is idle, or to a new one."""
        with self.lock:
            if self.stopped:
                return None
            if self.idle.empty():
                self.workers.add(worker := Worker(max(1, cores() // self.size)))
            else:
                worker = self.idle.get()
        done = worker.perform(task, functools.partial(self.progress, task.job))
        if done is not None and worker.process.poll() is None:
            self.idle.put(worker)
        else:
            with self.lock:
                self.workers.discard(worker)
            worker.close()
        return done


class Worker:
    """A process that does runs, seen from its parent."""

    def __init__(self, threads: int) -> None:
        self.words: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  # closed with the worker
        # XLA's pools take their size from this; the numbers do not depend on it.
        environment = {**os.environ, "PJRT_NPROC": str(threads)}
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "fedbayes.study.crew"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.words,
            env=environment,
            start_new_session=True,  # Ctrl-C is for the parent, which tells its workers
            pass_fds=_locks,
        )

    def perform(self, task: Task, progress: Callable[[int], None]) -> Done | None:
        """One run; None where it was stopped."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(msgspec.json.encode(task) + b"\n")
            self.process.stdin.flush()
            for line in self.process.stdout:
                answer = msgspec.json.decode(line, type=int | Done | None)
                if not isinstance(answer, int):
                    return answer
                progress(answer)
        code = self.process.wait()
        if code in (-signal.SIGINT, 130):
            return None
        self.words.seek(0)
        last = self.words.read().decode(errors="replace").strip().splitlines()
        why = "it was killed, perhaps for want of memory" if code == -signal.SIGKILL else (last or ["it said nothing"])[-1]
        return Done(failure=f"its process ended with code {code}: {why}; --processes 1 shows more")

    def close(self) -> None:
        """Let it end."""
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()
        self.process.wait()
        self.words.close()


_locks: list[int] = []
"""Open files whose lock the workers hold too, so that nobody else starts while one of them lives on."""


@contextlib.contextmanager
def alone(folder: Path, wait: float = 10.0) -> Iterator[None]:
    """Hold a folder against others that would write the same runs; a worker whose parent was just killed has time to end."""
    with files.locked(folder, wait=wait) as file:
        _locks.append(file)
        try:
            yield
        finally:
            _locks.remove(file)


def main() -> None:
    """A worker: jobs from its input, answers to its output, all other words to its error stream."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    tasks: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def listen() -> None:
        for line in sys.stdin.buffer:
            tasks.put(line)
        tasks.put(b"")
        busy.wait()  # the parent is gone in the middle of a run, which can be resumed at any moment
        os._exit(1)

    def answer(content: int | Done | None) -> None:
        answers.write(msgspec.json.encode(content) + b"\n")
        answers.flush()

    busy = threading.Event()
    threading.Thread(target=listen, daemon=True).start()
    while line := tasks.get():
        busy.set()
        try:
            done = perform(msgspec.json.decode(line, type=Task), answer)
        except KeyboardInterrupt:
            answer(None)
            return
        busy.clear()
        answer(done)


if __name__ == "__main__":
    main()
