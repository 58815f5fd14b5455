"""What each fault does to a tensor."""

from noisescope.faults.effects import digits, lanes, notes, products, tables  # noqa: F401  each registers its families
from noisescope.faults.effects.dispatch import act as act
