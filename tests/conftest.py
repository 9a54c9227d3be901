"""Eight simulated devices in this process; must be set before JAX starts."""

import os

os.environ["JAX_NUM_CPU_DEVICES"] = "8"
os.environ["JAX_PLATFORMS"] = "cpu"
