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
    return _init(*arguments, num_cpus=2, include_dashboard=False,
                 runtime_env={"worker_process_setup_hook": "dray.integrations.transfer_queue.register"}, **more)


ray.init = _with_hook


def pytest_collection_modifyitems(items):
    for module in {item.module for item in items}:
        if hasattr(module, "BACKEND_CONFIGS"):
            module.BACKEND_CONFIGS["Dray"] = CONF
        if hasattr(module, "_TQ_CONFIG"):
            module._TQ_CONFIG = OmegaConf.create(CONF)
