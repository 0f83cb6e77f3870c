"""A small job from its file to its last checkpoint: exit status, lines, rows, files."""
import json

from jobs import *

KEYS = {"step": int, "reward_mean": float, "response_length_mean": float, "tokens_per_s": float,
        "weight_version": int, "staleness_mean": float, "staleness_max": float,
        "update_seconds": float, "update_bytes": int}
TRAINED = {"loss", "grad_norm", "clip_fraction", "kl_to_reference", "entropy", "seconds", "samples",
           "tokens", "learning_rate"}
PARAMETERS = 259 * 16 + 16 * 16 * 4 + 16 * 3 + 3 * 16 * 32 + 3 * 16

first = work / "first"
done = run(first, json_lines=True)
check(done.returncode == 0, f"exit status {done.returncode}: {done.stderr}")
lines = [json.loads(line) for line in done.stdout.splitlines()]
check(all("event" in line for line in lines), "a line without an event")
check([l["step"] for l in lines if l["event"] == "step"] == list(range(7)), "steps in the lines")
end = lines[-1]
check(end["event"] == "end" and end["outcome"] == "done" and end["updates"] == 7, f"end: {end}")

table = rows(first)
check([row["step"] for row in table] == list(range(7)), "steps in metrics.jsonl")
for row in table:
    for key, kind in KEYS.items():
        check(isinstance(row.get(key), kind), f"step {row['step']}: {key} is {row.get(key)!r}")
    check(("eval_accuracy" in row) == (row["step"] in (0, 3, 6)), f"evaluation in {row['step']}")
for row in table[1:]:
    check(TRAINED <= row.keys(), f"step {row['step']}: no {TRAINED - row.keys()}")
    check(row["samples"] == 16 and row["weight_version"] == row["step"] - 1, f"{row}")
    check(row["staleness_max"] == 0 and row["rollout_gap_max"] < 1e-4, f"on-policy: {row}")
    check(row["update_bytes"] >= 4 * PARAMETERS, f"bytes of an update: {row['update_bytes']}")

names = {p.name for p in first.iterdir()}
check({"config.yaml", "metrics.jsonl", "checkpoints", "logs", "trace.json"} <= names, f"{names}")
check({p.name for p in (first / "checkpoints").iterdir()} ==
      {"latest", "step-000000", "step-000002", "step-000004", "step-000006"}, "checkpoints")
events = json.loads((first / "trace.json").read_text())
spans = {e["name"] for e in (events["traceEvents"] if isinstance(events, dict) else events)
         if e.get("ph") == "X"}
check({"rollout", "actor", "update weights", "reward"} <= spans, f"timeline: {spans}")
kept = [e for e in (events["traceEvents"] if isinstance(events, dict) else events)
        if e.get("ph") == "X" and e["name"].startswith("queue ")]
check({"queue insert", "queue put", "queue claim", "queue read", "queue commit"} <=
      {e["name"] for e in kept}, "the queue's timeline")
check({e["args"].get("task") for e in kept if e["name"] == "queue claim"} >= {"rollout", "reward"},
      "tasks of claims")
check(sum(e["args"]["rows"] for e in kept
          if e["name"] == "queue commit" and e["args"]["task"] == "reward") >= 16 * 6, "rows")

# The resolved job is a job, and gives the same run, whatever it was made from.
again = work / "again"
done = run(again, job=first / "config.yaml")
check(done.returncode == 0 and "done after 6 of 6 steps" in done.stdout, f"again: {done.stderr}")
check((again / "config.yaml").read_text() == (first / "config.yaml").read_text(), "config.yaml")
check_same_run(first, again, "the resolved job")

# Only what a person may count on: another seed is another run, a folder is used once.
other = work / "other"
check(run(other, "--seed", "2").returncode == 0, "another seed")
check(lasting(other) != lasting(first), "another seed gives the same run")
done = run(first)
check(done.returncode == 1 and "a run is there already" in done.stderr, f"{done.stderr}")

# The other ways that weights can go leave the same bits.
for arguments in (["weights.mode=disk"], ["weights.strategy=bucket", "weights.bucket_bytes=131072"],
                  ["weights.strategy=parameter"], ["roles.engine.ranks=1"],):
    folder = work / "-".join(arguments).replace("=", "-")
    sets = words(arguments)
    done = run(folder, *sets)
    check(done.returncode == 0, f"{arguments}: {done.stderr}")
    if "roles.engine.ranks=1" not in arguments:
        check(same_folder(folder / "checkpoints/step-000006/optimizer",
                          first / "checkpoints/step-000006/optimizer"), f"{arguments}: another result")

# Epochs, a reward command, RLOO, no reference: they run, and learn from every sample.
folder = work / "varied"
done = run(folder, "--set", "actor.epochs=2", "--set", "advantage.method=rloo", "--set",
           "reference.enabled=false", "--set", "reward.rule=command", "--set",
           "reward.command=while read -r line; do echo 0.25; done")
check(done.returncode == 0, f"varied: {done.stderr}")
check(all(row["reward_mean"] == 0.25 for row in rows(folder)[1:]), "rewards of a command")
finish()
