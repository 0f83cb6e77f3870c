"""dray simulate and dray size on traces: what they predict of runs that the trace is not of, how they refuse what they
cannot use, and that what dray size prints is a job file's. Runs are short, so limits are wide: bench/simulate.py has the
narrow ones."""
from jobs import *

CLOCK = ("clock.enabled=true", "clock.token_seconds=0.004", "clock.train_seconds=0.002", "clock.tokens=6",
         "clock.variation=0.3", "rollout.max_new_tokens=26", "steps=12", "eval.every=0", "checkpoint.every=1000",
         "roles.engine.ranks=1", "roles.trainer.ranks=1", "actor.optimiser_steps=1")


def dray(verb, trace, settings, *more):
    line = [PROGRAM, verb, str(job_file), "--trace", str(trace), *words(CLOCK + tuple(settings)), *more]
    return subprocess.run(line, capture_output=True, text=True, timeout=PATIENCE, cwd=work)


def simulate(trace, *settings):
    done = dray("simulate", trace, settings, "--json")
    check(done.returncode == 0, f"simulate {settings}: {done.stderr}")
    return json.loads(done.stdout)


def measured(folder):
    made = rows(folder)[3:-1]
    return (sum(row["step_seconds"] for row in made) / len(made),
            sum(row["staleness_mean"] for row in made) / len(made))


trace = work / "trace"
done = run(trace, *words(CLOCK))
check(done.returncode == 0, done.stderr)
for settings in (("schedule=one_step_async",), ("schedule=async", "roles.engine.instances=2")):
    folder = work / settings[0]
    done = run(folder, *words(CLOCK + settings))
    check(done.returncode == 0, done.stderr)
    seconds, staleness = measured(folder)
    said = simulate(trace, *settings)
    check(0.6 < said["step_seconds"]["mean"] / seconds < 1.5, f"{settings}: {said['step_seconds']}, took {seconds}")
    check(abs(said["staleness_mean"]["mean"] - staleness) < 0.35, f"{settings}: {said['staleness_mean']}, {staleness}")
    check(said["roles"]["engine"]["idle"]["mean"] < 1 and not said["estimated"], f"{settings}: {said}")
same = simulate(trace)
again = simulate(trace / "trace.json")
check({**same, "traces": 0} == {**again, "traces": 0}, "a run's folder and its trace.json are two traces")
# How far it is off for the run itself, as that was run, is said beside the prediction for another job.
seconds, _ = measured(trace)
for said in (same, again, simulate(trace, "schedule=async", "roles.engine.instances=2")):
    (off,) = said["traces"]
    check(0.8 < off["step_seconds"] / seconds < 1.25, f"the trace took {seconds} s a step: {off}")
    check(0.6 < off["ratio"] < 1.5 and off["simulated_seconds"] == same["step_seconds"]["mean"], f"{off}, {same}")
done = dray("simulate", trace, ())
check(f"{trace}: " in done.stdout and "simulated as it was run" in done.stdout, done.stdout)
check(same["step_seconds"]["deviation"] > 0 and same["runs"] == 10, f"no spread: {same}")

done = dray("size", trace, ("schedule=async",), "--devices", "5", "--json")
lines = [json.loads(line) for line in done.stdout.splitlines()]
check(done.returncode == 0 and [line["event"] for line in lines] == ["split"] * 4 + ["end"], f"size: {done}")
rates = [line["samples_per_s"] for line in lines[:-1]]
check(all(a * 1.002 >= b for a, b in zip(rates, rates[1:])), f"size: not the best first: {rates}")
check(all(line["instances"] + line["ranks"] == 5 for line in lines[:-1]), f"size: {lines}")
# All settings of the roles are in what it prints.
done = dray("size", trace, ("schedule=async", "roles.engine.env=[A=b]", "roles.desk.nice=3"), "--devices", "5",
            "--apply")
check('env: ["A=b"]' in done.stdout and "nice: 3" in done.stdout, f"applied: {done.stdout}")
# Devices are not, where another number of processes would share them.
done = dray("size", trace, ("schedule=async", "roles.engine.devices=cuda:0", "roles.trainer.devices=cuda:1"), "--devices", "5",
            "--apply")
kept = [line["instances"] for line in lines[:1]] == [1], [line["ranks"] for line in lines[:1]] == [1]
check(("cuda:0" in done.stdout, "cuda:1" in done.stdout) == kept and kept != (True, True), f"devices: {done.stdout}")
done = dray("size", trace, ("schedule=async",), "--devices", "5", "--apply")
applied = work / "applied.yaml"
applied.write_text(TINY + done.stdout)
done = subprocess.run([PROGRAM, "simulate", str(applied), "--trace", str(trace), "--json", *words(
    setting for setting in CLOCK + ("schedule=async",) if not setting.startswith("roles"))],
    capture_output=True, text=True)
check(done.returncode == 0, f"applied: {done.stderr}")
check(abs(json.loads(done.stdout)["samples_per_s"]["mean"] / rates[0] - 1) < 0.2, f"applied: {done.stdout}: {rates[0]}")
done = dray("size", trace, ("schedule=async", "staleness=3", "clock.train_seconds=0.002"), "--devices", "5",
            "--staleness", "0")
check(done.returncode == 2 and "whose mean staleness is at most 0" in done.stderr, f"staleness: {done.stderr}")

# Rows that were generated a second time, as too old or lost, count once: their groups are whole.
twice = work / "twice"
shutil.copytree(trace, twice)
for path in twice.glob("trace/engine*.lengths"):
    made = [[int(word) for word in line.split()] for line in path.read_text().splitlines()]
    path.write_text("".join(" ".join(map(str, row)) + "\n" for step, slot, prompt, tokens, begin, end in made for row in (
        [(step, slot, prompt, tokens, begin - 1, end - 1)] * (slot % 2) + [(step, slot, prompt, tokens, begin, end)])))
said = simulate(twice)
check(0.5 < said["step_seconds"]["mean"] / same["step_seconds"]["mean"] < 2, f"twice: {said}, once: {same}")

# Times of runs with other numbers of ranks are averaged as those of as many: their order does not matter. The runs are
# long enough for the times of tokens.
small, large = work / "small", work / "large"
ONE = ("roles.engine.ranks=1", "roles.trainer.ranks=1", "steps=40", "rollout.max_new_tokens=26")
done = run(small, *words(ONE))
check(done.returncode == 0, done.stderr)
shutil.copytree(small, large)
config = json.loads((large / "config.json").read_text())
for role in config["roles"]:
    role["ranks"] *= 1 if role["name"] == "desk" else 4
(large / "config.json").write_text(json.dumps(config))
seconds = []
for traces in ((small, small), (large, large), (small, large), (large, small)):
    line = [PROGRAM, "simulate", str(job_file), "--json", *words(ONE)]
    line += [word for folder in traces for word in ("--trace", str(folder))]
    done = subprocess.run(line, capture_output=True, text=True, timeout=PATIENCE, cwd=work)
    check(done.returncode == 0, f"ranks: {done.stderr}")
    seconds.append(json.loads(done.stdout)["step_seconds"]["mean"])
check(seconds[1] > 1.1 * seconds[0] and seconds[0] < seconds[2] < seconds[1], f"ranks: {seconds}")
check(abs(seconds[3] / seconds[2] - 1) < 0.01, f"ranks: the order of traces matters: {seconds}")

# What is no trace of this job, or no whole one, is refused by name, and says where.
pieces = work / "pieces"
shutil.copytree(trace, pieces)
config = json.loads((pieces / "config.json").read_text())
config["rollout"]["partial_tokens"] = 2
(pieces / "config.json").write_text(json.dumps(config))
done = dray("simulate", pieces, ())
check(done.returncode == 2 and "expected rollout.partial_tokens 0, found 2" in done.stderr, done)
done = dray("simulate", trace, ("rollout.samples=2", "rollout.prompts=8"))
check(done.returncode == 2 and "the trace is of another job: expected rollout.prompts 8, found 4" in done.stderr, done)
for name, damage, expected in (
        ("cut", lambda f: next(f.glob("trace/trainer*.spans")).write_bytes(
            next(f.glob("trace/trainer*.spans")).read_bytes()[:-7]), "the file is truncated"),
        ("half", lambda f: next(f.glob("trace/engine*.lengths")).write_text("1 0 3"), "truncated or damaged"),
        ("silent", lambda f: next(f.glob("trace/engine*.lengths")).unlink(), "the trace has no tokens"),
        ("none", lambda f: shutil.rmtree(f / "trace"), "files *.spans"),
        ("early", lambda f: next(f.glob("trace/trainer*.spans")).unlink(), "too short, or truncated"),
        ("config", lambda f: (f / "config.json").write_text("{"), "config.json")):
    bad = work / name
    shutil.copytree(trace, bad)
    damage(bad)
    for verb, more in (("simulate", ()), ("size", ("--devices", "4"))):
        done = dray(verb, bad, (), *more)
        check(done.returncode in (1, 2) and expected in done.stderr and str(bad) in done.stderr,
              f"{verb} {name}: {done.returncode} {done.stderr}")
finish()
