"""A job with a value model: what it leaves behind; one whose policy's or value model's trainer is killed,
and that is resumed, ends as an undisturbed one, bit for bit; job files that cannot be."""
import array
import importlib.util

from gae import *

NUMBERS = {"value_loss", "value_grad_norm", "value_clip_fraction", "value_mean", "returns_mean",
           "explained_variance"}

whole = work / "whole"
done = run(whole, job=gae_file)
check(done.returncode == 0, f"the undisturbed run: {done.stderr}")
table = rows(whole)
check(all(isinstance(row[key], float) for row in table[1:] for key in NUMBERS), f"{table[1:]}")
check(table[1]["value_mean"] == 0, "values begin at zero")
check(table[1]["explained_variance"] <= 1 and
      abs(table[1]["explained_variance"]) < 1e-9, "a constant explains nothing")
check(0 < table[3]["value_mean"] < table[4]["value_mean"] < table[4]["returns_mean"],
      f"values rise to returns: {table[3:5]}")
check(table[6]["value_loss"] < table[1]["value_loss"], "the value model learns")
phases = {name for row in table for name in row.get("seconds", ())}
check({"value", "critic", "critic_optimiser", "critic_publish", "critic_checkpoint"} <= phases,
      f"{phases}")
check({p.name for p in (whole / "critic").iterdir()} ==
      {"latest", "step-000002", "step-000004", "step-000006"}, "checkpoints of the value model")
config = json.loads((critic(whole, 6) / "config.json").read_text())
check(config["architectures"] == ["Qwen2ForTokenClassification"], f"{config}")

check_killed(whole, ["critic:0:after_checkpoint:4:kill", "trainer:0:checkpoint_named:4:kill"])

# Ctrl-C: both end after the same step, each with its checkpoint.
folder = work / "stopped"
process = start(folder, json_lines=True, job=gae_file)
for line in process.stdout:
    if '"event":"step","step":1' in line:
        break
process.send_signal(signal.SIGINT)
out, err = process.communicate(timeout=PATIENCE)
last = rows(folder)[-1]["step"]
check(process.returncode in (130, 0), f"stopped: status {process.returncode}: {err}")
check(checkpoint(folder, last).is_dir() and critic(folder, last).is_dir(), f"stopped at {last}")
check(run(folder, resume=True).returncode == 0, "stopped, resumed")
check(lasting(whole) == lasting(folder), "stopped and resumed: metrics")

# The policy's trainer is asked to leave while it waits for the value model's checkpoint, as by a host that leaves the
# run: it still writes its own checkpoint, and ends.
folder = work / "left"
process = start(folder, fault="critic:0:in_checkpoint:2:stop", job=gae_file)
halted, patience = [], time.monotonic() + PATIENCE / 2
while not halted and time.monotonic() < patience:
    time.sleep(0.05)
    halted = [pid for pid, _ in processes_of(folder) if state_of(pid) == "T"]
check(halted, "the value model's checkpoint of step 2 is not begun")
trainers = [pid for pid, line in processes_of(folder) if line.endswith("role trainer")]
awaited = False
while not awaited and time.monotonic() < patience:
    time.sleep(0.05)
    awaited = any(row["step"] == 2 for row in rows(folder))
time.sleep(0.3)
for pid in trainers:
    os.kill(pid, signal.SIGTERM)
time.sleep(0.3)
for pid in halted:
    os.kill(pid, signal.SIGCONT)
while any(state_of(pid) not in ("", "Z") for pid in trainers) and time.monotonic() < patience:
    time.sleep(0.05)
left = [pid for pid in trainers if state_of(pid) not in ("", "Z")]
check(len(trainers) == 2 and not left, f"of the trainers {trainers} {left} have not left")
for pid in left:
    os.kill(pid, signal.SIGKILL)
out, err = process.communicate(timeout=PATIENCE)
check("trainer rank" in err and "exited with status 0 before the queue's end" in err, f"left: {err}")
check(checkpoint(folder, 2).is_dir(), "the trainer that left wrote no checkpoint of step 2")
check(run(folder, resume=True).returncode == 0, "left, resumed")
check_same_models(whole, folder, "left and resumed")

# It is asked to leave between two steps, and alone: the value model's trainer writes no checkpoint there, so neither
# does this one, and it ends nevertheless.
folder = work / "alone"
process = start(folder, fault="trainer:0:claimed:4:stop", job=gae_file)
halted, patience = [], time.monotonic() + PATIENCE / 2
while not halted and time.monotonic() < patience:
    time.sleep(0.05)
    halted = [pid for pid, _ in processes_of(folder) if state_of(pid) == "T"]
check(halted, "the trainer has not claimed for step 4")
trainers = [pid for pid, line in processes_of(folder) if line.endswith("role trainer")]
for pid in trainers:
    os.kill(pid, signal.SIGTERM)
for pid in halted:
    os.kill(pid, signal.SIGCONT)
out, err = process.communicate(timeout=PATIENCE)
check("trainer rank" in err and "exited with status 0 before the queue's end" in err, f"alone: {err}")
check(not checkpoint(folder, 3).is_dir(), "alone: a checkpoint of step 3")

# Another role subscribes to the value model: its versions are what the checkpoints have.
WATCHER = """
import json, os, signal
import numpy as np
import dray
head = {"score.weight": np.zeros((1, 16), np.float32), "score.bias": np.zeros(1, np.float32)}
with dray.Role() as role:
    subscriber, version = role.subscriber(head, model="critic"), -1
    open(os.environ["DRAY_RUN"] + "/watching", "w").close()
    with open(os.environ["DRAY_RUN"] + "/seen", "w") as file:
        while version < 6:
            version = subscriber.update(min_version=version + 1)["version"]
            print(json.dumps([version, *map(float, head["score.weight"][0]), float(head["score.bias"][0])]),
                  file=file, flush=True)
    signal.pause()  # a command that ends before the run does is started anew
"""


def tensors(path):
    """The float32 tensors of a safetensors file."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    places = {n: t["data_offsets"] for n, t in json.loads(data[8:8 + size]).items() if "data_offsets" in t}
    return {n: array.array("f", data[8 + size + b:8 + size + e]).tolist() for n, (b, e) in places.items()}


if importlib.util.find_spec("numpy"):
    (work / "watcher.py").write_text(WATCHER)
    watched = work / "watched.yaml"
    watched.write_text(gae_file.read_text().replace("do echo", "do sleep 0.01; echo").replace(
        "[value, critic],", "[value, critic], after: [watcher],") +
        f"  - {{name: watcher, command: exec {sys.executable} {work}/watcher.py, ready: watching, "
        "grace_seconds: 1}\n")
    folder = work / "watched"
    done = run(folder, "--set", "checkpoint.every=1", job=watched,
               environment={"PYTHONPATH": os.environ["DRAY_SOURCE_DIR"] + "/python"})
    check(done.returncode == 0, f"watched: {done.stderr}")
    seen = [json.loads(line) for line in (folder / "seen").read_text().splitlines()]
    for version, *head in seen:
        if version == 0:
            check(not any(head), f"the first head: {head}")
            continue
        saved = tensors(critic(folder, version) / "model.safetensors")
        check(head == saved["score.weight"] + saved["score.bias"], f"version {version}: {head}")
    check(seen and all(map(any, seen[1:])), f"{seen}")


def refused(words, *arguments, job=gae_file):
    done = run(work / "refused", *arguments, job=job)
    check(done.returncode == 2 and words in done.stderr, f"{words}: {done.returncode}: {done.stderr}")


job_file.write_text(TINY.replace("advantage: {micro_batch: 4}", "advantage: {method: gae}"))
line = job_file.read_text().splitlines().index("advantage: {method: gae}") + 1
refused(f"tiny.yaml:{line}:13: roles: task value, as it is in this job by advantage.method: expected "
        "in a role, found in 0", job=job_file)
refused("task actor: expected the built-in program, as that of task critic is", "--set",
        "roles.trainer.command=true")
refused("task value: expected the built-in program with schedule async", "--set", "schedule=async", "--set",
        "roles.trainer.command=true", "--set", "roles.critic.command=true")
refused("the built-in value is there once, found 2 instances", "--set", "roles.critic.instances=2")
finish()
