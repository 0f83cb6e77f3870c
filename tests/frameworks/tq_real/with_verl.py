"""For pytest: verl's ReplayBuffer with dray.compat.transfer_queue as `transfer_queue`. The packages that it is in begin with
imports of all of verl's trainers, which are left out."""
import os
import pathlib
import sys
import types

import dray.compat.transfer_queue as shim

shim.install()
for name in ("verl.trainer", "verl.trainer.ppo", "verl.trainer.ppo.v1"):
    package = sys.modules[name] = types.ModuleType(name)
    package.__path__ = [str(pathlib.Path(os.environ["DRAY_UPSTREAM"], "verl", *name.split(".")))]
