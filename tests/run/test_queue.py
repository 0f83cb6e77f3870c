"""The queue's settings in a job: samples that are lost are replaced, any policy gives whole steps, Redis
gives the same bits as shared memory, and what cannot work is refused with its line."""
import shlex

from jobs import *

# ---- a reward that dies of one prompt --------------------------------------------------------------

GRADER = """
import json, os, sys
cursed = sys.argv[1]
for number, line in enumerate(sys.stdin):
    prompt = json.loads(line)["prompt"]
    if not os.path.exists(cursed) and number == 24:  # in the second step
        open(cursed, "w").write(prompt)
    if os.path.exists(cursed) and open(cursed).read() == prompt:
        os.kill(os.getpid(), 9)
    print(len(prompt) % 2, flush=True)
"""
grader = work / "grader.py"
grader.write_text(GRADER)


def with_grader(name, *more):
    words = [sys.executable, str(grader), str(work / f"{name}.cursed")]
    settings = {"reward.rule": "command", "reward.command": shlex.join(words),
                "queue.max_attempts": "2", "steps": "3"}
    arguments = [x for key, value in settings.items() for x in ("--set", f"{key}={value}")]
    return run(work / name, *arguments, *more)


done = with_grader("refilled")
log = "".join(p.read_text() for p in (work / "refilled" / "logs").glob("desk*"))
check(done.returncode == 0, f"a prompt that cannot be graded: {done.stderr}")
check("replaced by prompt" in log, f"nothing was replaced: {log}")
check([row["samples"] for row in rows(work / "refilled") if row["step"]] == [16] * 3,
      "a step is short of samples")

done = with_grader("refilled-groups", "--set", "queue.policy=group")
log = "".join(p.read_text() for p in (work / "refilled-groups" / "logs").glob("desk*"))
check(done.returncode == 0 and "replaced by prompt" in log, f"policy group: {done.stderr} {log}")
check([row["samples"] for row in rows(work / "refilled-groups") if row["step"]] == [16] * 3,
      "a step is short of samples")

done = with_grader("ends", "--set", "queue.on_loss=end")
check(done.returncode == 1 and "failed too often" in done.stderr, f"on_loss: end: {done.stderr}")

# ---- policies --------------------------------------------------------------------------------------

for policy, cap in (("fifo", 0), ("oldest_version", 0), ("group", 0), ("token_balanced", 0),
                    ("token_balanced", 12)):
    folder = work / f"{policy}-{cap}"
    done = run(folder, "--set", f"queue.policy={policy}", "--set", f"queue.token_cap={cap}",
               "--set", "steps=3")
    check(done.returncode == 0, f"{folder.name}: {done.stderr}")
    check([row["samples"] for row in rows(folder) if row["step"]] == [16] * 3, folder.name)

# ---- Redis -----------------------------------------------------------------------------------------

if shutil.which("redis-server"):
    plain, redis = work / "plain", work / "redis"
    socket = f"/tmp/dray-run-{os.getpid()}.redis"
    server = subprocess.Popen(["redis-server", "--port", "0", "--unixsocket", socket, "--save", "",
                               "--dir", str(work)], stdout=subprocess.DEVNULL)
    while not os.path.exists(socket) and server.poll() is None:
        time.sleep(0.01)
    try:
        check(run(plain).returncode == 0, "builtin")
        done = run(redis, "--set", "queue.backend=redis", "--set",
                   f"queue.backend_address=unix:{socket}")
        check(done.returncode == 0, f"redis: {done.stderr}")
        check_same_run(plain, redis, "redis")
        both = work / "both"
        done = run(both, "--set", "queue.backend=redis", "--set", "queue.durability=journal",
                   "--set", f"queue.backend_address=unix:{socket}")
        check(done.returncode == 0, f"redis with a journal: {done.stderr}")
        check_same_run(plain, both, "redis with a journal")
    finally:
        server.terminate()
        server.wait()

# ---- room ------------------------------------------------------------------------------------------

# What is trained leaves the queue at once: without a journal nobody would ask for it again.
done = run(work / "small", "--set", "checkpoint.every=100", "--set", "queue.capacity_rows=56")
check(done.returncode == 0, f"a small queue, and no checkpoint for six steps: {done.stderr}")

# ---- refusals --------------------------------------------------------------------------------------

TINY = TINY[:TINY.index("queue:")]
lines = TINY.count("\n")
for setting, message in (
        ("token_cap: 64", "queue.token_cap: expected 0 without policy token_balanced"),
        ("{policy: token_balanced, token_cap: 7}", "queue.token_cap: expected at least 8"),
        ("policy: prority", "did you mean 'priority'"),
        ("policy: lockstep", "'lockstep' is not for runs, where rank 0 of the trainer claims"),
        ("policy: priority", "'priority' is not for runs, where nothing gives samples"),
        ("on_loss: drop_group", "'drop_group' is not for runs, where each step trains"),
        ("on_loss: shrug", "expected one of refill, end"),
        ("on_lost: end", "did you mean 'on_loss'"),
        ("capacity_bytes: 4096", "queue.capacity_bytes: expected at least"),
        ("{durability: journal, capacity_rows: 71}", "expected at least 72 (2 batches of 16 and two evaluations "
         "of 12 are open at once, 1 batches wait for a checkpoint)"),
        ("backend_address: 'unix:/x'", "queue.backend_address: expected none")):
    bad = work / "bad.yaml"
    inner = setting if setting.startswith("{") else "{" + setting + "}"
    bad.write_text(TINY + "queue: " + inner + "\n")
    done = run(work / "bad", job=bad)
    check(done.returncode != 0 and message in done.stderr and f"bad.yaml:{lines + 1}" in done.stderr,
          f"{setting}: {done.stderr}")

bad = work / "bad.yaml"
bad.write_text(TINY.replace("reward: {micro_batch: 4}", "reward: {micro_batch: 6}") +
               "queue: {policy: group}\n")
done = run(work / "bad", job=bad)
check("reward.micro_batch: policy group takes whole groups of 4 samples" in done.stderr, done.stderr)

finish()
