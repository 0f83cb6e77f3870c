"""What befalls the supervisor itself: it is stopped, it cannot write, others are there before it."""
import resource
import socket

from jobs import *

# A folder that a disk was too full for has no job in it, least of all a shorter one.
folder = work / "full"


def few_bytes():
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))


done = subprocess.run(command(folder), cwd=work, capture_output=True, text=True, timeout=PATIENCE,
                      preexec_fn=few_bytes)
check(done.returncode == 1 and "config.yaml: File too large" in done.stderr, f"full: {done.stderr}")
check({p.name for p in folder.iterdir()} == {".lock"}, f"full: {list(folder.iterdir())}")

# The reason of a death is what this process said, not what one before it left in the log.
(folder / "logs").mkdir()
(folder / "logs/trainer-0.log").write_text("error: of another day\n")
done = run(folder, "--set", "steps=1", fault="trainer:0:after_step:1:exit")
check(done.returncode == 1 and "failed with status 1;" in done.stderr, f"a log: {done.stderr}")

# What will not mend itself ends the run at once.
began = time.monotonic()
folder = work / "no-metrics"
(folder / "metrics.jsonl").mkdir(parents=True)
done = run(folder)
check(done.returncode == 1 and "Is a directory" in done.stderr, f"metrics.jsonl: {done.stderr}")
with socket.create_server(("127.0.0.1", 0)) as taken:
    done = run(work / "taken", "--set", f"queue.metrics={taken.getsockname()[1]}")
check(done.returncode == 1 and "Address already in use" in done.stderr, f"port: {done.stderr}")
check(time.monotonic() - began < 20, f"{time.monotonic() - began:.1f} s for two that cannot start")

# Rewards are single-precision numbers; the command's signals are those of any program.
done = run(work / "reward", "--set", "limits.restarts=2", "--set", "reward.rule=command", "--set",
           "reward.command=while read -r x; do echo 1e39; done")
check("expected a number a line, found '1e39'" in done.stderr, f"a large reward: {done.stderr}")
pipes = 'i=$(awk "/SigIgn/{print \\$2}" /proc/$$/status); while read -r x; do echo $((0x$i & 0x1000)); done'
folder = work / "signals"
done = run(folder, "--set", "steps=1", "--set", "reward.rule=command", "--set",
           "reward.command=" + json.dumps(pipes))
check(done.returncode == 0 and rows(folder)[1]["reward_mean"] == 0, f"SIGPIPE: {done.stderr}")

# Stopped for longer than anybody may be silent, and woken, it listens before it judges.
folder = work / "stopped"
process = subprocess.Popen(
    command(folder, "--set", "steps=100000", "--set", "limits.wait_seconds=3", "--set",
            "eval.every=0", "--set", "checkpoint.every=100000", json_lines=True),
    cwd=work, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    preexec_fn=lambda: os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}))
for line in process.stdout:
    if '"event":"step","step":100,' in line:
        break
process.send_signal(signal.SIGSTOP)
time.sleep(3.6)
process.send_signal(signal.SIGCONT)
time.sleep(0.5)
process.send_signal(signal.SIGINT)
out, err = process.communicate(timeout=PATIENCE)
check("nothing moved" not in err, f"stopped: {process.returncode}: {err}")
check_nothing_left(folder)

# What a role's processes leave to this one does not stay as zombies. A hangup ends no run that nohup(1) started.
folder = work / "orphans"
roles = [{"name": "engine", "tasks": ["rollout", "eval"]}, {"name": "trainer", "tasks": ["old_log_prob", "actor"]},
         {"name": "desk", "tasks": ["driver", "reward", "reference", "advantage"]},
         {"name": "parent", "tasks": [], "command": f"while :; do (sleep 0.01 & echo $! >>{work}/orphans.pids); sleep 0.02; done"}]
process = subprocess.Popen(
    command(folder, "--set", "steps=100000", "--set", "eval.every=0", "--set", "checkpoint.every=100000", "--set",
            "roles=" + json.dumps(roles), json_lines=True), cwd=work, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    text=True, preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
pids, until = [], time.monotonic() + PATIENCE
for line in process.stdout:
    if '"event":"stopping"' in line or time.monotonic() > until:
        break
    if '"event":"step"' not in line or not (work / "orphans.pids").exists():
        continue
    if len(pids) >= 20 and not any(state_of(pid) == "Z" for pid in pids):
        break
    if len(pids) < 20:
        pids = [int(pid) for pid in (work / "orphans.pids").read_text().split()]
        if len(pids) >= 20:
            process.send_signal(signal.SIGHUP)
            until = time.monotonic() + 20
check('"event":"step"' in line, f"a hangup: {line}")
check(not any(state_of(pid) == "Z" for pid in pids), f"zombies: {[state_of(pid) for pid in pids]}")
process.send_signal(signal.SIGINT)
out, err = process.communicate(timeout=PATIENCE)
check(process.returncode == 130, f"orphans: {process.returncode} {err}")
check_nothing_left(folder)

# Of ranks that end together the one that was killed is named, not one that failed because of it.
folder = work / "together"
two = 'if [ $DRAY_RANK = 0 ]; then sleep 100; fi; while [ ! -e now ]; do sleep 0.02; done; exit 3'
roles = [{"name": "engine", "tasks": ["rollout", "eval"]}, {"name": "trainer", "tasks": ["old_log_prob", "actor"]},
         {"name": "desk", "tasks": ["driver", "reward", "reference", "advantage"]},
         {"name": "two", "tasks": [], "ranks": 2, "command": two, "cwd": str(work), "on_death": "end"}]
process = start(folder, "--set", "steps=100000", "--set", "eval.every=0", "--set", "roles=" + json.dumps(roles),
                json_lines=True)
for line in process.stdout:
    if '"event":"step","step":1,' in line:
        break


def child(rank):
    """The supervisor's own child of the role, not what that has started."""
    for pid, _ in processes_of(folder):
        variables = pathlib.Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        parent = pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1]
        if int(parent) == process.pid and {b"DRAY_ROLE=two", f"DRAY_RANK={rank}".encode()} <= set(variables):
            return pid


pids = [child(rank) for rank in range(2)]
process.send_signal(signal.SIGSTOP)
(work / "now").touch()
while state_of(pids[1]) != "Z":
    time.sleep(0.01)
os.kill(pids[0], signal.SIGKILL)
while state_of(pids[0]) != "Z":
    time.sleep(0.01)
process.send_signal(signal.SIGCONT)
_, said = process.communicate(timeout=PATIENCE)
check(process.returncode == 1 and "two rank 0 was killed by signal 9" in said, f"the killed one: {said}")
check_nothing_left(folder)

finish()
