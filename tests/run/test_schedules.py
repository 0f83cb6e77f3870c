"""A random run of each schedule, with faults (schedules.py; many more: soak_schedules.py)."""
from schedules import *

for seed, schedule in enumerate(known_schedules(), 11):
    run_case(Case(seed, [schedule]))
finish()
