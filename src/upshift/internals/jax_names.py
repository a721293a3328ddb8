"""List the undocumented names of jax that Upshift uses to call libtpu's compiler."""

from __future__ import annotations

from upshift.internals.lookup import Internal

FEATURE = "upshift xla compile"
INSTEAD = "run on a TPU, which needs no jax"
COMPILER = Internal("jax", "jax._src:compiler", FEATURE, INSTEAD)
MLIR = Internal("jax", "jax._src.interpreters:mlir", FEATURE, INSTEAD)
IR = Internal("jax", "jax._src.lib.mlir:ir", FEATURE, INSTEAD)
XLA_CLIENT = Internal("jax", "jax._src.lib:xla_client", FEATURE, INSTEAD)
BINDINGS = Internal("jax", "jax._src.lib:_jax", FEATURE, INSTEAD)
