"""report.html: what it shows is what metrics.jsonl says, it needs nothing from elsewhere, and a browser (Chromium, where
it is installed) draws it without errors at both widths, light and dark. dray report makes the same page again, and one of
several runs."""
from pages import *

CLOCK = ("clock.enabled=true", "clock.token_seconds=0.002", "clock.train_seconds=0.001", "steps=8", "roles.engine.ranks=1",
         "roles.engine.instances=2", "schedule=async", "rollout.prompts=4", "queue.max_attempts=3")


def report(*words):
    return subprocess.run([PROGRAM, "report", *map(str, words)], capture_output=True, text=True, cwd=work,
                          timeout=PATIENCE)


one, other = work / "one", work / "other"
for folder, more, fault in ((one, (), "engine.0:0:claimed:2:kill"), (other, ("schedule=sync", "staleness=0"), None)):
    done = run(folder, *words(CLOCK + more), fault=fault)
    check(done.returncode == 0, f"{folder.name}: {done.stderr}")
    page = folder / "report.html"
    check(f"report:     {page}" in done.stdout, f"{folder.name}: {done.stdout}")
    data = data_of(page)
    check(len(data["runs"]) == 1 and not data["live"], f"{folder.name}: {data.keys()}")
    shown = data["runs"][0]
    check_values(folder.name, shown, rows(folder))
    steps = numbers(shown["timeline"]["end_steps"], shown["timeline"]["ends"])
    check([int(s) for s in steps] == list(range(9)), f"{folder.name}: steps of the timeline: {steps}")
    check(len(shown["timeline"]["tracks"]) >= 3 and shown["timeline"]["bubbles"], f"{folder.name}: no timeline")
    settings = {key: (standard, value) for key, standard, value in shown["settings"]}
    check(settings["clock.enabled"] == (False, True) and settings["steps"][1] == 8, f"{folder.name}: {settings}")
    check("seed" not in settings and "rollout.temperature" not in settings, f"{folder.name}: {settings}")
    engines = {update["role"] for update in map(json.loads, (folder / "events.jsonl").read_text().splitlines())
               if update["event"] == "engine_update"}
    check(engines == set(shown["updates"]), f"{folder.name}: updates of {engines}: {shown['updates'].keys()}")
restarts = [e for e in data_of(one / "report.html")["runs"][0]["events"] if e["event"] == "restart"]
check(len(restarts) == 1 and "killed by signal 9" in restarts[0]["message"], f"restarts: {restarts}")

text = (one / "report.html").read_text()
check(not re.search(r"""(src|href)\s*=\s*["'](?!data:)|@import|url\(""", text), "the page names another file")
before = data_of(one / "report.html")
check(report(one).returncode == 0 and data_of(one / "report.html") == before, "dray report makes another page")
# Another process may write the page of the same run at the same moment.
half = other / ".report.html.partial"
half.write_text("of another process")
check(report(other).returncode == 0 and half.exists(), "two write one page")
half.unlink(missing_ok=True)
both = beside_each_other(*[(report, one)] * 5)
check(not any(done.returncode for done in both), f"five at once: {both}")
check(data_of(one / "report.html") == before and not list(one.glob("*report.html?*")), "five at once: the page")
done = report(one, other, "-o", "both.html")
check(done.returncode == 0 and len(data_of(work / "both.html")["runs"]) == 2, f"both: {done.stderr}")

# Text of the job's is text of the page, and never a tag of it.
for said in ("</script><script>document.x=1</script>", "<!--<script>"):
    (other / "events.jsonl").write_text(json.dumps({"event": "warning", "message": said}) + "\n")
    check(report(other).returncode == 0 and said not in (other / "report.html").read_text(), f"a tag: {said}")
    events = data_of(other / "report.html")["runs"][0]["events"]
    check([e["message"] for e in events] == [said], f"a tag: {events}")

# Times are those of a clock that has run for a hundred days, and are not rounded to what a float has bits for.
late = 100 * 86400 * 10**9
lines = [{"event": "queue", "at": late + k * 10**7, "step": 0, "columns": {"prompt": k}} for k in range(50)]
lines += [{"event": "engine_update", "role": "engine.0", "at": late + 5 + k * 10**7, "version": k, "bytes": 1,
           "seconds": 1, "pause_seconds": 1} for k in range(50)]
(other / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
check(report(other).returncode == 0, "late times")
shown = data_of(other / "report.html")["runs"][0]
for name, at, first in (("queue", shown["queue"]["at"], 0), ("updates", shown["updates"]["engine.0"]["at"], 5)):
    seen = [value + shown["since_ns"] for value in numbers(at, 50)]
    right = all(abs(value - late - first - k * 10**7) < 10**5 for k, value in enumerate(seen))
    check(len(seen) == 50 and right, f"late times: {name}: {seen}")
check(numbers(shown["queue"]["columns.prompt"], 50) == list(range(50)), f"late times: {shown['queue']}")

# Of a run of many rows each point is the mean of some: a step in which a role did not wait, or that has no stale token,
# counts as 0. What follows from the rows, such as the samples until a point, counts each row once.
long, made = work / "long", []
for step in range(10001):
    row = {"step": step, "samples": 16, "step_seconds": 0.5, "staleness_tokens": [4, 6] if step % 2 else [10],
           "time": {"engine": {"processes": 2, "busy": 0.75, "transfer": 0.0, "wait": {"samples": 0.25}}}}
    if step % 2:
        row["time"]["engine"]["wait"] = {"weights": 0.25}
    made.append(row)
shutil.copytree(other, long)
(long / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in made))
check(report(long).returncode == 0, "long")
shown = data_of(long / "report.html")["runs"][0]
check(shown["stride"] > 1 and 10001 % shown["stride"], f"long: {shown['stride']} rows a point")
check_values("long", shown, made)
points = -(-10001 // shown["stride"])
stale = [numbers(shown["curves"][f"stale.{k}"], points) for k in (0, 1)]
whole = sum(sum(kind[:-1]) for kind in stale) * shown["stride"] / (10001 - 10001 % shown["stride"])
check(same(whole, 10), f"long: {whole} tokens a step by their staleness, of 10")
if shutil.which("node"):
    script = re.search(r"<script>(.*)</script>", (long / "report.html").read_text(), re.S)[1]
    parts = [re.search(pattern, script, re.S | re.M)[0] for pattern in (
        r"^function bytesOf.*?^}$", r"^function floats.*?^}$", r"^for \(const run of DATA.runs\).*?^}$",
        r"^function settle.*?^}$", r"^function at\(.*?$", r"^function last\(.*?$", r"^function lastStep.*?$",
        r"^function meanOf.*?$")]
    data = json.dumps(data_of(long / "report.html"))
    (work / "settle.js").write_text(f"const DATA = {data};\n" + "\n".join(parts) + """
const run = DATA.runs[0], end = run.points - 1;
console.log(JSON.stringify([run.samples[end], run.time[end], meanOf(run, i => at(run, "step", i), 0), lastStep(run)]));
""")
    done = subprocess.run(["node", work / "settle.js"], capture_output=True, text=True, timeout=PATIENCE)
    check(done.returncode == 0 and json.loads(done.stdout) == [16 * 10001, 0.5 * 10001, 5000, 10000], f"long: {done}")

for name, content, expected in (("events.jsonl", "[]\n", "line 1: expected an object"),
                                ("events.jsonl", "{\n", "line 1"),
                                ("metrics.jsonl", '{"step": "x"}\n', "metrics.jsonl: line 1: expected a row"),
                                ("config.json", "[]", "config.json: expected an object")):
    bad = work / "bad"
    shutil.copytree(other, bad, dirs_exist_ok=True)
    (bad / name).write_text(content)
    done = report(bad, "-o", "bad.html")
    check(done.returncode == 1 and expected in done.stderr and not (work / "bad.html").exists(), f"{name}: {done.stderr}")
    shutil.rmtree(bad)

# The last event is torn, as by a full disk, and others come behind it when the run goes on.
torn = work / "torn"
done = run(torn, fault="trainer:0:after_step:4:exit")
check(done.returncode == 1, f"torn: {done.stdout}")
events = (torn / "events.jsonl").read_text().splitlines()
os.truncate(torn / "events.jsonl", (torn / "events.jsonl").stat().st_size - 20)
done = run(torn, resume=True)
check(done.returncode == 0 and "no report" not in done.stdout + done.stderr, f"torn: {done.stdout} {done.stderr}")
again = (torn / "events.jsonl").read_text().splitlines()
check(again[:len(events) - 1] == events[:-1] and all(map(json.loads, again[len(events) - 1:])), f"torn: {again}")
check(len(again) >= len(events) and report(torn).returncode == 0, f"torn: {again}")
bad = work / os.fsdecode(b"no-utf8-\xff")  # JSON cannot hold its name
shutil.copytree(other, bad)
for asked in (["report", bad], ["trace", "--json", bad]):
    done = subprocess.run([PROGRAM, *asked], capture_output=True, timeout=PATIENCE)
    check(done.returncode in (1, 2) and not done.stdout and b"UTF-8" in done.stderr, f"{asked[0]}: {done.stdout} {done.stderr}")
shutil.rmtree(bad)
done = report(work / "nowhere")
check(done.returncode == 1 and "nowhere" in done.stderr, f"nowhere: {done.stderr}")

if CHROMIUM:
    for width, dark in ((1280, False), (390, True)):
        open_page("one", one / "report.html", width, dark)
    open_page("both", work / "both.html", 1280, True)
else:
    print("chromium is not here: the page is not opened")
finish()
