"""Models on several devices of one process, and in stages across processes."""

from credit_dp.pipeline_parallel.placement import (
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
