"""`python -m noisescope.noisy_ops script.py ARGS`."""

import sys

from noisescope.errors import InvalidInput
from noisescope.noisy_ops.environment import run_script

try:
    sys.exit(run_script(sys.argv[1:]))
except InvalidInput as error:
    print(f"noisescope: {error}", file=sys.stderr)
    sys.exit(error.exit_code)
