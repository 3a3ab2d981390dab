"""Models on several devices of one process, and in pipeline stages on several ranks.

`module_placement` moves modules to devices of one process. `stages` cuts a model into stages, and
`pipeline` runs them on micro-batches by one of torch's schedules.
"""

from credit_dp.pipeline_parallel.module_placement import (
    get_device,
    model_output_device,
    move_to_device,
    parallelize_module,
    parallelize_pipeline,
    place_model,
    unparallelize_module,
    unparallelize_pipeline,
)

__all__ = [
    "get_device",
    "model_output_device",
    "move_to_device",
    "parallelize_module",
    "parallelize_pipeline",
    "place_model",
    "unparallelize_module",
    "unparallelize_pipeline",
]
