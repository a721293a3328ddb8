"""List the undocumented names of TRL that Upshift uses."""

from __future__ import annotations

from upshift.internals.lookup import Internal

PLANNING = "A plan for GRPOTrainer and RLOOTrainer"
TOKENIZE_PROMPTS = Internal("trl", "GRPOTrainer._tokenize_prompts", PLANNING)
