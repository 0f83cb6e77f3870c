"""Memory, descriptors and mappings of a run stay what they are, however many steps it makes: the clock job, its sleeps
as good as none, 32 rows a step in five tasks. Of every process (supervisor, coordinator, roles) the third quarter of the
run is compared with the second, the last with the third, and the last quarter's second half with its first: what grows
each time is not flat (caches and rings fill up once); of the run's folder the files are counted, and what is appended a step is bounded.
Of the queue's shared memory the chunks are counted, which are taken when they are needed and then used again: a process's own share
grows for as long as it meets pages of them for the first time, which with checkpoints far apart takes thousands of steps.

DRAY_TEST_STEPS: steps of each run (20,000). DRAY_TEST_SCHEDULES: some of the names below."""
import statistics

from jobs import *

STEPS = int(os.environ.get("DRAY_TEST_STEPS", 20000))
EVERY = 1.0  # seconds between looks
JOB = pathlib.Path(os.environ["DRAY_SOURCE_DIR"]) / "examples" / "clock.yaml"
ZERO = ("clock.token_seconds=1e-6", "clock.train_seconds=0", f"steps={STEPS}")
RUNS = {
    "sync": (),
    "one_step_async": ("schedule=one_step_async",),
    "rolling": ("schedule=rolling", "roles.engine.instances=2"),
    "async": ("schedule=async", "staleness=1"),
    "journal": ("queue.durability=journal", "checkpoint.every=200"),
}
# Growth that is allowed from one quarter to the next, of the least that was seen in each: what is in use for a moment
# comes and goes by megabytes. 100 bytes that are lost each step are 488 KiB a quarter.
SLACK_KB, SLACK = 384, 0.01
METRICS_BYTES, SPANS_BYTES = 2048, 32768  # a step, at most


def share_of_queue(maps):
    """Its share of the memory that the queue's rows lie in, in KiB."""
    whole, within = 0, False
    for line in maps.splitlines():
        if line[0] in "0123456789abcdef":
            within = "/memfd:dray-samples" in line
        elif within and line.startswith("Pss:"):
            whole += int(line.split()[1])
    return whole


def numbers(process):
    """Its own memory and its share of shared memory but the queue's in KiB, descriptors, mappings; None: the process
    has ended."""
    entry = pathlib.Path("/proc") / str(process)
    try:
        parts = (line.split() for line in (entry / "smaps_rollup").read_text().splitlines())
        memory = sum(int(part[1]) for part in parts if part[0] in ("Pss_Anon:", "Pss_Shmem:"))
        memory -= share_of_queue((entry / "smaps").read_text())
        return (memory, len(list((entry / "fd").iterdir())), len((entry / "maps").read_text().splitlines()))
    except OSError:
        return None


def chunks_of(folder):
    """Of the queue; None: nobody is there to ask, or not any more."""
    done = subprocess.run([PROGRAM, "status", "--json", "--connect", f"unix:{folder}/coordinator.socket"],
                          capture_output=True, text=True)
    queues = json.loads(done.stdout)["queues"] if done.returncode == 0 else []
    return queues[0]["chunks"] if queues else None


def look(folder):
    """Of each process, by its command line and role."""
    found = {}
    for process, line in processes_of(folder):
        seen = numbers(process)
        if seen:
            found[f"{line.replace(str(folder), 'FOLDER')} ({process})"] = seen
    return found


def step_of(folder):
    try:
        with open(folder / "metrics.jsonl", "rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - 8192))
            lines = file.read().splitlines()
        return json.loads(lines[-1])["step"] if lines else -1
    except (OSError, ValueError):  # none yet, or half a line
        return -1


def watch(name, settings):
    folder = work / name
    line = [PROGRAM, "run", str(JOB), "--out", str(folder)]
    for setting in (*ZERO, *settings):
        line += ["--set", setting]
    begun = time.monotonic()
    process = subprocess.Popen(line, cwd=work, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    looks = []
    while process.poll() is None:
        time.sleep(EVERY)
        step = step_of(folder)
        if 0 < step < STEPS:  # behind the last the timeline is put together, once
            chunks = chunks_of(folder)
            if chunks is not None:
                looks.append((step, look(folder), len(files(folder)), queue_bytes(folder), chunks))
    error = process.communicate()[1]
    check(process.returncode == 0, f"{name}: ends with {process.returncode}: {error}")
    took, usage = time.monotonic() - begun, os.times()
    print(f"{name}: {STEPS} steps in {took:.1f} s, {STEPS / took:.0f} steps/s, {len(looks)} looks, "
          f"{usage.children_user + usage.children_system:.1f} s of CPU so far", flush=True)
    check_nothing_left(folder)
    return folder, looks


def queue_bytes(folder):
    return sum(path.stat().st_size for path in folder.glob("queue/*") if path.is_file())


def compare(name, what, parts, slack, of=statistics.median):
    """parts: what was seen in each of three quarters."""
    if all(parts) and len(parts[-1]) > 1:
        half = len(parts[-1]) // 2
        a, b, c, d, e = map(of, [*parts, parts[-1][:half], parts[-1][half:]])
        print(f"  {what}: {a:.0f}, {b:.0f}, {c:.0f}; the last in halves: {d:.0f}, {e:.0f}", flush=True)
        check(b <= a + slack(a) or c <= b + slack(b) or e <= d + slack(d) / 2,
              f"{name}: {what} grows: {a:.0f}, {b:.0f}, {c:.0f}; in the end {parts[-1][-3:]}")


def check_flat(name, folder, looks):
    quarters = [[l for l in looks if STEPS * i / 4 < l[0] < STEPS * (i + 1) / 4] for i in (1, 2, 3)]
    check(all(len(part) > 1 for part in quarters), f"{name}: too few looks: {len(looks)}")
    processes = set().union(*(l[1] for l in quarters[0]))
    check(len(processes) >= 5, f"{name}: a supervisor, a coordinator and three roles expected, found {processes}")
    for process in sorted(processes):
        for i, (what, slack, of) in enumerate((("KiB", lambda a: SLACK_KB + SLACK * a, min),
                                               ("descriptors", lambda a: 1, statistics.median),
                                               ("mappings", lambda a: 2, statistics.median))):
            parts = [[l[1][process][i] for l in part if process in l[1]] for part in quarters]
            compare(name, f"{process[-60:]}: {what}", parts, slack, of)
            check(bool(parts[-1]), f"{name}: {process} is another one in the end")
    compare(name, "files", [[l[2] for l in part] for part in quarters], lambda a: 0)
    compare(name, "bytes of the journal", [[l[3] for l in part] for part in quarters], lambda a: 16 << 20)
    compare(name, "chunks of the queue", [[l[4] for l in part] for part in quarters], lambda a: 1, of=max)
    for what, pattern, most in (("metrics", "metrics.jsonl", METRICS_BYTES), ("spans", "trace/*.spans", SPANS_BYTES)):
        size = sum(path.stat().st_size for path in folder.glob(pattern))
        print(f"  {what}: {size / STEPS:.0f} bytes a step", flush=True)
        check(size < most * STEPS, f"{name}: {what}: {size} bytes of {STEPS} steps")


wanted = os.environ.get("DRAY_TEST_SCHEDULES", ",".join(RUNS)).split(",")
for name in wanted:
    where, seen = watch(name, RUNS[name])
    check_flat(name, where, seen)
    shutil.rmtree(where) if not failures else None
finish()
