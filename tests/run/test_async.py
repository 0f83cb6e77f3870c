"""Schedules whose steps train samples of several versions: async and rolling. What each allows is said
here anew: the version of every token of step k is from max(0, k - 1 - staleness) to k - 1, with
rolling from max(0, k - 2). That no sample is lost or trained twice is test_lineage.py's."""
from jobs import *

ASYNC = ("--set", "schedule=async")
CONTINUOUS = ("--set", "rollout.batching=continuous")
IN_FLIGHT = (*CONTINUOUS, "--set", "update=in_flight")
PAIR = ("--set", "roles.engine.instances=2", "--set", "roles.engine.ranks=1")


def trained(folder, staleness, what, samples=16, steps=6):
    """The rows of the run's steps, each within its bound."""
    found = rows(folder)[1:]
    check([row["step"] for row in found] == list(range(1, steps + 1)), f"{what}: {found}")
    for row in found:
        check(row["samples"] == samples and sum(row["staleness_tokens"]) == row["tokens"],
              f"{what}: {row}")
        check(row["staleness_max"] <= min(staleness, row["step"] - 1), f"{what}: {row}")
    return found


# ---- async without staleness is sync ---------------------------------------------------------------

plain, same = work / "sync", work / "same"
for folder, settings in ((plain, ()), (same, (*ASYNC, "--set", "staleness=0", "--set",
                                              "roles.engine.ranks=1"))):
    done = run(folder, *settings, environment={"DRAY_RECORD": str(folder) + ".lines"})
    check(done.returncode == 0, f"{folder.name}: {done.stderr}")


def samples(folder):
    made = {}
    for line in open(str(folder) + ".lines"):
        record = json.loads(line)
        if record["task"] == "actor":
            for slot, version, prompt, *_ in record["rows"]:
                made[record["partition"], slot] = (record["step"], version, prompt)
    return made


check(samples(plain) == samples(same) and len(samples(plain)) == 6 * 16,
      "async with staleness 0 trained other samples than sync")
check([row["reward_mean"] for row in rows(plain)] == [row["reward_mean"] for row in rows(same)],
      "async with staleness 0: other rewards than sync's")
trained(same, 0, "async without staleness")

# ---- staleness, updates, cuts ----------------------------------------------------------------------

for name, staleness, settings in (
        ("boundary", 1, ASYNC),
        ("flight", 2, (*ASYNC, "--set", "staleness=2", *IN_FLIGHT, "--set",
                       "rollout.partial_tokens=2")),
        ("rolling", 1, ("--set", "schedule=rolling", *PAIR))):
    done = run(work / name, *settings)
    check(done.returncode == 0, f"{name}: {done.stderr}")
    trained(work / name, staleness, name)
    looked = {row["step"]: row["eval_version"] for row in rows(work / name)
              if row.get("eval_accuracy") is not None}
    check(sorted(looked) == [0, 3, 6] and all(looked[step] >= step for step in looked) and
          looked[6] == 6, f"{name}: evaluations of {looked}")

# Short steps: an evaluation is made when it is due, not when the run has nothing else to do.
done = run(work / "often", *ASYNC, "--set", "steps=32", "--set", "eval.every=8")
check(done.returncode == 0, f"many short steps: {done.stderr}")
late = {row["step"]: row["eval_version"] - row["step"] for row in rows(work / "often")
        if row.get("eval_accuracy") is not None}
check(sorted(late) == [0, 8, 16, 24, 32] and all(0 <= late[step] < 8 for step in late),
      f"evaluations so many versions late: {late}")

done = run(work / "fresh", *ASYNC, "--set", "fresh_share=0.5", "--set", "rollout.samples=2")
check(done.returncode == 0, f"fresh share: {done.stderr}")
for row in trained(work / "fresh", 1, "fresh share", samples=8)[1:5]:
    check(row["staleness_tokens"][0] >= row["tokens"] / 4, f"fresh share: {row}")

# Without the end token each sample has four tokens: at least half of them are of the newest version.
done = run(work / "turns", "--set", "schedule=rolling", *PAIR, "--set", "fresh_share=0.5")
check(done.returncode == 0, f"fresh share of rolling: {done.stderr}")
for row in trained(work / "turns", 1, "fresh share of rolling"):
    check(row["staleness_tokens"][0] >= row["tokens"] / 4, f"fresh share of rolling: {row}")

# ---- advantages of the whole step ------------------------------------------------------------------

# Whitened over the tokens that the step trains they add up to nothing, and the first step's ratios are 1. A role of its
# own sees samples one group at a time.
whole = work / "whole.yaml"
whole.write_text(TINY + """
roles:
  - {name: engine, tasks: [rollout, eval]}
  - {name: trainer, tasks: [old_log_prob, actor], ranks: 2}
  - {name: desk, tasks: [driver, reward, reference]}
  - {name: advantage, tasks: [advantage]}
""")
WHOLE = (*ASYNC, "--set", "staleness=2", "--set", "advantage.method=reinforce++", "--set", "actor.optimiser_steps=1",
         "--set", "actor.kl=0", "--set", "reward.rule=command", "--set",
         "reward.command=while read -r line; do echo 0.$(echo \"$line\" | cksum | cut -c1-4); done", *CONTINUOUS)
done = run(work / "whole", *WHOLE, job=whole)
check(done.returncode == 0 and "anew" not in done.stdout + done.stderr, f"reinforce++: {done.stdout} {done.stderr}")
for row in trained(work / "whole", 2, "reinforce++"):
    check(abs(row["loss"]) < 1e-5 and row["grad_norm"] > 1e-3, f"reinforce++: {row}")

# Answers of very different length keep prompts of old steps there, and with them no new ones come: at some step all
# that there is was made before the version that is asked for (test_fresh_share.py has the same without chance).
slow = ("schedule=async", "staleness=4", "fresh_share=0.25", "steps=14", "seed=500031", "clock.token_seconds=1e-4",
        "clock.train_seconds=5e-4", "clock.variation=1", "clock.tail=100", "clock.tail_share=0.02", "eval.every=10",
        "roles.engine.instances=3", "rollout.batching=continuous", "update=in_flight", "rollout.partial_tokens=8",
        "limits.wait_seconds=10")
done = run(work / "asked", *words(slow),
           job=os.path.join(os.environ["DRAY_SOURCE_DIR"], "examples/clock.yaml"))
check(done.returncode == 0, f"a share of samples that none can be of any more: {done.stderr}")
trained(work / "asked", 4, "a share of samples", samples=32, steps=14)

# ---- refusals --------------------------------------------------------------------------------------

for settings, message in (
        (("staleness=1",), "staleness: expected 0 with schedule sync"),
        (("schedule=rolling", "staleness=2"), "staleness: expected 0 with schedule rolling"),
        (("schedule=rolling",), "schedule: expected two instances with the task rollout"),
        (("schedule=asinc",), "did you mean 'async'"),
        (("schedule=async", "update=in_flight"), "expected rollout.batching continuous"),
        (("update=in_flight", "rollout.batching=continuous"), "update: expected boundary"),
        (("schedule=async", "update=anew"), "continuous with update anew"),
        (("fresh_share=0.5",), "fresh_share: expected 0 with schedule sync"),
        (("schedule=async", "stream=false"), "stream: expected true with schedule async"),
        (("schedule=async", "queue.policy=fifo"), "queue.policy: expected none with schedule async"),
        (("schedule=async", "staleness=64", "queue.capacity_rows=400"),
         "queue.capacity_rows: expected at least")):
    arguments = words(settings)
    done = run(work / "refused", *arguments)
    check(done.returncode == 2 and message in done.stderr and not (work / "refused").exists(),
          f"{settings}: {done.stderr}")

finish()
