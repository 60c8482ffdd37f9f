"""The number of examples that a property test looks at: few and always the same, or many new ones (`make
properties`).
"""

import os

from hypothesis import HealthCheck, Phase, settings

SCALE = int(os.environ.get("CDC_EXAMPLES", "1"))
"""Multiplies the number of examples."""


def budget(examples: int, *, steps: int = 50) -> settings:
    """Settings of one property test.

    Spark and servers are slow: no deadline, and no search for a smaller example; what a failure
    shows has to be small.
    """
    return settings(
        max_examples=examples * SCALE,
        stateful_step_count=steps,
        deadline=None,
        derandomize=SCALE == 1,
        database=None,
        print_blob=True,
        phases=(Phase.explicit, Phase.generate),
        suppress_health_check=list(HealthCheck),
    )
