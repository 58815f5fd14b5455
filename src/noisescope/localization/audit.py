"""`audit`: every operator computed again on the host from its real inputs, and all code between operators run there.

Each call is recorded on the device with its inputs and outputs. An operator is computed again in float64 from copies of
those inputs and of the weights; what differs by more than the round-off model allows (roundoff_floors.py, judge.py) is a
suspect. Everything else, from the token ids to the logits that the caller gets, is the model's own code: it is run on
the host with the operators' recorded results in it (host_twin.py), and must make what the device made of them. Each call
is judged on what it was given, so errors do not accumulate from layer to layer, and the first that fails is the source.

One batch; another batch, with fused attention taken apart into its operators; the first batch again, which shows what is
not repeatable and what remembers the batch before. Then other shapes, and decode steps with the model's cache. A few
more forwards where a fault inside attention asks for them.
"""

from __future__ import annotations

import copy
import time
from typing import Any

import torch
from torch import Tensor, nn

from noisescope.errors import InvalidInput
from noisescope.localization.audit_log import AuditLog
from noisescope.localization.audit_verdict import conclude, hidden_in_attention, suspects_inside_attention
from noisescope.localization.call_tree import CallTree, HostStates, with_whole_modules
from noisescope.localization.coverage import Phase
from noisescope.localization.host_operators import host_arithmetic
from noisescope.localization.host_twin import HostTwin
from noisescope.localization.inputs import Batch, parts_of, remarks
from noisescope.localization.verdict import Verdict
from noisescope.localization.workloads import Workload, workloads_for
from noisescope.model.anatomy import ATTENTION, Anatomy, Unit
from noisescope.model.forwards import device_of, evaluating
from noisescope.model.loading import Subject
from noisescope.probe.watch import RecordedCall, watch
from noisescope.sites import FUSED, WHOLE

_TRIES = 3  # forwards with attention taken apart in which a fault that comes and goes may show its operator
_FORMULAS = ("linear", "norm", "silu", "gelu", "embedding", "softmax", "matmul", "bmm", FUSED)
