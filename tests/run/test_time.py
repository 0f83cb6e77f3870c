"""Time that adds up: what each thread of each process does is told once and without gaps, why it waits is
known, and the seconds of each row are the wall time, however many steps are in flight and whoever dies. Idle figures
that do not add up (verl #6693) fail here."""
import resource

from timelines import *

JOB = ("warmup.max_steps=3", "warmup.reward=0", "warmup.batch=8", "model.hidden_size=32", "steps=8",
       "rollout.prompts=8", "roles.trainer.ranks=2", "roles.engine.ranks=2")


def by_role(threads, begin, end):
    """{role: {busy, transfer, cause: seconds}} of the first threads, within [begin, end)."""
    sums = {}
    for (_, label, tid), spans in threads.items():
        role = sums.setdefault(label.split(" ")[0].split(".")[0], {})
        for a, b, kind, _, args in spans if tid == 1 else []:
            key = args["cause"] if kind == "wait" else kind
            role[key] = role.get(key, 0) + max(0, min(b, end) - max(a, begin)) / 1e9
    return sums


def look(name, *settings, fault=None):
    folder = work / name
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = run(folder, *words(JOB + settings), fault=fault)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    check(done.returncode == 0, f"{name}: {done.stderr}")
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    threads = timelines(folder)
    for (_, label, tid), spans in threads.items():
        for part in split(spans):
            check_thread(f"{name}: {label}, thread {tid}", part)
    told = sum(s[4].get("cpu_ns", 0) for spans in threads.values() for s in spans) / 1e9
    check(0.1 * used < told <= used + JITTER, f"{name}: {told} s of CPU are told, {used} s were used")
    return threads, check_rows(name, rows(folder)[1:])


def check_sums(name, threads, trainer, made, together=()):
    """What the rows say is what the trace says of the same time: from the first publication to the last, with the
    evaluations between them. The sum alone of the causes `together`: a wait for samples learns only at its end that it
    was for admission, and a row that was written before has it as one for samples."""
    begin, end = (max(s[1] for s in trainer if s[3] == "publish" and s[4]["step"] == step)
                  for step in (0, len(made)))
    whole = sum(row["step_seconds"] for row in made)
    check(abs((end - begin) / 1e9 - whole) < 0.05 * whole + JITTER,
          f"{name}: steps take {whole} s, {(end - begin) / 1e9} s by the trace")
    for role, seconds in by_role(threads, begin, end).items():
        rows_say = {key: sum((row["time"][role] | row["time"][role]["wait"]).get(key, 0) for row in made)
                    for key in CAUSES | {"busy", "transfer"}}
        wall = whole * made[-1]["time"][role]["processes"]
        for keys in [{key} for key in rows_say if key not in together] + [set(together)]:
            told, seen = (sum(of.get(key, 0) for key in keys) for of in (rows_say, seconds))
            check(abs(told - seen) < 0.05 * wall + 2 * JITTER,
                  f"{name}: {role}: {sorted(keys)}: the rows say {told} s, the trace {seen} s of {wall}")


for name, settings in (("sync", ()), ("one_step", ("schedule=one_step_async",)),
                       ("continuous", ("rollout.batching=continuous", "rollout.max_new_tokens=6")),
                       ("both", ("schedule=one_step_async", "rollout.batching=continuous"))):
    threads, made = look(name, *settings)
    of = {(label, tid): spans for (_, label, tid), spans in threads.items()}
    ranks = {("engine 0", 1), ("engine 1", 1), ("trainer 0", 1), ("trainer 1", 1), ("desk 0", 1)}
    check(ranks <= set(of), f"{name}: {set(of)}")
    trainer = of["trainer 0", 1]
    check_sums(name, threads, trainer, made)
    work_of = {s[3]: s[4] for s in trainer if s[4].get("rows", 0) > 0}
    check(work_of.get("actor", {}).get("tokens", 0) > 0, f"{name}: work without rows and tokens: {work_of}")
    trained = sum(s[4].get("rows", 0) for s in trainer if s[3] == "actor")
    check(trained == 32 * len(made), f"{name}: {trained} rows trained, by the trace")

# Prompts that wait because as much is under way as may be.
threads, made = look("admission", "schedule=async", "staleness=0")
trainer = next(spans for (_, label, tid), spans in threads.items() if (label, tid) == ("trainer 0", 1))
check_sums("admission", threads, trainer, made, together=("samples", "admission"))
check(sum(row["time"]["engine"]["wait"].get("admission", 0) for row in made) > 0, "admission: no row tells of it")

# Who is dead waits to be started anew, and the step goes on meanwhile.
threads, made = look("killed", fault="engine:0:generated:3:kill")
waits = [row["time"]["engine"]["wait"].get("restart", 0) for row in made]
told = sum(s[1] - s[0] for (_, label, _), spans in threads.items() for s in spans
           if s[4].get("cause") == "restart" and label.startswith("engine")) / 1e9
check(told > 0 and abs(sum(waits) - told) < 0.1 * told, f"restart: {waits} in the rows, {told} s in the trace")

# What a job's own program keeps the desk waiting for.
slow = "while read line; do sleep 0.01; echo 1; done"
threads, made = look("tool", "steps=2", "reward.rule=command", f"reward.command={slow}")
for row in made:
    check(row["time"]["desk"]["wait"].get("tool", 0) > 32 * 0.01, f"waits for the tool: {row['time']['desk']}")

finish()
