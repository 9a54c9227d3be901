"""An import, and the most anonymous memory that it needed beyond what the imported modules need, in bytes on the last line.

python tests/watched_import.py HF_DIR WORKDIR
"""

import sys
import threading
import time
from pathlib import Path

import jax

from minitf.huggingface import folder
from minitf.huggingface.convert import import_model


def anonymous() -> int:
    """Of this process: pages of files are not counted, as the system can take them away."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


if __name__ == "__main__":
    jax.block_until_ready(jax.jit(lambda x: x + 1)(jax.numpy.ones(8)))
    folder.safetensors()
    before = highest = anonymous()

    def watch():
        global highest
        while True:
            highest = max(highest, anonymous())
            time.sleep(0.002)

    threading.Thread(target=watch, daemon=True).start()
    import_model(sys.argv[1], sys.argv[2])
    print(highest - before)
