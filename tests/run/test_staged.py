"""Trainer and engine of one job file share a GPU in turns, each with its memory in arenas (helper_staged.c, on the
fake driver): the GPU holds what one of them needs, and the weights, and not what both need."""
from shared import *

FAKE = os.environ.get("DRAY_FAKE_CUDA")
if not FAKE or not os.path.exists(FAKE):
    print("DRAY_FAKE_CUDA names no fake driver")
    sys.exit(77)
MIB = 1 << 20
TRAINER, ENGINE, WEIGHTS = 16, 16, 4  # MiB that each has in its arenas, and the weights of these
COPIES = 2  # what a GPU gives at least: in it lies the list of copies of the engine's update
PROGRAM_OF_ROLES = pathlib.Path(os.environ["DRAY_BUILD_DIR"]) / "run_helper_staged"
JOB = TINY.replace("name: tiny", "name: staged") + f"""
roles:
- {{name: engine, tasks: [rollout, eval], command: exec {PROGRAM_OF_ROLES}, devices: "cuda:0"}}
- {{name: trainer, tasks: [actor], command: exec {PROGRAM_OF_ROLES}, devices: "cuda:0", env: [STAGED_ROWS=16]}}
- {{name: desk, tasks: [driver, reward, advantage]}}
"""
job = work / "staged.yaml"
job.write_text(JOB.replace("reference: {micro_batch: 8}", "reference: {enabled: false}")
               .replace("actor: {", "actor: {old_log_prob: rollout, "))


def scene(name, mib, *arguments, **environment):
    """On a GPU with so much memory."""
    folder = work / name
    done = run(folder, *arguments, job=job, environment={
        "DRAY_CUDA_LIBRARY": FAKE, "DRAY_NVRTC_LIBRARY": FAKE, "FAKE_CUDA_DEVICES": "1",
        "FAKE_CUDA_STATE": str(work / f"{name}.gpu"), "FAKE_CUDA_BYTES": str(mib * MIB),
        "XDG_CACHE_HOME": str(work / "cache"), **environment})
    stages = [line.split() for role in ("trainer", "engine")
              for line in (folder / f"stages-{role}").read_text().splitlines()]
    return done, [(stage, int(used) / MIB) for stage, used in stages]


done, stages = scene("turns", 1024)
check(done.returncode == 0, f"turns: {done.stdout} {done.stderr}")
check([row["step"] for row in rows(work / "turns")] == [*range(7)], "turns: steps")
peak = max(used for _, used in stages)
print("peak", peak, "MiB")
check(max(TRAINER, ENGINE) <= peak <= max(TRAINER, ENGINE) + WEIGHTS + COPIES, f"peak: {peak} MiB: {stages}")
# Each stage was taken again and again: what is not released is not resumed.
for tag in ("weights", "kv_cache", "optimizer", "gradients"):
    check(sum(stage == tag for stage, _ in stages) >= 5, f"{tag}: {stages}")

# What is never released needs the sum, and there is not so much.
done, stages = scene("never", TRAINER + ENGINE - WEIGHTS, STAGED="never")
check(done.returncode == 1 and "ENOMEM" in done.stderr + done.stdout, f"never: {done.stdout} {done.stderr}")
done, stages = scene("apart", 1024, *devices(engine="", trainer=""), STAGED="never")
check(done.returncode == 0, f"apart: {done.stdout} {done.stderr}")
check(max(used for _, used in stages) >= TRAINER + ENGINE, f"apart: {stages}")
finish()
