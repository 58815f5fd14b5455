"""Fault tests from a report. No torch here."""

from noisescope.plans.fault_tests import generate as generate
from noisescope.plans.fault_values import FaultTest as FaultTest
from noisescope.plans.fault_values import FaultTestResult as FaultTestResult
from noisescope.plans.fault_values import to_csv as to_csv
