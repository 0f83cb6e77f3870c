"""Responses that call a tool: what is trained, what is seen of it, and that neither the time that answers take nor
an engine that dies while rows wait changes a bit of a run with closed batches."""
from jobs import *

CALCULATOR = ["tool.kind=calculator", "tool.min_seconds=0.005", "tool.max_seconds=0.015"]
SUMS = ["steps=3", "checkpoint.every=3", "eval.every=3", "data.source=tool", "data.steps=3", "model.hidden_size=32",
        "model.intermediate_size=64", "rollout.max_new_tokens=20", "rollout.micro_batch=8", "eval.micro_batch=12",
        "roles.trainer.ranks=1"]
WARM = ["warmup.max_steps=3000", "warmup.reward=0.1", "warmup.lr=1e-2"]


def trained(name, *settings, fault=None, base=SUMS):
    words = [word for setting in [*base, *settings] for word in ("--set", setting)]
    folder = work / name
    done = run(folder, *words, fault=fault)
    check(done.returncode == 0, f"{name}: {done.stderr}")
    return folder


# A model that calls the calculator: all others begin with it.
warm = trained("warm", *WARM, *CALCULATOR, "steps=1")
FROM = [*SUMS, "warmup.max_steps=0", f"model.checkpoint={checkpoint(warm, 0)}"]
EXPRESSION = r"""
import json, re, sys
for line in sys.stdin:
    text = re.search(r"[0-9+* -]*$", json.loads(line)["response"][:-1])[0]
    value = None
    if re.fullmatch(r" *\d+ *([+*-] *\d+ *)+", text):
        value = eval(re.sub(r"\d+", lambda number: str(int(number[0])), text))
    print(json.dumps({"answer": None if value is None or abs(value) >= 2**63 else str(value)}), flush=True)
"""
(work / "sums.py").write_text(EXPRESSION)

plain = trained("plain", *CALCULATOR, base=FROM)
for row in rows(plain)[1:]:
    check(0.2 < row["turns_mean"] <= 8, f"turns: {row}")
    check(row["time"]["engine"]["wait"]["tool"] > 0, f"time of the tool: {row}")
    check(row["rollout_gap_max"] < 1e-3, f"log-probs: {row}")
    check(row["staleness_tokens"] == [row["tokens"]], f"tokens that nobody sampled have no staleness: {row}")
check(rows(warm)[0]["reward_mean"] >= 0.1, f"the tool's tokens are no part of the reward: {rows(warm)[0]}")

killed = trained("killed", *CALCULATOR, base=FROM, fault="engine:0:waiting:2:kill")
check_same_run(killed, plain, "an engine killed while rows wait", steps=3)
own = trained("own", "tool.kind=command", f"tool.command={sys.executable} {work}/sums.py", *CALCULATOR[1:], base=FROM)
check(same_folder(checkpoint(own, 3) / "optimizer", checkpoint(plain, 3) / "optimizer"), "a program that calculates")

other = trained("other", *CALCULATOR, "schedule=one_step_async", "roles.engine.ranks=1", base=FROM)
again = trained("again", *CALCULATOR, "schedule=one_step_async", "roles.engine.ranks=1", base=FROM,
                fault="engine:0:waiting:2:kill")
check_same_run(again, other, "one_step_async", steps=3)

# Newer weights come while rows wait: the calls go on, and no token is older than may be.
for update in ("in_flight", "anew"):
    folder, record = work / update, work / f"{update}.lines"
    settings = [*FROM, *CALCULATOR, "steps=6", "eval.every=6", "schedule=async", "rollout.batching=continuous",
                f"update={update}"]
    done = run(folder, *words(settings),
               environment={"DRAY_RECORD": str(record)})
    check(done.returncode == 0, f"{update}: {done.stderr}")
    steps = [line for line in map(json.loads, record.open()) if line["task"] == "actor"]
    check(sum(len(line["rows"]) for line in steps) == 6 * 16, f"{update}: {steps}")
    for line in steps:
        for *_, oldest, newest in line["rows"]:
            check(max(0, line["step"] - 2) <= oldest <= newest < line["step"], f"{update}: {line}")
            check(update == "in_flight" or oldest == newest, f"a sample of one version: {line}")

free = trained("free", *CALCULATOR, "rollout.batching=continuous", "advantage.method=reinforce++",
               "actor.aggregate=sample", base=FROM)
check(all(row["samples"] == 16 and row["turns_mean"] > 0.2 for row in rows(free)[1:]), f"continuous: {rows(free)}")
finish()
