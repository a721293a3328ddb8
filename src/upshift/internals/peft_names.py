"""List the undocumented names of peft that Upshift uses."""

from __future__ import annotations

from upshift.internals.lookup import Internal

MERGING = "Merging an adapter"
INSTEAD = "merge it by peft's merge_and_unload"
LINEAR = Internal("peft", "peft.tuners.lora.layer:Linear", MERGING, INSTEAD)
EMBEDDING = Internal("peft", "peft.tuners.lora.layer:Embedding", MERGING, INSTEAD)
PARAMETER = Internal("peft", "peft.tuners.lora.layer:ParamWrapper", MERGING, INSTEAD)
CONVOLUTION = Internal("peft", "peft.tuners.lora.layer:_ConvNd", MERGING, INSTEAD)
DORA = Internal("peft", "peft.tuners.lora.variants:DoraLinearVariant", MERGING, INSTEAD)
LAYER = Internal("peft", "peft.tuners.tuners_utils:BaseTunerLayer", MERGING, INSTEAD)
CACHES = Internal("peft", "BaseTunerLayer._caches", MERGING, INSTEAD)
