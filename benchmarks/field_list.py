"""All fault cases, in a fixed pseudo-random order."""

from __future__ import annotations

import functools

import field_population
import field_population_attention
import field_population_everywhere
import field_population_floor16
import field_population_flow
import field_population_paths
from field_cases import FaultCase, order_of


@functools.cache
def fault_cases() -> tuple[FaultCase, ...]:
    found = [
        *field_population.cases(),
        *field_population_flow.cases(),
        *field_population_everywhere.cases(),
        *field_population_attention.cases(),
        *field_population_paths.cases(),
        *field_population_floor16.cases(),
    ]
    names = [case.name for case in found]
    twice = {name for name in names if names.count(name) > 1}
    assert not twice, f"two cases have the same name: {sorted(twice)}"
    return tuple(sorted(found, key=lambda case: order_of(case.name)))
