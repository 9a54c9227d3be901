"""Trains several times, one run after the other, in the same processes: starting them anew would take most of the time.

python -m several_runs '[[ARGUMENT, ...], ...]'    # each list is what minitf.train gets
"""

import json
import sys

from minitf import train

if __name__ == "__main__":
    statuses = [train.main(arguments) for arguments in json.loads(sys.argv[1])]
    sys.exit(max(statuses))
