"""A run whose queue has a journal: its coordinator is killed at random, the run resumed, again and
again; it ends bit-identical to an undisturbed one, and does not roll out again what was kept."""
import importlib.util
import random

from jobs import *

seed = int(os.environ.get("DRAY_TEST_SEED", time.time_ns() % 1000000))
print("seed", seed)
random.seed(seed)
TIMES.add("update_bytes")  # weights that nobody had to roll out with are not fetched
journal = "queue.durability=journal"


def journals(folder):
    return list((folder / "queue").glob("queue-*.journal"))


whole = work / "whole"
check(run(whole, "--set", journal).returncode == 0, "the undisturbed run")
check(not (whole / "queue").exists(), "a journal is left of a run that ended well")

for number in range(3):
    folder = work / f"coordinator-{number}"
    begun = time.monotonic()
    process = start(folder, "--set", journal)
    while not journals(folder) and process.poll() is None:
        time.sleep(0.01)
    time.sleep(random.random())
    found = [pid for pid, line in processes_of(folder) if "--coordinator" in line]
    for pid in found:
        os.kill(pid, signal.SIGKILL)
    out, error = process.communicate(timeout=PATIENCE)
    if not found or process.returncode == 0:
        continue  # it was over before
    check(f"dray run --resume {folder}" in error, error)
    check(journals(folder), "no journal is left of a run that was killed")
    done = run(folder, resume=True)
    check(done.returncode == 0, f"resumed: {done.stderr}")
    check_same_run(whole, folder, f"coordinator killed, {number}")

# A trainer that dies with a step rolled out, and not trained.
folder = work / "trainer"
check(run(folder, "--set", journal, fault="trainer:0:claimed:3:kill").returncode == 1, "trainer")
done = run(folder, resume=True)
check(done.returncode == 0, f"trainer, resumed: {done.stderr}")
check_same_run(whole, folder, "trainer killed")
made = {e["args"].get("step") for e in json.loads((folder / "trace.json").read_text())["traceEvents"]
        if e["ph"] == "X" and e["name"] == "rollout"}
check(3 not in made and 4 in made, f"step 3 was rolled out again: {made}")

# ---- checkpoints of the queue ----------------------------------------------------------------------

saved = "queue.durability=checkpoint"


def snapshots(folder):
    return sorted(p.name for p in (folder / "queue").glob("step-*.checkpoint"))


kept = work / "kept"
check(run(kept, "--set", saved).returncode == 0, "undisturbed, with checkpoints of the queue")
check_same_run(whole, kept, "with checkpoints of the queue")
check(not (kept / "queue").exists(), "checkpoints of the queue are left of a run that ended well")

folder = work / "kept-trainer"
check(run(folder, "--set", saved, "--set", "checkpoint.keep=1",
          fault="trainer:0:claimed:5:kill").returncode == 1, "trainer, with checkpoints")
check(snapshots(folder) == ["step-0.checkpoint", "step-4.checkpoint"], snapshots(folder))
used = folder / "queue" / "step-4.checkpoint"
bytes_of_it = used.read_bytes()
used.write_bytes(b"no samples" * 100)
done = run(folder, resume=True)
check(done.returncode == 1 and "step-4.checkpoint" in done.stderr, f"a broken one: {done.stderr}")
used.write_bytes(bytes_of_it)
done = run(folder, resume=True)
check(done.returncode == 0, f"trainer, with checkpoints, resumed: {done.stderr}")
check_same_run(whole, folder, "trainer killed, with checkpoints")

# Whatever is killed, and whatever the queue held then.
for number in range(2):
    folder = work / f"kept-{number}"
    process = start(folder, "--set", saved)
    while len(snapshots(folder)) < 2 and process.poll() is None:
        time.sleep(0.01)
    time.sleep(random.random() / 2)
    for pid, line in processes_of(folder):
        if ("--coordinator" if number else "trainer") in line:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
    process.communicate(timeout=PATIENCE)
    if process.returncode == 0:
        continue  # it was over before
    done = run(folder, resume=True)
    check(done.returncode == 0, f"checkpoints, resumed: {done.stderr}")
    check_same_run(whole, folder, f"killed, {number}, with checkpoints of the queue")

# A trainer in Python writes them, too.
if importlib.util.find_spec("torch"):
    from tiny_python import job_with
    job = job_with("rollout", """
with dray.Role() as role:
    for batch in role.batches():
        answer(batch, max(0, int(batch.tag("step")[0]) - 1))
""")
    folder = work / "python"
    small = words((saved, "steps=3", "reference.enabled=false", "actor.old_log_prob=rollout", "checkpoint.keep=1",
                   "eval.every=0"))
    done = run(folder, *small, job=job, environment={"KILL": "3"})
    check(done.returncode == 1 and snapshots(folder) == ["step-0.checkpoint", "step-2.checkpoint"],
          f"a trainer in Python, killed: {snapshots(folder)}: {done.stderr}")
    used = folder / "queue" / "step-2.checkpoint"
    bytes_of_it = used.read_bytes()
    used.write_bytes(b"no samples" * 100)
    done = run(folder, resume=True)
    check(done.returncode == 1 and "step-2.checkpoint" in done.stderr, f"a broken one of Python: {done.stderr}")
    used.write_bytes(bytes_of_it)
    done = run(folder, resume=True)
    check(done.returncode == 0 and [row["step"] for row in rows(folder)] == [0, 1, 2, 3], f"resumed: {done.stderr}")

done = run(work / "wrong", "--set", "queue.durability=forever")
check(done.returncode != 0 and "durability" in done.stderr, f"wrong word: {done.stderr}")
finish()
