"""Hosts of their own for runs (network namespaces on one bridge, shaped links), and `dray join` on them. Used by the
tests beside it. Needs root and ip(8); else skipped."""
import atexit
import collections
import threading

from jobs import *

PORT = 7461


def ip(*words, must=True):
    return subprocess.run(["ip", *words], check=must, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


if os.geteuid() or not shutil.which("ip"):
    print("needs root and ip(8)")
    shutil.rmtree(work)
    sys.exit(77)

MARK = f"dh{os.getpid() % 1000000}"
NET = f"10.{70 + os.getpid() % 100}.{os.getpid() // 100 % 250}"
SPACES = []


def remove_spaces():
    for space in SPACES:
        ip("netns", "del", space, must=False)
    ip("link", "del", MARK, must=False)


def make_spaces(count):
    atexit.register(remove_spaces)
    if ip("link", "add", MARK, "type", "bridge", must=False).returncode:
        print("no network namespaces here")
        shutil.rmtree(work)
        sys.exit(77)
    ip("link", "set", MARK, "up")
    for i in range(count):
        space = f"{MARK}n{i}"
        if ip("netns", "add", space, must=False).returncode:
            print("no network namespaces here")
            shutil.rmtree(work)
            sys.exit(77)
        SPACES.append(space)
        ip("link", "add", f"{MARK}.{i}", "type", "veth", "peer", "name", "eth0", "netns", space)
        ip("link", "set", f"{MARK}.{i}", "master", MARK, "up")
        ip("-n", space, "addr", "add", f"{NET}.{i + 1}/24", "dev", "eth0")
        ip("-n", space, "link", "set", "eth0", "up")
        ip("-n", space, "link", "set", "lo", "up")
        if shutil.which("tc"):
            subprocess.run(["ip", "netns", "exec", space, "tc", "qdisc", "add", "dev", "eth0", "root", "tbf", "rate",
                            "500mbit", "burst", "256kb", "latency", "50ms"], stderr=subprocess.DEVNULL)


def link_set(number, state):
    ip("-n", SPACES[number], "link", "set", "eth0", state)


def on(number, line, before=(), **environment):
    """Starts a command on a host."""
    space = SPACES[number]
    return subprocess.Popen([*before, "ip", "netns", "exec", space, *map(str, line)], cwd=work, text=True,
                            env=dict(os.environ, DRAY_HOST=space, **environment), stdout=subprocess.PIPE,
                            stderr=subprocess.STDOUT)


def begin(folder, job, *arguments, **environment):
    """The run, on host 0; when its tokens are there."""
    record = folder.with_name(folder.name + ".record")
    process = on(0, command(folder, *arguments, json_lines=True, job=job), DRAY_RECORD=str(record), **environment)
    read_on(process)
    deadline = time.monotonic() + PATIENCE
    while not (folder / "tokens" / "task.token").exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    return process


def read_on(process):
    """Its events, as they come: a run whose output nobody reads stands still."""
    process.seen = []

    def read():
        for line in process.stdout:
            if line.startswith("{"):
                process.seen.append(json.loads(line))
    threading.Thread(target=read, daemon=True).start()
    return process


def join(number, folder, job, roles, *more, token="engine", before=(), **environment):
    return on(number, [PROGRAM, "join", f"{NET}.1:{PORT}", "--job", job, "--roles", roles, "--token",
                       folder / "tokens" / f"{token}.token", "--name", f"host{number}", *more], before,
              DRAY_RECORD=str(folder) + ".record", **environment)


def look(process):
    """Events that the run has printed by now."""
    return list(process.seen)


def wait_for(process, what, seconds=PATIENCE):
    """The first event for which `what` holds; None: the run ended, or it took too long."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        over = process.poll() is not None
        for event in look(process):
            if what(event):
                return event
        if over:
            return None
        time.sleep(0.02)
    return None


def reached(process, step):
    return check(wait_for(process, lambda e: e["event"] == "step" and e["step"] >= step),
                 f"step {step} was not reached: {look(process)[-3:]}")


def end(process, what, status=0):
    deadline = time.monotonic() + PATIENCE
    while process.poll() is None and time.monotonic() < deadline:
        look(process) if hasattr(process, "seen") else time.sleep(0.02)
        time.sleep(0.02)
    if process.poll() is None:
        process.kill()
    said = look(process) if hasattr(process, "seen") else process.stdout.read()
    check(process.wait() == status, f"{what}: status {process.returncode}, {str(said)[-900:]}")
    return said


def check_trained(folder, steps, batch, what):
    """Every step of as many samples as it should be, none trained twice."""
    lines = map(json.loads, folder.with_name(folder.name + ".record").read_text().splitlines())
    trained = collections.defaultdict(list)
    for line in lines:
        if line["task"] == "actor":
            trained[line["step"]] += [(line["partition"], row[0], tuple(row[2])) for row in line["rows"]]
    check(sorted(trained) == list(range(1, steps + 1)), f"{what}: steps {sorted(trained)}")
    check(all(len(rows) == batch for rows in trained.values()), f"{what}: samples lost")
    all_rows = [row for rows in trained.values() for row in rows]
    check(len(set(all_rows)) == len(all_rows), f"{what}: trained twice")
    check(all(row["samples"] == batch for row in rows(folder)[1:]), f"{what}: metrics")
