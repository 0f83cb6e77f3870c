"""Random trainer placement -> random engine placement for every family, bit for bit. Megatron's
cuts are written again in numpy from its rules; see reshard.py."""

import os

from begin import needs, scale as SCALE, seed as SEED

with needs:
    import numpy  # noqa: F401

import dray  # noqa: F401 (skips without the library)
import reshard

reshard.run(int(os.environ.get("DRAY_TEST_CASES", 500 * SCALE)), SEED)
