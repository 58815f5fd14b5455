"""`noisescope.diagnostic`: the public name of noisescope.compat.diagnostic."""

import sys
from typing import TYPE_CHECKING

from noisescope.compat import diagnostic

if TYPE_CHECKING:
    from noisescope.compat.diagnostic import *  # noqa: F403

sys.modules[__name__] = diagnostic
