"""`noisescope.noisy_ops`: the public name of noisescope.compat.noisy_ops.

`python -m noisescope.noisy_ops script.py ARGS` runs a script under the noise that environment variables describe.
"""

import sys
from typing import TYPE_CHECKING

from noisescope.compat import noisy_ops
from noisescope.compat.noisy_ops.environment import run_script
from noisescope.errors import InvalidInput

if TYPE_CHECKING:
    from noisescope.compat.noisy_ops import *  # noqa: F403

if __name__ == "__main__":
    try:
        sys.exit(run_script(sys.argv[1:]))
    except InvalidInput as error:
        print(f"noisescope: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
sys.modules[__name__] = noisy_ops
