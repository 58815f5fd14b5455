"""The public questions: where measuring (torch, no why) and interpreting (why, no torch) meet."""

from noisescope.api.activations import save_activations as save_activations
from noisescope.api.comparing import compare as compare
from noisescope.api.comparing import record as record
from noisescope.api.diagnosing import diagnose as diagnose
from noisescope.api.diagnosing import put_to_the_test as put_to_the_test
from noisescope.api.diagnosing import robustness as robustness
from noisescope.api.diagnosing import with_fault_located as with_fault_located
from noisescope.api.experimenting import phases as phases
from noisescope.api.guarding import gate as gate
from noisescope.api.planning import plan_precision as plan_precision
from noisescope.api.planning import verify_precision as verify_precision
from noisescope.api.planning import with_precision_planned as with_precision_planned
from noisescope.api.smoothing import plan_smoothquant as plan_smoothquant
from noisescope.api.smoothing import smooth_outliers as smooth_outliers
from noisescope.locators.locate import locate as locate
from noisescope.preparation import Options as Options
from noisescope.preparation import prepare as prepare
from noisescope.preparation import prepare_diagnosis as prepare_diagnosis
