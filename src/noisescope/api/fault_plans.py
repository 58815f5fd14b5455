"""Fault tests from a report. No torch here."""

from noisescope.plans.fault_tests import generate as generate
from noisescope.plans.fault_tests import to_csv as to_csv
