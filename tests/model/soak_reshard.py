"""20,000 seeds of test_reshard.py."""

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
print("seed", SEED)
reshard.run(20000, SEED)
