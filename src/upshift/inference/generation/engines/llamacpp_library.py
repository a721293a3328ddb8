"""Load llama.cpp's library once. It reports its errors to Upshift instead of the terminal."""

from __future__ import annotations

from functools import cache
from typing import Any

ERROR = 3  # GGML_LOG_LEVEL_ERROR


class LlamaCpp:
    def __init__(self) -> None:
        import llama_cpp

        self.api: Any = llama_cpp
        self.said = "it does not say why"  # the last error
        self._listener = llama_cpp.llama_log_callback(self._listen)  # the library holds no reference
        llama_cpp.llama_log_set(self._listener, None)
        llama_cpp.llama_backend_init()

    def _listen(self, level: int, text: bytes, _: Any) -> None:
        if level == ERROR:
            self.said = text.decode(errors="replace").strip()


@cache
def load_llamacpp() -> LlamaCpp:
    return LlamaCpp()
