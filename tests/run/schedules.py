"""Random runs: a seed draws a schedule, settings, roles, and faults. Processes are killed, or stopped for a
while, where the program says that they are (DRAY_FAULT) or at some moment, and what ends is resumed. In the
end all that was trained is checked, whatever happened on the way. Used by the tests beside it."""
import re
import shlex

from gae import *

SLOWER = 8 if "asan" in PROGRAM or "tsan" in PROGRAM else 1
STOPPED = 3 * SLOWER  # seconds that a process is stopped
TIME = 120 * SLOWER  # seconds that a start of a run may take besides its stops; and twice limits.wait_seconds
EVERY = ("claimed", "committed")
DRIVER = ("inserted", "sealed", "finished", "cleared")
POINTS = {"engine": EVERY + ("generated", "updating", "updated"),
          "driver": DRIVER, "reward": EVERY + ("rewarded", "scored"), "other": EVERY,
          "desk": EVERY + DRIVER + ("rewarded", "scored"),
          "trainer": EVERY + ("after_warmup", "after_backward", "after_step", "after_publish", "after_commit",
                              "in_checkpoint", "checkpoint_named", "after_checkpoint", "covered")}
POINTS["critic"] = tuple(point for point in POINTS["trainer"] if point not in ("after_warmup", "covered"))
TRAINERS = ("trainer", "critic")  # with them the run ends
CLOCK = ["clock.enabled=true", "clock.tokens=4", "clock.variation=0.7", "clock.correlation=0.5", "clock.tail=4",
         "clock.tail_share=0.1", "clock.token_seconds=1e-3", "clock.train_seconds=1e-3",
         "clock.log_prob_seconds=2e-4", "clock.reward_seconds=1e-4", "rollout.max_new_tokens=20"]


def grader():
    """The grader of examples/roles in C: a role that is no program of ours."""
    source, build = (pathlib.Path(os.environ[name]) for name in ("DRAY_SOURCE_DIR", "DRAY_BUILD_DIR"))
    if not (work / "grade").exists():
        subprocess.run([*shlex.split(os.environ.get("CC", "cc")), "-std=c17", f"-I{source}/include",
                        str(source / "examples/roles/grade.c"), "-o", str(work / "grade"), f"-L{build}",
                        "-ldray", f"-Wl,-rpath,{build}"], check=True)
    return str(work / "grade")


class Case:
    """What a seed draws."""

    def __init__(self, seed, schedules):
        self.random = r = random.Random(seed)
        self.seed = seed
        self.schedule = r.choice(schedules)
        self.settings = [f"schedule={self.schedule}", "limits.restarts=30", "queue.max_attempts=30"]
        self.wait = r.choice([5, 20]) * SLOWER
        self.clock = r.random() < 0.5
        staleness = self.draw_schedule()
        self.bounds = Bounds(self.schedule, staleness)
        every, self.durability = r.choice([1, 2, 3]), r.choice(["none", "checkpoint", "journal"])
        self.settings += [f"limits.wait_seconds={self.wait}", f"checkpoint.every={every}",
                          f"queue.durability={self.durability}",
                          f"weights.mode={r.choice(['tensor', 'tensor', 'disk'])}"]
        self.settings += CLOCK if self.clock else []
        self.policy = r.choice(["ordered"] * 4 + ["group", "token_balanced", "oldest_version", "fifo"]
                               if self.schedule != "async" else ["ordered"])
        self.settings.append(f"queue.policy={self.policy}")
        # What the trainer computes; the rest of the settings changes no bit.
        self.computed = [one for one in ("actor.epochs=2", "actor.old_log_prob=rollout", "reference.enabled=false",
                                         "advantage.method=rloo") if r.random() < 0.15]
        self.critic_ranks = r.choice([1, 2]) if r.random() < 0.2 else 0  # 0: no value model
        if self.critic_ranks:
            self.computed = [one for one in self.computed if "advantage" not in one]
            self.computed += ["advantage.method=gae", "critic.micro_batch=8"]
        self.settings += self.computed
        self.draw_roles()
        self.settings.append("roles=" + json.dumps(self.roles))
        # Before the undisturbed one that ends it.
        self.starts = [self.draw_faults() for _ in range(r.choice([1, 1, 2, 3]))]

    def draw_schedule(self):
        r, staleness = self.random, 0
        if self.schedule == "async":
            staleness = r.choice([0, 1, 1, 2, 4])
            self.settings.append(f"staleness={staleness}")
        self.continuous = r.random() < 0.3
        if self.continuous:
            self.settings.append("rollout.batching=continuous")
        if self.schedule == "sync":
            self.settings.append(f"stream={r.choice(['true', 'true', 'false'])}")
        elif (self.schedule != "async" or staleness) and r.random() < 0.4:
            self.continuous = True  # what is computed together depends on when it comes
            self.settings.append(f"rollout.partial_tokens={r.choice([1, 3])}")
        if self.schedule in ("rolling", "async"):
            at_once = "rollout.batching=continuous" in self.settings and r.random() < 0.7
            self.settings.append(f"update={r.choice(['in_flight', 'anew']) if at_once else 'boundary'}")
        if (self.schedule == "rolling" or staleness) and r.random() < 0.3:
            self.settings.append(f"fresh_share={r.choice([0.25, 0.5])}")
        return staleness

    def draw_roles(self):
        """labels: of the instances, with what points they have and how many ranks."""
        r = self.random
        ranks, instances = r.choice([(1, 1), (2, 1), (1, 2)])
        if self.schedule == "rolling":
            ranks, instances = r.choice([(1, 2), (1, 3), (2, 2)])
        self.trainer_ranks, self.engine_ranks = r.choice([1, 2]), ranks
        self.roles, self.labels = [], []
        apart = r.random() < 0.25  # evaluations by an engine of their own
        self.add("engine", ["rollout"] + ([] if apart else ["eval"]), "engine", ranks, instances)
        if apart:
            self.add("judge", ["eval"], "engine")
        self.add("trainer", ["old_log_prob", "actor"], "trainer", self.trainer_ranks)
        if self.critic_ranks:
            self.add("critic", ["value", "critic"], "critic", self.critic_ranks)
        desk = r.choice(["one", "one", "apart", "own"])
        if desk == "one":
            self.add("desk", ["driver", "reward", "reference", "advantage"], "desk")
        elif desk == "apart":
            self.add("driver", ["driver"], "driver")
            self.add("scorer", ["reward", "score"], "reward", instances=r.choice([1, 2]))
            self.add("helper", ["reference", "advantage"], "other")
        else:
            self.add("desk", ["driver", "reference", "advantage"], "driver")
            self.add("grader", ["reward"], None, instances=r.choice([1, 2]), command=grader())

    def add(self, name, tasks, points, ranks=1, instances=1, **more):
        self.roles.append({"name": name, "tasks": tasks, "ranks": ranks, "instances": instances, **more})
        self.labels += [(name if instances == 1 else f"{name}.{i}", points, ranks) for i in range(instances)]

    def draw_faults(self):
        """A start: (what DRAY_FAULT is, what happens at which second to whom)."""
        r, points, moments = self.random, [], []
        for _ in range(r.choice([0, 1, 1, 2])):
            label, kind, ranks = r.choice([one for one in self.labels if one[1]])
            point = r.choice(POINTS[kind])
            rank = 0 if point in EVERY else r.randrange(ranks)
            points.append(f"{label}:{rank}:{point}:{r.randrange(STEPS + 1)}:"
                          f"{r.choice(['kill', 'kill', 'kill', 'exit', 'stop'])}")
        for _ in range(r.choice([0, 1, 1, 2]) if points else r.choice([1, 2])):
            who = r.choice(["supervisor", "--coordinator", *(f"role {role['name']}" for role in self.roles),
                            *(f"role {role['name']}" for role in self.roles if role["name"] not in TRAINERS)])
            what = r.choice([signal.SIGKILL] * 3 + [signal.SIGSTOP] +
                            ([signal.SIGINT] if who == "supervisor" else []))
            moments.append((r.uniform(0, 0.6 if self.clock else 0.5) * SLOWER, who, what, r.random()))
        return ",".join(points), sorted(moments)

    def may_end(self, start):
        """Whether what is drawn for a start may end the run: else it goes on to its end."""
        points, moments = start
        patient = self.wait > 4 * STOPPED
        fatal = any(point.split(":")[0] in TRAINERS and not point.endswith(":stop") for point in points.split(","))
        stops = "stop" in points or any(what == signal.SIGSTOP for _, _, what, _ in moments)
        return fatal or (stops and not patient) or any(
            who.removeprefix("role ") in ("supervisor", "--coordinator", *TRAINERS) and what != signal.SIGSTOP
            for _, who, what, _ in moments)

    def same_bits(self):
        """Cases that end with the same checkpoint; None: what is computed together depends on the moment."""
        if not self.bounds.exact or self.continuous or self.policy != "ordered":
            return None
        return "-".join([self.schedule, str(self.clock), str(self.engine_ranks), str(self.trainer_ranks),
                         str(self.critic_ranks), *self.computed])

    def arguments(self):
        return [*DATA, *words(self.settings)]

    def __str__(self):
        return f"seed {self.seed}"

    def describe(self):
        return f"{self}: {' '.join(self.settings)}; " + "; ".join(f"{points} {moments}" for points, moments in self.starts)


seen = collections.Counter()  # how often what happened


def set_priority(value):
    """Where it may be: who wakes processes after 3 s must have a core by then, whatever runs beside."""
    try:
        os.setpriority(os.PRIO_PROCESS, 0, value)
    except OSError:
        pass


def usual_priority():
    set_priority(0)


def victims(folder, process, who):
    if who == "supervisor":
        return [process.pid]
    return sorted(pid for pid, line in processes_of(folder) if who in line and pid != process.pid)


def befall(folder, process, who, what, which):
    found = victims(folder, process, who)
    if found:
        try:
            os.kill(found[int(which * len(found))], what)
            seen[f"{signal.Signals(what).name} of {who}"] += 1
        except ProcessLookupError:
            pass


def wake(folder, since):
    """Lets processes go on that have been stopped for a while; whether any is stopped."""
    stopped = set()
    for pid, _ in processes_of(folder):
        if state_of(pid) == "T":
            stopped.add(pid)
            if time.monotonic() - since.setdefault(pid, time.monotonic()) > STOPPED:
                os.kill(pid, signal.SIGCONT)
    for pid in [pid for pid in since if pid not in stopped]:
        del since[pid]
    return bool(stopped)


def disturbed(folder, case, start):
    """A start of the run, with what befalls it. Its exit status, what it said, and how long it took
    besides stops; status None: it did not end."""
    points, moments = start
    resume = (folder / "config.yaml").exists()
    environment = dict(os.environ, **begin_record(folder), DRAY_FAULT=points)
    line = command(folder, resume=True) if resume else command(folder, *case.arguments())
    moments, stopped, slept, begun = list(moments), {}, 0.0, time.monotonic()
    set_priority(-10)
    with open(work / "out", "w+") as out:
        process = subprocess.Popen(line, stdout=out, stderr=out, cwd=work, env=environment, preexec_fn=usual_priority)
        last = begun
        while process.poll() is None and time.monotonic() - begun - slept < TIME + 2 * case.wait:
            time.sleep(0.02)
            now = time.monotonic()
            while moments and now - begun > moments[0][0]:
                befall(folder, process, *moments.pop(0)[1:])
            if now - last > 0.2:
                slept += now - last if wake(folder, stopped) else 0
                last = now
        late = process.poll() is None
        if late:
            process.kill()
        process.wait()
        out.seek(0)
        text = out.read()
    usual_priority()
    killed = ("--coordinator", signal.SIGKILL) in [(who, what) for _, who, what, _ in start[1]]
    check_nothing_left(folder, sockets=process.returncode >= 0 and not late and not killed)
    return None if late else process.returncode, text, time.monotonic() - begun - slept


def check_rows(folder, case):
    made = rows(folder)
    check([row["step"] for row in made] == list(range(STEPS + 1)), f"{case}: rows {[r['step'] for r in made]}")
    for row in made[1:]:
        low, high = case.bounds.versions(row["step"])
        check(row["samples"] == BATCH, f"{case}: {row}")
        check(low <= row["weight_version_min"] <= row["weight_version"] <= high, f"{case}: versions: {row}")
        check(row["staleness_max"] == row["step"] - 1 - row["weight_version_min"], f"{case}: staleness: {row}")
    due = [row for row in made if row["step"] in (0, 3, STEPS)]
    check(all(row["step"] <= row.get("eval_version", -1) <= (row["step"] if case.bounds.exact else STEPS)
              for row in due), f"{case}: evaluations: {due}")


def check_models(folder, case):
    if not case.critic_ranks:
        check_lineage(folder, str(case), case.bounds)
        return
    kept = case.durability != "none" and case.schedule != "async"
    check_both(folder, str(case), case.bounds, ("critic",) if kept else ("critic", "value"))


wholes = {}


def check_bits(folder, case):
    key = case.same_bits()
    if key and key not in wholes:
        wholes[key] = whole = work / f"whole-{key}"
        roles = [{"name": "engine", "tasks": ["rollout", "eval"], "ranks": case.engine_ranks},
                 *(role for role in case.roles if role["name"] in TRAINERS),
                 {"name": "desk", "tasks": ["driver", "reward", "reference", "advantage"]}]
        layout = [f"roles={json.dumps(roles)}", f"schedule={case.schedule}", *case.computed,
                  *(CLOCK if case.clock else [])]
        done = recorded(whole, *DATA, *words(layout))
        check(done.returncode == 0, f"{case}: undisturbed: {done.stderr}")
    if key:
        a, b = (checkpoint(f, STEPS) for f in (wholes[key], folder))
        check(same_folder(a / "optimizer", b / "optimizer"), f"{case}: other bits than the undisturbed run's")
        check(not case.critic_ranks or same_folder(critic(wholes[key], STEPS), critic(folder, STEPS)),
              f"{case}: another value model than the undisturbed run's")
        check(lineage(wholes[key], STEPS) == lineage(folder, STEPS), f"{case}: other samples than the undisturbed run's")


def run_case(case):
    """Runs it, and checks it; True: nothing was wrong, and the folder is gone."""
    folder, before, longest = work / f"case-{case.seed}", len(failures), 0.0
    for start in [*case.starts, ("", [])]:
        status, text, took = disturbed(folder, case, start)
        longest = max(longest, took)
        what = f"{case}: {start}: status {status}: {text[-700:]}"
        check(status is not None, f"it outlived its limits: {what}")
        check(status in ((0, 1, 130, -signal.SIGKILL, -signal.SIGINT) if case.may_end(start) else (0,)), what)
        check(status != 1 or f"dray run --resume {folder}" in text, f"no advice: {what}")
        seen[f"status {status}"] += 1
        if newest(folder) > 0:
            check_models(folder, case)
        if len(failures) > before or status == 0:
            break
    if len(failures) == before:
        check_rows(folder, case)
        check_bound(folder, str(case), case.bounds)
        check_bits(folder, case)
    for log in folder.rglob("logs/*.log"):
        for fault in re.findall(r"^fault: (\w+) at (\w+) of", log.read_text(errors="replace"), re.M):
            seen[" at ".join(fault)] += 1
    seen[f"schedule {case.schedule}{' with a value model' if case.critic_ranks else ''}"] += 1
    good = len(failures) == before
    if good:
        shutil.rmtree(folder)
        record_of(folder).unlink()
    else:
        print(case.describe(), flush=True)
    return good, longest
