"""Load llama.cpp's library once. It reports its errors to Upshift instead of the terminal."""

from __future__ import annotations

from functools import cache
from typing import Any

ERROR_LEVEL = 3  # GGML_LOG_LEVEL_ERROR


class LlamaCpp:
    """llama.cpp's library, its functions, and its last error."""

    def __init__(self) -> None:
        import llama_cpp

        self.api: Any = llama_cpp
        self.last_error = "it does not say why"
        self._log_callback = llama_cpp.llama_log_callback(self._receive_log)  # the library holds no reference
        llama_cpp.llama_log_set(self._log_callback, None)
        llama_cpp.llama_backend_init()

    def _receive_log(self, level: int, text: bytes, _: Any) -> None:
        if level == ERROR_LEVEL:
            self.last_error = text.decode(errors="replace").strip()


@cache
def load_llamacpp() -> LlamaCpp:
    """Return the library, loaded once per process."""
    return LlamaCpp()
