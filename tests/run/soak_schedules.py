"""200 random runs over all schedules, with faults (schedules.py); DRAY_TEST_SCALE times as many. One case again:
DRAY_TEST_SEED=NUMBER, and DRAY_TEST_CASES=1."""
from schedules import *

first = int(os.environ.get("DRAY_TEST_SEED", str(random.SystemRandom().randrange(1 << 32))))
count = int(os.environ.get("DRAY_TEST_CASES", 200 * int(os.environ.get("DRAY_TEST_SCALE", "1"))))
print(f"seeds {first} to {first + count - 1} (DRAY_TEST_SEED, DRAY_TEST_CASES)", flush=True)
schedules, longest = known_schedules(), 0.0
for seed in range(first, first + count):
    case = Case(seed, schedules)
    good, took = run_case(case)
    longest = max(longest, took)
    if not good:
        print(f"again: DRAY_TEST_SEED={seed} DRAY_TEST_CASES=1", flush=True)
for what, times in sorted(seen.items()):
    print(f"{times:6} {what}")
print(f"the longest start took {longest:.1f} s", flush=True)
finish()
