"""List the undocumented names of OpenVINO that Upshift uses."""

from __future__ import annotations

from upshift.internals.lookup import Internal

INSTEAD = "use another engine (--engine)"
FP16_WEIGHTS = Internal(
    "openvino", "openvino._offline_transformations:compress_model_transformation", "Weights in fp16 by OpenVINO", INSTEAD
)
STATEFUL = Internal(
    "openvino", "openvino._offline_transformations:apply_make_stateful_transformation", "Generation by OpenVINO", INSTEAD
)
PAGES = Internal(
    "openvino", "openvino._offline_transformations:paged_attention_transformation", "Generation from pages by OpenVINO", INSTEAD
)
