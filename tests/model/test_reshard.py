"""Random trainer placement -> random engine placement for every family, bit for bit. Megatron's
cuts are written again in numpy from its rules; see reshard.py."""

import os
import sys
import time

try:
    import numpy  # noqa: F401
except ImportError as missing:
    print("skipped:", missing)
    sys.exit(77)

import dray  # noqa: F401 (skips without the library)
import reshard

SEED = int(os.environ.get("DRAY_TEST_SEED", time.time()))
SCALE = int(os.environ.get("DRAY_TEST_SCALE", 1))
print("seed", SEED)
reshard.run(int(os.environ.get("DRAY_TEST_CASES", 500 * SCALE)), SEED)
