"""A grader of one's own that writes another number of rewards a row than the job lists: the run ends, and says so."""
import importlib.util

from jobs import *

if not importlib.util.find_spec("numpy"):
    print("numpy is missing")
    shutil.rmtree(work)
    sys.exit(77)

os.environ["PYTHONPATH"] = os.environ["DRAY_SOURCE_DIR"] + "/python"
ROLES = """
roles:
  - {name: engine, tasks: [rollout, eval]}
  - {name: trainer, tasks: [old_log_prob, actor]}
  - {name: grader, tasks: [reward], command: exec %s grade.py}
  - {name: desk, tasks: [driver, reference, advantage]}
""" % sys.executable
job_file.write_text(TINY + ROLES)
# WIDE: how many numbers a row the column `rewards` gets.
(work / "grade.py").write_text("""
import os
import dray, numpy

with dray.Role() as role:
    for batch in role.batches():
        batch.set("reward", (batch.slots % 2).astype(numpy.float32))
        batch.set("rewards", numpy.ones((batch.rows, int(os.environ["WIDE"])), numpy.float32))
""")
both = "rewards=[{name: right}, {name: half, weight: 0.5}]"
for wide, right in (("2", True), ("1", False), ("3", False)):
    folder = work / f"wide-{wide}"
    done = run(folder, "--set", "steps=1", "--set", both, environment={"WIDE": wide})
    said = "" if right else f"column rewards: expected 2 numbers a row, found {wide}"
    check(not right or rows(folder)[1]["rewards"] == {"right": 1, "half": 1}, f"wide {wide}: {rows(folder)[-1]}")
    check((done.returncode == 0) == right and said in done.stderr, f"wide {wide}: {done.returncode}: {done.stderr}")
finish()
