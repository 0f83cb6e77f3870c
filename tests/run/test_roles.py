"""Roles that are programs of the job's own: they are told what they are by their environment, start in
order, end with the queue, and are named when they die, hang or leave too early."""
import http.server
import re
import shlex
import threading

from jobs import *

SOURCE = pathlib.Path(os.environ["DRAY_SOURCE_DIR"])
BUILD = pathlib.Path(os.environ["DRAY_BUILD_DIR"])
BUILT_IN = [{"name": "engine", "tasks": ["rollout", "eval"], "ranks": 2},
            {"name": "trainer", "tasks": ["old_log_prob", "actor"], "ranks": 2},
            {"name": "desk", "tasks": ["driver", "reference", "advantage"]}]
SHELL = {"name": "grader", "tasks": ["reward"]}
PLAIN = ["--set", "steps=2"]


def with_roles(name, *more, built_in=BUILT_IN, extra=""):
    """The job with these roles, as a file."""
    path = work / f"{name}.yaml"
    path.write_text(TINY + extra + "roles: " + json.dumps([*built_in, *more]) + "\n")
    return path


def own(name, *more, arguments=(), built_in=BUILT_IN, extra="", **options):
    job = with_roles(name, *more, built_in=built_in, extra=extra)
    return run(work / name, *PLAIN, *arguments, job=job, **options)


# ---- the grader in C, as docs/roles.md shows it ------------------------------------------------------
compiler = shlex.split(os.environ.get("CC", "cc"))
subprocess.run([*compiler, "-std=c17", "-Wall", "-Wextra", "-Werror", f"-I{SOURCE}/include",
                str(SOURCE / "examples/roles/grade.c"), "-o", str(work / "grade"), f"-L{BUILD}", "-ldray",
                f"-Wl,-rpath,{BUILD}"], check=True)
GRADE = {**SHELL, "command": str(work / "grade"), "instances": 2}
LEARNT = ["--set", "warmup.max_steps=400", "--set", "warmup.reward=0.2"]
done = run(work / "plain", *PLAIN, *LEARNT)
check(done.returncode == 0, f"plain: {done.stderr}")
wanted = [row["reward_mean"] for row in rows(work / "plain")]
check(all(0 < reward < 1 for reward in wanted), f"rewards: {wanted}")
done = own("graders", GRADE, arguments=LEARNT)
check(done.returncode == 0, f"graders: {done.stderr}")
graders = sorted(p.name for p in (work / "graders/logs").glob("grader*"))
check(graders == ["grader.0-0.log", "grader.1-0.log"], f"graders: {graders}")
rewards = [row["reward_mean"] for row in rows(work / "graders")]
check(rewards == wanted, f"graders: {rewards}, not {wanted}")

# The same in Python, as docs/roles.md has it.
python = os.environ.get("DRAY_TEST_PYTHON") or sys.executable
if subprocess.run([python, "-c", "import numpy"], capture_output=True).returncode == 0:
    block = (SOURCE / "docs/roles.md").read_text().split("```python role\n")[1].split("```")[0]
    (work / "grade.py").write_text(block)
    done = own("python", {**SHELL, "command": f"exec {python} grade.py", "cwd": ".",
                          "env": [f"PYTHONPATH={SOURCE}/python"]}, arguments=LEARNT)
    check(done.returncode == 0, f"python: {done.stderr}")
    rewards = [row["reward_mean"] for row in rows(work / "python")]
    check(rewards == wanted, f"python: {rewards}, not {wanted}")

    # A rollout that does not say each token's version: the sample's counts, and bounds its staleness.
    (work / "rollout.py").write_text("""
import sys, dray, numpy as np
with dray.Role() as role:
    for batch in role.batches():
        column = "eval_response" if batch.task == "eval" else "response"
        batch.set(column, [np.array([49, 258], np.int32)] * batch.rows)
        behind = 0 if batch.task == "eval" else int(sys.argv[1])
        batch.set_tag("version", [max(0, batch.tag("step")[0] - behind)] * batch.rows)
        if behind:
            batch.set("rollout_log_prob", [np.array([-1, -1], np.float32)] * batch.rows)
""")
    for behind in (1, 2):
        role = {"name": "engine", "tasks": ["rollout", "eval"], "command": f"exec {python} rollout.py {behind}",
                "cwd": ".", "env": [f"PYTHONPATH={SOURCE}/python"]}
        name = f"untold-{behind}"
        done = own(name, {"name": "grader", "tasks": ["reward"]}, built_in=[role, *BUILT_IN[1:]],
                   extra="tasks: [{name: rollout, writes: [response, rollout_log_prob]}]\n",
                   arguments=["--set", "queue.on_loss=end", "--set", "limits.wait_seconds=5"])
        if behind == 1:
            check(done.returncode == 0, f"{name}: {done.stderr}")
            tokens = [row["staleness_tokens"] for row in rows(work / name)[1:]]
            check(tokens == [[32], [32]], f"{name}: {tokens}")
        else:
            check(done.returncode == 1, f"{name}: trained samples that are too old")
else:
    print("no numpy: the grader in Python is not tried")

# ---- what a process is told --------------------------------------------------------------------------
table = (SOURCE / "docs/roles.md").read_text().split("## What a process is told")[1].split("##")[0]
PAGE = {name for line in table.splitlines() if line.startswith("| `") for name in re.findall(r"`([A-Z_]+)`", line.split("|")[1])}
NICE = min(19, os.nice(0) + 3)
show = (f"env >{work}/env.$DRAY_ROLE.$DRAY_INSTANCE.$DRAY_RANK; ls /proc/self/fd >{work}/fds; "
        f"pwd >{work}/pwd; nice >{work}/nice.$DRAY_INSTANCE.$DRAY_RANK; exec {work}/grade")
(work / "there").mkdir()
secrets = {"DRAY_TOKEN": "dray1.secret", "DRAY_REDIS_PASSWORD": "secret", "RANK": "7", "KEPT": "yes"}
done = own("told", {**SHELL, "command": show, "ranks": 2, "instances": 2, "env": ["MINE=1 2", "KEPT=no"],
                    "cwd": "there", "devices": "cpu:0", "nice": 3}, environment=secrets)
check(done.returncode == 0, f"told: {done.stderr}")
config = json.loads((work / "told/config.json").read_text())
check(config["steps"] == 2 and config["roles"][3]["cwd"] == str(work / "there"), f"config.json: {config}")
for instance in (0, 1):
    ports = set()
    for rank in (0, 1):
        told = dict(line.split("=", 1) for line in
                    (work / f"env.grader.{instance}.{rank}").read_text().splitlines() if "=" in line)
        wanted = {"DRAY_RUN": str(work / "told"), "DRAY_CONFIG": str(work / "told/config.json"),
                  "DRAY_QUEUE": "samples", "DRAY_TASK": "reward", "DRAY_ROLE": "grader",
                  "DRAY_INSTANCE": str(instance), "DRAY_EPOCH": "1", "DRAY_STEP": "0", "DRAY_EVAL_FROM": "0",
                  "DRAY_RANK": str(rank), "DRAY_DEVICES": "cpu:0", "RANK": str(rank), "WORLD_SIZE": "2",
                  "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
                  "TORCHELASTIC_RUN_ID": f"tiny/grader.{instance}", "TORCHELASTIC_RESTART_COUNT": "0",
                  "MINE": "1 2", "KEPT": "no"}
        wrong = {k: told.get(k) for k, v in wanted.items() if told.get(k) != v}
        check(not wrong, f"environment of {instance}, {rank}: {wrong}")
        check(told["DRAY_ADDRESS"].startswith("unix:/"), told["DRAY_ADDRESS"])
        missing, unknown = PAGE - set(told), {n for n in told if n.startswith("DRAY_")} - set(os.environ) - PAGE
        check(missing == {"DRAY_LEASES", "DRAY_TOKEN_FILE"}, f"on the page, and not told: {missing}")
        check(not unknown, f"told, and not on the page: {unknown}")
        check(not {"DRAY_TOKEN", "DRAY_REDIS_PASSWORD", "DRAY_GROUP_FD"} & set(told), "secrets are told")
        ports.add(told["MASTER_PORT"])
    check(len(ports) == 1 and ports.pop() > "0", f"ports: {ports}")
check((work / "pwd").read_text().strip() == str(work / "there"), "cwd")
nices = {path.name: path.read_text() for path in work.glob("nice.*")}
check(len(nices) == 4 and set(nices.values()) == {f"{NICE}\n"}, f"nice: {NICE} expected of four, found {nices}")
check((work / "fds").read_text().split() == ["0", "1", "2", "3"], "a command has descriptors of ours")

# ---- order: a server with a URL, then who needs it; it ends when the others have ended ----------------
log = work / "order.log"


class Server(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        with log.open("a") as file:
            file.write(f"{self.path}\n")
        self.send_response(200 if log.read_text().count("/health") > 2 else 503)
        self.end_headers()

    def log_message(self, *_):
        pass


server = http.server.HTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
script = work / "server.sh"
script.write_text(f"""trap 'echo ended >>{log}; exit 0' TERM
echo started >>{log}
touch $DRAY_RUN/server.ready
while :; do sleep 0.1; done
""")
done = own("order",
           {"name": "judge", "command": f"exec sh {script}", "ready": f"http://127.0.0.1:{server.server_port}/health"},
           {"name": "file", "command": "touch $DRAY_RUN/yes; exec sleep 1000", "ready": "yes"},
           {**SHELL, "command": f"echo graded >>{log}; exec {work}/grade", "after": ["judge", "file"]})
check(done.returncode == 0, f"order: {done.stderr}")
seen = log.read_text().split()
check("started" in seen[:4] and seen.count("/health") == 3 and seen[-2:] == ["graded", "ended"],
      f"order: {seen}")
# A file from before the start does not count, whatever its time, and one that was written since does, as when the clock
# was set back meanwhile.
(work / "clock").mkdir()
(work / "clock/late").touch()
os.utime(work / "clock/late", (time.time() + 3600,) * 2)
done = own("clock", {"name": "early", "command": "touch -d 2001-01-01 $DRAY_RUN/early; exec sleep 1000", "ready": "early"},
           {"name": "late", "command": "sleep 0.5; touch $DRAY_RUN/true; date >$DRAY_RUN/late; exec sleep 1000",
            "ready": "late"},
           {**SHELL, "command": f"ls $DRAY_RUN >{work}/clock.ls; exec {work}/grade", "after": ["early", "late"]},
           arguments=["--set", "limits.wait_seconds=20"])
check(done.returncode == 0, f"clock: {done.stderr}")
check({"early", "true"} <= set((work / "clock.ls").read_text().split()), "clock: a file of an earlier run counts")
done = own("never", {"name": "judge", "command": "exec sleep 1000", "ready": "no/such/file"},
           {**GRADE, "after": ["judge"]}, arguments=["--set", "limits.wait_seconds=1"])
check(done.returncode == 1 and "role judge is not ready after 1 s" in done.stderr, f"never: {done.stderr}")

# ---- who does not end, dies, or leaves too early ------------------------------------------------------
deaf = f"{work}/grade; trap '' TERM; while :; do sleep 0.1; done"
began = time.monotonic()
done = own("deaf", {**SHELL, "command": deaf, "grace_seconds": 0.5})
check(done.returncode == 0 and "grader did not end on SIGTERM: killed" in done.stdout,
      f"deaf: {done.stdout}{done.stderr}")
check(time.monotonic() - began < 20, f"deaf: {time.monotonic() - began:.1f} s")
mark = work / "once"
flaky = f"if [ $DRAY_EPOCH = 1 ]; then exit 0; fi; echo $DRAY_EPOCH >{mark}; exec {work}/grade"
done = own("early", {**SHELL, "command": flaky})
check(done.returncode == 0 and mark.read_text() == "2\n" and
      "grader rank 0 exited with status 0 before the queue's end: starting grader anew" in done.stdout,
      f"early: {done.stdout}{done.stderr}")
done = own("last", {**SHELL, "command": "echo 'error: no luck' >&2; exit 3", "on_death": "end"})
check(done.returncode == 1 and "grader rank 0 failed with status 3: no luck; " in done.stderr and
      "dray run --resume" in done.stderr, f"last: {done.stderr}")
once = f"if mkdir {work}/lock.$DRAY_INSTANCE.$DRAY_EPOCH && [ $DRAY_INSTANCE = 1 ]; then exit 1; fi; exec {work}/grade"
done = own("apart", {**SHELL, "command": once, "instances": 2}, arguments=["--set", "limits.restarts=3"])
check(done.returncode == 1 and "grader.1 died 3 times in a row" in done.stderr or done.returncode == 0,
      f"apart: {done.stderr}")
check(not (work / "lock.0.2").exists(), "an instance was started anew with another one")

# What a command has started ends with the supervisor, too, however that ends. (A queue with a journal
# outlives its coordinator, and who claims from it waits for another one.)
job = with_roles("orphans", {**SHELL, "command": f"{work}/grade & wait", "instances": 2})
process = start(work / "orphans", "--set", "steps=100000", "--set", "queue.durability=journal", job=job,
                json_lines=True)
check(any('"event":"step","step":1,' in line for line in process.stdout), "orphans: no step")
process.kill()
process.communicate(timeout=PATIENCE)
check_nothing_left(work / "orphans", sockets=False)

# ---- silence, and slowness ---------------------------------------------------------------------------
stop = f"if [ $DRAY_EPOCH = 1 ]; then kill -STOP $$; fi; exec {work}/grade"
done = own("silent", {**SHELL, "command": stop}, arguments=["--set", "limits.wait_seconds=3"])
check(done.returncode == 0 and "grader rank 0 has been stopped for" in done.stdout,
      f"silent: {done.stdout}{done.stderr}")
done = run(work / "hangs", *PLAIN, "--set", "limits.wait_seconds=3", fault="trainer:0:after_backward:1:stop")
check(done.returncode == 1 and "trainer rank 0 has been stopped for" in done.stderr and
      "and holds 4 rows of actor" in done.stderr, f"hangs: {done.stderr}")
# Many passes over 16 samples take longer than anybody may be silent, and are not silence. How many it
# takes depends on the machine.
for epochs in (1024, 4096, 16384):
    name = f"slow-{epochs}"
    done = run(work / name, "--set", "steps=1", "--set", "limits.wait_seconds=2", "--set", f"actor.epochs={epochs}",
               "--set", "actor.micro_batch=1", "--set", "model.layers=16", "--set", "roles.trainer.ranks=1")
    check(done.returncode == 0, f"{name}: {done.stderr}")
    seconds = rows(work / name)[1]["step_seconds"]
    if seconds > 2:
        break
check(seconds > 2, f"slow: {seconds} s is not, even with {epochs} epochs")
done = run(work / "limit", "--set", "steps=1", "--set", "limits.step_seconds=2", "--set", "clock.enabled=true",
           "--set", "clock.train_seconds=1")
check(done.returncode == 1 and "(limits.step_seconds); held: " in done.stderr and
      "rows of actor by trainer/0" in done.stderr, f"limit: {done.stderr}")
finish()
