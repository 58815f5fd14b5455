"""What a number means: bands, findings, risk scores, avalanche points and advice. Does not import torch.

Bands, risk and avalanches are for injected task metrics; a predicted divergence in nats has a rank and no band. What
could not be measured stays "not measurable" and never falls into a good band.
"""

from noisescope.findings.avalanche import PointAvalanche as PointAvalanche
from noisescope.findings.avalanche import Window as Window
from noisescope.findings.avalanche import avalanche_points as avalanche_points
from noisescope.findings.avalanche import neighbours as neighbours
from noisescope.findings.finding import ADVICE as ADVICE
from noisescope.findings.finding import BORDERLINE as BORDERLINE
from noisescope.findings.finding import NOT_RATED as NOT_RATED
from noisescope.findings.finding import PRIORITIES as PRIORITIES
from noisescope.findings.finding import SEVERITIES as SEVERITIES
from noisescope.findings.finding import Finding as Finding
from noisescope.findings.finding import Recommendation as Recommendation
from noisescope.findings.finding import Target as Target
from noisescope.findings.finding import by_priority as by_priority
from noisescope.findings.finding import metric_name as metric_name
from noisescope.findings.finding import operator_advice as operator_advice
from noisescope.findings.finding import outlier_advice as outlier_advice
from noisescope.findings.finding import percent as percent
from noisescope.findings.risk_scores import Assessment as Assessment
from noisescope.findings.risk_scores import Risk as Risk
from noisescope.findings.risk_scores import Term as Term
from noisescope.findings.risk_scores import dashboard_risk as dashboard_risk
from noisescope.findings.risk_scores import hardware_assessment as hardware_assessment
from noisescope.findings.risk_scores import report_risk as report_risk
from noisescope.findings.thresholds import BANDS as BANDS
from noisescope.findings.thresholds import DASHBOARD_POINTS as DASHBOARD_POINTS
from noisescope.findings.thresholds import EXPECTED_CORRELATIONS as EXPECTED_CORRELATIONS
from noisescope.findings.thresholds import GAIN_ROUND_OFF as GAIN_ROUND_OFF
from noisescope.findings.thresholds import LIMITS as LIMITS
from noisescope.findings.thresholds import NOT_MEASURABLE as NOT_MEASURABLE
from noisescope.findings.thresholds import ROUND_OFF as ROUND_OFF
from noisescope.findings.thresholds import as_expected as as_expected
from noisescope.findings.thresholds import band as band
from noisescope.findings.thresholds import band_range as band_range
from noisescope.findings.thresholds import meaning as meaning
