"""The demo's recipe, whole, under every schedule but `sync` (soak_recipe.py): with each way to take weights, with and
without responses in pieces. All runs end, no sample is older than may be, and where samples are at most one version
old, held-out accuracy ends above 0.9. Each run has another seed."""
from lineage import *

job = pathlib.Path(os.environ["DRAY_SOURCE_DIR"]) / "examples" / "reverse.yaml"
PAIR = ("schedule=rolling", "roles.engine.instances=2", "roles.engine.ranks=1")
UPDATES = {"boundary": (), "in_flight": ("update=in_flight", "rollout.batching=continuous")}
KINDS = [("one_step_async", 1, ("schedule=one_step_async",))]
KINDS += [(f"rolling-{update}", 1, (*PAIR, *more)) for update, more in UPDATES.items()]
KINDS += [(f"async-{staleness}-{update}", staleness, ("schedule=async", f"staleness={staleness}", *more))
          for staleness in (1, 2, 4) for update, more in UPDATES.items()]
CASES = [(f"{name}-{tokens}", staleness, (*settings, f"rollout.partial_tokens={tokens}"))
         for name, staleness, settings in KINDS for tokens in (0, 3)]
first = int(os.environ.get("DRAY_TEST_SEED", random.SystemRandom().randrange(1 << 32)))
wanted = os.environ.get("DRAY_TEST_SCHEDULES", "")  # words that a case's name has; none: all cases
print(f"seeds from {first} on (DRAY_TEST_SEED)", flush=True)

for number, (name, staleness, settings) in enumerate(CASES):
    if wanted and not any(word in name for word in wanted.split(",")):
        continue
    folder, begun = work / name, time.monotonic()
    line = command(folder, "--seed", str(first + number), *words(settings), job=job)
    done = subprocess.run(line, cwd=work, capture_output=True, text=True, timeout=3600)
    check_nothing_left(folder)
    check(done.returncode == 0, f"{name}, seed {first + number}: {done.stderr}")
    made = rows(folder)
    measured = [row["eval_accuracy"] for row in made if row.get("eval_accuracy") is not None]
    print(f"{name}, seed {first + number}: {measured}, {time.monotonic() - begun:.0f} s", flush=True)
    check([row["step"] for row in made] == list(range(401)), f"{name}: {len(made)} rows")
    check(max(row["staleness_max"] for row in made) <= staleness, f"{name}: older than {staleness}")
    check(staleness > 1 or measured[-1] > 0.9, f"{name}, seed {first + number}: {measured}")
finish()
