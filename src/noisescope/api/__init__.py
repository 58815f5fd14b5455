"""The public questions: where measuring (torch, no why) and interpreting (why, no torch) meet."""

from noisescope.api.diagnosing import diagnose as diagnose
from noisescope.api.diagnosing import put_to_the_test as put_to_the_test
from noisescope.api.diagnosing import robustness as robustness
from noisescope.api.diagnosing import with_fault_located as with_fault_located
from noisescope.locators.locate import locate as locate
from noisescope.preparation import Options as Options
from noisescope.preparation import prepare as prepare
from noisescope.preparation import prepare_diagnosis as prepare_diagnosis
