"""Runs small jobs and looks at what they leave behind. Used by the tests beside it."""
import concurrent.futures
import filecmp
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time

PROGRAM = os.environ.get("DRAY_PROGRAM")
if not PROGRAM or not os.path.exists(PROGRAM):
    print("DRAY_PROGRAM is not there")
    sys.exit(77)

# Under sanitizers everything takes longer; nothing here is about time.
PATIENCE = 240

TINY = """
name: tiny
steps: 6
model: {hidden_size: 16, intermediate_size: 32, layers: 1, heads: 2, kv_heads: 2,
        max_positions: 32, embedding_std: 0.3, weight_std: 0.1}
data: {digits: 2}
warmup: {max_steps: 0}
rollout: {prompts: 4, samples: 4, max_new_tokens: 4, micro_batch: 4}
reward: {micro_batch: 4}
reference: {micro_batch: 8}
old_log_prob: {micro_batch: 8}
advantage: {micro_batch: 4}
actor: {optimiser_steps: 2, micro_batch: 4, lr: 1e-3, warmup_steps: 2}
eval: {every: 3, prompts: 12, micro_batch: 4}
checkpoint: {every: 2, keep: 10}
limits: {wait_seconds: 60}
queue: {max_attempts: 8}
"""

TIMES = {"tokens_per_s", "step_seconds", "seconds", "time", "update_seconds"}

work = pathlib.Path(tempfile.mkdtemp(prefix="dray-run-test-"))
job_file = work / "tiny.yaml"
job_file.write_text(TINY)
failures = []


def check(condition, what):
    if not condition:
        failures.append(what)
        print("FAILED:", what, flush=True)


def some(points):
    """Every second of many points alike; all of them where more cases are asked for, as by `make soak`."""
    return points if int(os.environ.get("DRAY_TEST_SCALE", "1")) > 1 else points[::2]


def beside_each_other(*cases):
    """What the cases, each a function with its arguments, return: for runs that wait more than they compute."""
    with concurrent.futures.ThreadPoolExecutor(min(5, len(cases))) as pool:
        return [one.result() for one in [pool.submit(*case) for case in cases]]


def words(settings):
    """As --set wants them."""
    return [word for setting in settings for word in ("--set", setting)]


def command(folder, *arguments, resume=False, json_lines=False, job=job_file):
    line = [PROGRAM, "run"]
    line += ["--resume", str(folder)] if resume else [str(job), "--out", str(folder)]
    return line + (["--json"] if json_lines else []) + list(arguments)


def run(folder, *arguments, fault=None, environment=None, **options):
    env = dict(os.environ, **(environment or {}))
    env.pop("DRAY_FAULT", None)
    if fault:
        env["DRAY_FAULT"] = fault
    done = subprocess.run(command(folder, *arguments, **options), env=env, cwd=work,
                          capture_output=True, text=True, timeout=PATIENCE)
    check_nothing_left(folder)
    return done


def start(folder, *arguments, fault=None, **options):
    env = dict(os.environ)
    if fault:
        env["DRAY_FAULT"] = fault
    return subprocess.Popen(command(folder, *arguments, **options), env=env, cwd=work,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def state_of(pid):
    """As /proc has it: "R", "T", ...; "": there is no such process."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return ""


def processes_of(folder):
    """Processes that name the run's folder in their command line, or that are roles of it; of roles, "role NAME"
    is added to the command line."""
    found = []
    for entry in pathlib.Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                line = (entry / "cmdline").read_bytes().split(b"\0")
                variables = dict(pair.split(b"=", 1) for pair in (entry / "environ").read_bytes().split(b"\0")
                                 if b"=" in pair)
            except OSError:
                continue
            role = variables.get(b"DRAY_RUN") == str(folder).encode()
            if (role or any(str(folder).encode() in word for word in line)) and state_of(entry.name) not in ("", "Z"):
                line += [b"role", variables.get(b"DRAY_ROLE", b"")] if role else []
                found.append((int(entry.name), b" ".join(line).decode()))
    return found


def check_nothing_left(folder, sockets=True):
    left = processes_of(folder)
    for _ in range(200):  # the kernel ends what a killed supervisor leaves, in its own time
        if not left:
            break
        time.sleep(0.05)
        left = processes_of(folder)
    check(not left, f"processes left behind: {left}")
    if sockets:
        check(not list(pathlib.Path(folder).glob("*.socket")), f"sockets left in {folder}")


def leave(folder, *arguments, fault, **options):
    """A run that stands still at the point of the fault (stop), until its trainer is asked to leave there."""
    process = start(folder, *arguments, fault=fault, **options)
    halted, patience = [], time.monotonic() + PATIENCE / 4
    while not halted and process.poll() is None and time.monotonic() < patience:
        time.sleep(0.05)
        halted = [pid for pid, _ in processes_of(folder) if state_of(pid) == "T"]
    for pid in [pid for pid, line in processes_of(folder) if line.endswith("role trainer")]:
        os.kill(pid, signal.SIGTERM)
    for pid in halted:
        os.kill(pid, signal.SIGCONT)
    out, err = process.communicate(timeout=PATIENCE)
    check(halted and "exited with status 0 before the queue's end" in err, f"left at {fault}: {halted}: {err}")
    check_nothing_left(folder)


def rows(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def lasting(folder):
    """The rows without what depends on the clock."""
    return [{k: v for k, v in row.items() if k not in TIMES} for row in rows(folder)]


def files(folder):
    return sorted(p.relative_to(folder) for p in folder.rglob("*") if p.is_file())


def same_folder(a, b):
    """The queue's cursor counts how often the run was resumed."""
    return files(a) == files(b) and all(filecmp.cmp(a / f, b / f, shallow=False) for f in files(a)
                                        if f.name != "queue.cursor")


def checkpoint(folder, step):
    return folder / "checkpoints" / f"step-{step:06}"


def check_same_run(folder, other, what, steps=6):
    a, b = (checkpoint(f, steps) for f in (folder, other))
    check(b.is_dir() and same_folder(a, b), f"{what}: the last checkpoint differs")
    check(lasting(folder) == lasting(other), f"{what}: the metrics differ")


def finish():
    if failures:
        print(f"{len(failures)} checks failed; folders are in {work}")
        for log in sorted(work.rglob("logs/*.log")):
            errors = [l for l in log.read_text(errors="replace").splitlines()
                      if l.startswith("error") or "ERROR: " in l]
            if errors:
                print(log.relative_to(work), *errors[:4], sep="\n  ")
        sys.exit(1)
    shutil.rmtree(work)
    print("ok")
