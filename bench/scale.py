"""Measures the cost of a row that goes through five tasks, with many processes on few cores.

    bench/scale.py [--engines N] [--ranks N] [--seconds S] [--set KEY=VALUE ...] [--json] [--quick] [--strict]

runs the clock job (examples/clock.yaml) almost without sleeps, with 32 engines, a trainer of 8 ranks and 256 rows a
step. It prints the rows per second, the CPU time of a row in all processes and in each role, and the share of a core
that the coordinator takes. The processes do everything that dray does in a job: claims, commits, weights, updates,
reports.

The limits are of the same run: the rows per second that the cores could make (cores / CPU time of a row), and the cost
of a request and its answer over a Unix socket between two processes that do nothing else.

--strict makes the exit status 1 below 2,000 rows/s, when a row takes 0.4 ms of CPU or more, or 0.1 ms or more in the
coordinator, or when the coordinator would take a fifth of a core at 2,000 rows/s."""
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import time

import jobs

TICK = os.sysconf("SC_CLK_TCK")
SETTINGS = ("clock.token_seconds=1e-6", "clock.train_seconds=0", "steps=1000000", "rollout.prompts=64", "eval.every=0")
ROWS, LEAST_ROWS = 256, 2000  # rows of a step; rows per second
MOST_MS, MOST_COORDINATOR_MS, MOST_CORE = 0.4, 0.1, 0.2


def cpu_seconds(process):
    fields = (process / "stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / TICK


def look(folder):
    """Returns the CPU seconds of the run's processes so far, by role, and the number of processes."""
    spent, count = {}, 0
    for process in pathlib.Path("/proc").iterdir():
        try:
            if not process.name.isdigit():
                continue
            variables = dict(pair.split("=", 1) for pair in
                             (process / "environ").read_text(errors="replace").split("\0") if "=" in pair)
            line = (process / "cmdline").read_text(errors="replace")
            of_run = variables.get("DRAY_RUN") == str(folder)
            if of_run or str(folder) in line:
                role = variables["DRAY_ROLE"] if of_run else "coordinator" if "--coordinator" in line else "supervisor"
                spent[role] = spent.get(role, 0) + cpu_seconds(process)
                count += 1
        except OSError:  # the process has ended
            continue
    return spent, count


def last_step(folder):
    try:
        with open(folder / "metrics.jsonl", "rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - 8192))
            return json.loads(file.read().splitlines()[-1])["step"]
    except (OSError, ValueError, IndexError):  # there is no line yet, or half of one
        return -1


def message_us():
    """Returns the CPU time of a request and its answer, of 64 bytes each, in both processes together."""
    ours, theirs = socket.socketpair()
    count, child = 20000, os.fork()
    if not child:
        ours.close()
        while data := theirs.recv(64):
            theirs.sendall(data)
        os._exit(0)
    theirs.close()
    begin = time.process_time()
    for _ in range(count):
        ours.sendall(bytes(64))
        ours.recv(64)
    own = time.process_time() - begin
    ours.close()
    usage = os.wait4(child, 0)[2]
    return (own + usage.ru_utime + usage.ru_stime) / count * 1e6


def wait_for_step(run, folder, step, seconds):
    end = time.monotonic() + seconds
    while last_step(folder) < step:
        if run.poll() is not None or time.monotonic() > end:
            sys.exit(f"bench/scale.py: no step {step} after {seconds} s, status {run.poll()}")
        time.sleep(0.05)


def measure(a, folder):
    settings = *SETTINGS, f"roles.engine.instances={a.engines}", f"roles.trainer.ranks={a.ranks}", *a.set
    run = subprocess.Popen(jobs.command("run", "clock", folder, settings), stdout=subprocess.DEVNULL)
    try:
        wait_for_step(run, folder, 20, 120)
        first, begin, (before, _) = last_step(folder), time.monotonic(), look(folder)
        time.sleep(2 if a.quick else a.seconds)
        last, took, (after, processes) = last_step(folder), time.monotonic() - begin, look(folder)
    finally:
        run.send_signal(signal.SIGINT)
        run.wait(60)
    rows = max(1, (last - first) * ROWS)
    each = {role: 1e3 * (after[role] - before.get(role, 0)) / rows for role in after}
    row = sum(each.values())
    return {"processes": processes, "rows_per_s": rows / took, "row_cpu_ms": row, "cpu_ms": each,
            "coordinator_core": each["coordinator"] * 1e-3 * rows / took,
            "coordinator_core_at_2000": each["coordinator"] * 1e-3 * LEAST_ROWS,
            "limit_rows_per_s": 1e3 * len(os.sched_getaffinity(0)) / row, "message_cpu_us": message_us()}


def show(seen):
    print(f"the clock job, {seen['processes']} processes on {len(os.sched_getaffinity(0))} cores, five tasks")
    print(f"  {seen['rows_per_s']:8.0f} rows/s   of {seen['limit_rows_per_s']:.0f} that the cores could make: "
          f"{seen['row_cpu_ms']:.3f} ms of CPU a row")
    for role, ms in sorted(seen["cpu_ms"].items(), key=lambda item: -item[1]):
        print(f"  {ms:8.3f} ms       {role}")
    print(f"  {100 * seen['coordinator_core']:8.1f} %        of a core: the coordinator, "
          f"{100 * seen['coordinator_core_at_2000']:.1f} % at {LEAST_ROWS} rows/s")
    print(f"  {seen['message_cpu_us']:8.1f} us       of CPU: a request and its answer over a bare Unix socket")


def main():
    a = jobs.options(__doc__, engines=32, ranks=8, seconds=10.0).parse_args()
    with tempfile.TemporaryDirectory(prefix="dray-scale-") as made:
        seen = measure(a, pathlib.Path(made) / "run")
    print(json.dumps(seen)) if a.json else show(seen)
    missed = (seen["rows_per_s"] < LEAST_ROWS or seen["row_cpu_ms"] >= MOST_MS or
              seen["cpu_ms"]["coordinator"] >= MOST_COORDINATOR_MS or seen["coordinator_core_at_2000"] >= MOST_CORE)
    sys.exit(1 if a.strict and missed else 0)


if __name__ == "__main__":
    main()
