"""Other hosts join a run (`listen:`, `dray join`), each in a network namespace: who may not is told why; hosts come and
go while the run goes on; logs, timelines and clocks come home. tests/run/soak_hosts.py breaks links and hosts."""
from netspaces import *

make_spaces(3)
STEPS, BATCH = 60, 16
JOB = work / "hosts.yaml"
JOB.write_text(TINY.replace("steps: 6", f"steps: {STEPS}") + f"""
listen: tcp:{NET}.1:{PORT}
clock: {{enabled: true, token_seconds: 0.01, tokens: 3, train_seconds: 1e-4}}
schedule: async
roles:
  - {{name: engine, tasks: [rollout, eval], instances: 3, local: 0}}
  - {{name: trainer, tasks: [old_log_prob, actor]}}
  - {{name: desk, tasks: [driver, reward, reference, advantage]}}
""")
OTHER = work / "other.yaml"
OTHER.write_text(JOB.read_text().replace("lr: 1e-3", "lr: 2e-3"))


def refused(folder, why, *words, number=1, status=1, job=JOB, roles="engine:1", token="engine", **environment):
    process = join(number, folder, job, roles, "--wait", "2", *words, token=token, **environment)
    said = process.communicate(timeout=PATIENCE)[0]
    check(process.returncode == status and why in said, f"expected {why!r}, status {process.returncode}: {said}")


def refusals(folder):
    refused(folder, "`lr: 0.001` expected, found `lr: 0.002`", job=OTHER, status=2)
    refused(folder, "another job file", "--set", "seed=9", status=2)
    refused(folder, "no such role; did you mean 'engine'?", roles="engin:1")
    refused(folder, "needs a token of the role engine; found one of the role task", token="task")
    refused(folder, "runs on the run's own host", roles="trainer", token="trainer", status=2)
    refused(folder, "1 to 3 expected, found 4", roles="engine:4", status=2)
    old = work / "old"
    old.mkdir()
    for role in ("master", "engine"):
        subprocess.run([PROGRAM, "token", "--role", role, "--master", old / "master.token", "--out",
                        old / f"{role}.token"], check=True, stdout=subprocess.DEVNULL)
    refused(folder, "does not take the token", "--token", old / "engine.token", token="../../old/engine")


def offset_of(folder):
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    return names, {names[e["pid"]]: e["args"] for e in events if e["name"] == "clock"}, events


folder = work / "run"
run_ = begin(folder, JOB)
check(wait_for(run_, lambda e: e["event"] == "waiting" and "engine: 0 of 3" in e["message"]), "nobody was waited for")
refusals(folder)
# Its clock is an hour ahead, where this kernel has time namespaces.
SHIFT = ["unshare", "-T", "--monotonic", "3600"]
shifted = subprocess.run([*SHIFT, "true"], stderr=subprocess.DEVNULL).returncode == 0
# The run stands still for longer than the host waits for its answer: the host asks again, and both requests are taken.
stopped = [pid for pid, line in processes_of(folder) if f"{PROGRAM} run" in line]
for number in (signal.SIGSTOP, signal.SIGCONT):
    for pid in stopped:
        os.kill(pid, number)
    if number == signal.SIGSTOP:
        first = join(1, folder, JOB, "engine:2", before=SHIFT if shifted else ())
        time.sleep(10)
reached(run_, 5)
# Its folder has files that it may not bring home: of a place that it had before, and of a program's own.
out = work / "out"
(out / "logs").mkdir(parents=True)
for name in ("engine.0-0.log", "notes.txt"):
    (out / "logs" / name).write_text("not at home")
(out / "stop").symlink_to(work / "of an earlier run")
second = join(2, folder, JOB, "engine:1", "--json", "--out", out, "--shared", os.path.relpath(folder))
check(wait_for(run_, lambda e: e["event"] == "host" and "host2" in e["message"]), "the second host has not joined")
reached(run_, 10)
# The folder that it shares is not there yet, as before the run of a cluster has begun.
refused(folder, "0 of 3 are free", "--shared", work / "not there yet", number=2, roles="engine:1")
first.terminate()  # a drain
said = end(first, "the first host's drain")
check("leaving" in said and "left the run" in said, f"the drain said {said}")
check(wait_for(run_, lambda e: e["event"] == "host" and "host1 has left" in e["message"]), "the first host never left")
reached(run_, 15)
third = join(1, folder, JOB, "engine:1")
end(run_, "the run")
end(third, "the third host")
said = [json.loads(line) for line in end(second, "the second host").splitlines()]
check([line["event"] for line in said] == ["joined"], f"the second host said {said}")
check_trained(folder, STEPS, BATCH, "hosts")
check(not [e for e in look(run_) if e["event"] in ("restart", "warning")], f"{look(run_)}")

# A trainer's steps find what the run has of them.
there = {name: os.readlink(out / name) for name in ("metrics.jsonl", ".metrics.pending", "feed.json", "stop")}
check(there == {name: str(folder.resolve() / name) for name in there}, f"links: {there}")

# What the joined hosts had is at home.
names, clocks, events = offset_of(folder)
check({"engine.0 0", "engine.1 0", "engine.2 0"} <= set(names.values()), f"timelines: {names}")
check(set(clocks) >= {"engine.0 0", "engine.1 0", "engine.2 0"}, f"clocks: {clocks}")
added = [c["added_ns"] for c in clocks.values()]
check(all(0 <= c["error_ns"] < 1e8 for c in clocks.values()), f"clocks: {clocks}")
check(not shifted or any(abs(ns + 3600e9) < 1e8 for ns in added), f"an hour ahead: {clocks}")
check(all(abs(ns) < 1e8 or abs(ns + 3600e9) < 1e8 for ns in added), f"clocks: {clocks}")
spans = [e for e in events if e["ph"] == "X"]
check(max(e["ts"] + e["dur"] for e in spans) < 300e6, "the timeline is as long as the run")
check(all((folder / "logs" / f"engine.{i}-0.log").exists() for i in range(3)), "logs are not at home")
at_home = {log.name: "not at home" in log.read_text() for log in (folder / "logs").iterdir()}
check(not any(at_home.values()) and "notes.txt" not in at_home, f"foreign files are at home: {at_home}")
made = rows(folder)[-1]["time"]["engine"]
check(made["processes"] == 3 and made["wait"], f"time of the engines: {made}")
finish()
