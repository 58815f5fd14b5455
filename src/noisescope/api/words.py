"""Numbers and findings in words, for whoever prints them. No torch here."""

from noisescope.findings import percent as percent
from noisescope.findings.verdicts import Verdict as Verdict
from noisescope.findings.verdicts import exit_code as exit_code
from noisescope.findings.verdicts import headline as headline
from noisescope.findings.verdicts import overall as overall
from noisescope.plans.prediction import prediction_sentence as prediction_sentence
from noisescope.plans.smoothing import gain_sentence as gain_sentence
from noisescope.plans.words import counted as counted
from noisescope.plans.words import times_better as times_better
from noisescope.reports.changes import change_line as change_line
from noisescope.reports.changes import largest as largest
from noisescope.reports.changes import run_line as run_line
from noisescope.reports.changes import verdict_line as change_verdict_line
from noisescope.reports.phases import theory_line as theory_line
from noisescope.reports.phases import verdict_line as verdict_line
from noisescope.reports.words import band_of as band_of
from noisescope.reports.words import estimate as estimate
from noisescope.reports.words import finding_lines as finding_lines
from noisescope.reports.words import mean as mean
from noisescope.sites import OPERATORS as OPERATORS

__all__ = ["change_verdict_line"]
