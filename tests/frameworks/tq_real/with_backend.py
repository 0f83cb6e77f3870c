"""For pytest: TransferQueue itself, with Ray, and its values in dray."""
import os

import dray.integrations.transfer_queue

import ray
from omegaconf import OmegaConf

CONF = {"controller": {"polling_mode": True}, "backend": {"storage_backend": dray.integrations.transfer_queue.NAME,
                                                          "Dray": {"capacity_rows": 1000}}}
os.environ["TQ_TEST_BACKEND"] = "Dray"
_init = ray.init


def _with_hook(*arguments, **more):
    for last in (False, False, True):
        try:
            return _init(*arguments, num_cpus=2, include_dashboard=False,
                         runtime_env={"worker_process_setup_hook": "dray.integrations.transfer_queue.register"}, **more)
        except Exception as failure:  # Ray gives a node 30 s to start, which are few on a busy machine
            if last or "timed out during startup" not in str(failure):
                raise
            ray.shutdown()


ray.init = _with_hook


def pytest_collection_modifyitems(items):
    for module in {item.module for item in items}:
        if hasattr(module, "BACKEND_CONFIGS"):
            module.BACKEND_CONFIGS["Dray"] = CONF
        if hasattr(module, "_TQ_CONFIG"):
            module._TQ_CONFIG = OmegaConf.create(CONF)
