"""A job under Ray: `python -m dray.ray JOB.yaml`, or dray.ray.run("JOB.yaml") inside of a program that uses Ray already.

The run itself (`dray run`: coordinator, built-in driver and trainer, the run's folder) is an actor on the node of the
caller. Every place of the other roles (an instance, or a rank of a role with `spread`) is an actor in a placement group
of its role, which joins the run (`dray join`). So Ray says where processes are and which GPUs they see; where a node
dies, Ray starts its actors on another one, and they join again; where the run ends by a death, it is resumed.

A role asks Ray for a CPU a rank, for as many GPUs as `devices` has of `cuda`, and for what `--resources` says. The job
file, what it names, and the programs of roles are where they are on the caller's node, on all nodes; trainers that write
checkpoints also reach the run's folder."""
from __future__ import annotations

import argparse
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from typing import Mapping, Optional, Sequence

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from .server import program

HOME = {"driver", "actor", "critic", "reference", "old_log_prob", "value"}   # built in: they work in the run's folder
TOKENS = {"trainer": ("actor", "critic"), "engine": ("rollout", "eval")}


@dataclass
class Role:
    """What Ray needs to know of a role."""
    name: str
    places: int
    token: str
    bundle: dict
    gang: bool
    settings: list = field(default_factory=list)


def _resolved(job: str, settings: Sequence[str]) -> dict:
    done = subprocess.run([program(), "run", "--print", "job", job, *_sets(settings)], text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    if done.returncode:
        raise ValueError(done.stderr.strip())
    return json.loads(done.stdout)


def _sets(settings: Sequence[str]) -> list:
    return [word for setting in settings for word in ("--set", setting)]


def _gpus(devices: str) -> int:
    """How many `cuda` devices the text names: "cuda:0-3", "cuda:0,2"."""
    kind, _, numbers = devices.partition(":")
    if kind != "cuda":
        return 0
    count = 0
    for part in numbers.split(","):
        first, _, last = part.partition("-")
        count += int(last or first) - int(first) + 1
    return count


def _roles(config: dict, resources: Mapping[str, Mapping[str, float]]) -> list:
    """Those that are actors: all but those whose built-in programs work in the run's folder."""
    found = []
    for role in config["roles"]:
        tasks = set(role["tasks"])
        if not role["command"] and tasks & HOME:
            continue
        places = role["ranks"] if role["spread"] else role["instances"]
        bundle = {"CPU": 1 if role["spread"] else role["ranks"], **resources.get(role["name"], {})}
        gpus = _gpus(role["devices"])
        if gpus:
            bundle["GPU"] = gpus / places if gpus % places else gpus // places
        token = next((name for name, of in TOKENS.items() if tasks & set(of)), "task" if tasks else "engine")
        prefix = f"roles.{role['name']}."
        found.append(Role(role["name"], places, token, bundle, role["spread"],
                          [prefix + "local=0"] + ([prefix + "devices="] if gpus else [])))
    unknown = set(resources) - {role.name for role in found}
    if unknown:
        raise ValueError(f"--resources: no role of this job that is an actor is called {sorted(unknown)}; "
                         f"there are {[role.name for role in found]}")
    return found


class _Process:
    """A program that gets a signal when this actor is gone: Ray ends actors without a word to what they started."""

    def __init__(self, words: Sequence[str], last: int = signal.SIGTERM, **environment: str):
        # What runs on one Ray node shares memory; Ray nodes of one machine need not.
        host = f"{socket.gethostname()}-{ray.get_runtime_context().get_node_id()[:12]}"
        self._child = subprocess.Popen(
            [sys.executable, "-m", "dray.ray_child", str(os.getpid()), str(int(last)), *words],
            env=dict(os.environ, DRAY_HOST=host, **environment), stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, errors="replace")  # what dies may have written half a character

    def wait(self) -> tuple:
        """(its status, the last lines that it printed)."""
        last = []
        for line in self._child.stdout:
            print(line, end="", flush=True)
            last = (last + [line.rstrip()])[-8:]
        return self._child.wait(), last

    def signal(self, number: int) -> None:
        self._child.send_signal(number)


@ray.remote(max_concurrency=4)
class Run:
    """`dray run`, in the run's folder."""

    def __init__(self, job: str, settings: Sequence[str], folder: str, restarts: int):
        self._job, self._folder, self._restarts = job, folder, restarts
        address = ray.util.get_node_ip_address()
        with socket.socket() as probe:
            probe.bind((address, 0))
            port = probe.getsockname()[1]
        self._settings = [*settings, f"listen=tcp:{address}:{port}"]
        self._process, self._stopped = None, False
        self._lock = threading.Lock()  # between a start and stop(), which come in different threads

    def settings(self) -> list:
        return self._settings

    def run(self) -> int:
        """Until the run has ended well, or has died too often."""
        status = 1
        for attempt in range(self._restarts + 1):
            resume = os.path.exists(os.path.join(self._folder, "config.yaml"))
            words = ["--resume", self._folder] if resume else [self._job, "--out", self._folder,
                                                               *_sets(self._settings)]
            with self._lock:
                if self._stopped:
                    return 130
                self._process = _Process([program(), "run", *words], signal.SIGKILL)
            status, last = self._process.wait()
            if status in (0, 130) or status == 2 or self._stopped:
                break
            print(f"the run died ({last[-1:]}); {self._restarts - attempt} more starts", flush=True)
        if self._stopped and status == -signal.SIGINT:  # before it took the signal as a wish
            return 130
        if status not in (0, 130):
            raise RuntimeError(f"dray run: status {status}: " + "\n".join(last))
        return status

    def token(self, role: str, seconds: float = 120) -> str:
        """Of a role of the run, as text."""
        path = pathlib.Path(self._folder, "tokens", f"{role}.token")
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if path.exists() and path.stat().st_size:
                return path.read_text()
            time.sleep(0.05)
        raise TimeoutError(f"{path}: the run has made no tokens in {seconds:.0f} s")

    def stop(self) -> None:
        """Ends the run after its step and a checkpoint."""
        with self._lock:
            self._stopped = True
            if self._process:
                self._process.signal(signal.SIGINT)


@ray.remote(max_restarts=-1, max_task_retries=-1, max_concurrency=2)
class Place:
    """`dray join` for one place of a role."""

    def __init__(self, run, job: str, settings: Sequence[str], folder: str, role: str, token: str, wait: int):
        self._run, self._job, self._settings, self._folder = run, job, settings, folder
        self._role, self._token, self._wait = role, token, wait

    def join(self) -> None:
        """Until the run is over. What goes wrong meanwhile is tried again: the run may be on its way back."""
        failed = 0
        while failed < 20:
            begun = time.monotonic()
            status, last = self._join_once()
            if status == 0:
                return
            if status == 2:
                raise RuntimeError("dray join: " + "\n".join(last))
            failed = failed + 1 if time.monotonic() - begun < 60 else 1
            time.sleep(0.5)
        raise RuntimeError(f"dray join: {failed} times in a row: " + "\n".join(last))

    def _join_once(self):
        token = ray.get(self._run.token.remote(self._token))
        with tempfile.TemporaryDirectory(prefix="dray-ray-") as folder:
            path = pathlib.Path(folder, "token")
            path.touch(0o600)
            path.write_text(token)
            shared = ["--shared", self._folder] if os.path.isdir(self._folder) else []
            name = f"{socket.gethostname()}-{ray.get_runtime_context().get_node_id()[:8]}"
            return _Process([program(), "join", "--job", self._job, "--roles", f"{self._role}:1", "--token",
                             str(path), "--name", name, "--wait", str(self._wait), *shared,
                             *_sets(self._settings)]).wait()


def _group(role: Role):
    return placement_group([role.bundle] * role.places, strategy="PACK" if role.gang else "SPREAD",
                           name=f"dray-{role.name}")


def run(job: str, settings: Sequence[str] = (), out: Optional[str] = None, *,
        resources: Optional[Mapping[str, Mapping[str, float]]] = None, restarts: int = 3, wait: int = 300,
        address: Optional[str] = None) -> str:
    """Runs the job in the cluster that this process is connected to, or in the one at `address` ("auto"); returns the
    run's folder. settings: "key=value". resources: {"rollout": {"fast": 1}}, what a place of the role asks Ray for
    beside CPUs and GPUs. restarts: how often the run is resumed when it dies. wait: seconds that a role waits for the
    run to come back. RuntimeError: the run failed, with its last lines."""
    if not ray.is_initialized():
        ray.init(address=address or "auto", log_to_driver=True)
    job = os.path.abspath(job)
    config = _resolved(job, settings)
    roles = _roles(config, resources or {})
    folder = os.path.abspath(out or os.path.join("runs", config["name"]))
    os.makedirs(folder, exist_ok=True)
    if os.path.exists(os.path.join(folder, "config.yaml")):
        raise FileExistsError(f"{folder}: a run is there already")
    all_settings = [*settings, *(setting for role in roles for setting in role.settings)]
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    home = Run.options(num_cpus=1, scheduling_strategy=here).remote(job, all_settings, folder, restarts)
    groups, places = [], []
    try:
        all_settings = ray.get(home.settings.remote())
        whole = home.run.remote()
        for role in roles:
            group = _group(role)
            groups.append(group)
            for i in range(role.places):
                strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=i)
                extra = {name: n for name, n in role.bundle.items() if name not in ("CPU", "GPU")}
                actor = Place.options(num_cpus=role.bundle["CPU"], num_gpus=role.bundle.get("GPU", 0),
                                      resources=extra, scheduling_strategy=strategy).remote(
                    home, job, all_settings, folder, role.name, role.token, wait)
                places.append((actor, actor.join.remote()))
        _await(whole, [joined for _, joined in places], home)
        ray.wait([joined for _, joined in places], num_returns=len(places), timeout=30)
    finally:
        for actor, _ in places:
            ray.kill(actor)
        ray.kill(home)
        for group in groups:
            remove_placement_group(group)
    return folder


def _await(whole, joins, home):
    """The run's end; a place that is refused ends it, as nothing would come to it."""
    pending = [whole, *joins]
    try:
        while pending:
            done, pending = ray.wait(pending, num_returns=1)
            ray.get(done)
            if whole in done:
                return
    except KeyboardInterrupt:
        ray.get(home.stop.remote())
        ray.get(whole)


def _resource(text: str) -> tuple:
    match = re.fullmatch(r"([\w-]+):([\w.:-]+)=([0-9.]+)", text)
    if not match:
        raise argparse.ArgumentTypeError(f"expected ROLE:NAME=AMOUNT, found {text!r}")
    return match[1], match[2], float(match[3])


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m dray.ray", description="Runs a job in a Ray cluster: its roles "
                                     "are actors in placement groups.")
    parser.add_argument("job", metavar="JOB.yaml")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="as of `dray run`")
    parser.add_argument("--out", metavar="DIR", help="the run's folder; default: runs/NAME")
    parser.add_argument("--address", default="auto", help="of the cluster; default: auto")
    parser.add_argument("--resources", action="append", default=[], type=_resource, metavar="ROLE:NAME=AMOUNT",
                        help="what each place of the role asks Ray for, too; may be given again")
    parser.add_argument("--restarts", type=int, default=3, help="how often a run that dies is resumed; default: 3")
    given = parser.parse_args()
    resources: dict = {}
    for role, name, amount in given.resources:
        resources.setdefault(role, {})[name] = amount
    try:
        print(run(given.job, given.set, given.out, resources=resources, restarts=given.restarts,
                  address=given.address))
    except (ValueError, FileExistsError) as error:
        print(f"dray.ray: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
